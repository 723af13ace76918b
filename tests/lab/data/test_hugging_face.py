import json
import re
import shutil
from pathlib import Path

import datasets
import pytest

from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import load_dataset
from image_files import BROKEN, number_of, numbered, write_folder
from in_turn import in_turn

NAMES = ["cat", "dog"]


def table(count, labels=None, images=None, names=NAMES):
    """Return rows of distinct images with alternating labels."""
    features = datasets.Features(
        {"id": datasets.Value("int64"), "img": datasets.Image(), "kind": datasets.ClassLabel(names=names)}
    )
    images = images or [{"bytes": numbered(n), "path": None} for n in range(count)]
    labels = labels if labels is not None else [n % 2 for n in range(count)]
    return datasets.Dataset.from_dict({"id": list(range(count)), "img": images, "kind": labels}, features=features)


def save(root, val="validation", **parts):
    datasets.DatasetDict({"train": table(6), val: table(4), **parts}).save_to_disk(str(root))
    return root


def test_a_folder_packed_as_the_page_says_gives_the_batches_of_the_folder_bit_for_bit(tmp_path, monkeypatch):
    page = Path(__file__).parents[3] / "docs" / "training.md"
    write_folder(tmp_path / "IMAGENET", ("cat", "Bird", "dog"), per_class=11)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    exec(re.search(r"^```python pack\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[1])
    batches = []
    for name, root in (("image_folder", tmp_path / "IMAGENET"), ("hugging_face", tmp_path / "PACKED")):
        data = DataModule(name, root=root, size=(16, 16), batch_size=4, seed=3)
        order = data.train_order()
        order.start(2)
        batches.append([*data.train_dataloader(order), *data.eval_dataloader((16, 16))])
        assert data.info.class_names == ("Bird", "cat", "dog")
    for (images, labels), (others, expected) in zip(*batches, strict=True):
        assert images.equal(others) and labels.equal(expected)


def test_a_data_set_of_the_hub_is_loaded_by_timms_name(tmp_path, monkeypatch):
    """A folder of Parquet files stands for the hub."""
    for split, count in (("train", 6), ("validation", 4)):
        (tmp_path / "hub").mkdir(exist_ok=True)
        table(count).to_parquet(tmp_path / "hub" / f"{split}.parquet")
    data = DataModule(f"hfds/{tmp_path / 'hub'}", root=tmp_path / "cache", size=(8, 8))
    assert (data.num_train, data.num_test, data.info.class_names) == (6, 4, ("cat", "dog"))
    assert [(number_of(data.images["test"][n][0]), data.images["test"][n][1]) for n in range(4)] == [
        (n, n % 2) for n in range(4)
    ]
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"`dataset` must be hfds/NAME .* got nobody/nothing \("):
        load_dataset("hfds/nobody/nothing", "train", tmp_path / "cache")


@pytest.mark.parametrize("kind", [*BROKEN, "none"])
def test_a_broken_image_is_passed_over_in_training_and_named_in_evaluation(tmp_path, kind):
    images = [{"bytes": numbered(n), "path": None} for n in range(6)]
    images[1] = None if kind == "none" else {"bytes": BROKEN[kind](numbered(1)), "path": None}
    save(tmp_path, train=table(6, images=images), validation=table(6, images=images))
    train, test = (load_dataset("hugging_face", split, tmp_path)[0] for split in ("train", "test"))
    assert (number_of(train[1][0]), train[1][1]) == (2, 0)
    assert [path.name for path in train.skipped] == ["row 1"]
    with pytest.raises(ValueError, match="row 1"):
        test[1]


def test_an_image_that_is_a_path_is_not_read(tmp_path):
    (tmp_path / "secret.png").write_bytes(numbered(9))
    images = [{"bytes": None, "path": str(tmp_path / "secret.png")}, *[{"bytes": numbered(n)} for n in range(3)]]
    rows = table(4, images=images)
    storage = rows.cast_column(
        "img", datasets.Features({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
    )
    root = save(tmp_path / "root", train=storage)  # otherwise save_to_disk would embed the image
    path = root / "train" / "dataset_info.json"
    info = json.loads(path.read_text())
    info["features"]["img"] = {"_type": "Image"}
    path.write_text(json.dumps(info))
    train, _ = load_dataset("hugging_face", "train", root)
    assert train.read(0) == b"" and number_of(train[0][0]) == 0
    assert [place.name for place in train.skipped] == ["secret.png"]


def of_one_class(root):
    rows = table(2, labels=[0, 0], names=["cat"])
    return save(root, train=rows, validation=rows)


def without(split):
    def write(root):
        parts = {name: table(4) for name in ("train", "validation") if name != split}
        datasets.DatasetDict(parts).save_to_disk(str(root))

    return write


REFUSED = {
    "no label": (lambda root: save(root, train=table(6, labels=[0, 1, None, 1, 0, 1])), "got None in row 2"),
    "no class": (lambda root: save(root, train=table(6, labels=[0, 1, -1, 1, 0, 1])), "got -1 in row 2"),
    "no images": (lambda root: save(root, train=table(6).remove_columns("img")), r"got id \(Value\)"),
    "no labels": (lambda root: save(root, train=table(6).remove_columns("kind")), r"got id \(Value\)"),
    "other classes": (lambda root: save(root, train=table(6, names=["cat", "wolf"])), "wolf"),
    "one class": (of_one_class, "2 to 1,000,000 classes"),
    "no train": (without("train"), "train"),
    "no validation": (without("validation"), "validation"),
    "one table": (lambda root: table(4).save_to_disk(str(root)), "one table"),
    "another folder": (lambda root: root.mkdir(), "save_to_disk"),
}


@in_turn("kind", REFUSED)
def test_data_sets_of_another_form_are_refused_with_the_reason(kind, tmp_path):
    write, match = REFUSED[kind]
    write(tmp_path / kind)
    with pytest.raises(ValueError, match=match):
        DataModule("hugging_face", root=tmp_path / kind, size=(8, 8))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a data set; tests must not change it."""
    return save(tmp_path_factory.mktemp("saved") / "root")


def test_a_truncated_missing_or_damaged_file_is_refused_by_name(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "root")
    (arrow,) = (tmp_path / "root" / "train").glob("*.arrow")
    content = arrow.read_bytes()
    for length in [0, 3, 8, 49, len(content) // 2]:
        arrow.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"whole and undamaged, got .*root"):
            load_dataset("hugging_face", "train", tmp_path / "root")
    arrow.unlink()
    with pytest.raises(ValueError, match=arrow.name):
        load_dataset("hugging_face", "train", tmp_path / "root")
    arrow.write_bytes(content)
    for name in ("dataset_dict.json", "train/state.json", "train/dataset_info.json"):
        path = tmp_path / "root" / name
        right = path.read_text()
        for wrong in ("{", "[]", "null"):
            path.write_text(wrong)
            with pytest.raises(ValueError, match="`data_root` must"):
                load_dataset("hugging_face", "train", tmp_path / "root")
        path.write_text(right)
