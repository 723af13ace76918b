"""Card of a choice: its scores with intervals, and its ranks among the choices of a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from graticule.lab.figures.save import save_figure
from graticule.lab.figures.style import PALETTE
from graticule.lab.gym.profile import LOWEST, Profile, choice_labels
from graticule.lab.studies.significance import LEVEL, holm, paired_test
from graticule.lab.studies.tables import Rows, markdown
from graticule.registry.checks import printable
from graticule.system.files import write_text

#: The protocol of a card, which makes the rows of a table comparable: seeds, and cells per side of the further test.
SEEDS, SIDES = (0, 1, 2, 3, 4), (9,)


class Standing(NamedTuple):
    """Mean scores of a choice over all tasks, one per seed, in percent, and its rank with an interval."""

    choice: str
    scores: tuple[float, ...]
    rank: int
    best: int
    worst: int

    @property
    def cells(self) -> tuple[str, str]:
        """Return the mean and the rank with their intervals, for a table."""
        return interval_text(self.scores), f"{self.rank} ({self.best} to {self.worst})"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t, whose ends are NaN with fewer than two values."""
    if len(values) < 2:
        return fmean(values) if values else math.nan, math.nan, math.nan
    test = paired_test(values, [0.0] * len(values))
    return (values[0],) * 3 if test is None else (test.difference, test.low, test.high)


def interval_text(values: Sequence[float]) -> str:
    """Write the mean and its 95 % interval.

    >>> interval_text([50.0, 51.0, 52.0]), interval_text([50.0]), interval_text([])
    ('51.0 (48.5 to 53.5)', '50.0', '-')
    """
    mean, low, high = interval(values)
    return "-" if math.isnan(mean) else f"{mean:.1f}" + ("" if math.isnan(low) else f" ({low:.1f} to {high:.1f})")


def overall(profile: Profile, choice: str, side: int) -> dict[int, float]:
    """Return the mean score over all tasks in percent, for every seed that has all tasks.

    A score below chance counts as chance, since those of `box` have no lower bound.
    """
    found: dict[int, list[float]] = {}
    for row in profile.rows:
        if (row.choice, row.side) == (choice, side) and not math.isnan(row.normalized):
            found.setdefault(row.seed, []).append(100 * max(0.0, row.normalized))
    return {seed: fmean(scores) for seed, scores in sorted(found.items()) if len(scores) == len(profile.tasks)}


def standings(profile: Profile, side: int) -> list[Standing]:
    """Rank the choices by their mean over all tasks, at a size, over the seeds that all of them have.

    The interval of a rank is from 1 + the number of better choices to the number of choices that are not worse. Better
    and worse are decided by paired t-tests over seeds, adjusted by Holm's method for all pairs with the choice.

    Reference: Inference for Ranks (Mogstad, Romano, Shaikh and Wilhelm, 2024), section 3, for a single rank.
    """
    means = [overall(profile, choice, side) for choice in profile.choices]
    seeds = sorted(set.intersection(*map(set, means)))
    scores = np.array([[by[seed] for seed in seeds] for by in means])
    difference = scores[:, None] - scores
    p = np.full(difference.shape[:2], math.nan)
    if len(seeds) > 1:
        with np.errstate(divide="ignore", invalid="ignore"):  # equal differences
            error = difference.std(2, ddof=1) / len(seeds) ** 0.5
            p = 2 * stats.t.sf(abs(difference.mean(2) / error), len(seeds) - 1)
    found = []
    for own, choice in enumerate(profile.choices):
        higher = difference[own].mean(1) > 0
        lower = difference[own].mean(1) < 0
        adjusted = holm([None if math.isnan(one) else float(one) for one in p[own]])
        beyond = np.array([one is not None and one < LEVEL for one in adjusted])
        best, worst = 1 + int((lower & beyond).sum()), len(scores) - int((higher & beyond).sum())
        found.append(Standing(choice, tuple(scores[own].tolist()), 1 + int(lower.sum()), best, worst))
    return sorted(found, key=lambda one: one.rank)


def ranks(profile: Profile) -> Rows:
    """Return a header and one row per choice: parameters, and mean and rank at every size, the best first."""
    by_side = [{one.choice: one for one in standings(profile, side)} for side in profile.sides]
    names = dict(zip(profile.choices, choice_labels(profile.choices), strict=True))
    heads = [text for side in profile.sides for text in (f"{side} x {side} cells", "rank")]
    rows: Rows = [("choice", "parameters", *heads)]
    for choice in by_side[0]:
        parameters = max(row.parameters for row in profile.rows if row.choice == choice)
        cells = [text for standing in by_side for text in standing[choice].cells]
        rows.append((f"`{names[choice]}`", f"{parameters:,}", *cells))
    return rows


def complete(table: Profile, tasks: Sequence[str], seeds: Sequence[int], sides: Sequence[int]) -> Profile:
    """Return the scores of the choices of a table that have all of them for tasks, seeds and sizes."""
    kept = [row for row in table.rows if row.task in tasks and row.seed in seeds and row.side in sides]
    counts = Counter(row.choice for row in kept if not math.isnan(row.normalized))
    found = [choice for choice in counts if counts[choice] == len(tasks) * len(seeds) * len(sides)]
    if not found:
        raise ValueError(
            f"`table` must have a choice with scores of {', '.join(tasks)} for seeds {', '.join(map(str, seeds))} and "
            f"{', '.join(map(str, sides))} cells per side, got {len(table.choices)} choices without some of them."
        )
    return Profile(tuple(kept)).chosen(found, tasks)


def write_card(profile: Profile, table: Profile | None, folder: Path, title: str, notes: Sequence[str]) -> list[Path]:
    """Write the card of the only choice of a profile, `card.md` and `card.png`, and return the paths.

    Args:
        profile: the scores of the choice.
        table: those of other choices, `complete` for the same tasks, seeds and sizes.
        folder: of the files.
        title: name of the choice.
        notes: lines on the origin of the scores.
    """
    (choice,) = profile.choices
    others = [row for row in table.rows if row.choice != choice] if table is not None else []
    beside = Profile((*profile.rows, *others)).chosen(tasks=profile.tasks)
    header, *rows = ranks(beside)
    own = [row for row in rows if row[0] == f"`{choice_labels(beside.choices)[0]}`"]
    tasks: Rows = [("task", *header[2::2])]
    for task in profile.tasks:
        percents = ([100 * score for score in profile.scores(choice, task, side)] for side in profile.sides)
        tasks.append((task, *map(interval_text, percents)))
    said = (
        f"Means of {len(profile.seeds)} seeds with 95 % intervals; 0 is chance, 100 a perfect answer. Ranks are among "
    )
    said += f"{len(beside.choices)} choices, by the mean over tasks."
    picture = save_figure(draw_card(profile, beside, title), folder / "card.png")
    parts = [f"# {title}", markdown([header, *own]), said, f"![{title}](card.png)", markdown(tasks), *notes]
    return [write_text(folder / "card.md", "\n\n".join(parts) + "\n"), picture]


def draw_card(profile: Profile, beside: Profile, title: str) -> Figure:
    """Draw the scores of the first choice on every task with intervals, and those of the other choices as ticks."""
    choice, *others = beside.choices
    figure = Figure(figsize=(7.2, 1.2 + 0.27 * len(profile.tasks)), layout="constrained")
    panels = figure.subplots(1, len(profile.sides), squeeze=False, sharey=True).flatten()
    for ax, side in zip(panels, profile.sides, strict=True):
        for row, task in enumerate(profile.tasks):
            for other in others:
                ax.plot(max(100 * beside.mean(other, task, side), 100 * LOWEST), row, "|", color="0.6", markersize=9)
            mean, low, high = interval([100 * score for score in profile.scores(choice, task, side)])
            ax.plot([low, high], [row, row], color=PALETTE[0])
            ax.plot(mean, row, "o", color=PALETTE[0], markersize=5)
        ax.set(xlim=(100 * LOWEST - 3, 105), title=f"{side} × {side} cells", xlabel="chance = 0, perfect = 100")
        ax.set_yticks(range(len(profile.tasks)), list(map(printable, profile.tasks)), parse_math=False)
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle(printable(title), fontsize=11, parse_math=False)
    return figure
