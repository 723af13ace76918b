"""The same images in folders, in .tar files and in a WebDataset give the same examples and the same runs."""

import io
import json
import pickle
import tarfile

import numpy as np
import pytest

from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import load_dataset
from graticule.lab.training.loop import train
from image_files import BROKEN, number_of, numbered, write_folder
from in_turn import in_turn
from short_runs import assert_same_end, short, stopped

CLASSES = tuple(f"c{number:02}" for number in range(20))


def write_tar(path, members, kind=tarfile.REGTYPE, mode="w"):
    """Write an archive of name -> bytes; `kind` is the type of its first member."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for index, (name, content) in enumerate(members.items()):
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), tarfile.REGTYPE if index else kind
            archive.addfile(member, io.BytesIO(content))


def in_one(split, files, root):
    write_tar(root / f"{split}.tar", {f"./{split}/{group}/{file}": content for group, file, content in files})


def per_class(split, files, root):
    for name in CLASSES:
        write_tar(root / split / f"{name}.tar", {file: content for group, file, content in files if group == name})


def in_turns(split, files, root):
    for shard in range(3):  # each has images of every class
        write_tar(
            root / split / f"{shard}.tar", {f"{group}/{file}": content for group, file, content in files[shard::3]}
        )


def web(split, files, root, label=lambda key, number: {f"{key}.cls": str(number).encode()}):
    for shard in range(3):
        members = {}
        for group, file, content in files[shard::3]:
            key, number = f"{group}_{file.partition('.')[0]}", CLASSES.index(group)
            members |= {f"{key}.JPEG": content, **label(key, number)}
        write_tar(root / f"imagenet-{split}-{shard:04}.tar", members)


def described(split, files, root):
    web(split, files, root, lambda key, number: {f"{key}.json": json.dumps({"name": key, "label": number}).encode()})


def both(split, files, root):
    """Write labels in .cls, beside JSON without them."""
    web(split, files, root, lambda key, number: {f"{key}.json": b"{}", f"{key}.cls": b"%d\n" % number})


LAYOUTS = [in_one, per_class, in_turns, web, described, both]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Write 200 images as a folder and in each layout; tests must not change them."""
    root = tmp_path_factory.mktemp("packed")
    folder = write_folder(root / "folder", CLASSES, per_class=5)
    for layout in LAYOUTS:
        for split in ("train", "val"):
            files = [(path.parent.name, path.name, path.read_bytes()) for path in sorted(folder.glob(f"{split}/*/*"))]
            layout(split, files, root / layout.__name__)
    (root / "described" / "classes.txt").write_text("\n".join(CLASSES))
    return root


@in_turn("layout", LAYOUTS)
def test_every_layout_has_the_images_labels_and_names_of_the_folder(packed, layout):
    named = layout in (in_one, per_class, in_turns, described)
    for split in ("train", "test"):
        expected, _ = load_dataset("image_folder", split, packed / "folder")
        images, info = load_dataset("image_folder", split, packed / layout.__name__)
        assert info.class_names == (CLASSES if named else tuple(map(str, range(20))))
        assert images.labels.tolist() == expected.labels.tolist() and len(images) == 100
        copy = pickle.loads(pickle.dumps(images))  # as for a worker that is spawned
        assert [copy.read(index) for index in range(100)] == [expected.read(index) for index in range(100)]
        assert np.array_equal(images[37][0], expected[37][0]) and images[37][1] == expected[37][1]
        name = f"c07_{37 % 5}" if layout in (web, described, both) else f"{37 % 5}"
        assert images.place(37).name == f"{name}.JPEG" and images.files_of(37)[0].is_file()


@in_turn("layout", [in_turns, described])
def test_a_run_on_shards_that_is_stopped_and_resumed_equals_the_run_on_the_folder_bit_for_bit(
    packed, layout, tmp_path_factory
):
    runs, options = tmp_path_factory.mktemp("runs"), {"dataset": "image_folder", "img_size": (8, 8), "epochs": 1}
    options |= {"limit_train": 40, "limit_test": 20, "model_kwargs": ("depth=1",)}
    whole = train(short(**options, data_root=packed / "folder"), runs / "whole", progress=False)
    recipe = short(**options, data_root=packed / layout.__name__)
    run = stopped(recipe, runs / "stopped", 1)
    assert_same_end(train(recipe, run.folder, resume=True, progress=False), whole)


def images_of(*names):
    return {name: numbered(index) for index, name in enumerate(names)}


def write_pair(root, train, test=None):
    write_tar(root / "train.tar", train)
    write_tar(root / "val.tar", test or images_of("a/0.png", "b/0.png"))
    return root


@in_turn("kind", [*BROKEN])
def test_a_broken_image_is_skipped_and_named_in_training_and_an_error_in_evaluation(tmp_path_factory, kind):
    members = images_of("a/0.png", "a/1.png", "b/0.png")
    members["a/0.png"] = BROKEN[kind](members["a/0.png"])
    root = write_pair(tmp_path_factory.mktemp("root"), members, members)
    images, _ = load_dataset("image_folder", "train", root)
    assert np.array_equal(images[0][0], images[1][0]) and images.skipped == [root / "train.tar" / "a" / "0.png"]
    with pytest.raises(ValueError, match=r"val\.tar/a/0\.png cannot be used"):
        load_dataset("image_folder", "test", root)[0][0]


def test_names_in_an_archive_lead_nowhere_else(tmp_path):
    root = write_pair(tmp_path / "data", images_of("/a/0.png", "../../b/1.png", f"a/{'x' * 300}.png", "a/\u00e4.png"))
    images, info = load_dataset("image_folder", "train", root)
    assert info.class_names == ("a", "b") and len(images) == 4 and all(images[index] for index in range(4))
    assert {images.files_of(index)[0] for index in range(4)} == {root / "train.tar"}
    assert all(str(images.place(index)).startswith(f"{root / 'train.tar'}/") for index in range(4))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "train.tar", "val.tar"]


def test_an_index_follows_its_files_and_images_that_were_cut_off_later_are_broken(tmp_path):
    root = write_pair(tmp_path, images_of("a/0.png", "b/0.png"))
    assert len(load_dataset("image_folder", "train", root)[0]) == 2
    write_pair(root, images_of(*(f"{group}/{index}.png" for group in "ab" for index in range(20))))
    images, _ = load_dataset("image_folder", "train", root)
    assert len(images) == 40
    (root / "train.tar").write_bytes((root / "train.tar").read_bytes()[:1700])
    assert number_of(images[39][0]) == 0 and images.skipped == [root / "train.tar" / "b" / "9.png"]


TWO = images_of("a/0.png", "b/0.png")
LABELED = {**images_of("0.png", "1.png"), "0.cls": b"0", "1.cls": b"1"}


def pair(train, test=TWO):
    return lambda root: write_pair(root, train, test)


def changed(change, members=TWO):
    """Write a pair whose training file is `change` of the right one."""

    def write(root):
        write_pair(root, members)
        (root / "train.tar").write_bytes(bytes(change(bytearray((root / "train.tar").read_bytes()))))

    return write


def damaged(content):
    content[1024 + 20] ^= 1  # in the second header
    return content


def listed(text):
    def write(root):
        write_pair(root, LABELED, LABELED)
        (root / "classes.txt").write_text(text)

    return write


def compressed(root):
    write_pair(root, TWO)
    write_tar(root / "train.tar", TWO, mode="w:gz")


def linked(root):
    write_pair(root, TWO)
    write_tar(root / "train.tar", TWO, kind=tarfile.LNKTYPE)


def mixed(root):
    write_pair(root, LABELED)


REFUSED = {
    "empty": (changed(lambda content: b""), r"whole, uncompressed .tar files, got .*train\.tar: empty file"),
    "compressed": (compressed, r"got .*train\.tar: "),
    "cut in an image": (changed(lambda content: content[: 1024 + 540]), r"train\.tar: 'b/0.png' goes beyond its end"),
    "cut between images": (
        changed(lambda content: content[:1024]),
        r"train\.tar: it is damaged or cut off at byte 1,024",
    ),
    "damaged": (changed(damaged), r"train\.tar: it is damaged or cut off at byte 1,024"),
    "link": (linked, r"train\.tar: 'a/0.png' is a link"),
    "no images": (pair({"a.txt": b""}, {"a.txt": b""}), r"two classes or more, got none in .*train\.tar"),
    "one class": (pair(images_of("a/0.png"), images_of("a/0.png")), "two classes or more, got a in"),
    "other classes": (pair(TWO, images_of("a/0.png", "c/0.png")), "in training only: b; in evaluation only: c "),
    "mixed": (mixed, "in training only: 0, 1; in evaluation only: a, b "),
    "no label": (pair({**LABELED, "2.png": numbered(2)}), r"train.tar/2.png must have its own label .* got None"),
    "two images": (pair({**LABELED, "1.jpg": numbered(2)}), r"train.tar/1.jpg must have its own label"),
    "no number": (pair({**LABELED, "1.cls": b"cat"}), r"train.tar/1.png must have its own label .* got b'cat'"),
    "huge": (pair({**LABELED, "1.cls": b"9" * 12}), r"below 1,000,000, .* got 9{12}\."),
    "no key": (pair({**images_of("0.png"), "0.json": b'{"class": 3}'}), r'"label" in a file .json, got None'),
    "gap": (pair({**LABELED, "1.cls": b"2"}, {**LABELED, "1.cls": b"2"}), "every class from 0 on, got 0, 2 in"),
    "too many names": (listed("cat\ndog\nwolf\n"), r"classes\.txt must have a line for each of 2 classes, got 3"),
}


@in_turn("kind", [*REFUSED])
def test_archives_of_another_form_and_damaged_ones_are_refused_with_the_reason(kind, tmp_path_factory):
    write, match = REFUSED[kind]
    write(root := tmp_path_factory.mktemp("root"))
    with pytest.raises(ValueError, match=match):
        DataModule("image_folder", root=root, size=(8, 8))
