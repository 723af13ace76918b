"""`graticule runs`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
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
    """List the runs in folders: how far each is, and its best score so far; the one that changed last is last."""

    folders: tyro.conf.Positional[list[Path]] = dataclasses.field(default_factory=lambda: [Path("runs")])
    """folders with runs, at whatever depth"""
    sort: Literal["age", "name", "best"] = "age"
    """order by the last change, by name, or by the best score: the best run last, those of one metric together"""
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
        print_table(("run", "state", "model", "joining", "epoch", best, "last", "changed"), rows)
        counts = Counter(summary.state for _, summary in found)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        print(f"{len(found)} run{'s' * (len(found) > 1)}: {states}")
    for name, summary in found:
        if summary.damage:
            print(f"{name} is damaged: {printable(summary.damage)}")
    if options.json is not None:
        print_written(write_json(options.json, [_record(name, summary) for name, summary in found]))
    return 0


def _rank(summary: Summary) -> tuple[int, float, int]:
    """What runs are sorted by: their metric, how good the best score is (those without one come first), its epoch."""
    from graticule.tasks.metric import METRICS

    metric, best = summary.metric, summary.best
    group = -1 if metric is None else METRICS.index(metric)
    if metric is None or best is None:
        return group, -math.inf, 0
    return group, best[0] if metric.highest else -best[0], best[1]


def _row(name: str, summary: Summary, mixed: bool) -> list[str]:
    """Make the row of a run; where metrics are `mixed`, its best score says which it is."""
    recipe, metric = summary.recipe, summary.metric
    joining = [str(recipe[key]) for key in ("encoding", "joining") if recipe.get(key)]
    best = last = "-"
    if metric is not None and summary.best:
        unit = f" {metric.unit or metric.label}" if mixed else ""
        best = f"{metric.show(summary.best[0], unit=False)}{unit} ({summary.best[1]})"
    if metric is not None and summary.last is not None:
        last = metric.show(summary.last, unit=False)
    epoch = f"{summary.epoch}/{'?' if summary.epochs is None else summary.epochs}"
    model = printable(str(recipe.get("model", "-")))
    age = _age(time.time() - summary.changed)
    return [name, summary.state, model, printable(", ".join(joining)) or "-", epoch, best, last, age]


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
