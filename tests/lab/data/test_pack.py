import json
import os
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from image_files import write_folder
from shard_files import numbered, samples, write_numbered, write_tar

from graticule.lab.commands import pack as command
from graticule.lab.data import pack as pack_module
from graticule.lab.data.module import DataModule
from graticule.lab.data.pack import pack, verify
from graticule.lab.data.registry import load_dataset


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Write files of five small images, in batches of two."""
    monkeypatch.setattr(pack_module, "_FILE_BYTES", 5 * len(numbered(0)))
    monkeypatch.setattr(pack_module, "_BATCH_BYTES", 2 * len(numbered(0)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a folder of 16 training and 6 evaluation images; tests must not change it."""
    return write_numbered(tmp_path_factory.mktemp("pack") / "folder", train=8)


def quiet(*args, **kwargs):
    return pack(*args, **{"workers": 1, "progress": False, **kwargs})


def contents(root):
    """Return the bytes of every file except the lock, by name."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_packed_images_are_those_of_the_folder_byte_by_byte_in_its_order_with_labels_classes_and_names(
    folder, tmp_path
):
    packed = quiet(folder, tmp_path)
    assert (packed.images, packed.files, packed.written) == ({"train": 16, "test": 6}, {"train": 4, "test": 2}, 6)
    assert packed.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.arrow"))
    for split in ("train", "test"):
        images, info = load_dataset("hugging_face", split, tmp_path)
        files, expected = load_dataset("image_folder", split, folder)
        assert info.class_names == expected.class_names
        np.testing.assert_array_equal(images.labels, files.labels)
        for index in range(len(files)):
            assert images.read(index) == files.read(index)
            assert str(images.place(index)).endswith(f"row {index}: {files.place(index).relative_to(folder)}")


def test_training_on_packed_images_has_the_batches_of_training_on_the_folder(tmp_path):
    """Also with files of other encoders, augmentation and order: packing changes nothing in a run."""
    pack(write_folder(tmp_path / "folder"), tmp_path / "packed", progress=False)
    found = []
    for name in ("folder", "packed"):
        dataset = "image_folder" if name == "folder" else "hugging_face"
        data = DataModule(dataset, root=tmp_path / name, size=(16, 16), batch_size=4, seed=3)
        data.setup()
        order = data.train_order()
        order.sampler.set_epoch(2)
        found.append(list(data.train_dataloader(order)))
    for (images, labels), (others, expected) in zip(*found, strict=True):
        assert images.equal(others) and labels.equal(expected)


def test_the_library_datasets_loads_a_packed_folder_and_sha256sum_accepts_the_checksums(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    quiet(folder, tmp_path)
    rows = datasets.load_from_disk(str(tmp_path))
    assert (rows["train"].num_rows, rows["validation"].num_rows) == (16, 6)
    assert rows["train"].features == datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["class 0", "class 1"])}
    )
    images, _ = load_dataset("hugging_face", "train", tmp_path)
    for index in (0, 7, 15):
        np.testing.assert_array_equal(np.asarray(rows["train"][index]["image"]), np.asarray(images[index][0]))
        assert rows["train"][index]["label"] == images[index][1]
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True)


def test_packing_again_gives_the_same_bytes_with_any_number_of_workers_and_at_any_time(folder, tmp_path):
    quiet(folder, tmp_path / "one")
    shutil.copytree(folder, tmp_path / "copy")  # files with other times
    quiet(tmp_path / "copy", tmp_path / "two", workers=4)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_packing_that_was_killed_does_not_load_and_is_resumed_without_writing_a_file_twice(
    folder, tmp_path, monkeypatch
):
    quiet(folder, tmp_path / "whole")
    content, count = pack_module._content, 0

    def kill_in_the_middle(source):
        nonlocal count
        count += 1
        if count > 14:  # two files of five images, and four of the third
            os.kill(os.getpid(), signal.SIGKILL)
        return content(source)

    if not (process := os.fork()):
        with monkeypatch.context() as patch:
            patch.setattr(pack_module, "_content", kill_in_the_middle)
            try:
                quiet(folder, tmp_path / "out")
            finally:
                os._exit(1)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    assert list((tmp_path / "out" / "train").glob(".*.tmp"))  # an unfinished file
    with pytest.raises(ValueError, match="packing was not finished"):
        load_dataset("hugging_face", "test", tmp_path / "out")
    with pytest.raises(ValueError, match="packed completely"):
        verify(tmp_path / "out", progress=False)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("data-*.arrow")}
    assert len(done) == 2
    assert quiet(folder, tmp_path / "out").written == 6 - len(done)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_until_the_last_file_is_written_a_packed_folder_does_not_load(folder, tmp_path, monkeypatch):
    """Wherever packing is interrupted, the folder is complete or refused."""
    quiet(folder, tmp_path / "whole")
    total, written = len(contents(tmp_path / "whole")), 0

    class Stop(Exception):
        pass

    def write_whole(path, write):
        nonlocal left
        if not left:
            raise Stop
        left -= 1
        return whole(path, write)

    whole = pack_module.write_whole
    monkeypatch.setattr(pack_module, "write_whole", write_whole)
    monkeypatch.setattr(
        pack_module, "write_text", lambda path, text: write_whole(path, lambda temporary: temporary.write_text(text))
    )
    for written in range(total - 1):  # pack.json is written by another function
        left = written
        output = tmp_path / str(written)
        with pytest.raises(Stop):
            quiet(folder, output)
        for split in ("train", "test"):
            with pytest.raises(ValueError, match="packing was not finished"):
                load_dataset("hugging_face", split, output)
    left = total
    quiet(folder, output)
    assert contents(output) == contents(tmp_path / "whole")


def test_packing_again_writes_only_files_that_are_truncated_changed_or_missing(folder, tmp_path):
    quiet(folder, tmp_path)
    before = contents(tmp_path)
    assert quiet(folder, tmp_path).written == 0
    first, second, third, _ = sorted((tmp_path / "train").glob("*.arrow"))
    os.truncate(first, 600)
    flip(second)
    third.unlink()
    assert quiet(folder, tmp_path).written == 3
    assert contents(tmp_path) == before


def flip(path):
    """Change a byte of the last image in an Arrow file."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"IDAT") + 6] ^= 1
    path.write_bytes(content)


def grow(folder):
    path = folder / "train" / "class 0" / "0000.PNG"
    path.write_bytes(path.read_bytes() + b"more")


def test_other_files_than_it_was_begun_with_are_refused_and_change_nothing(tmp_path):
    changes = {
        "a file less": lambda root: (root / "train" / "class 1" / "0003.PNG").unlink(),
        "another name": lambda root: (root / "val" / "class 1" / "0002.PNG").rename(root / "val" / "class 1" / "9.PNG"),
        "another size": grow,
    }
    for case, change in changes.items():
        root, output = write_numbered(tmp_path / case / "folder", train=4), tmp_path / case / "out"
        quiet(root, output)
        before = contents(output)
        change(root)
        with pytest.raises(ValueError, match=r"begun with the same files, got .*, which was begun with others"):
            quiet(root, output)
        assert contents(output) == before, case


def test_a_file_that_changes_while_it_is_packed_is_named(tmp_path, monkeypatch):
    folder = write_numbered(tmp_path / "folder", train=4)
    begin = pack_module._begin
    monkeypatch.setattr(pack_module, "_begin", lambda *args: (begin(*args), grow(folder)))
    with pytest.raises(ValueError, match=r"0000\.PNG must not change"):
        quiet(folder, tmp_path / "out")


def test_empty_files_are_refused_by_name_or_left_out_and_counted(tmp_path):
    folder = write_numbered(tmp_path / "folder", train=4)
    empty = ("train/class 0/0001.PNG", "val/class 1/0002.PNG")
    for name in empty:
        (folder / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"got 2: .*0001\.PNG.*0002\.PNG"):
        quiet(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    packed = quiet(folder, tmp_path / "out", skip_broken=True)
    assert (packed.images, packed.left_out) == ({"train": 7, "test": 5}, empty)
    assert len(load_dataset("hugging_face", "train", tmp_path / "out")[0]) == 7
    for path in (folder / "train" / "class 0").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="only empty files in class 0"):
        quiet(folder, tmp_path / "other", skip_broken=True)


def test_a_source_or_an_output_that_does_not_fit_is_refused_before_anything_is_written(folder, tmp_path):
    linked = write_numbered(tmp_path / "linked", train=1)
    (linked / "train" / "class 0" / "z.png").symlink_to("nowhere")
    huge = write_numbered(tmp_path / "huge", train=1)
    os.truncate(huge / "train" / "class 0" / "0000.PNG", 1 << 33)  # sparse
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    cases = {
        "link": (linked, "out", {}, "link"),
        "too large": (huge, "out", {}, r"0000\.PNG must have at most"),
        "workers": (folder, "out2", {"workers": 0}, "`workers`"),
        "not empty": (folder, "thesis", {}, r"thesis\.tex"),
        "the folder itself": (folder, folder, {}, "`output`"),
        "in the folder": (folder, folder / "train" / "x", {}, "`output`"),
    }
    for case, (source, output, options, match) in cases.items():
        with pytest.raises(ValueError, match=match):
            quiet(source, tmp_path / output, **options)
        assert not list((tmp_path / output).rglob("*.arrow")), case
    assert not (tmp_path / "out").exists()


def test_names_with_line_breaks_or_invalid_unicode_are_packed(tmp_path):
    folder = write_numbered(tmp_path / "folder", train=2)
    for split in ("train", "val"):
        (folder / split / "class 1").rename(folder / split / "a\nb")
    place = folder / "train" / "class 0"
    os.rename(place / "0000.PNG", os.fsencode(place) + b"/\xff.png")
    (place / "0001.PNG").rename(place / "http:::x.png")
    quiet(folder, tmp_path / "out")
    images, info = load_dataset("hugging_face", "train", tmp_path / "out")
    assert info.class_names == ("a\nb", "class 0")
    assert {images.place(index).name for index in range(4)} >= {"\\xff.png", "http:::x.png"}


def test_two_do_not_pack_into_one_folder_at_a_time(folder, tmp_path):
    with pack_module.locked(tmp_path) as free:
        assert free
        with pytest.raises(ValueError, match="another process"):
            quiet(folder, tmp_path)


def test_tars_are_packed_with_the_names_of_their_members(tmp_path):
    root = tmp_path / "tars"
    write_tar(root / "train" / "b.tar", samples([1, 0], first=4))
    write_tar(root / "train" / "a.tar", samples([0, 1, 1, 0]))
    write_tar(root / "val" / "a.tar", samples([0, 1]))
    (root / "classes.txt").write_text("cat\r\ndog\n")
    assert quiet(root, tmp_path / "out").images == {"train": 6, "test": 2}
    images, info = load_dataset("hugging_face", "train", tmp_path / "out")
    assert info.class_names == ("cat", "dog") and images.labels.tolist() == [0, 1, 1, 0, 1, 0]
    assert [images.read(index) for index in range(6)] == [numbered(index) for index in range(6)]
    assert str(images.place(4)).endswith("row 4: train/b.tar/004.png")


def test_tars_that_the_library_webdataset_writes_are_packed(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    for split, count in (("train", 10), ("val", 4)):
        (tmp_path / "tars" / split).mkdir(parents=True)
        pattern = str(tmp_path / "tars" / split / "%03d.tar")
        with webdataset.ShardWriter(pattern, maxcount=4, verbose=0) as writer:
            for n in range(count):
                writer.write({"__key__": f"dir/{n:05d}", "png": numbered(n), "cls": n % 2, "json": {"n": n}})
    quiet(tmp_path / "tars", tmp_path / "out")
    images, info = load_dataset("hugging_face", "train", tmp_path / "out")
    assert (info.class_names, images.labels.tolist()) == (("0", "1"), [0, 1] * 5)
    assert [images.read(index) for index in range(10)] == [numbered(index) for index in range(10)]


def test_a_folder_of_classes_is_packed_though_a_tar_lies_beside_them(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    with tarfile.open(tmp_path / "copy" / "train" / "class 0.tar", "w"):
        pass
    assert quiet(tmp_path / "copy", tmp_path / "out").images == {"train": 16, "test": 6}


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory):
    """Return a packed folder; tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module, "_FILE_BYTES", 5 * len(numbered(0)))
        root = tmp_path_factory.mktemp("packed")
        quiet(folder, root)
    return root


def test_whole_files_are_verified_and_every_bad_one_is_named(packed, tmp_path):
    checked = verify(packed, workers=2, progress=False)
    assert (checked.images, checked.files) == ({"train": 16, "test": 6}, {"train": 4, "test": 2})
    assert checked.bytes == sum(path.stat().st_size for path in packed.rglob("*.arrow"))
    root = tmp_path / "copy"
    shutil.copytree(packed, root)
    flip(root / "train" / "data-00001-of-00004.arrow")
    os.truncate(root / "train" / "data-00002-of-00004.arrow", 600)
    (root / "train" / "data-00003-of-00004.arrow").unlink()
    (root / "train" / "more.arrow").write_bytes(b"")
    info = root / "validation" / "dataset_info.json"
    info.write_text(info.read_text().replace("class 0", "class 2"))
    with pytest.raises(ValueError) as caught:
        verify(root, workers=2, progress=False)
    named = [str(Path(line.strip()).relative_to(root)) for line in str(caught.value).splitlines()[1:]]
    arrows = [f"train/data-0000{number}-of-00004.arrow" for number in (1, 2, 3)]
    assert named == [*arrows, "validation/dataset_info.json", "train/more.arrow"]


def test_damage_to_any_file_of_a_packed_folder_is_found(packed, tmp_path):
    for name in contents(packed):
        for harm in ("changed", "gone"):
            root = tmp_path / harm / name
            shutil.copytree(packed, root)
            if harm == "gone":
                (root / name).unlink()
            else:
                (root / name).write_bytes((root / name).read_bytes() + b"\n ")
            with pytest.raises((ValueError, FileNotFoundError), match=f"{name}|packed completely"):
                verify(root, workers=1, progress=False)


def test_a_packed_folder_whose_files_are_fewer_than_it_says_does_not_load(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "copy")
    path = tmp_path / "copy" / "train" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "_data_files": state["_data_files"][:-1]}))
    with pytest.raises(ValueError, match=r"train must have the 16 images of pack\.json, got 15"):
        load_dataset("hugging_face", "train", tmp_path / "copy")
    with pytest.raises(FileNotFoundError, match=r"pack\.json"):
        verify(tmp_path, progress=False)


def test_the_command_packs_resumes_and_verifies(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert command.run([str(folder), str(out), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"wrote 6 files to {out}" in printed and "train  16 images in 4 files" in printed
    (out / "train" / "data-00001-of-00004.arrow").unlink()
    assert command.run([str(folder), str(out), "--workers", "1"]) == 0
    assert "wrote 1 files" in (printed := capsys.readouterr().out) and "5 existed" in printed
    assert command.run([str(out), "--verify", "--workers", "1"]) == 0
    assert "is unchanged" in capsys.readouterr().out
    with pytest.raises(ValueError, match="verify"):
        command.run([str(out), "--verify", "--skip-broken"])
    with pytest.raises(ValueError, match="output"):
        command.run([str(folder)])
