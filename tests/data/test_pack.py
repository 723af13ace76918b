import gc
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from shard_files import number_of, write_numbered

from graticule.commands import pack as command
from graticule.data import load_dataset
from graticule.data import pack as pack_module
from graticule.data.pack import pack
from graticule.data.verify import verify


def tars(root):
    """The bytes of every shard and index, by name."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.tar*"))}


def quiet(*args, **kwargs):
    return pack(*args, **{"workers": 1, "progress": False, "images_per_shard": 5, **kwargs})


def test_every_file_is_in_one_shard_byte_by_byte_with_its_label_and_named_in_the_list(tmp_path):
    folder = write_numbered(tmp_path / "folder")
    packed = quiet(folder, tmp_path / "out")
    assert (packed.images, packed.shards) == ({"train": 74, "test": 6}, {"train": 15, "test": 2})
    assert packed.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.tar"))
    for split, part in (("train", "train"), ("test", "val")):
        images, _ = load_dataset("shards", split, tmp_path / "out")
        files, _ = load_dataset("image_folder", split, folder)
        sources = [folder / line for line in (tmp_path / "out" / part / "files.txt").read_text().splitlines()]
        assert sorted(sources) == sorted(path for path, _ in files.files)
        for index, source in enumerate(sources):
            assert images.read(index) == source.read_bytes()
            assert images.place(index).name == f"{index:09d}.png"
            assert images.labels[index] == dict(files.files)[source]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it leaves closing the shards to the interpreter
def test_the_library_webdataset_reads_the_same_images_and_labels(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    quiet(write_numbered(tmp_path / "folder"), tmp_path / "out")
    images, _ = load_dataset("shards", "train", tmp_path / "out")
    urls = [str(path) for path in images.shards]
    read = webdataset.WebDataset(urls, shardshuffle=False).decode("pil").to_tuple("__key__", "png", "cls")
    found = list(read)
    gc.collect()  # here, where the warning is expected
    assert [key for key, _, _ in found] == [f"{index:09d}" for index in range(74)]
    for index, (_, image, label) in enumerate(found):
        np.testing.assert_array_equal(np.asarray(image), np.asarray(images[index][0]))
        assert label == images[index][1]


def test_packing_again_gives_the_same_bytes_with_any_number_of_workers_and_at_any_time(tmp_path):
    folder = write_numbered(tmp_path / "folder", train=8)
    quiet(folder, tmp_path / "one")
    shutil.copytree(folder, tmp_path / "copy")  # files with other times
    quiet(tmp_path / "copy", tmp_path / "two", workers=4)
    assert tars(tmp_path / "one") == tars(tmp_path / "two")
    quiet(folder, tmp_path / "three", seed=1)
    assert tars(tmp_path / "one") != tars(tmp_path / "three")


def test_shards_mix_the_classes_and_are_as_large_as_each_other(tmp_path):
    quiet(write_numbered(tmp_path / "folder", classes=4, train=50, val=1), tmp_path / "out", images_per_shard=19)
    images, _ = load_dataset("shards", "train", tmp_path / "out")
    sizes = np.diff(images.starts)
    assert (len(sizes), sizes.min(), sizes.max()) == (11, 18, 19)
    assert all(len(set(part.tolist())) == 4 for part in np.split(images.labels, images.starts[1:-1]))


def test_packing_that_was_killed_goes_on_and_makes_no_shard_twice(tmp_path):
    folder = write_numbered(tmp_path / "folder")
    whole = quiet(folder, tmp_path / "whole")
    script = f"""
import os, signal
from graticule.data import pack
member, count = pack._member, 0
def kill_in_the_middle(*args):
    global count
    count += 1
    if count > 35:  # three shards of five images, and half of the fourth
        os.kill(os.getpid(), signal.SIGKILL)
    return member(*args)
pack._member = kill_in_the_middle
pack.pack({str(folder)!r}, {str(tmp_path / "out")!r}, images_per_shard=5, workers=1, progress=False)
"""
    killed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "out" / "train").glob(".*.tmp"))  # the half
    shutil.copy(tmp_path / "whole" / "val" / "000000.tar", tmp_path / "out" / "val")
    with pytest.raises(ValueError, match="not finished"):
        load_dataset("shards", "train", tmp_path / "out")
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "train").glob("*.tar")}
    assert len(done) == 3
    packed = quiet(folder, tmp_path / "out")
    assert packed.written == sum(whole.shards.values()) - 3
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert tars(tmp_path / "out") == tars(tmp_path / "whole")
    assert not list(tmp_path.rglob(".*.tmp"))


def test_packing_what_is_packed_does_nothing_and_a_shard_that_is_cut_or_gone_is_made_again(tmp_path):
    folder = write_numbered(tmp_path / "folder")
    quiet(folder, tmp_path / "out")
    before = tars(tmp_path / "out")
    assert quiet(folder, tmp_path / "out").written == 0
    os.truncate(tmp_path / "out" / "train" / "000002.tar", 600)
    (tmp_path / "out" / "train" / "000004.tar").unlink()
    (tmp_path / "out" / "val" / "000001.tar.json").unlink()
    assert quiet(folder, tmp_path / "out").written == 3
    assert tars(tmp_path / "out") == before


def grow(folder):
    path = folder / "train" / "class 0" / "0000.PNG"
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (lambda folder: None, {"images_per_shard": 6}, "images_per_shard: 5, now 6"),
        (lambda folder: None, {"seed": 1}, "seed: 0, now 1"),
        (lambda folder: (folder / "train" / "class 1" / "0003.PNG").unlink(), {}, "list of files"),
        (lambda folder: (folder / "val" / "class 1").rename(folder / "val" / "x"), {}, "classes"),
        (grow, {}, "list of files"),
    ],
    ids=["images a shard", "seed", "a file less", "another class", "a file of another size"],
)
def test_other_files_or_options_than_it_was_begun_with_are_refused_and_named(tmp_path, change, options, match):
    folder = write_numbered(tmp_path / "folder", train=4)
    quiet(folder, tmp_path / "out")
    before = tars(tmp_path / "out")
    change(folder)
    with pytest.raises(ValueError, match=match):
        quiet(folder, tmp_path / "out", **options)
    assert tars(tmp_path / "out") == before


def test_a_file_that_changes_while_it_is_packed_is_named(tmp_path, monkeypatch):
    folder = write_numbered(tmp_path / "folder", train=4)
    begin = pack_module._begin
    monkeypatch.setattr(pack_module, "_begin", lambda *args: (begin(*args), grow(folder)))
    with pytest.raises(ValueError, match=r"0000\.PNG must not change"):
        quiet(folder, tmp_path / "out")


def test_files_of_no_bytes_are_refused_by_name_or_left_out_and_counted(tmp_path):
    folder = write_numbered(tmp_path / "folder", train=4)
    empty = [folder / "train" / "class 0" / "0001.PNG", folder / "val" / "class 1" / "0002.PNG"]
    for path in empty:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"0001\.PNG.*0002\.PNG"):
        quiet(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    packed = quiet(folder, tmp_path / "out", skip_broken=True)
    assert (packed.images, packed.left_out) == ({"train": 7, "test": 5}, tuple(empty))
    for path in (folder / "train" / "class 0").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="class 0"):
        quiet(folder, tmp_path / "other", skip_broken=True)


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path):
    folder = write_numbered(tmp_path / "folder", train=4)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "train" / "class 0" / "z.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match="link"):
        quiet(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [({"images_per_shard": 0}, "images_per_shard"), ({"workers": 0}, "workers"), ({"seed": -1}, "seed")],
)
def test_nonsensical_options_are_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=f"`{match}`"):
        quiet(write_numbered(tmp_path / "folder", train=1), tmp_path / "out", **options)


@pytest.mark.parametrize("output", ["folder", "folder/packed", "folder/train/x"])
def test_shards_are_not_written_into_what_is_packed(tmp_path, output):
    with pytest.raises(ValueError, match="`output`"):
        quiet(write_numbered(tmp_path / "folder", train=1), tmp_path / output)


def test_a_folder_with_other_things_in_it_is_not_written_to(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        quiet(write_numbered(tmp_path / "folder", train=1), tmp_path / "out")


def test_a_class_whose_name_is_no_line_is_refused(tmp_path):
    folder = write_numbered(tmp_path / "folder", train=1)
    for split in ("train", "val"):
        (folder / split / "class 1").rename(folder / split / "a\nb")
    with pytest.raises(ValueError, match="names"):
        quiet(folder, tmp_path / "out")


def test_two_do_not_pack_into_one_folder_at_a_time(tmp_path):
    folder = write_numbered(tmp_path / "folder", train=1)
    (tmp_path / "out").mkdir()
    with pack_module.locked(tmp_path / "out") as alone:
        assert alone
        with pytest.raises(ValueError, match="another process"):
            quiet(folder, tmp_path / "out")


def test_whole_shards_pass_and_every_bad_one_is_named(tmp_path):
    packed = quiet(write_numbered(tmp_path / "folder"), tmp_path / "out")
    checked = verify(tmp_path / "out", workers=1, progress=False)
    assert (checked.images, checked.shards, checked.bytes) == (packed.images, packed.shards, packed.bytes)
    train = tmp_path / "out" / "train"
    flipped = bytearray((train / "000001.tar").read_bytes())
    flipped[700] ^= 1
    (train / "000001.tar").write_bytes(flipped)
    os.truncate(train / "000003.tar", 600)
    (train / "000005.tar.json").unlink()
    index = json.loads((train / "000007.tar.json").read_text())
    (train / "000007.tar.json").write_text(json.dumps({**index, "labels": [1 - label for label in index["labels"]]}))
    with pytest.raises(ValueError) as caught:
        verify(tmp_path / "out", workers=2, progress=False)
    lines = str(caught.value).splitlines()[1:]
    assert [number for line in lines for number in (1, 3, 5, 7) if f"{number:06d}.tar" in line] == [1, 3, 5, 7]
    assert len(lines) == 4


def test_a_shard_that_is_gone_is_missed(tmp_path):
    quiet(write_numbered(tmp_path / "folder"), tmp_path / "out")
    (tmp_path / "out" / "train" / "000001.tar").unlink()
    with pytest.raises(ValueError, match="shards are missing"):
        verify(tmp_path / "out", workers=1, progress=False)
    with pytest.raises(FileNotFoundError, match=r"pack\.json"):
        verify(tmp_path / "folder", workers=1, progress=False)


def test_the_command_packs_goes_on_and_checks(tmp_path, capsys):
    folder, out = write_numbered(tmp_path / "folder", train=8), tmp_path / "out"
    options = ["--workers", "1", "--images-per-shard", "4"]
    assert command.run([str(folder), str(out), *options]) == 0
    printed = capsys.readouterr().out
    assert f"wrote 6 shards to {out}" in printed
    assert "train  16 images in 4 shards" in printed
    (out / "train" / "000001.tar").unlink()
    assert command.run([str(folder), str(out), *options]) == 0
    assert "wrote 1 shards" in (printed := capsys.readouterr().out) and "5 were there" in printed
    assert command.run([str(out), "--verify", "--workers", "1"]) == 0
    assert "as it was packed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="verify"):
        command.run([str(out), "--verify", "--seed", "3"])
    with pytest.raises(ValueError, match="output"):
        command.run([str(folder)])
    images, _ = load_dataset("shards", "train", out)
    assert sorted(number_of(images[n][0]) for n in range(16)) == list(range(16))
