import builtins
import json
import os
import shutil

import numpy as np
import pytest
from image_files import BROKEN
from shard_files import number_of, numbered

from graticule.data import DataModule, load_dataset

datasets = pytest.importorskip("datasets")

NAMES = ["cat", "dog"]


def table(count, labels=None, images=None, names=NAMES):
    """Rows of images that can be told apart, and labels that alternate."""
    features = datasets.Features(
        {"id": datasets.Value("int64"), "img": datasets.Image(), "kind": datasets.ClassLabel(names=names)}
    )
    images = images or [{"bytes": numbered(n), "path": None} for n in range(count)]
    labels = labels if labels is not None else [n % 2 for n in range(count)]
    return datasets.Dataset.from_dict({"id": list(range(count)), "img": images, "kind": labels}, features=features)


def save(root, val="validation", **parts):
    datasets.DatasetDict({"train": table(6), val: table(4), **parts}).save_to_disk(str(root))
    return root


@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_a_saved_data_set_gives_its_images_in_colour_with_their_labels(tmp_path, val):
    save(tmp_path, val)
    for split, count in (("train", 6), ("test", 4)):
        images, info = load_dataset("hf_disk", split, tmp_path)
        assert (info.class_names, info.channels, info.size) == (("cat", "dog"), 3, None)
        assert images.labels.tolist() == [n % 2 for n in range(count)]
        assert [(number_of(images[n][0]), images[n][1]) for n in range(count)] == [(n, n % 2) for n in range(count)]


def test_rows_that_were_chosen_and_shuffled_before_saving_keep_their_labels(tmp_path):
    save(tmp_path, train=table(20).shuffle(seed=1).select(range(3, 15)))
    images, _ = load_dataset("hf_disk", "train", tmp_path)
    assert len(images) == 12
    assert all(number_of(image) % 2 == label for image, label in (images[n] for n in range(12)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_it_trains_with_workers_and_without_on_the_same_batches(tmp_path):
    save(tmp_path)
    found = []
    for workers in (0, 2):
        data = DataModule("hf_disk", root=tmp_path, size=(4, 6), batch_size=2, workers=workers)
        data.setup()
        found.append([(images.sum().item(), labels.tolist()) for images, labels in data.train_dataloader()])
    assert len(found[0]) == 3
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [*BROKEN, "none"])
def test_a_broken_image_is_passed_over_in_training_and_named_in_evaluation(tmp_path, kind):
    images = [{"bytes": numbered(n), "path": None} for n in range(6)]
    images[1] = None if kind == "none" else {"bytes": BROKEN[kind](numbered(1)), "path": None}
    save(tmp_path, train=table(6, images=images), validation=table(6, images=images))
    train, test = (load_dataset("hf_disk", split, tmp_path)[0] for split in ("train", "test"))
    assert (number_of(train[1][0]), train[1][1]) == (3, 1)
    assert [path.name for path in train.skipped] == ["row 1"]
    with pytest.raises(ValueError, match="row 1"):
        test[1]


def test_an_image_that_is_only_a_path_is_not_read(tmp_path):
    (tmp_path / "secret.png").write_bytes(numbered(9))
    images = [{"bytes": None, "path": str(tmp_path / "secret.png")}, *[{"bytes": numbered(n)} for n in range(3)]]
    rows = table(4, images=images)
    storage = rows.cast_column(
        "img", datasets.Features({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
    )
    root = save(tmp_path / "root", train=storage)  # else save_to_disk would take the image in
    images, _ = load_dataset("hf_disk", "train", pretend_images(root))
    with pytest.raises(ValueError, match=r"row 0.*secret\.png"):
        images[0]
    assert number_of(images[1][0]) == 0


def pretend_images(root):
    """Say of the column of the training rows that it is of kind Image."""
    path = root / "train" / "dataset_info.json"
    info = json.loads(path.read_text())
    info["features"]["img"] = {"_type": "Image"}
    path.write_text(json.dumps(info))
    return root


@pytest.mark.parametrize(
    ("labels", "match"), [([0, 1, None, 1, 0, 1], "label for every row"), ([0, 1, -1, 1, 0, 1], "-1 in row 2")]
)
def test_a_row_without_a_class_is_named(tmp_path, labels, match):
    save(tmp_path, train=table(6, labels=labels))
    with pytest.raises(ValueError, match=match):
        load_dataset("hf_disk", "train", tmp_path)


@pytest.mark.parametrize("dropped", ["img", "kind"])
def test_columns_that_are_not_there_are_an_error_that_lists_those_that_are(tmp_path, dropped):
    save(tmp_path, train=table(6).remove_columns(dropped))
    with pytest.raises(ValueError, match=r"got id \(Value\)"):
        load_dataset("hf_disk", "train", tmp_path)


def test_classes_that_differ_between_the_splits_are_named(tmp_path):
    save(tmp_path, train=table(6, names=["cat", "wolf"]))
    with pytest.raises(ValueError, match="wolf"):
        load_dataset("hf_disk", "test", tmp_path)


def test_one_class_is_too_few(tmp_path):
    one = table(2, labels=[0, 0], names=["cat"])
    save(tmp_path, train=one, validation=one)
    with pytest.raises(ValueError, match="two classes"):
        load_dataset("hf_disk", "train", tmp_path)


@pytest.mark.parametrize("missing", ["train", "validation"])
def test_a_split_that_is_not_there_is_named(tmp_path, missing):
    parts = {"train": table(6), "validation": table(4)}
    del parts[missing]
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path))
    with pytest.raises(ValueError, match=missing):
        load_dataset("hf_disk", "train", tmp_path)


def test_a_single_table_or_another_folder_or_none_is_refused(tmp_path):
    table(4).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(ValueError, match="one table"):
        load_dataset("hf_disk", "train", tmp_path / "one")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="save_to_disk"):
        load_dataset("hf_disk", "train", tmp_path / "other")
    for root in (None, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=str(root)):
            load_dataset("hf_disk", "train", root)


@pytest.mark.parametrize("harm", ["cut", "empty", "gone", "no json"])
def test_a_damaged_data_set_is_refused_with_its_folder(tmp_path, harm):
    arrow = next((save(tmp_path) / "train").glob("*.arrow"))
    if harm == "cut":
        arrow.write_bytes(arrow.read_bytes()[:-700])
    elif harm == "empty":
        arrow.write_bytes(b"")
    elif harm == "gone":
        arrow.unlink()
    else:
        (tmp_path / "train" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_dataset("hf_disk", "train", tmp_path)


def test_a_link_or_a_name_that_leads_out_is_refused(tmp_path):
    save(tmp_path / "root")
    shutil.copytree(tmp_path / "root" / "train", tmp_path / "elsewhere")
    path = tmp_path / "root" / "train" / "state.json"
    state = json.loads(path.read_text())
    name = state["_data_files"][0]["filename"]
    path.write_text(json.dumps({**state, "_data_files": [{"filename": f"../../elsewhere/{name}"}]}))
    with pytest.raises(ValueError, match="elsewhere"):
        load_dataset("hf_disk", "train", tmp_path / "root")
    shutil.rmtree(tmp_path / "root" / "train")
    (tmp_path / "root" / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="link"):
        load_dataset("hf_disk", "train", tmp_path / "root")


def test_no_code_beside_the_data_runs(tmp_path):
    root = save(tmp_path / "root")
    for name in ("root.py", "dataset.py", "__init__.py", "train/train.py"):
        (root / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    images, _ = load_dataset("hf_disk", "train", root)
    assert np.asarray(images[0][0]).shape == (4, 6, 3)
    assert not (tmp_path / "ran").exists()


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"graticule\[hf\]"):
        load_dataset("hf_disk", "train", tmp_path)


def test_files_that_are_not_plain_or_not_in_the_folder_are_refused_before_they_are_opened(tmp_path):
    root = save(tmp_path / "root")
    state, splits = root / "train" / "state.json", root / "dataset_dict.json"
    right = state.read_text()
    for wrong in ({"_data_files": [{"filename": "/dev/zero"}]}, {"_data_files": 3}, {"_data_files": ["a"]}, [], 3):
        state.write_text(json.dumps(json.loads(right) | wrong if isinstance(wrong, dict) else wrong))
        with pytest.raises(ValueError, match=r"tables in itself, got /dev/zero|state\.json is damaged"):
            load_dataset("hf_disk", "train", root)
    state.write_text(right)
    splits.write_text(json.dumps({"splits": ["train", "validation", str(tmp_path)]}))
    with pytest.raises(ValueError, match="tables in itself"):
        load_dataset("hf_disk", "train", root)
    splits.unlink()
    os.mkfifo(splits)
    with pytest.raises(ValueError, match=r"dataset_dict\.json must be a plain file, got a pipe"):
        load_dataset("hf_disk", "train", root)


@pytest.mark.parametrize(
    "kind",
    [
        {"_type": "ClassLabel", "num_classes": 999_999_999},
        {"_type": "ClassLabel", "names_file": "/dev/zero"},
        {"_type": "ClassLabel", "names": ["a", "a"]},
        {"_type": "ClassLabel", "names": 3},
        None,
    ],
    ids=str,
)
def test_absurd_classes_are_refused(tmp_path, kind):
    path = save(tmp_path) / "train" / "dataset_info.json"
    info = json.loads(path.read_text())
    info["features"]["kind"] = kind
    path.write_text(json.dumps(info))
    with pytest.raises(ValueError, match="`data_root` must be a folder that DatasetDict"):
        load_dataset("hf_disk", "train", tmp_path)
