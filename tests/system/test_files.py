"""Files are written completely, and read within limits; only plain ones are read."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graticule.lab.training.run_folder import lock_folder
from graticule.system.files import (
    check_plain,
    read_bytes,
    read_json,
    write_bytes,
    write_json,
    write_text,
    write_whole,
)
from in_turn import in_turn

WRITERS = {
    "text": lambda path: write_text(path, "a"),
    "bytes": lambda path: write_bytes(path, b"a"),
    "json": lambda path: write_json(path, {"a": 1}),
    "torch": lambda path: write_whole(path, lambda temporary: torch.save({"a": torch.ones(2)}, temporary)),
    "safetensors": lambda path: write_whole(path, lambda temporary: save_file({"a": torch.ones(2)}, temporary)),
}


@in_turn("writer", WRITERS)
@in_turn("umask", [0o022, 0o027, 0o077])
def test_a_file_gets_the_mode_of_new_files_whoever_writes_it(writer, umask, tmp_path):
    before = os.umask(umask)
    try:
        for _ in range(2):  # a new file, and over an existing one
            path = WRITERS[writer](tmp_path / "file")
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == ["file"]


def test_a_lock_is_held_until_its_process_is_killed_even_if_its_workers_live_on(tmp_path):
    script = f"""
import os, time
from pathlib import Path
from graticule.lab.training.run_folder import lock_folder
with lock_folder(Path({str(tmp_path)!r})) as free:
    os.fork()
    os.write(1, str(free)[:1].encode())  # the worker too: once it runs, it has closed the lock it inherited
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.read(2) == "TT"
        for _ in range(2):  # failing to lock does not release the lock of another
            with lock_folder(tmp_path) as free:
                assert not free
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with lock_folder(tmp_path) as free:
            assert free
            with lock_folder(tmp_path) as again:
                assert not again
        assert (tmp_path / ".lock").exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def bind(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


#: A kind of files -> makes one at a path.
MAKERS = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": bind,
    "link that leads back to itself": lambda path: path.symlink_to(path.name),
    "link that leads back to itself, over another": lambda path: (path.symlink_to("b"), Path("b").symlink_to(path)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_other_kinds_of_files_are_refused_and_not_opened(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    MAKERS[kind](tmp_path / "a")
    for read in (check_plain, read_json, lambda path: read_bytes(path, 10)):
        with pytest.raises(ValueError, match=f"a must be a plain file, got a {kind.partition(',')[0]}"):
            read(tmp_path / "a")


def test_a_link_to_a_plain_file_is_followed_and_one_to_nothing_is_not_there(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("nowhere")
    linked = tmp_path / "b"
    assert (check_plain(linked), read_bytes(linked, 2), read_json(linked)) == (2, b"12", 12)
    with pytest.raises(FileNotFoundError, match="c"):
        check_plain(tmp_path / "c")


def test_a_file_above_the_limit_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no disk, and would take all memory
    with pytest.raises(ValueError, match=r"at most 67,108,864 bytes, got 1,099,511,627,776"):
        read_json(tmp_path / "a")


def test_a_file_without_json_is_refused_by_name(tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    for content in (b"", b"{", b"\xff\x00\xff", b"9" * 5000, deep):
        (tmp_path / "a").write_bytes(content)
        why = "nested too deeply" if content is deep else "damaged"
        with pytest.raises(ValueError, match=f"a must be JSON, and is {why}"):
            read_json(tmp_path / "a")


def test_the_next_writer_removes_what_a_killed_writer_left_and_nothing_else(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from graticule.system.files import write_whole\n"
        "write_whole(Path(sys.argv[1]), lambda path: (path.write_text('half'), os.kill(os.getpid(), 9)))"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.safetensors")], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    others = [left.with_name(left.name.replace(left.suffixes[-2], f".{os.getpid()}")), tmp_path / ".mine.tmp"]
    others.append(tmp_path / f".model.safetensors.another-machine.{left.suffixes[-2][1:]}.tmp")
    for other in others:
        other.write_text("of a process that runs, of the user, or of another machine")
    write_text(tmp_path / "config.json", "{}")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "config.json"])
