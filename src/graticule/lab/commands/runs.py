"""`graticule runs`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from graticule.lab.arguments import Positional
from graticule.lab.commands.options import JsonOutput
from graticule.lab.studies.runs import RunSummary, find_runs, flat_values, summarize
from graticule.registry.checks import printable


@dataclass
class RunsOptions(JsonOutput):
    """List the runs in folders with their progress, their best score so far, and the values in which they differ.

    graticule runs
    graticule runs runs/study --sort best
    """

    folders: Positional[list[Path]] = field(default_factory=lambda: [Path("runs")])
    """folders with runs, at any depth"""
    sort: Literal["age", "name", "best"] = "age"
    """sort by the last change, by name, or by the best score (best run last, runs of one metric together)"""


#: Values of recipes that are shown first: in columns if they differ, otherwise in the line below the table.
_FIRST = ("model", "encoding", "joining", "seed", "lr")
#: Most other values that are shown in columns by default.
_OTHERS = 4


def run(options: RunsOptions) -> int:
    """List the runs in folders, each run once."""
    names: dict[Path, str] = {}
    for folder in options.folders:
        for place in find_runs(folder):
            relative = place.relative_to(folder) if len(options.folders) == 1 else place
            names.setdefault(place.resolve(), str(relative) if relative.parts else place.resolve().name)
    runs = [(printable(name), summarize(place)) for place, name in names.items()]
    keys: dict[str, Any] = {"age": lambda run: run[1].changed, "name": itemgetter(0), "best": lambda run: _rank(run[1])}
    runs.sort(key=keys[options.sort])
    if options.json:
        return options.finish([_record(name, summary) for name, summary in runs])
    if not runs:
        options.say(printable(f"no run in {', '.join(map(str, options.folders))}"))
    else:
        _show(runs, options)
    for name, summary in runs:
        if summary.damage:
            options.say(f"{name} is damaged: {printable(summary.damage)}")
    return 0


def _show(runs: Sequence[tuple[str, RunSummary]], options: RunsOptions) -> None:
    """Print a row per run, with a column for each value in which the recipes differ, up to `_OTHERS`."""
    built_positions = [summary.position if summary.recipe.get("encoding") is None else {} for _, summary in runs]
    recipes = [
        flat_values({**summary.recipe, **built}) for (_, summary), built in zip(runs, built_positions, strict=True)
    ]
    keys = dict.fromkeys([*_FIRST, *(key for recipe in recipes for key in recipe)])
    columns = {key: [recipe.get(key, "-") for recipe in recipes] for key in keys}
    columns["encoding"] = ["own" if value == "None" else value for value in columns["encoding"]]
    shared = {key: columns[key][0] for key in _FIRST if len(set(columns[key])) == 1 and len(runs) > 1}
    readable = [at for at, recipe in enumerate(recipes) if recipe]
    differing = [key for key, column in columns.items() if len({column[at] for at in readable}) > 1]
    others = [key for key in differing if key not in _FIRST]
    complete = [key for key in others if "-" not in columns[key]][:_OTHERS]
    metrics = {summary.metric for _, summary in runs if summary.metric is not None}
    mixed = len(metrics) != 1
    best = "best" if mixed else f"best {metrics.pop().title}"
    listed = [*(key for key in _FIRST if key not in shared), *complete]
    rows = [
        [name, summary.state, *(columns[key][at] for key in listed), *_results(summary, mixed)]
        for at, (name, summary) in enumerate(runs)
    ]
    options.print_table(["run", "state", *listed, "epoch", best, "last", "time", "changed"], *rows)
    if shared:
        options.say(f"all have {', '.join(f'{key} {value}' for key, value in shared.items())}")
    if left_out := [key for key in others if key not in complete]:
        options.say(f"other values differ or are not in all recipes, as --json lists: {', '.join(left_out)}")
    states = Counter(summary.state for _, summary in runs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    options.say(f"{len(runs)} run{'s' * (len(runs) > 1)}: {counts}")


def _rank(summary: RunSummary) -> tuple[str, float, int]:
    """Return the sort key of a run: metric, then best score (runs without one come first), then its epoch."""
    metric, best = summary.metric, summary.best
    if metric is None or best is None:
        return "" if metric is None else metric.title, -math.inf, 0
    return metric.title, best[0] if metric.highest else -best[0], best[1]


def _results(summary: RunSummary, mixed: bool) -> list[str]:
    """Return the progress, scores and age of a run; if metrics are `mixed`, its best score names its metric."""
    metric = summary.metric
    best = last = "-"
    if metric is not None and summary.best:
        unit = f" {metric.unit or metric.label}" if mixed else ""
        best = f"{metric.show(summary.best[0], unit=False)}{unit} ({summary.best[1]})"
    if metric is not None and summary.last is not None:
        last = metric.show(summary.last, unit=False)
    epoch = f"{summary.epoch}/{'?' if summary.epochs is None else summary.epochs}"
    seconds = "-" if summary.seconds is None else _length(summary.seconds, 1)
    return [epoch, best, last, seconds, _length(time.time() - summary.changed)]


def _length(seconds: float, decimals: int = 0) -> str:
    """Return a duration in its largest unit, truncated to `decimals`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{math.floor(seconds / size * 10**decimals) / 10**decimals:.{decimals}f} {unit}"
    return f"{max(seconds, 0):.0f} s"  # the clock of a file server can be ahead


def _record(name: str, summary: RunSummary) -> dict[str, Any]:
    recipe, best, metric = summary.recipe, summary.best, summary.metric
    scores = {}
    if metric is not None:
        scores = {f"best_{metric.key}": best[0] if best else None, f"last_{metric.key}": summary.last}
    return {
        "name": name,
        "folder": str(summary.folder),
        "state": summary.state,
        "damage": summary.damage or None,
        **{key: recipe.get(key) for key in ("task", *_FIRST)},
        "epoch": summary.epoch,
        "epochs": summary.epochs,
        **scores,
        "best_epoch": best[1] if best else None,
        "seconds": summary.seconds,
        "changed": datetime.fromtimestamp(summary.changed).astimezone().isoformat(timespec="seconds"),
        "recipe": recipe,
    }
