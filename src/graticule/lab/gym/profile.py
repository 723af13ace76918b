"""Profile of choices: the scores of every choice on every task, in a file that later runs extend, and its pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from graticule.lab.figures.style import SIMILARITY
from graticule.lab.studies.tables import csv_of_records, markdown, read_records
from graticule.registry.checks import printable
from graticule.system.files import write_text


@dataclass(frozen=True)
class Row:
    """Score of a trained model at one size.

    choice: its text, such as encoding=rope.
    trained, side: cells per side, in training and in this test.
    score, chance: in the measure of the task.
    normalized: the score on a scale where chance is 0 and a perfect answer is 1.
    steps: training steps; training stops early if the task is solved.
    recipe: the hash of the recipe.
    """

    choice: str
    task: str
    surface: str
    seed: int
    trained: int
    side: int
    score: float
    chance: float
    normalized: float
    steps: int
    seconds: float
    parameters: int
    recipe: str


@dataclass(frozen=True)
class Profile:
    """Scores of several choices on several tasks, at several sizes, over seeds."""

    rows: tuple[Row, ...]

    @property
    def choices(self) -> list[str]:
        """Return the choices, in the order of the rows."""
        return list(dict.fromkeys(row.choice for row in self.rows))

    @property
    def tasks(self) -> list[str]:
        """Return the tasks, in the order of the rows."""
        return list(dict.fromkeys(row.task for row in self.rows))

    @property
    def seeds(self) -> list[int]:
        """Return the seeds."""
        return sorted({row.seed for row in self.rows})

    @property
    def sides(self) -> list[int]:
        """Return the sides, beginning with the training side."""
        return sorted({row.side for row in self.rows}, key=lambda side: (side != self.trained, side))

    @property
    def trained(self) -> int:
        """Return the training side."""
        return self.rows[0].trained

    def scores(self, choice: str, task: str, side: int) -> list[float]:
        """Return the normalized scores over seeds; empty if nothing was measured."""
        return [
            row.normalized
            for row in self.rows
            if (row.choice, row.task, row.side) == (choice, task, side) and not math.isnan(row.normalized)
        ]

    def mean(self, choice: str, task: str, side: int) -> float:
        """Return the mean normalized score over seeds; NaN if nothing was measured."""
        found = self.scores(choice, task, side)
        return fmean(found) if found else math.nan

    def deviation(self, choice: str, task: str, side: int) -> float:
        """Return the standard deviation over seeds; NaN with fewer than two."""
        found = self.scores(choice, task, side)
        return stdev(found) if len(found) > 1 else math.nan

    def chosen(self, choices: Sequence[str] | None = None, tasks: Sequence[str] | None = None) -> Profile:
        """Return the profile of some choices and tasks, in this order."""
        choices, tasks = choices or self.choices, tasks or self.tasks
        kept = [row for row in self.rows if row.choice in choices and row.task in tasks]
        return Profile(tuple(sorted(kept, key=lambda row: (choices.index(row.choice), tasks.index(row.task)))))

    def table(self, side: int) -> list[tuple[str, ...]]:
        """Return a header and one row per choice: normalized scores in percent, with the deviation over seeds."""
        rows = [("choice", "parameters (maximum)", *self.tasks)]
        for choice, name in zip(self.choices, choice_labels(self.choices), strict=True):
            parameters = max(row.parameters for row in self.rows if row.choice == choice)  # heads differ
            rows.append((name, f"{parameters:,}", *(self._cell(choice, task, side) for task in self.tasks)))
        return rows

    def _cell(self, choice: str, task: str, side: int) -> str:
        mean, deviation = self.mean(choice, task, side), self.deviation(choice, task, side)
        if math.isnan(mean):
            return "-"
        return percent(mean) + ("" if math.isnan(deviation) else f" ± {percent(deviation)}")

    def markdown(self) -> str:
        """Return a table per size in Markdown."""
        return "\n\n".join(f"{self.title(side)}\n\n{markdown(self.table(side))}" for side in self.sides)

    def title(self, side: int) -> str:
        """Describe the scores at a size."""
        where = "as in training" if side == self.trained else f"trained on {self.trained} x {self.trained}"
        seeds = f"seed {self.seeds[0]}" if len(self.seeds) == 1 else f"mean ± s.d. of {len(self.seeds)} seeds"
        return f"{side} x {side} cells, {where}; scores from 0 (chance) to 100 (solved), {seeds}"

    def csv(self) -> str:
        """Return one line per score."""
        return csv_of_records(Row, self.rows)


def percent(share: float) -> str:
    """Write a share as a whole percentage, 0 without a sign.

    >>> [percent(share) for share in (0.987, -0.004, -0.02)]
    ['99', '0', '-2']
    """
    return str(round(100 * share))


def read_profile(path: Path) -> Profile:
    """Read the rows that `Profile.csv` wrote; an absent file has no rows."""
    return Profile(tuple(read_records(path, Row)))


def write_profile(path: Path, profile: Profile) -> Path:
    """Write the rows of a profile, completely or not at all; returns `path`."""
    return write_text(path, profile.csv())


def merged(kept: Profile, new: Sequence[Row], order: Mapping[tuple[str, str, int], int]) -> Profile:
    """Return the rows of both, sorted by `order` of (choice, task, seed) and by size; unordered ones come last."""
    rows = [*kept.rows, *new]
    return Profile(
        tuple(sorted(rows, key=lambda row: (order.get((row.choice, row.task, row.seed), len(order)), row.side)))
    )


#: Lower scores are not written out: they are below chance by more than means anything.
LOWEST = -0.2


def heat_map(profile: Profile, title: str = "") -> Figure:
    """Draw the normalized scores, one panel per size, one row per choice, one column per task, with the deviations."""
    sides, choices, tasks = profile.sides, profile.choices, profile.tasks
    names = choice_labels(choices)
    cell = 0.4 if len(profile.seeds) > 1 else 0.26
    wide = 0.8 + min(0.065 * max(map(len, names)), 4.5) + 0.4 * len(tasks)
    figure = Figure(figsize=(wide, (1.1 + cell * len(choices)) * len(sides)), layout="constrained")
    panels = figure.subplots(len(sides), 1, squeeze=False, sharey=True).flatten()
    scale: dict[str, Any] = {"cmap": SIMILARITY, "norm": Normalize(0, 1)}
    for ax, side in zip(panels, sides, strict=True):
        means = np.array([[profile.mean(choice, task, side) for task in tasks] for choice in choices])
        ax.imshow(means, aspect="auto", interpolation="nearest", **scale)
        for row, choice in enumerate(choices):
            for column, task in enumerate(tasks):
                _write_cell(ax, (row, column), means[row, column], profile.deviation(choice, task, side))
        ax.set_xticks(
            range(len(tasks)),
            [printable(task) for task in tasks],
            rotation=50,
            ha="right",
            fontsize=9,
            parse_math=False,
        )
        ax.set_yticks(range(len(choices)), list(map(printable, names)), fontsize=9, parse_math=False)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.set_title(_panel_title(profile, side), fontsize=10)
    bar = figure.colorbar(ScalarMappable(**scale), ax=list(panels), shrink=0.5, pad=0.01)
    bar.set_ticks([0, 1], labels=["chance", "solved"], fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _write_cell(ax: Axes, at: tuple[int, int], mean: float, deviation: float) -> None:
    row, column = at
    if math.isnan(mean):
        ax.text(column, row, "-", ha="center", va="center", fontsize=8)
        return
    color = "black" if mean > 0.6 else "white"
    shown = percent(mean) if mean >= LOWEST else f"< {percent(LOWEST)}"
    spread = "" if math.isnan(deviation) else f"\n±{percent(deviation)}" if deviation < 1 else "\n> ±99"
    ax.text(column, row, shown + spread, ha="center", va="center", fontsize=8, color=color)


def _panel_title(profile: Profile, side: int) -> str:
    cells = f"{side} × {side} cells"
    where = cells if side == profile.trained else f"{cells}, trained on {profile.trained} × {profile.trained}"
    counts = sorted({len(profile.scores(choice, task, side)) for choice in profile.choices for task in profile.tasks})
    number = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"{where}, " + ("one seed" if number == "1" else f"mean ± s.d. of {number} seeds")


def choice_labels(choices: Sequence[str]) -> list[str]:
    """Write choices in the words of the docs: without the names of their values and, if they differ, model_kwargs.

    >>> choice_labels(["encoding=learnable(std=1),joining=lape", "encoding=sgu,model=gmlp,model_kwargs=num_blocks=2"])
    ['learnable(std=1), lape', 'sgu, gmlp']
    """
    words = [re.sub(r",(joining|model)=", ", ", choice.removeprefix("encoding=")) for choice in choices]
    short = [word.partition(",model_kwargs=")[0] for word in words]
    return short if len(set(short)) == len(short) else words
