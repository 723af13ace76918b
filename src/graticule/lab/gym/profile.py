"""Profile of choices: the scores of every choice on every task in a file, with means, ranks, a figure and a card."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from scipy import stats

from graticule.analysis.share import mean_estimate
from graticule.lab.figures.style import SIMILARITY
from graticule.lab.studies.significance import LEAST, LEVEL, holm, rounding
from graticule.lab.studies.tables import Rows, csv_of_records, markdown, read_records
from graticule.registry.checks import printable
from graticule.system.files import write_text
from graticule.system.tables import PrintedTable

#: The most choices of a printed profile.
_PRINTED = 5


@dataclass(frozen=True)
class ProfileRow:
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

    @property
    def cell(self) -> tuple[str, str, int]:
        """Choice, task and seed, which identify a training."""
        return self.choice, self.task, self.seed

    @property
    def known(self) -> bool:
        """Return whether the score was measured."""
        return not math.isnan(self.normalized)


@dataclass(frozen=True, repr=False)
class Profile(PrintedTable):
    """Scores of several choices on several tasks, at several sizes, over seeds; printed, those of the training side."""

    rows: tuple[ProfileRow, ...]

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
        """Return the scores over seeds, in percent from chance to perfect answers; empty if nothing was measured."""
        cell = (choice, task, side)
        return [100 * row.normalized for row in self.rows if (row.choice, row.task, row.side) == cell and row.known]

    def overall(self, side: int) -> dict[str, list[float]]:
        """Return choice -> its mean scores over all tasks in percent, for the seeds that have all choices and tasks.

        A score below chance counts as chance, since those of `box` have no lower bound.
        """
        choices, count = self.choices, len(self.tasks)
        by_seed: dict[int, dict[str, list[float]]] = {seed: {choice: [] for choice in choices} for seed in self.seeds}
        for row in self.rows:
            if row.side == side and row.known:
                by_seed[row.seed][row.choice].append(100 * max(0.0, row.normalized))
        complete = [by for by in by_seed.values() if all(len(scores) == count for scores in by.values())]
        return {choice: [fmean(by[choice]) for by in complete] for choice in choices}

    def select(self, choices: Sequence[str] | None = None, tasks: Sequence[str] | None = None) -> Profile:
        """Return the profile of some choices and tasks, in this order."""
        choices, tasks = choices or self.choices, tasks or self.tasks
        rows = [row for row in self.rows if row.choice in choices and row.task in tasks]
        return Profile(tuple(sorted(rows, key=lambda row: (choices.index(row.choice), tasks.index(row.task)))))

    def complete(self, tasks: Sequence[str], seeds: Sequence[int], sides: Sequence[int]) -> Profile:
        """Return the scores of the choices that have all of them for tasks, seeds and sizes."""
        rows = [row for row in self.rows if row.task in tasks and row.seed in seeds and row.side in sides]
        counts = Counter(row.choice for row in rows if row.known)
        choices = [choice for choice in counts if counts[choice] == len(tasks) * len(seeds) * len(sides)]
        if not choices:
            raise ValueError(
                f"`table` must have a choice with scores of {', '.join(tasks)} for seeds "
                f"{', '.join(map(str, seeds))} and {', '.join(map(str, sides))} cells per side, got "
                f"{len(self.choices)} choices without some of them."
            )
        return Profile(tuple(rows)).select(choices, tasks)

    def table(self, side: int) -> Rows:
        """Return a header and one row per choice: scores in percent, with the deviation over seeds."""
        rows: Rows = [("choice", "parameters (maximum)", *self.tasks)]
        for choice, name in zip(self.choices, choice_labels(self.choices), strict=True):
            cells = (" ± ".join(map(str, _mean(self.scores(choice, task, side)))) or "-" for task in self.tasks)
            rows.append((name, self._parameters(choice), *cells))
        return rows

    @property
    def heading(self) -> str:
        """The size, what the scores are, and the number of choices that are printed."""
        more = f"; {_PRINTED} of {len(self.choices)} choices" * (len(self.choices) > _PRINTED)
        return f"{self.title(self.trained)}{more}" if self.rows else "no scores"

    def summary(self) -> Rows:
        """Return the first columns of the table as in training, transposed: a row per task."""
        if not self.rows:
            return [("choice",)]
        (first, *names), *rows = ([*row[: _PRINTED + 1]] for row in zip(*self.table(self.trained), strict=True))
        numbered = (f"{number} {name}" for number, name in enumerate(names, 1))  # as names may be cut alike
        return [(first, *numbered), *map(tuple, rows)]

    def _parameters(self, choice: str) -> str:
        return f"{max(row.parameters for row in self.rows if row.choice == choice):,}"  # heads differ

    def ranks(self) -> Rows:
        """Return a header and one row per choice: parameters, and mean and rank at every size, the best first."""
        names = choice_labels(self.choices)
        rows = [[f"`{name}`", self._parameters(choice)] for choice, name in zip(self.choices, names, strict=True)]
        order: list[int] = []
        for side in self.sides:
            scores = list(self.overall(side).values())
            for row, values, (rank, best, worst) in zip(rows, scores, rank_intervals(scores), strict=True):
                row += [interval_text(values), f"{rank} [{best}, {worst}]"]
            order = order or sorted(range(len(rows)), key=lambda index: -fmean(scores[index]))
        heads = [text for side in self.sides for text in (f"{side} x {side} cells", "rank")]
        return [("choice", "parameters", *heads), *(tuple(rows[index]) for index in order)]

    def markdown(self) -> str:
        """Return a table per size in Markdown."""
        return "\n\n".join(f"{self.title(side)}\n\n{markdown(self.table(side))}" for side in self.sides)

    def title(self, side: int) -> str:
        """Describe the scores at a size."""
        where = "as in training" if side == self.trained else f"trained on {self.trained} x {self.trained}"
        seeds = f"seed {self.seeds[0]}" if len(self.seeds) == 1 else f"mean ± s.d. of {len(self.seeds)} seeds"
        return f"{side} x {side} cells, {where}; scores from 0 (chance) to 100 (solved), {seeds}"

    def card(self, table: Profile | None, notes: Sequence[str]) -> str:
        """Return the card of the only choice, as Markdown beside `gym.png`.

        Args:
            table: the scores of other choices, `complete` for the same tasks, seeds and sizes.
            notes: lines on the origin of the scores.
        """
        (choice,) = self.choices
        others = [row for row in table.rows if row.choice != choice] if table is not None else []
        beside = Profile((*self.rows, *others))
        name = choice_labels(beside.choices)[0]
        header, *rows = beside.ranks()
        tasks: Rows = [("task", *header[2::2])]
        for task in self.tasks:
            tasks.append((task, *(interval_text(self.scores(choice, task, side)) for side in self.sides)))
        about = (
            f"Means of {len(self.seeds)} seeds with 95 % intervals; 0 is chance, 100 a perfect answer. Ranks are among "
            f"{len(beside.choices)} choices, by the mean over tasks."
        )
        ranked = markdown([header, *(row for row in rows if row[0] == f"`{name}`")])
        parts = [f"# {name}", ranked, about, markdown(tasks), f"![Scores of {name}](gym.png)", *notes]
        return "\n\n".join(parts) + "\n"


def _mean(values: Sequence[float]) -> list[int]:
    """Return mean and standard deviation in whole percent; the mean alone of a single value, nothing of none."""
    return [round(function(values)) for function in (fmean, stdev)[: len(values)]]


def read_profile(path: Path) -> Profile:
    """Read the rows that `write_profile` wrote; an absent file has no rows."""
    return Profile(tuple(read_records(path, ProfileRow)))


def write_profile(path: Path, profile: Profile) -> Path:
    """Write one line per score, completely or not at all; returns `path`."""
    return write_text(path, csv_of_records(ProfileRow, profile.rows))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t, whose ends are NaN for a single value."""
    mean, low, high = map(float, mean_estimate(np.array(values)))
    return mean, low, high


def interval_text(values: Sequence[float]) -> str:
    """Write the mean and its 95 % interval.

    >>> interval_text([50.0, 51.0, 52.0]), interval_text([50.0])
    ('51.0 [48.5, 53.5]', '50.0')
    """
    mean, low, high = interval(values)
    return f"{mean:.1f}" if math.isnan(low) else f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def rank_intervals(seeded: Sequence[Sequence[float]]) -> list[tuple[int, int, int]]:
    """Return the rank, the best and the worst possible rank of each choice, from its scores of the same seeds.

    The interval is from 1 + the number of better choices to the number of choices that are not worse. Better and worse
    are decided by paired t-tests, adjusted by Holm's method for all pairs with the choice; fewer than three seeds, or
    differences that are all equal, are not tested.

    Reference: Inference for Ranks (Mogstad, Romano, Shaikh and Wilhelm, 2024), section 3, for a single rank.
    """
    scores = np.array(seeded)
    mean = (difference := scores[:, None] - scores).mean(2)
    p = np.full(mean.shape, math.nan)
    if (seeds := scores.shape[1]) >= LEAST:
        deviation = difference.std(2, ddof=1)
        deviation[np.ptp(difference, 2) <= rounding(abs(scores).max())] = math.nan
        p = 2 * stats.t.sf(abs(mean / deviation) * seeds**0.5, seeds - 1)
    ranks = []
    for index in range(len(scores)):
        adjusted = holm([None if math.isnan(value) else float(value) for value in p[index]])
        beyond = np.array([value is not None and value < LEVEL for value in adjusted])
        better, worse = mean[index] < 0, mean[index] > 0
        best, worst = 1 + int((better & beyond).sum()), len(scores) - int((worse & beyond).sum())
        ranks.append((1 + int(better.sum()), best, worst))
    return ranks


#: Lower scores are not written out: they are below chance by more than means anything.
LOWEST = -20


def heat_map(profile: Profile) -> Figure:
    """Draw the scores, one panel per size, one row per choice, one column per task, with the deviations."""
    sides, choices, tasks = profile.sides, profile.choices, profile.tasks
    names = choice_labels(choices)
    cell = 0.4 if len(profile.seeds) > 1 else 0.26
    wide = 0.8 + min(0.065 * max(map(len, names)), 4.5) + 0.4 * len(tasks)
    figure = Figure(figsize=(wide, (1.1 + cell * len(choices)) * len(sides)), layout="constrained")
    panels = figure.subplots(len(sides), 1, squeeze=False, sharey=True).flatten()
    scale: dict[str, Any] = {"cmap": SIMILARITY, "norm": Normalize(0, 100)}
    for ax, side in zip(panels, sides, strict=True):
        scores = [[profile.scores(choice, task, side) for task in tasks] for choice in choices]
        means = np.array([[fmean(values) if values else math.nan for values in row] for row in scores])
        ax.imshow(means, aspect="auto", interpolation="nearest", **scale)
        for row, of_choice in enumerate(scores):
            for column, values in enumerate(of_choice):
                mean, *deviation = _mean(values) or (math.nan,)
                text = "-" if not values else str(mean) if mean >= LOWEST else f"< {LOWEST}"
                if deviation:
                    text += f"\n±{deviation[0]}" if deviation[0] < 100 else "\n> ±99"
                color = "white" if mean <= 60 else "black"
                ax.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
        labels = [printable(task) for task in tasks]
        ax.set_xticks(range(len(tasks)), labels, rotation=50, ha="right", fontsize=9, parse_math=False)
        ax.set_yticks(range(len(choices)), list(map(printable, names)), fontsize=9, parse_math=False)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        counts = sorted({len(values) for of_choice in scores for values in of_choice})
        number = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        where = f"{side} × {side} cells" + (
            "" if side == profile.trained else f", trained on {profile.trained} × {profile.trained}"
        )
        ax.set_title(f"{where}, {'one seed' if number == '1' else f'mean ± s.d. of {number} seeds'}", fontsize=10)
    bar = figure.colorbar(ScalarMappable(**scale), ax=list(panels), shrink=0.5, pad=0.01)
    bar.set_ticks([0, 100], labels=["chance", "solved"], fontsize=9)
    return figure


def choice_labels(choices: Sequence[str]) -> list[str]:
    """Write choices in the words of the docs: without the names of their values and, if they differ, model_kwargs.

    >>> choice_labels(["encoding=learnable(std=1),joining=lape", "encoding=sgu,model=gmlp,model_kwargs=num_blocks=2"])
    ['learnable(std=1), lape', 'sgu, gmlp']
    """
    words = [re.sub(r",(joining|model)=", ", ", choice.removeprefix("encoding=")) for choice in choices]
    short = [word.partition(",model_kwargs=")[0] for word in words]
    return short if len(set(short)) == len(short) else words
