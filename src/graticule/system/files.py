"""Atomic writes of files, and reads with a size limit."""

from __future__ import annotations

import codecs
import errno
import glob
import io
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def make_folder(folder: Path) -> Path:
    """Create a folder and those above it, as far as they do not exist; returns `folder`."""
    if link := next((part for part in (folder, *folder.parents) if part.is_symlink() and not part.exists()), None):
        raise ValueError(f"{link} must be a folder, got a link that leads nowhere, to {os.readlink(link)}.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _remove_left(folder: Path) -> None:
    """Remove the temporary files of `write_whole` whose process, on this machine, was killed; once per process."""
    if os.name != "posix":  # elsewhere, asking for a process may end it
        return
    for left in folder.glob(f".*.{glob.escape(platform.node())}.*.tmp"):
        process = left.suffixes[-2][1:]
        if process.isdecimal():
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                left.unlink(missing_ok=True)
            except (OSError, OverflowError):  # of another user
                pass


def write_whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Let `write` create a temporary file next to `path`, then replace `path` by it; returns `path`.

    The file gets the mode that the process gives to new files, whichever mode `write` gave it.

    A device or a pipe is written to and not replaced, and so is everything in /dev, where a shell may have put a file.
    """
    above = next(folder for folder in path.parents if folder.exists())
    if not above.is_dir() or path.is_dir():
        problem = f"{above} is not a folder" if not above.is_dir() else "it is a folder"
        raise OSError(f"{path} could not be written: {problem}.")
    if path.parts[:2] == ("/", "dev") or (path.exists() and not path.is_file()):
        return _write_stream(path, write)
    make_folder(path.parent)
    _remove_left(path.parent)
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        write(temporary)
        temporary.chmod(mode)  # safetensors makes files that nobody else may read
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # the latter two for a failed write
        full = not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "; is the disk full?" if full else "."
        raise OSError(
            f"{path} could not be written ({_first_line(error)}){hint} An existing file is unchanged."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _write_stream(path: Path, write: Callable[[Path], Any]) -> Path:
    """Let `write` create a temporary file, and write its contents to the device or pipe at `path`; returns `path`."""
    sys.stdout.flush()  # it may be the same stream
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / (path.name or "stream")
        write(temporary)
        try:
            with path.open("ab", buffering=0) as file:
                file.write(temporary.read_bytes())
        except OSError as error:
            raise OSError(f"{path} could not be written ({_first_line(error)}).") from error
    return path


def write_text(path: Path, text: str) -> Path:
    """Write `text` to `path`, completely or not at all; returns `path`."""
    return write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path`, completely or not at all; returns `path`."""
    return write_whole(Path(path), lambda temporary: temporary.write_bytes(data))


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> Path:
    """Write arrays to `path` as compressed .npz, completely or not at all; returns the path."""
    import numpy as np  # not needed by commands that only read files

    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return write_bytes(path, buffer.getvalue())


def write_json(path: Path, values: object) -> Path:
    """Write `values` as JSON to `path`, completely or not at all; returns `path`."""
    return write_text(path, json.dumps(values, indent=2) + "\n")


def check_plain(path: Path) -> int:
    """Check that `path`, links followed, is a plain file, without opening it; returns its size in bytes.

    Reading a pipe can wait forever, and reading a device can take all memory.

    Raises:
        FileNotFoundError: if it does not exist, or is a broken link.
        ValueError: if it is a folder, a pipe, a device, a socket, or a link that leads back to itself.
    """
    try:
        status = path.stat()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path} must be a plain file, got a link that leads back to itself.") from None
    if not stat.S_ISREG(status.st_mode):
        kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
        kind = next((name for test, name in kinds if test(status.st_mode)), "device")
        raise ValueError(f"{path} must be a plain file, got a {kind}.")
    return status.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a plain file of at most `limit` bytes."""
    if (size := check_plain(path)) > limit:
        raise ValueError(f"{path} must have at most {limit:,} bytes, got {size:,}.")
    return path.read_bytes()


def read_utf8(path: Path, limit: int) -> str:
    """Read a UTF-8 text file of at most `limit` bytes, without its byte order mark."""
    content = read_bytes(path, limit)
    # among decodable bytes, a zero byte means UTF-16 or UTF-32 without a byte order mark, or no text
    try:
        text = content.decode("utf-8")
        wrong = content.find(b"\0")
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        encoding = "UTF-16 or no text" if b"\0" in content else "Latin-1 or another older encoding"
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "UTF-16"
        raise ValueError(
            f"{path} must be text in UTF-8, got byte 0x{content[wrong]:02x} at offset {wrong}, which is not "
            f"text: the file may be {encoding}; save it as UTF-8, or leave it out."
        )
    return text.removeprefix("\ufeff")


def read_json(path: Path, limit: int = 1 << 26) -> Any:
    """Read the JSON in a plain file of at most `limit` bytes."""
    content = read_bytes(path, limit)
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(f"{path} must be JSON, and is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, and is damaged ({error}).") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
