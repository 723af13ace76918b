"""Files are read within limits, and only plain ones are read."""

import os
import socket

import pytest

from graticule.system.files import check_plain, read_bytes, read_json


def pipe(path):
    os.mkfifo(path)


def loop(path):
    path.symlink_to(path.name)


def circle(path):
    path.symlink_to("other")
    path.with_name("other").symlink_to(path.name)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (pipe, "pipe"),
        (device, "device"),
        (folder, "folder"),
        (loop, "link that leads back to itself"),
        (circle, "link that leads back to itself"),
    ],
)
def test_other_kinds_of_files_are_refused_and_not_opened(tmp_path, make, kind):
    make(tmp_path / "a")
    for read in (check_plain, read_json, lambda path: read_bytes(path, 10)):
        with pytest.raises(ValueError, match=f"a must be a plain file, got a {kind}"):
            read(tmp_path / "a")


def test_a_socket_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("a")
        with pytest.raises(ValueError, match="got a socket"):
            check_plain(tmp_path / "a")


def test_a_link_to_a_plain_file_is_followed_and_one_to_nothing_is_not_there(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("nowhere")
    assert (
        check_plain(tmp_path / "b") == 2 and read_bytes(tmp_path / "b", 2) == b"12" and read_json(tmp_path / "b") == 12
    )
    with pytest.raises(FileNotFoundError, match="c"):
        check_plain(tmp_path / "c")


def test_a_file_above_the_limit_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no disk, and would take all memory
    with pytest.raises(ValueError, match=r"at most 67,108,864 bytes, got 1,099,511,627,776"):
        read_json(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"\xff\x00\xff", "damaged"),
        (b"9" * 5000, "damaged"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "cut", "no text", "long number", "deep"],
)
def test_a_file_without_json_is_refused_by_name(tmp_path, content, why):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=f"a must be JSON, and is {why}"):
        read_json(tmp_path / "a")
