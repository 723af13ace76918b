"""`graticule runs`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from graticule.checks import printable
from graticule.commands.options import parse, print_table, print_written

if TYPE_CHECKING:
    from graticule.studies.runs import Summary


@dataclass
class Runs:
    """List the runs in folders with their progress and their best score so far; the last changed run is last."""

    folders: tyro.conf.Positional[list[Path]] = dataclasses.field(default_factory=lambda: [Path("runs")])
    """folders with runs, at any depth"""
    sort: Literal["age", "name", "best"] = "age"
    """sort by the last change, by name, or by the best score (best run last, runs of one metric together)"""
    json: Path | None = None
    """write the list to this file too"""


def run(arguments: list[str]) -> int:
    """List the runs in folders."""
    options = parse(Runs, "runs", arguments)
    from graticule.files import followed, write_json
    from graticule.studies.runs import find_runs, summarise

    options.json = followed(options.json)
    names: dict[Path, str] = {}
    for folder in options.folders:
        for place in find_runs(folder):
            relative = place.relative_to(folder) if len(options.folders) == 1 else place
            names.setdefault(place.resolve(), str(relative) if relative.parts else place.resolve().name)
    found = [(printable(name), summarise(place)) for place, name in names.items()]
    if options.sort == "name":
        found.sort(key=lambda one: one[0])
    elif options.sort == "best":
        found.sort(key=lambda one: _rank(one[1]))
    else:
        found.sort(key=lambda one: one[1].changed)
    if not found:
        print(printable(f"no run in {', '.join(map(str, options.folders))}"))
    else:
        metrics = {summary.metric for _, summary in found if summary.metric is not None}
        mixed = len(metrics) != 1
        best = "best" if mixed else f"best {metrics.pop().title}"
        rows = [_row(name, summary, mixed) for name, summary in found]
        columns = ("run", "state", "model", "encoding", "joining", "seed", "epoch", best, "last", "changed")
        print_table(columns, rows)
        counts = Counter(summary.state for _, summary in found)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        print(f"{len(found)} run{'s' * (len(found) > 1)}: {states}")
    for name, summary in found:
        if summary.damage:
            print(f"{name} is damaged: {printable(summary.damage)}")
    if options.json is not None:
        print_written(write_json(options.json, [_record(name, summary) for name, summary in found]))
    return 0


def _rank(summary: Summary) -> tuple[str, float, int]:
    """Return what runs are sorted by: metric, then best score (runs without one come first), then its epoch."""
    metric, best = summary.metric, summary.best
    if metric is None or best is None:
        return "" if metric is None else metric.title, -math.inf, 0
    return metric.title, best[0] if metric.highest else -best[0], best[1]


def _row(name: str, summary: Summary, mixed: bool) -> list[str]:
    """Return the row of a run; where metrics are `mixed`, its best score names its metric."""
    recipe, metric = summary.recipe, summary.metric
    best = last = "-"
    if metric is not None and summary.best:
        unit = f" {metric.unit or metric.label}" if mixed else ""
        best = f"{metric.show(summary.best[0], unit=False)}{unit} ({summary.best[1]})"
    if metric is not None and summary.last is not None:
        last = metric.show(summary.last, unit=False)
    epoch = f"{summary.epoch}/{'?' if summary.epochs is None else summary.epochs}"
    chosen = [_chosen(recipe, key) for key in ("model", "encoding", "joining", "seed")]
    age = _age(time.time() - summary.changed)
    return [name, summary.state, *chosen, epoch, best, last, age]


def _chosen(recipe: Mapping[str, Any], key: str) -> str:
    """Return a value of a recipe as it is shown; `own` for the encoding that is the model's own."""
    if key == "encoding" and recipe and recipe.get(key) is None:
        return "own"
    return str(recipe.get(key, "-"))


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"  # the clock of a file server may be ahead


def _record(name: str, summary: Summary) -> dict[str, Any]:
    recipe, best, metric = summary.recipe, summary.best, summary.metric
    scores = {}
    if metric is not None:
        scores = {f"best_{metric.key}": best[0] if best else None, f"last_{metric.key}": summary.last}
    return {
        "name": name,
        "folder": str(summary.folder),
        "state": summary.state,
        "damage": summary.damage or None,
        **{key: recipe.get(key) for key in ("task", "model", "encoding", "joining", "seed")},
        "epoch": summary.epoch,
        "epochs": summary.epochs,
        **scores,
        "best_epoch": best[1] if best else None,
        "changed": datetime.fromtimestamp(summary.changed).astimezone().isoformat(timespec="seconds"),
    }
