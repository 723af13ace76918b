"""Files that are written whole."""

import os

import pytest
import torch
from safetensors.torch import save_file

from graticule.files import write_bytes, write_json, write_text, write_whole

WRITERS = {
    "text": lambda path: write_text(path, "a"),
    "bytes": lambda path: write_bytes(path, b"a"),
    "json": lambda path: write_json(path, {"a": 1}),
    "torch": lambda path: write_whole(path, lambda temporary: torch.save({"a": torch.ones(2)}, temporary)),
    "safetensors": lambda path: write_whole(path, lambda temporary: save_file({"a": torch.ones(2)}, temporary)),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_gets_the_mode_of_new_files_whoever_writes_it(writer, umask, tmp_path):
    before = os.umask(umask)
    try:
        for _ in range(2):  # anew, and over what is there
            path = WRITERS[writer](tmp_path / "file")
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
