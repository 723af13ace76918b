"""The memory allocator of this process; imports no PyTorch."""

from __future__ import annotations

import contextlib
import ctypes


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones; elsewhere, this does nothing.

    Otherwise the buffers of each training step are mapped and cleared anew, most of all in Dask's workers, whose
    MALLOC_TRIM_THRESHOLD_ turns off glibc's adaptive thresholds.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):
        for threshold in (trim_threshold, mmap_threshold):
            ctypes.CDLL(None).mallopt(threshold, 2**31 - 1)
