"""Execution of runs: in this process, in local processes, or by the workers of a Dask cluster.

Any `concurrent.futures.Executor` will do. A run is trained wherever its folder can be written; one whose process died
is submitted again and resumes from its checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, connection, get_context
from pathlib import Path
from typing import Any, TypeVar

import lightning_fabric  # noqa: F401 - adds handlers, whose streams are replaced
import torch

from graticule.lab.studies.plan import PlannedRun, format_seconds, seconds_left
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import Interrupted
from graticule.lab.training.task import read_recipe
from graticule.registry.checks import install
from graticule.registry.plugins import load_plugin, loaded_plugins

Job = TypeVar("Job")


#: Number of times that a job whose process died is submitted again; a run, without a new checkpoint in between.
ATTEMPTS = 3
#: File in the folder of a run with the output of its process.
OUTPUT = "output.txt"
#: Seconds between two checks for finished jobs, and before a job is submitted again.
_POLL, _PAUSE = 0.2, 1.0
#: Seconds to wait for a scheduler.
_TIMEOUT = 10
#: Exceptions of a job itself; others mean that its process died, and depend on the executor.
_OWN = (ValueError, TypeError, FileNotFoundError, ImportError)


def outcomes(
    jobs: Sequence[Job],
    call: Callable[[Job], tuple[Any, ...]],
    executor: Executor | None = None,
    gives_up: Callable[[Job], bool] | None = None,
    waiting: Callable[[], object] = lambda: None,
) -> Iterator[tuple[Job, Any]]:
    """Yield each job with its result, or with its exception, as it ends.

    Args:
        jobs: what is computed.
        call: job -> a function and its arguments.
        executor: computes them; without one they are computed here, in order, and an exception is raised.
        gives_up: called if the process of a job died; returns whether the job is not submitted again. By default after
            `ATTEMPTS` deaths.
        waiting: called between two checks for ended jobs.
    """
    if executor is None:
        for job in jobs:
            function, *arguments = call(job)
            yield job, function(*arguments)
        return
    deaths = Counter[int]()
    pending: dict[Future[Any], int] = {executor.submit(*call(job)): index for index, job in enumerate(jobs)}
    while pending:
        done, _ = wait(pending, timeout=_POLL, return_when=FIRST_COMPLETED)
        again = []
        for future in done:
            index = pending.pop(future)
            error = future.exception()
            if error is None or isinstance(error, _OWN):
                yield jobs[index], future.result() if error is None else error
                continue
            deaths[index] += 1
            if deaths[index] > ATTEMPTS if gives_up is None else gives_up(jobs[index]):
                yield jobs[index], error
            else:
                again.append(index)
        if again:
            time.sleep(_PAUSE)  # a process that is ending may hold the lock of its run
        pending |= {executor.submit(*call(jobs[index])): index for index in again}
        waiting()


def train_runs(
    runs: Sequence[PlannedRun],
    executor: Executor | None = None,
    *,
    progress: bool = True,
    ended: Callable[[PlannedRun], None] = lambda run: None,
) -> None:
    """Train the runs that are not finished, one after the other in this process, or by `executor`.

    Args:
        runs: a plan.
        executor: trains the runs.
        progress: whether progress is printed.
        ended: called in this process with each run that has been trained, while `executor` trains others.

    Raises:
        RuntimeError: if runs failed in an executor, with their names, after all others are finished.
        Interrupted: if the user stopped it.
    """
    plugins = loaded_plugins()
    lost: dict[Path, tuple[Path | None, int]] = {}  # last checkpoint, and number of deaths since it
    failures: list[str] = []
    left = [run for run in runs if not run.run.finished]

    def call(planned: PlannedRun) -> tuple[Any, ...]:
        if executor is None:
            return _train_here, planned, runs, progress
        return train_job, planned.recipe.to_dict(), str(planned.folder.resolve()), plugins

    def gives_up(planned: PlannedRun) -> bool:
        last = Run(planned.folder).last
        before, deaths = lost.get(planned.folder, (last, 0))
        deaths = deaths if before == last else 0  # it has a new checkpoint since the last time
        deaths += (planned.folder / OUTPUT).exists()  # it had begun: a run that only waited is not counted
        lost[planned.folder] = (last, deaths)
        return deaths > ATTEMPTS

    shows = progress and executor is not None
    total = sum(run.epochs for run in runs)
    with progress_bar(total=total, unit="epoch", wanted=shows, initial=sum(map(_epochs_done, runs))) as bar:

        def show() -> None:
            bar.update(sum(map(_epochs_done, runs)) - bar.n)
            bar.set_postfix_str(f"{sum(run.run.finished for run in runs)} of {len(runs)} runs", refresh=False)

        try:
            for planned, result in outcomes(left, call, executor, gives_up, show):
                if isinstance(result, BaseException):
                    kind = "" if planned.folder not in lost else f"{type(result).__name__}: "
                    failures.append(f"{planned.folder}: {kind}{result}")
                else:
                    ended(planned)
        except KeyboardInterrupt:
            if executor is None:
                raise
            raise Interrupted(str(runs[0].folder.parent)) from None
    if failures:
        raise RuntimeError("some runs failed; the others are finished:\n" + "\n".join(failures))


def _train_here(planned: PlannedRun, runs: Sequence[PlannedRun], progress: bool) -> None:
    """Train a run in this process, after a line about it and the time that all of them need."""
    if progress:
        count, times = sum(run.run.finished for run in runs), [left for left in seconds_left(runs) if left != 0]
        left = "" if None in times else f", about {format_seconds(sum(filter(None, times)))} left"
        run_text = f"{planned.choice}, seed {planned.recipe.seed} -> {planned.folder}"
        print(f"run {count + 1} of {len(runs)}{left}: {run_text}", file=sys.stderr, flush=True)
    train(planned.recipe, planned.folder, resume=True, progress=progress)


def train_job(recipe: Mapping[str, Any], folder: str, plugins: Sequence[str]) -> None:
    """Train or resume a run in this process, and append its output to `OUTPUT` in its folder.

    Raises:
        InterruptedError: if a signal stopped it; it can be resumed.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with _output_in(Path(folder) / OUTPUT):
        for plugin in plugins:
            load_plugin(plugin)
        try:
            train(read_recipe(recipe), folder, resume=True, progress=False)
        except Interrupted as stopped:
            raise InterruptedError(str(stopped)) from None


@contextlib.contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Append the output of this process to a file."""
    with path.open("a", encoding="utf-8") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield


def parse_on(on: str) -> tuple[str, str]:
    """Parse `--on`: here, local:N, or dask:ADDRESS."""
    kind, _, value = on.partition(":")
    if on == "here" or (kind == "local" and value.isdecimal() and int(value) > 0) or (kind == "dask" and value):
        return kind, value
    raise ValueError(
        f"`on` must be here, local:N (N processes of one thread each) or dask:ADDRESS (of a scheduler), got {on!r}."
    )


@contextlib.contextmanager
def executor_of(on: str) -> Iterator[Executor | None]:
    """Build the executor that `--on` names; None for this process."""
    kind, value = parse_on(on)
    if kind == "here":
        yield None
    elif kind == "dask":
        yield from _dask(value)
    else:
        pool = LocalProcesses(int(value))
        try:
            yield pool
        except BaseException:
            # SIGTERM makes a run save a checkpoint; a process that starts another run gets another SIGTERM
            while alive := active_children():
                for process in alive:
                    process.terminate()
                connection.wait([process.sentinel for process in alive], timeout=_POLL)
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _dask(address: str) -> Iterator[Executor]:
    """Connect to the scheduler of a Dask cluster, whose workers share the folder of the runs.

    A worker that dies is replaced, and its run resumes on another one. Workers of one thread each train a run each.
    """
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise ValueError(f"`on` must be here or local:N without the package distributed; {install('dask')}.") from None
    client: Any
    try:
        client = Client(address, timeout=_TIMEOUT)
    except OSError as error:
        raise ValueError(f"`on` must be the address of a running scheduler, got {address!r}: {error}") from None
    with client, client.get_executor() as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


class LocalProcesses(Executor):
    """Processes on this machine, of one thread each; they are restarted if one dies.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = self._start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn` in one of the processes."""
        with _one_thread():
            try:
                return self._pool.submit(fn, *args, **kwargs)
            except BrokenProcessPool:
                self._pool = self._start()
                return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes after their current calls."""
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _start(self) -> ProcessPoolExecutor:
        context = get_context("spawn")
        return ProcessPoolExecutor(self.count, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit processes that start in the block to one thread, by variables that libraries read when imported."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ.update(dict.fromkeys(before, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            os.environ.update({} if value is None else {name: value})


def _epochs_done(planned: PlannedRun) -> int:
    """Return the number of finished epochs of a run, from its history."""
    try:
        return max(0, planned.run.metrics_file.read_text(encoding="utf-8").count("\n") - 1)
    except OSError:
        return 0
