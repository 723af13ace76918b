"""The same work on many things, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from tqdm import tqdm

Task = TypeVar("Task")
Result = TypeVar("Result")


def check_workers(workers: int | None) -> int:
    """Return how many threads are to work: one a core that this process may use, unless `workers` says it.

    Raises:
        ValueError: if it is below 1.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"`workers` must be at least 1, got {workers}.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return workers or cores


def work(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    workers: int,
    *,
    about: str,
    unit: str,
    weights: Sequence[int] | None = None,
    progress: bool = True,
) -> list[Result]:
    """Return what `function` makes of every task, in their order; the first error ends it.

    Threads, not processes: reading, writing and hashing leave the interpreter to others, and a process that imports
    PyTorch takes longer to start than many a folder to pack.

    Args:
        function: what is done.
        tasks: what it takes.
        workers: threads.
        about: what the bar says.
        unit: what it counts.
        weights: how many of these each task is (default: one).
        progress: show the bar.
    """
    weights = [1] * len(tasks) if weights is None else weights
    with (
        tqdm(total=sum(weights), desc=about, unit=unit, disable=not progress) as bar,
        ThreadPoolExecutor(workers) as pool,
    ):
        futures = {pool.submit(function, task): weight for task, weight in zip(tasks, weights, strict=True)}
        try:
            for future in as_completed(futures):
                future.result()
                bar.update(futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
