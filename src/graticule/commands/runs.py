"""`graticule runs`."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from graticule.commands.options import parse, print_table, printable

if TYPE_CHECKING:
    from graticule.studies.runs import Summary


@dataclass
class Runs:
    """List the runs in folders: how far each is, and its top-1 so far; the one that changed last is last."""

    folders: tyro.conf.Positional[list[Path]] = dataclasses.field(default_factory=lambda: [Path("runs")])
    """folders with runs, at whatever depth"""
    sort: Literal["age", "name", "best"] = "age"
    """order by the last change, by name, or by the best top-1, the highest last"""
    json: Path | None = None
    """write the list to this file too"""


def run(arguments: list[str]) -> int:
    """List the runs in folders."""
    options = parse(Runs, "runs", arguments)
    from graticule.files import write_json
    from graticule.studies.runs import find_runs, summarise

    names: dict[Path, str] = {}
    for folder in options.folders:
        for place in find_runs(folder):
            relative = place.relative_to(folder) if len(options.folders) == 1 else place
            names.setdefault(place.resolve(), str(relative) if relative.parts else place.resolve().name)
    found = [(printable(name), summarise(place)) for place, name in names.items()]
    if options.sort == "name":
        found.sort(key=lambda one: one[0])
    elif options.sort == "best":
        found.sort(key=lambda one: one[1].best or (-1.0, 0))
    else:
        found.sort(key=lambda one: one[1].changed)
    if not found:
        print(f"no run in {', '.join(map(str, options.folders))}")
    else:
        rows = [_row(name, summary) for name, summary in found]
        print_table(("run", "state", "model", "joining", "epoch", "best top-1 (%)", "last", "changed"), rows)
        counts = Counter(summary.state for _, summary in found)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        print(f"{len(found)} run{'s' * (len(found) > 1)}: {states}")
    for name, summary in found:
        if summary.damage:
            print(f"{name} is damaged: {printable(summary.damage)}")
    if options.json is not None:
        print(f"wrote {write_json(options.json, [_record(name, summary) for name, summary in found])}")
    return 0


def _row(name: str, summary: Summary) -> list[str]:
    recipe = summary.recipe
    joining = [str(recipe[key]) for key in ("encoding", "joining") if recipe.get(key)]
    best = f"{summary.best[0]:.2f} ({summary.best[1]})" if summary.best else "-"
    last = "-" if summary.last is None else f"{summary.last:.2f}"
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
    recipe, best = summary.recipe, summary.best
    return {
        "name": name,
        "folder": str(summary.folder),
        "state": summary.state,
        "damage": summary.damage or None,
        **{key: recipe.get(key) for key in ("model", "encoding", "joining", "seed")},
        "epoch": summary.epoch,
        "epochs": summary.epochs,
        "best_top1": best[0] if best else None,
        "best_epoch": best[1] if best else None,
        "last_top1": summary.last,
        "changed": datetime.fromtimestamp(summary.changed).astimezone().isoformat(timespec="seconds"),
    }
