"""List the studies, or train and measure the missing runs of one."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from evidence.studies import CELL, __doc__, load, names, read_table, run_study
from graticule.lab.studies.execution import executor_of, parse_on
from graticule.lab.studies.plan import format_seconds

DATA = Path(__file__).parents[2] / "docs" / "data"


def main(arguments: list[str] | None = None) -> None:
    """List the studies, or run one."""
    parser = argparse.ArgumentParser("python -m evidence.studies", description=__doc__)
    parser.add_argument("study", nargs="?", help="its name")
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone (default: those of the study)")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed; the table is beside the runs")
    parser.add_argument("--data-root", type=Path, help="folder of the data set")
    parser.add_argument("--on", default="here", help="here, local:N or dask:ADDRESS, as in graticule compare")
    options = parser.parse_args(arguments)
    parse_on(options.on)
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
    table = (folder if options.quick else DATA) / f"study_{options.study}.csv"
    with executor_of(options.on) as executor:
        run_study(study, folder, table, quick=options.quick, data_root=options.data_root, executor=executor)
    print(f"wrote {table}")


if __name__ == "__main__":
    main()
