import json
import os
import pickle
import tarfile
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from image_files import BROKEN, picture
from PIL import Image
from shard_files import number_of, numbered, samples, write_numbered, write_tar
from torch.utils.data import DataLoader

from graticule.data import BatchOrder, DataModule, EpochSampler, SeededImages, load_dataset
from graticule.data import shard_index as shard_index_module
from graticule.data.pack import pack
from graticule.data.shards import ShardImages

FORK = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """74 training images in 15 shards, 6 to evaluate on in 2."""
    root = tmp_path_factory.mktemp("shards")
    pack(write_numbered(root / "folder"), root / "packed", images_per_shard=5, workers=1, progress=False)
    return root / "packed"


def foreign(root, train=(0, 1, 1, 0), val=(0, 1)):
    """Shards as another program leaves them: no index, no classes.txt."""
    write_tar(root / "train" / "a.tar", samples(train))
    write_tar(root / "val" / "a.tar", samples(val))
    return root


def bare_index(labels):
    """What `order` needs to know of a shard."""
    zeros = np.zeros(len(labels), np.int64)
    return shard_index_module.ShardIndex((), zeros, zeros, np.asarray(labels), bytes=0)


def number_tensor(image):
    return torch.tensor(number_of(image))


def batches(images, rank, workers, epochs, skip=0, stop=None, seed=3):
    """The numbers of the images that a rank of two sees, batch by batch, epoch by epoch."""
    order = BatchOrder(EpochSampler(len(images), seed, order=partial(images.order, seed)), 8, rank=rank, world_size=2)
    loader = DataLoader(
        SeededImages(images, number_tensor, seed),
        batch_sampler=order,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    seen = []
    for epoch in epochs:
        order.sampler.set_epoch(epoch)
        order.skip(skip)
        seen.append([numbers.tolist() for (numbers, _), _ in zip(loader, range(stop or len(order)), strict=False)])
    return seen


def flat(nested):
    return [number for batch in nested for number in batch]


@FORK
def test_every_image_comes_once_an_epoch_over_ranks_and_workers(packed):
    images, _ = load_dataset("shards", "train", packed)
    ranks = [batches(images, rank, 2, range(3)) for rank in range(2)]
    for epoch in range(3):
        assert sorted(flat(ranks[0][epoch]) + flat(ranks[1][epoch])) == list(range(74))


@FORK
@pytest.mark.parametrize("workers", [0, 1])
def test_the_images_of_a_batch_do_not_depend_on_the_number_of_workers(packed, workers):
    images, _ = load_dataset("shards", "train", packed)
    assert batches(images, 1, workers, range(2)) == batches(images, 1, 2, range(2))


@FORK
@pytest.mark.parametrize("done", [1, 4, 9])
def test_a_run_that_goes_on_in_the_middle_of_an_epoch_sees_what_is_left_of_it_and_nothing_twice(packed, done):
    images, _ = load_dataset("shards", "train", packed)
    for rank in range(2):
        (whole,) = batches(images, rank, 2, [1])
        again, _ = load_dataset("shards", "train", packed)
        (before,) = batches(images, rank, 2, [1], stop=done)
        (after,) = batches(again, rank, 2, [1], skip=done)
        assert before + after == whole


def test_the_order_is_a_function_of_seed_and_epoch_and_differs_by_both():
    images = ShardImages([""] * 40, [bare_index([0] * 25)] * 40, skip_broken=True)
    orders = {(seed, epoch): images.order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert all(np.array_equal(np.sort(order), np.arange(1000)) for order in orders.values())
    assert len({order.tobytes() for order in orders.values()}) == 9
    np.testing.assert_array_equal(orders[1, 2], images.order(1, 2))


@pytest.mark.parametrize("sizes", [[50] * 40, [1] * 40, [3, 200, 17, 90] * 10, [30] * 8, [12] * 3, [9]])
def test_an_epoch_reads_from_a_few_shards_at_a_time_and_is_done_with_each(sizes):
    images = ShardImages([""] * len(sizes), [bare_index([0] * size) for size in sizes], skip_broken=True)
    at = np.searchsorted(images.starts, images.order(0, 5), side="right") - 1
    first = [np.flatnonzero(at == shard)[0] for shard in range(len(sizes))]
    last = [np.flatnonzero(at == shard)[-1] for shard in range(len(sizes))]
    begun, left = (
        np.searchsorted(np.sort(first), range(len(at)), "right"),
        np.searchsorted(np.sort(last), range(len(at))),
    )
    assert (begun - left).max() <= 8


def test_a_batch_mixes_many_shards_from_the_first_on():
    images = ShardImages([""] * 40, [bare_index([0] * 100)] * 40, skip_broken=True)
    at = images.order(0, 0) // 100
    assert min(len(set(at[start : start + 64].tolist())) for start in range(0, 4000 - 64, 64)) >= 5


def open_tars():
    """The shards that this process holds open."""
    links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return [path for path in (os.readlink(link) for link in links if os.path.islink(link)) if path.endswith(".tar")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not tell what is open")
def test_only_few_files_are_open_at_a_time_and_none_behind_the_images(packed):
    images, _ = load_dataset("shards", "train", packed)
    images._files.limit = 4
    for index in images.order(0, 0).tolist():
        assert images[index][1] in (0, 1)
        assert len(open_tars()) <= 4
    assert open_tars()
    del images
    assert not open_tars()


def test_images_that_were_read_from_can_be_sent_to_another_process_and_read_there(packed):
    images, _ = load_dataset("shards", "test", packed)
    here = [number_of(images[n][0]) for n in range(len(images))]
    sent = pickle.dumps(images)
    there = pickle.loads(sent)
    assert not there._files._open  # what is open here is not open there
    assert [number_of(there[n][0]) for n in range(len(there))] == here


def test_labels_and_names_of_classes_are_those_of_the_folder(packed):
    for split, each in (("train", 37), ("test", 3)):
        images, info = load_dataset("shards", split, packed)
        assert info.class_names == ("class 0", "class 1")
        assert len(images) == len(images.labels) == 2 * each
        assert all(label == number_of(image) // each for image, label in (images[i] for i in range(2 * each)))


def test_the_batches_of_training_come_in_the_order_of_the_stream(packed):
    data = DataModule("shards", root=packed, size=(8, 12), batch_size=8, seed=5)
    data.setup()
    images, _ = load_dataset("shards", "train", packed)
    order = data.train_order()
    order.sampler.set_epoch(2)
    assert [index for batch in order for _, index in batch] == images.order(5, 2).tolist()
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 74


def test_what_the_library_webdataset_writes_loads(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    for split, count in (("train", 10), ("val", 4)):
        (tmp_path / split).mkdir()
        with webdataset.ShardWriter(str(tmp_path / split / "%03d.tar"), maxcount=4, verbose=0) as writer:
            for n in range(count):
                writer.write({"__key__": f"dir/{n:05d}", "png": numbered(n), "cls": n % 2, "json": {"n": n}})
    images, info = load_dataset("shards", "train", tmp_path)
    assert (info.num_classes, len(images), len(images.shards)) == (2, 10, 3)
    assert [(number_of(images[n][0]), images[n][1]) for n in range(10)] == [(n, n % 2) for n in range(10)]


def test_an_index_made_from_headers_is_kept_and_made_anew_when_the_shard_changes(tmp_path, monkeypatch):
    shard = foreign(tmp_path) / "train" / "a.tar"
    load_dataset("shards", "train", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shard_index_module, "read_headers", None)
        assert load_dataset("shards", "train", tmp_path)[0].labels.tolist() == [0, 1, 1, 0]
    os.utime(write_tar(shard, samples([1, 0, 0, 1])), ns=(1, 1))  # as many bytes
    assert load_dataset("shards", "train", tmp_path)[0].labels.tolist() == [1, 0, 0, 1]


def test_a_folder_that_cannot_be_written_loads_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(shard_index_module, "write_text", refuse)
    images, _ = load_dataset("shards", "train", foreign(tmp_path))
    assert number_of(images[3][0]) == 3
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_is_passed_over_in_training_and_named_in_evaluation(tmp_path, kind):
    for split in ("train", "val"):
        members = list(samples([0, 1, 0, 1, 1]))
        members[2] = ("001.png", BROKEN[kind](numbered(1)))
        write_tar(tmp_path / split / "x.tar", members)
    train, test = (load_dataset("shards", split, tmp_path)[0] for split in ("train", "test"))
    image, label = train[1]
    assert (number_of(image), label) == (3, 1)  # the next one of the class
    assert [str(path) for path in train.skipped] == [str(tmp_path / "train" / "x.tar" / "001.png")]
    with pytest.raises(ValueError, match=r"val.x\.tar.001\.png"):
        test[1]


@FORK
def test_what_a_worker_passed_over_is_known_to_the_process_that_reports_it(tmp_path):
    members = [*samples([0, 1, 0, 1])]
    members[4] = ("002.png", b"")
    write_tar(foreign(tmp_path) / "train" / "a.tar", members)
    data = DataModule("shards", root=tmp_path, size=(8, 8), batch_size=2, workers=2)
    data.setup()
    list(data.train_dataloader())
    assert [path.name for path in data.skipped] == ["002.png"]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("made", ["by us", "elsewhere"])
def test_a_shard_that_is_cut_is_refused_by_name_wherever_it_is_cut(tmp_path, made, share):
    if made == "by us":
        pack(write_numbered(tmp_path / "folder"), tmp_path / "out", workers=1, progress=False)
    else:
        foreign(tmp_path / "out", train=[0, 1] * 40)
    shard = next((tmp_path / "out" / "train").glob("*.tar"))
    content = shard.read_bytes()
    end = len(content.rstrip(b"\0"))  # within what the tar holds; the zeros behind it are its end
    shard.write_bytes(content[: int(end * share)])
    with pytest.raises(ValueError, match=rf"{shard.name}.*(cut|damaged)"):
        load_dataset("shards", "train", tmp_path / "out")


def test_a_tar_cut_between_two_members_is_refused_though_every_member_is_whole(tmp_path):
    shard = foreign(tmp_path) / "train" / "a.tar"
    with tarfile.open(shard) as tar:
        border = tar.getmembers()[4].offset
    shard.write_bytes(shard.read_bytes()[:border])
    with pytest.raises(ValueError, match=r"a\.tar is cut"):
        load_dataset("shards", "train", tmp_path)


def test_a_header_damaged_in_the_middle_is_refused(tmp_path):
    shard = foreign(tmp_path) / "train" / "a.tar"
    with tarfile.open(shard) as tar:
        border = tar.getmembers()[4].offset
    content = bytearray(shard.read_bytes())
    content[border + 100 : border + 300] = b"\xff" * 200
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.tar is cut or damaged"):
        load_dataset("shards", "train", tmp_path)


def test_two_tars_one_behind_the_other_are_refused_for_one_would_be_lost(tmp_path):
    shard = foreign(tmp_path) / "train" / "a.tar"
    shard.write_bytes(shard.read_bytes() * 2)
    with pytest.raises(ValueError, match="lost"):
        load_dataset("shards", "train", tmp_path)


def test_a_shard_that_is_cut_while_it_is_read_is_an_error_in_training_too(tmp_path):
    images, _ = load_dataset("shards", "train", foreign(tmp_path))
    shard = tmp_path / "train" / "a.tar"
    os.truncate(shard, 1000)
    with pytest.raises(ValueError, match=r"a\.tar"):
        images[3]


def special(name, kind, target=""):
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header, None


@pytest.mark.parametrize(
    ("member", "match"),
    [
        (("../evil.png", numbered(0)), r"\.\./evil"),
        (("a/../../evil.png", numbered(0)), r"evil"),
        (("/etc/evil.png", numbered(0)), "/etc/evil"),
        (("C:\\evil.png", numbered(0)), "evil"),
        (("..\\evil.png", numbered(0)), "evil"),
        (special("009.png", tarfile.SYMTYPE, "/etc/passwd"), "009.png"),
        (special("009.png", tarfile.LNKTYPE, "000.png"), "009.png"),
        (special("009.png", tarfile.FIFOTYPE), "009.png"),
        (special("009.png", tarfile.CHRTYPE), "009.png"),
    ],
    ids=["up", "up inside", "absolute", "drive", "backslash", "symbolic link", "hard link", "fifo", "device"],
)
def test_a_member_that_leads_out_or_is_no_file_is_refused_and_nothing_is_unpacked(tmp_path, member, match):
    root = foreign(tmp_path / "root")
    write_tar(root / "train" / "a.tar", [*samples([0, 1]), member, ("009.cls", b"1")])
    with pytest.raises(ValueError, match=match):
        load_dataset("shards", "train", root)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "a.tar", "root", "train", "val"]


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("7.cls", b"1")], "image"),
        ([("7.png", numbered(0))], "cls"),
        ([("7.png", numbered(0)), ("7.jpg", numbered(0)), ("7.cls", b"1")], "image"),
        ([("7.png", numbered(0)), ("7.cls", b"1"), ("7.cls", b"1")], "cls"),
        ([("7.png", numbered(0)), ("8.cls", b"1")], "cls"),
        ([("7.png", numbered(0)), ("7.cls", b"cat")], "cat"),
        ([("7.png", numbered(0)), ("7.cls", b"")], "number"),
        ([("7.png", numbered(0)), ("7.cls", b"1.5")], "number"),
        ([("7.png", numbered(0)), ("7.cls", b"1" * 100)], "number"),
        ([("7.png", numbered(0)), ("7.cls", b"-1")], "-1"),
    ],
    ids=["no image", "no class", "two images", "two classes", "torn", "a word", "empty", "half", "long", "negative"],
)
def test_a_sample_that_is_not_an_image_and_the_number_of_a_class_is_named(tmp_path, members, match):
    write_tar(foreign(tmp_path) / "train" / "a.tar", [*samples([0, 1]), *members])
    with pytest.raises(ValueError, match=rf"a\.tar.*{match}"):
        load_dataset("shards", "train", tmp_path)


def test_other_members_of_a_sample_and_notes_are_passed_over(tmp_path):
    members = [(f"./{name}", content) for name, content in samples([0, 1])]
    members[2:2] = [("./000.json", b"{}"), ("./000.seg.png", b"a mask")]
    write_tar(foreign(tmp_path) / "train" / "a.tar", [special("./", tarfile.DIRTYPE), ("__info__", b"x"), *members])
    images, _ = load_dataset("shards", "train", tmp_path)
    assert [(number_of(images[n][0]), images[n][1]) for n in range(2)] == [(0, 0), (1, 1)]


def test_a_label_outside_of_the_classes_is_named_with_its_member(tmp_path):
    (foreign(tmp_path, train=(0, 1, 2), val=(0, 1)) / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(ValueError, match=r"a\.tar.*from 0 to 1, got 2 of 002\.png"):
        load_dataset("shards", "train", tmp_path)


@pytest.mark.parametrize("text", ["cat\ncat\n", "cat\n\ndog\n", "\n"])
def test_names_of_classes_must_be_there_and_differ(tmp_path, text):
    (foreign(tmp_path) / "classes.txt").write_text(text)
    with pytest.raises(ValueError, match=r"classes\.txt"):
        load_dataset("shards", "train", tmp_path)


def test_classes_that_differ_between_the_splits_are_named(tmp_path):
    (foreign(tmp_path, train=(0, 1, 2), val=(0, 1)) / "classes.txt").write_text("cat\r\ndog\r\nwolf")
    with pytest.raises(ValueError, match="wolf"):
        load_dataset("shards", "train", tmp_path)


def test_one_class_is_too_few(tmp_path):
    with pytest.raises(ValueError, match="two classes"):
        load_dataset("shards", "train", foreign(tmp_path, train=[0, 0], val=[0]))


@pytest.mark.parametrize("name", ["a.tar", "b.tar.gz", "b.tgz"])
def test_compressed_shards_are_refused(tmp_path, name):
    foreign(tmp_path)
    write_tar(tmp_path / "train" / name, samples([0, 1]), mode="w:gz")
    with pytest.raises(ValueError, match=rf"{name} must be a tar that is not compressed"):
        load_dataset("shards", "train", tmp_path)


@pytest.mark.parametrize("content", [b"", b"no tar at all", b"\0" * 10240, b"x" * 2000])
def test_what_is_no_tar_or_has_no_samples_is_refused_by_name(tmp_path, content):
    (foreign(tmp_path) / "train" / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.tar"):
        load_dataset("shards", "train", tmp_path)


def test_shards_that_are_not_there_are_an_error_that_says_what_should_be(tmp_path):
    for root in (None, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=str(root)):
            load_dataset("shards", "train", root)
    with pytest.raises(FileNotFoundError, match="train"):
        load_dataset("shards", "train", tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(FileNotFoundError, match=r"\*\.tar"):
        load_dataset("shards", "train", tmp_path)


@pytest.mark.parametrize("linked", ["train/a.tar", "train"])
def test_a_link_that_leads_out_is_refused(tmp_path, linked):
    root = foreign(tmp_path / "root")
    (root / linked).rename(tmp_path / "elsewhere")
    (root / linked).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="link"):
        load_dataset("shards", "train", root)


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": [0, 1]},
        {"offsets": [10**9] * 5},
        {"sizes": [-1] * 5},
        {"labels": ["0"] * 5},
        {"labels": [0.5] * 5},
        {"names": [1] * 5},
        {"count": 4},
        {"bytes": None},
        {"bytes": 10240 * 99},
    ],
    ids=str,
)
def test_an_index_that_is_damaged_or_of_another_shard_is_named(tmp_path, change):
    pack(write_numbered(tmp_path / "f", train=5), tmp_path / "o", images_per_shard=5, workers=1, progress=False)
    path = tmp_path / "o" / "train" / "000001.tar.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"000001\.tar"):
        load_dataset("shards", "train", tmp_path / "o")


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_an_index_that_is_no_index_is_named(tmp_path, text):
    (foreign(tmp_path) / "train" / "a.tar.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.tar\.json"):
        load_dataset("shards", "train", tmp_path)


def test_a_shard_that_is_missing_from_a_packed_folder_is_found_out(tmp_path):
    pack(write_numbered(tmp_path / "f"), tmp_path / "o", images_per_shard=5, workers=1, progress=False)
    (tmp_path / "o" / "train" / "000003.tar").unlink()
    with pytest.raises(ValueError, match=r"74 images for train.*got 69"):
        load_dataset("shards", "train", tmp_path / "o")


def test_images_of_every_kind_come_in_colour_of_8_bits(tmp_path):
    grey = np.arange(48, dtype=np.uint16).reshape(6, 8) * 1365  # 0 ... 64155
    pictures = {
        "cmyk.jpg": picture(0).convert("CMYK"),
        "deep.png": Image.fromarray(grey),
        "dot.png": picture(1, 1, 1),
        "alpha.png": picture(2).convert("RGBA"),
    }
    root = tmp_path / "folder"
    for split in ("train", "val"):
        for label in "ab":
            (root / split / label).mkdir(parents=True)
            for name, image in pictures.items():
                image.save(root / split / label / name)
    pack(root, tmp_path / "packed", workers=1, progress=False)
    for name, place in (("image_folder", root), ("shards", tmp_path / "packed")):
        images, _ = load_dataset(name, "train", place)
        found = [images[n][0] for n in range(8)]
        assert {image.mode for image in found} == {"RGB"}
        assert Counter(image.size for image in found) == {(56, 40): 4, (8, 6): 2, (1, 1): 2}
        for image in found:
            if image.size == (8, 6):
                np.testing.assert_array_equal(np.asarray(image), np.repeat((grey >> 8)[..., None], 3, -1))
        data = DataModule(name, root=place, size=(8, 12), batch_size=8)
        data.setup()
        assert next(iter(data.train_dataloader()))[0].shape == (8, 3, 8, 12)


@pytest.mark.parametrize("options", [{"train_share": 0.5}, {"limit_train": 9}])
def test_a_part_of_the_images_keeps_the_order_of_the_shards(packed, options):
    modules = [DataModule("shards", root=packed, size=(8, 12), **chosen) for chosen in ({}, options)]
    for data in modules:
        data.setup()
    source, chosen = (data._images["train"] for data in modules)
    assert len(chosen) < len(source)
    for epoch in range(2):
        order = chosen.order(3, epoch)
        assert sorted(order) == list(range(len(chosen)))
        kept = [index for index in source.order(3, epoch) if index in set(chosen.indices)]
        assert [chosen.indices[place] for place in order] == kept
