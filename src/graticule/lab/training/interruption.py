"""Interruption of training: by the user, or by preemption on a cluster."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Interrupted(Exception):
    """Training was stopped; the run can be resumed."""


class Preempted(Interrupted):
    """The run was preempted (SIGTERM, or SIGUSR1 from SLURM); a checkpoint was saved first."""


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[bool]:
    """Pass the signals to `handler` within the block, and restore their handlers after it.

    Yields False in threads other than the main one, which receive no signals.
    """
    try:
        before = {number: signal.signal(number, handler) for number in SIGNALS}
    except ValueError:
        yield False
        return
    try:
        yield True
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
