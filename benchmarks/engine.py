"""Time of a comparison on several processes relative to one run at a time, and a check that the scores are equal.

    python benchmarks/engine.py --processes 2
    python benchmarks/engine.py --check dask
    python benchmarks/engine.py --check submitit

Eight runs (two choices, four seeds) of a small ViT on the digits. Without --check they are trained one run at a time
with all threads, and by `--on local:N` in N processes of one thread each, and the wall times are printed; they include
one import of PyTorch per process. With --check dask two workers execute the runs, and one worker is killed (SIGKILL)
during training; with --check submitit a process is started for each run. Then the scores of each run are compared bit
by bit with those of a single process with one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.comparison import compare
from graticule.lab.studies.execution import executor_of
from graticule.lab.tasks.classification import Recipe

SEEDS = [0, 1, 2, 3]


def choices(epochs: int) -> dict[str, Recipe]:
    """Return the recipes to compare."""
    base = dataclasses.replace(
        load_recipe("digits_quick"), epochs=epochs, warmup_epochs=0, accelerator="cpu", checkpoint_steps=20
    )
    return {name: dataclasses.replace(base, joining=name) for name in ("default", "lape")}


def scores(epochs: int, folder: Path, executor: Any = None) -> tuple[dict[str, list[float]], float]:
    """Run the comparison in `folder`; returns the scores and the wall time in seconds."""
    start = time.perf_counter()
    found = compare(choices(epochs), SEEDS, folder, progress=False, executor=executor)
    return found.scores, time.perf_counter() - start


@contextlib.contextmanager
def dask_workers(folder: Path) -> Iterator[Any]:
    """Start two Dask workers, and kill one of them as soon as it has saved a checkpoint."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
        executor_of(f"dask:{cluster.scheduler_address}", folder) as executor,
    ):
        pids = client.run(_prepare)

        def kill() -> None:
            while not list(folder.glob("*/seed-*/checkpoints/step-*")):
                time.sleep(0.05)
            print(f"killed a worker with {len(list(folder.glob('*/seed-*/result.json')))} runs finished")
            os.kill(min(pids.values()), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        yield executor


def _prepare() -> int:
    torch.set_num_threads(1)
    return os.getpid()


def check(kind: str, epochs: int, folder: Path) -> None:
    """Compare the scores of runs executed by `kind` with those of this process."""
    torch.set_num_threads(1)
    expected, _ = scores(epochs, folder / "here")
    where = folder / kind
    where.mkdir()
    carried = dask_workers(where) if kind == "dask" else executor_of("slurm(cluster='local', timeout_min=30)", where)
    os.environ["OMP_NUM_THREADS"] = "1"
    with carried as executor:
        found, _ = scores(epochs, where, executor)
    if found != expected:
        raise SystemExit(f"{kind}: the scores differ: {found} and {expected}")
    print(f"{kind}: the scores of {len(SEEDS) * len(found)} runs are equal to the last digit")


def main() -> None:
    """Parse the options, then time or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--check", choices=["dask", "submitit"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.check:
            check(options.check, options.epochs, Path(folder))
            return
        for number in range(options.rounds):
            _, alone = scores(options.epochs, Path(folder) / f"here-{number}")
            with executor_of(f"local:{options.processes}", Path(folder)) as executor:
                _, together = scores(options.epochs, Path(folder) / f"local-{number}", executor)
            print(
                f"one at a time, {torch.get_num_threads()} threads: {alone:.1f} s; local:{options.processes}: "
                f"{together:.1f} s; ratio {together / alone:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
