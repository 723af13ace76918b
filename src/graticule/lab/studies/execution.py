"""Execution of runs: in this process, in local processes, or by the workers of a Dask cluster.

Any `concurrent.futures.Executor` will do. A run is trained wherever its folder can be written; one whose process died
resumes from its checkpoint when the command is repeated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from multiprocessing import active_children, connection, get_context
from pathlib import Path
from typing import Any

import lightning_fabric  # noqa: F401 - adds handlers, whose streams are replaced
import torch

from graticule.lab.studies.plan import PlannedRun
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.loop import train
from graticule.lab.training.run_folder import Interrupted
from graticule.lab.training.task import read_recipe
from graticule.registry.checks import install
from graticule.registry.plugins import load_plugin, loaded_plugins
from graticule.system.allocator import keep_freed_memory

#: File in the folder of a run with the output of its process.
OUTPUT = "output.txt"
#: Seconds to wait for a scheduler, and the number of times that it calls a failed job again.
_TIMEOUT, _RETRIES = 10, 3
#: Exceptions of a job itself; others mean that its process died, and depend on the executor.
_OWN = (ValueError, TypeError, FileNotFoundError, ImportError)


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
    left = [run for run in runs if not run.run.finished]
    done, total = len(runs) - len(left), len(runs)
    if executor is None:
        for number, planned in enumerate(left, done + 1):
            if progress:
                name = f"{planned.choice}, seed {planned.recipe.seed} -> {planned.folder}"
                print(f"run {number} of {total}: {name}", file=sys.stderr, flush=True)
            train(planned.recipe, planned.folder, resume=True, progress=progress)
            ended(planned)
        return
    failures, plugins = [], loaded_plugins()
    futures = {
        executor.submit(train_job, run.recipe.to_dict(), str(run.folder.resolve()), plugins): run for run in left
    }
    try:
        with progress_bar(total=total, unit="run", wanted=progress, initial=done) as bar:
            for future in as_completed(futures):
                if (error := future.exception()) is None:
                    ended(futures[future])
                else:
                    kind = "" if isinstance(error, _OWN) else f"{type(error).__name__}: "
                    failures.append(f"{futures[future].folder}: {kind}{error}")
                bar.update()
    except KeyboardInterrupt:
        raise Interrupted(str(runs[0].folder.parent)) from None
    if failures:
        raise RuntimeError("runs failed; the same command resumes them:\n" + "\n".join(sorted(failures)))


def train_job(recipe: Mapping[str, Any], folder: str, plugins: Sequence[str]) -> None:
    """Train or resume a run in this process, and append its output to `OUTPUT` in its folder.

    Raises:
        InterruptedError: if a signal stopped it; it can be resumed.
    """
    keep_freed_memory()
    Path(folder).mkdir(parents=True, exist_ok=True)
    output = (Path(folder) / OUTPUT).open("a", encoding="utf-8")
    with output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        for plugin in plugins:
            load_plugin(plugin)
        try:
            train(read_recipe(recipe), folder, resume=True, progress=False)
        except Interrupted as stopped:
            raise InterruptedError(str(stopped)) from None


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
        with ProcessPoolExecutor(int(value), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                # SIGTERM makes a run save a checkpoint; a process that starts another run gets another SIGTERM
                while alive := active_children():
                    for process in alive:
                        process.terminate()
                    connection.wait([process.sentinel for process in alive], timeout=0.2)
                raise


def _dask(address: str) -> Iterator[Executor]:
    """Connect to the scheduler of a Dask cluster, whose workers share the folder of the runs.

    The scheduler gives the run of a worker that dies to another one, which resumes it. A worker of one thread trains
    one run at a time.
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
    with client, client.get_executor(retries=_RETRIES) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
