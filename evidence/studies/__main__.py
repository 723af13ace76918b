"""List the studies, or train and measure the missing runs of one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from evidence.studies import CELL, __doc__, accept_copies, load, names, read_table, run_study
from graticule.lab.studies.execution import executor_of, parse_on
from graticule.lab.studies.plan import format_seconds
from graticule.lab.training.run_folder import Preempted, handling_signals

DATA = Path(__file__).parents[2] / "docs" / "data"


@contextlib.contextmanager
def stopping_after(seconds: float | None) -> Iterator[None]:
    """End the block after some seconds, as a cluster does: by SIGTERM, after which a run saves a checkpoint."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Preempted

    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    with handling_signals(stop):
        timer.start()
        try:
            with contextlib.suppress(Preempted):
                yield
        finally:
            timer.cancel()


def main(arguments: list[str] | None = None) -> None:
    """List the studies, or run one."""
    parser = argparse.ArgumentParser("python -m evidence.studies", description=__doc__)
    parser.add_argument("study", nargs="?", help="its name")
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone (default: the study's)")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed; the table is beside the runs")
    parser.add_argument("--data-root", type=Path, help="folder of the data set")
    parser.add_argument("--copies", action="store_true", help="the files of CIFAR-10 may be copies, such as JPEG ones")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command continues")
    parser.add_argument("--output", type=Path, help="folder of the table (default: docs/data)")
    parser.add_argument("--on", default="here", help="here, local:N or dask:ADDRESS, as in graticule compare")
    options = parser.parse_args(arguments)
    parse_on(options.on)
    if options.copies:
        accept_copies()
    if options.study is None:
        for name in names():
            study = load(name)
            planned = len(study.cells) * len(study.seeds)
            known = len(read_table(DATA / f"study_{name}.csv").drop_duplicates(CELL))
            source = f" Based on {study.follows}." if study.follows else ""
            cost = f"{known} of {planned} runs measured, about {format_seconds(planned * study.seconds)} on one core"
            print(f"{name}: {study.question}{source} {cost}.")
        return
    study, name = load(options.study), options.study + "-quick" * options.quick
    seeds = tuple(options.seeds or study.seeds)
    study = dataclasses.replace(study, seeds=seeds[:1] if options.quick else seeds)
    folder = Path("runs") / f"study-{name}"
    table = (options.output or (folder if options.quick else DATA)) / f"study_{options.study}.csv"
    seconds = None if options.minutes is None else 60 * options.minutes
    with stopping_after(seconds), executor_of(options.on) as executor:
        run_study(study, folder, table, quick=options.quick, data_root=options.data_root, executor=executor)
    known, planned = len(read_table(table).drop_duplicates(CELL)), len(study.cells) * len(study.seeds)
    state = "" if known == planned else f"stopped with {known} of {planned} runs; the same command continues; "
    print(f"{state}wrote {table}" if known else f"{state}no run ended")


if __name__ == "__main__":
    main()
