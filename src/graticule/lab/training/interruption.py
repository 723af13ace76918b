"""Interruption of training: by the user, or by preemption on a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]

#: The exit code that means "try again" to a scheduler: EX_TEMPFAIL of sysexits.h.
REQUEUE = 75
#: The exit code for a stop by the user, as in shells for SIGINT.
STOPPED = 130


class Interrupted(Exception):
    """Training was stopped; the run can be resumed."""


class Preempted(Interrupted):
    """The run was preempted (SIGTERM, or SIGUSR1 from SLURM); a checkpoint was saved first."""


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Pass the signals to `handler` within the block, and restore their handlers after it; only in the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS if in_main}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def requeue_code() -> int:
    """Return the exit code of a command that a signal stopped.

    Raises:
        ValueError: if GRATICULE_REQUEUE_CODE is not an exit code.
    """
    code = os.environ.get("GRATICULE_REQUEUE_CODE", str(REQUEUE))
    if not code.isdecimal() or int(code) > 255:
        raise ValueError(f"`GRATICULE_REQUEUE_CODE` must be an exit code from 0 to 255, got {code!r}.")
    # if a process started by Lightning failed, Lightning would kill the first one before that has ended
    return 0 if int(os.environ.get("LOCAL_RANK", 0)) else int(code)
