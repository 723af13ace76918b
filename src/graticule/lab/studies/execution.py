"""Execution of the runs of a study: in this process, or in local processes.

A run is trained wherever its folder can be written. Resuming, retrying and waiting are the same for all executors: a
run whose process died is submitted again and resumes from its checkpoint, and runs that other processes train are
waited for. This module does not import PyTorch: a process sets its number of threads first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

from graticule.lab.studies.plan import PlannedRun, format_seconds, seconds_left
from graticule.lab.terminal import bar as progress_bar

Job = TypeVar("Job")


#: Number of times that a run whose process died is submitted again without a new checkpoint in between.
ATTEMPTS = 3
#: File in the folder of a run with the output of its process.
OUTPUT = "output.txt"
#: Seconds between two checks for finished runs, and for runs that other processes train.
_POLL, _PATIENCE = 0.2, 5.0


class Submitted(Protocol):
    """A call in another process, as a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def result(self) -> Any:
        """Return the result of the call, or raise its exception."""


class Submits(Protocol):
    """An executor of runs, such as any `concurrent.futures.Executor`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Submitted:
        """Call `fn(*args)` in another process."""


def train_runs(
    runs: Sequence[PlannedRun],
    executor: Submits | None = None,
    *,
    part: tuple[int, int] = (1, 1),
    progress: bool = True,
    ended: Callable[[PlannedRun], None] = lambda run: None,
) -> int:
    """Train the runs that are not finished, one after the other in this process, or by `executor`.

    Several machines may call this for the same runs in a shared folder: each takes runs that no other process trains.

    Args:
        runs: a plan.
        executor: trains the runs.
        part: (k, n): train only the k-th of n parts.
        progress: whether progress is printed.
        ended: called in this process with each run that has been trained, while `executor` trains others.

    Returns:
        The number of unfinished runs of all parts.

    Raises:
        ValueError: if `part` is not (k, n) with k from 1 to n.
        RuntimeError: if runs failed, with their names, after all others are finished.
        Interrupted: if the user stopped it.
    """
    number, parts = part
    if not 1 <= number <= parts:
        raise ValueError(f"`part` must be K/N with K from 1 to N, such as 2/4, got {number}/{parts}.")
    mine = runs[number - 1 :: parts]
    if executor is None:
        _train_here(mine, progress, ended)
    else:
        _train_elsewhere(mine, executor, progress, ended)
    return sum(not one.run.finished for one in runs)


def train_job(recipe: Mapping[str, Any], folder: str, plugins: Sequence[str]) -> str:
    """Train or resume a run in this process; returns 'finished', 'in use' or 'stopped'.

    Its output is appended to `OUTPUT` in its folder.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with _output_in(Path(folder) / OUTPUT):
        from graticule.registry.plugins import load_plugin

        for plugin in plugins:
            load_plugin(plugin)
        from graticule.lab.training.interruption import Interrupted
        from graticule.lab.training.loop import train
        from graticule.lab.training.task import read_recipe

        try:
            train(read_recipe(recipe), folder, resume=True, progress=False)
        except BlockingIOError:
            return "in use"
        except Interrupted:
            return "stopped"
    return "finished"


@contextlib.contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Append the output of this process to a file, and that of Lightning, whose handlers keep the stream they found."""
    import lightning  # noqa: F401 - adds the handlers

    named = map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))
    handlers: list[Any] = [one for log in named for one in log.handlers if isinstance(one, logging.StreamHandler)]
    streams = [handler.stream for handler in handlers]
    with path.open("a", encoding="utf-8") as output:
        for handler in handlers:
            handler.stream = output
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                yield
        finally:
            for handler, stream in zip(handlers, streams, strict=True):
                handler.stream = stream


def parse_on(on: str) -> int:
    """Parse `--on`: the number of local processes; 0 for this process."""
    kind, _, value = on.partition(":")
    if on == "here":
        return 0
    if kind == "local" and value.isdecimal() and int(value) > 0:
        return int(value)
    raise ValueError(f"`on` must be here, or local:N (N processes of one thread each), got {on!r}.")


@contextlib.contextmanager
def executor_of(on: str) -> Iterator[Submits | None]:
    """Build the executor that `--on` names: here (None) or local:N."""
    if not (processes := parse_on(on)):
        yield None
        return
    pool = LocalProcesses(processes)
    try:
        yield pool
    except BaseException:
        _terminate(active_children())
        raise
    finally:
        pool.close()


def _terminate(processes: Sequence[BaseProcess]) -> None:
    """Stop processes: SIGTERM makes a run save a checkpoint; a process that starts another run gets another SIGTERM."""
    while alive := [process for process in processes if process.is_alive()]:
        for process in alive:
            process.terminate()
        wait([process.sentinel for process in alive], timeout=_POLL)


class LocalProcesses:
    """Processes on this machine, of one thread each; they are restarted if one dies.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = self._started()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Submitted:
        """Call `fn(*args)` in one of the processes."""
        try:
            return self._pool.submit(fn, *args)
        except BrokenProcessPool:
            self._pool = self._started()
            return self._pool.submit(fn, *args)

    def close(self) -> None:
        """End the processes after their current calls."""
        self._pool.shutdown(cancel_futures=True)

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.count, mp_context=get_context("spawn"), initializer=_use_one_thread)


def _use_one_thread() -> None:
    """Limit this process to one thread; called before PyTorch is imported."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def _train_here(runs: Sequence[PlannedRun], progress: bool, ended: Callable[[PlannedRun], None]) -> None:
    """Train the runs one after the other; those that other processes train come last."""
    from graticule.lab.training.loop import train

    waiting = [one for one in runs if not one.run.finished]
    said = False
    while waiting:
        in_use = []
        for one in waiting:
            if progress and not one.run.finished:
                done, times = sum(one.run.finished for one in runs), [left for left in seconds_left(runs) if left != 0]
                left = "" if None in times else f", about {format_seconds(sum(filter(None, times)))} left"
                what = f"{one.choice}, seed {one.recipe.seed} -> {one.folder}"
                print(f"run {done + 1} of {len(runs)}{left}: {what}", file=sys.stderr, flush=True)
            try:
                train(one.recipe, one.folder, resume=True, progress=progress)
            except BlockingIOError:
                in_use.append(one)
            else:
                ended(one)
        if len(in_use) == len(waiting):
            if progress and not said:
                print(f"waiting for {len(in_use)} runs that other processes train", file=sys.stderr, flush=True)
                said = True
            time.sleep(_PATIENCE)
        waiting = in_use


def collect(
    jobs: Sequence[Job],
    submit: Callable[[Job], Submitted],
    give_up: Callable[[Job], bool],
    delay: Callable[[Any], float | None] = lambda result: None,
) -> Iterator[list[tuple[Job, Any]]]:
    """Submit jobs, and yield those that have ended since the last check, each with its result or its exception.

    Args:
        jobs: what is submitted.
        submit: submits a job.
        give_up: called if the process of a job died; returns False if the job is to be submitted again.
        delay: result -> seconds until its job is submitted again; None if the job has ended.
    """
    outstanding = [(submit(job), job) for job in jobs]
    later: list[tuple[float, Job]] = []  # with the time to submit again
    while outstanding or later:
        done = [pair for pair in outstanding if pair[0].done()]
        outstanding = [pair for pair in outstanding if pair not in done]
        ended: list[tuple[Job, Any]] = []
        for future, job in done:
            try:
                result = future.result()
            except (ValueError, TypeError, FileNotFoundError, ImportError) as error:  # raised by the job itself
                ended.append((job, error))
            except Exception as error:  # the exception if a process died depends on the executor
                if give_up(job):
                    ended.append((job, error))
                else:
                    later.append((time.monotonic(), job))
            else:
                if (wanted := delay(result)) is None:
                    ended.append((job, result))
                else:
                    later.append((time.monotonic() + wanted, job))
        now = time.monotonic()
        outstanding += [(submit(job), job) for due, job in later if due <= now]
        later = [(due, job) for due, job in later if due > now]
        yield ended
        if not done:
            time.sleep(_POLL)


def _train_elsewhere(
    runs: Sequence[PlannedRun], executor: Submits, progress: bool, ended: Callable[[PlannedRun], None]
) -> None:
    """Submit the runs, submit again those whose process died, and show the finished epochs over all of them."""
    from graticule.lab.training.interruption import Interrupted
    from graticule.lab.training.run import Run
    from graticule.registry.plugins import loaded_plugins

    plugins = loaded_plugins()
    lost: dict[Path, tuple[Path | None, int]] = {}  # last checkpoint, and number of deaths since it
    failures: list[str] = []

    def submit(one: PlannedRun) -> Submitted:
        return executor.submit(train_job, one.recipe.to_dict(), str(one.folder.resolve()), plugins)

    def give_up(one: PlannedRun) -> bool:
        last = Run(one.folder).last
        before, times = lost.get(one.folder, (last, 0))
        times = times if before == last else 0  # it has a new checkpoint since the last time
        times += (one.folder / OUTPUT).exists()  # it had begun: a run that only waited is not counted
        lost[one.folder] = (last, times)
        return times > ATTEMPTS

    def delay(state: str) -> float | None:
        return {"finished": None, "in use": _PATIENCE}.get(state, 0.0)

    total = sum(one.epochs for one in runs)
    with progress_bar(total=total, unit="epoch", wanted=progress, initial=sum(map(_epochs_done, runs))) as bar:
        try:
            for results in collect([one for one in runs if not one.run.finished], submit, give_up, delay):
                for one, result in results:
                    if isinstance(result, Exception):
                        kind = "" if one.folder not in lost else f"{type(result).__name__}: "
                        failures.append(f"{one.folder}: {kind}{result}")
                    else:
                        ended(one)
                bar.update(sum(map(_epochs_done, runs)) - bar.n)
                bar.set_postfix_str(f"{sum(one.run.finished for one in runs)} of {len(runs)} runs", refresh=False)
        except KeyboardInterrupt:
            raise Interrupted(str(runs[0].folder.parent)) from None
    if failures:
        raise RuntimeError("some runs failed; the others are finished:\n" + "\n".join(failures))


def _epochs_done(one: PlannedRun) -> int:
    """Return the number of finished epochs of a run, from its history."""
    try:
        return max(0, one.run.metrics_file.read_text(encoding="utf-8").count("\n") - 1)
    except OSError:
        return 0
