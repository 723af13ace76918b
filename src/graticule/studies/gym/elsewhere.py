"""Trainings of a gym in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from graticule.studies.execution import ATTEMPTS, Submitted

Job = TypeVar("Job")
#: Seconds between two checks for ended jobs.
_POLL = 0.05


def ended(jobs: Sequence[Job], submit: Callable[[Job], Submitted]) -> Iterator[tuple[Job, object]]:
    """Submit all jobs, and yield each with its result as it ends.

    A job whose process died is submitted again, until it has died more than `ATTEMPTS` times.

    Raises:
        Exception: the exception of a job.
    """
    outstanding = [(submit(job), job, 1) for job in jobs]
    while outstanding:
        waiting: list[tuple[Submitted, Job, int]] = []
        again: list[tuple[Job, int]] = []
        for future, job, times in outstanding:
            if not future.done():
                waiting.append((future, job, times))
                continue
            try:
                result = future.result()
            except (ValueError, TypeError, FileNotFoundError, ImportError):  # raised by the job itself
                raise
            except Exception:  # its process died: each executor raises a different exception for that
                if times > ATTEMPTS:
                    raise
                again.append((job, times + 1))
            else:
                yield job, result
        if len(waiting) == len(outstanding):
            time.sleep(_POLL)
        outstanding = [*waiting, *((submit(job), job, times) for job, times in again)]
