import tarfile

import pytest
from shard_files import numbered, samples, write_tar

from graticule.lab.data.tars import has_tars, read_tar, tar_files


def write_tars(root, train=(0, 1, 1, 0), val=(0, 1)):
    write_tar(root / "train" / "a.tar", samples(train))
    write_tar(root / "val" / "a.tar", samples(val))
    return root


def special(name, kind, target=""):
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header, None


def test_the_images_of_a_tar_are_where_it_says_and_other_members_are_ignored(tmp_path):
    members = [(f"./{name}", content) for name, content in samples([0, 1])]
    members[2:2] = [("./000.json", b"{}"), ("./000.seg.png", b"a mask")]
    path = write_tar(tmp_path / "a.tar", [special("./", tarfile.DIRTYPE), ("__info__", b"x"), *members])
    found = read_tar(path)
    assert [(image.name, image.label) for image in found] == [("./000.png", 0), ("./001.png", 1)]
    content = path.read_bytes()
    assert [content[image.offset : image.offset + image.size] for image in found] == [numbered(0), numbered(1)]


def test_a_truncated_damaged_or_invalid_tar_is_refused_by_name(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples([0, 1] * 40))
    content = path.read_bytes()
    end = len(content.rstrip(b"\0"))  # the zeros after it mark the end of the tar
    with tarfile.open(path) as tar:
        border = tar.getmembers()[4].offset
    damaged = bytearray(content)
    damaged[border + 100 : border + 300] = b"\xff" * 200
    cases = {f"cut at {share}": (content[: int(end * share)], "truncated|damaged") for share in (0.1, 0.5, 0.9, 0.999)}
    cases |= {
        "cut between members": (content[:border], "is truncated"),
        "damaged header": (bytes(damaged), "is truncated or damaged"),
        "two tars": (content * 2, "lost"),
        "empty": (b"", ""),
        "no tar": (b"no tar at all", ""),
        "zeros": (bytes(10240), "samples"),
        "text": (b"x" * 2000, ""),
        "gzip": (b"\x1f\x8b" + bytes(600), "not compressed"),
    }
    for case, (wrong, match) in cases.items():
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"a\.tar.*({match})"):
            read_tar(path)
            pytest.fail(case)


def test_a_member_outside_of_the_tar_or_not_regular_is_refused_and_nothing_is_unpacked(tmp_path):
    members = {
        "../evil.png": ("../evil.png", numbered(0)),
        "a/../../evil.png": ("a/../../evil.png", numbered(0)),
        "/etc/evil.png": ("/etc/evil.png", numbered(0)),
        "evil": ("C:\\evil.png", numbered(0)),
        "evil.png": ("..\\evil.png", numbered(0)),
        "007.png": special("007.png", tarfile.SYMTYPE, "/etc/passwd"),
        "009.png": special("009.png", tarfile.LNKTYPE, "000.png"),
        "008.png": special("008.png", tarfile.FIFOTYPE),
        "010.png": special("010.png", tarfile.CHRTYPE),
    }
    for name, member in members.items():
        path = write_tar(tmp_path / "root" / "a.tar", [*samples([0, 1]), member, ("009.cls", b"1")])
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            read_tar(path)
    assert [path.name for path in tmp_path.rglob("*")] == ["root", "a.tar"]


def test_a_sample_without_exactly_one_image_and_class_is_named(tmp_path):
    image = numbered(0)
    cases = {
        "no image": ([("7.cls", b"1")], "image"),
        "no class": ([("7.png", image)], "cls"),
        "two images": ([("7.png", image), ("7.jpg", image), ("7.cls", b"1")], "image"),
        "two classes": ([("7.png", image), ("7.cls", b"1"), ("7.cls", b"1")], "cls"),
        "torn": ([("7.png", image), ("8.cls", b"1")], "cls"),
        "a word": ([("7.png", image), ("7.cls", b"cat")], "cat"),
        "empty": ([("7.png", image), ("7.cls", b"")], "number"),
        "half": ([("7.png", image), ("7.cls", b"1.5")], "number"),
        "long": ([("7.png", image), ("7.cls", b"1" * 100)], "number"),
    }
    for case, (members, match) in cases.items():
        path = write_tar(tmp_path / "a.tar", [*samples([0, 1]), *members])
        with pytest.raises(ValueError, match=rf"a\.tar.*{match}"):
            read_tar(path)
            pytest.fail(case)


def test_folders_of_tars_that_are_refused_are_named_with_the_reason(tmp_path):
    def names(text):
        return lambda root: (root / "classes.txt").write_text(text)

    def compressed(name):
        return lambda root: write_tar(root / "train" / name, samples([0, 1]), mode="w:gz")

    cases = {
        "negative": ({"train": (0, -1)}, None, r"a\.tar.*classes from 0 to 999999, got -1 for 001\.png"),
        "absurd": ({"train": (0, 99999999)}, None, r"a\.tar.*classes from 0 to 999999, got 99999999"),
        "no name": ({"train": (0, 1, 2)}, names("cat\ndog\n"), r"a\.tar.*from 0 to 1, got 2 for 002\.png"),
        "same names": ({}, names("cat\ncat\n"), r"classes\.txt"),
        "empty name": ({}, names("cat\n\ndog\n"), r"classes\.txt"),
        "no names": ({}, names("\n"), r"classes\.txt"),
        "many names": (
            {},
            names("\n".join(map(str, range(1_000_001)))),
            "1,000,000 different names at most, .* got 1000001",
        ),
        "classes differ": ({"train": (0, 1, 2)}, names("cat\r\ndog\r\nwolf"), "wolf"),
        "one class": ({"train": (0, 0), "val": (0,)}, None, "two classes"),
        "gzipped": ({}, compressed("a.tar"), r"a\.tar must be a tar that is not compressed"),
        "tar.gz": ({}, compressed("b.tar.gz"), r"b\.tar\.gz must be a tar that is not compressed"),
        "tgz": ({}, compressed("b.tgz"), r"b\.tgz must be a tar that is not compressed"),
        "no val": ({}, lambda root: (root / "val").rename(root / "x"), "val or validation or test"),
        "empty val": ({}, lambda root: (root / "val" / "a.tar").unlink(), r"\*\.tar"),
    }
    for case, (labels, change, match) in cases.items():
        root = write_tars(tmp_path / case / "root", **labels)
        if change:
            change(root)
        assert has_tars(root)
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            tar_files(root)
            pytest.fail(case)
