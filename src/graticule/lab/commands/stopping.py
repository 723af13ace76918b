"""Stopping of commands that train: one line of output, and an exit code that a scheduler understands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

from graticule.lab.training.interruption import Interrupted, Preempted, handling_signals

#: The exit code that means "try again" to a scheduler: EX_TEMPFAIL of sysexits.h.
REQUEUE = 75
#: The exit code for a stop by the user, as in shells for SIGINT.
STOPPED = 130


def requeue_code() -> int:
    """Return the exit code of a command that a signal stopped.

    Raises:
        ValueError: if GRATICULE_REQUEUE_CODE is not an exit code.
    """
    given = os.environ.get("GRATICULE_REQUEUE_CODE", str(REQUEUE))
    if not given.isdecimal() or int(given) > 255:
        raise ValueError(f"`GRATICULE_REQUEUE_CODE` must be an exit code from 0 to 255, got {given!r}.")
    # if a process started by Lightning failed, Lightning would kill the first one before that has ended
    return 0 if int(os.environ.get("LOCAL_RANK", 0)) else int(given)


def run_resumable(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command that resumes when called again; if it is stopped, also between two runs, print one line."""
    requeue = requeue_code()
    try:
        with handling_signals(_stop):
            return run(arguments)
    except Preempted:
        print("graticule: stopped on a signal; the same command resumes it.", file=sys.stderr)
        return requeue
    except (Interrupted, KeyboardInterrupt):
        print("\ngraticule: stopped; the same command resumes it.", file=sys.stderr)
        return STOPPED


def _stop(number: int, frame: FrameType | None) -> None:
    raise Preempted
