"""Locks of folders between processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def locked(folder: Path, wait: float = 0) -> Iterator[bool]:
    """Lock `folder` until the block or the process ends, in whatever way; yield whether the lock was acquired.

    It is a lock of the operating system on the file .lock. That file is kept: removing it could take the lock from
    another process.

    Args:
        folder: an existing folder.
        wait: seconds to wait for another process that has the lock.

    Raises:
        OSError: if `folder` cannot be written to, or its file system has no locks.
    """
    with contextlib.ExitStack() as stack:
        try:  # a soft lock, used on file systems without locks, would outlive a killed process
            stack.enter_context(FileLock(folder / ".lock", timeout=wait, fallback_to_soft=False))
            free = True
        except Timeout:
            free = False
        yield free
