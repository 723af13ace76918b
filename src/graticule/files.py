"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Let `write` make a temporary file beside `path`, then put it in its place; returns `path`.

    Raises:
        OSError: if it cannot be written, such as on a full disk; what was at `path` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save turns a failed write into a RuntimeError
        raise OSError(
            f"{path} could not be written ({_first_line(error)}); is the disk full? What was there before is as it was."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write `text` to `path`, whole or not at all; returns `path`."""
    return write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path`, whole or not at all; returns `path`."""
    return write_whole(Path(path), lambda temporary: temporary.write_bytes(data))


def write_json(path: Path, values: Any) -> Path:
    """Write `values` as JSON to `path`, whole or not at all; returns `path`."""
    return write_text(path, json.dumps(values, indent=2) + "\n")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
