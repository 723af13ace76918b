"""How commands end that train and are stopped: in one line, with an exit code that a scheduler understands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

from graticule.training.interruption import Interrupted, Preempted, handling_signals

#: What a scheduler takes for "try again": EX_TEMPFAIL of sysexits.h.
REQUEUE = 75
#: The exit code of what the user stopped, as shells have it for SIGINT.
STOPPED = 130


def requeue_code() -> int:
    """Return the exit code of a command that a signal stopped.

    Raises:
        ValueError: if GRATICULE_REQUEUE_CODE is not an exit code.
    """
    given = os.environ.get("GRATICULE_REQUEUE_CODE", str(REQUEUE))
    if not given.isdecimal() or int(given) > 255:
        raise ValueError(f"`GRATICULE_REQUEUE_CODE` must be an exit code from 0 to 255, got {given!r}.")
    # where Lightning started a process, one that fails would let it kill the first before that one has ended
    return 0 if int(os.environ.get("LOCAL_RANK", 0)) else int(given)


def run_resumable(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command that, called again, resumes; if it is stopped, also between two runs, say so in one line."""
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
