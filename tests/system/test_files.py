"""Files are written completely."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from graticule.lab.training.run_folder import locked
from graticule.system.files import keep_open, replace, write_bytes, write_json, write_text, write_whole
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
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_lock_is_held_until_its_process_is_killed_even_if_its_workers_live_on(tmp_path):
    script = f"""
import os, time
from pathlib import Path
from graticule.lab.training.run_folder import locked
with locked(Path({str(tmp_path)!r})) as free:
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
            with locked(tmp_path) as free:
                assert not free
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with locked(tmp_path) as free:
            assert free
            with locked(tmp_path) as again:
                assert not again
        assert (tmp_path / ".lock").exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("keep", [keep_open, lambda folder: contextlib.nullcontext(folder.mkdir())])
def test_a_file_is_renamed_in_a_folder_whether_it_is_kept_open_or_not(keep, tmp_path):
    folder = tmp_path / "run"
    with keep(folder):
        (folder / "new").write_bytes(b"new")
        replace(folder / "new", write_bytes(folder / "file", b"old"))
        assert [(one.name, one.read_bytes()) for one in folder.iterdir()] == [("file", b"new")]
