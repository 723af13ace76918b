"""Ranks of the choices of a gym with intervals, and the card of a single choice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy import stats

from graticule.lab.gym.profile import Profile, choice_labels
from graticule.lab.studies.significance import LEVEL, holm, paired_test
from graticule.lab.studies.tables import Rows, markdown
from graticule.system.files import write_text


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t, whose ends are NaN for a single value."""
    test = paired_test(values, [0.0] * len(values))
    if test is not None:
        return test.difference, test.low, test.high
    mean = fmean(values)  # equal values, or a single one
    return (mean, mean, mean) if len(values) > 1 else (mean, math.nan, math.nan)


def interval_text(values: Sequence[float]) -> str:
    """Write the mean and its 95 % interval.

    >>> interval_text([50.0, 51.0, 52.0]), interval_text([50.0])
    ('51.0 [48.5, 53.5]', '50.0')
    """
    mean, low, high = interval(values)
    return f"{mean:.1f}" if math.isnan(low) else f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def overall(profile: Profile, side: int) -> dict[str, list[float]]:
    """Return choice -> its mean scores over all tasks in percent, for the seeds that have all choices and tasks.

    A score below chance counts as chance, since those of `box` have no lower bound.
    """
    found: dict[int, dict[str, list[float]]] = {}
    for row in profile.rows:
        if row.side == side and not math.isnan(row.normalized):
            of_seed = found.setdefault(row.seed, {choice: [] for choice in profile.choices})
            of_seed[row.choice].append(100 * max(0.0, row.normalized))
    whole = [by for _, by in sorted(found.items()) if {*map(len, by.values())} == {len(profile.tasks)}]
    return {choice: [fmean(by[choice]) for by in whole] for choice in profile.choices}


def rank_intervals(given: Sequence[Sequence[float]]) -> list[tuple[int, int, int]]:
    """Return the rank, the best and the worst possible rank of each choice, from its scores of the same seeds.

    The interval is from 1 + the number of better choices to the number of choices that are not worse. Better and worse
    are decided by paired t-tests, adjusted by Holm's method for all pairs with the choice.

    Reference: Inference for Ranks (Mogstad, Romano, Shaikh and Wilhelm, 2024), section 3, for a single rank.
    """
    scores = np.array(given)
    mean = (difference := scores[:, None] - scores).mean(2)
    p = np.full(mean.shape, math.nan)
    if (seeds := scores.shape[1]) > 1:
        with np.errstate(divide="ignore", invalid="ignore"):  # equal differences
            p = 2 * stats.t.sf(abs(mean / difference.std(2, ddof=1)) * seeds**0.5, seeds - 1)
    found = []
    for own in range(len(scores)):
        adjusted = holm([None if math.isnan(one) else float(one) for one in p[own]])
        beyond = np.array([one is not None and one < LEVEL for one in adjusted])
        better, worse = mean[own] < 0, mean[own] > 0
        found.append(
            (1 + int(better.sum()), 1 + int((better & beyond).sum()), len(scores) - int((worse & beyond).sum()))
        )
    return found


def ranks(profile: Profile) -> Rows:
    """Return a header and one row per choice: parameters, and mean and rank at every size, the best first."""
    rows = [
        [f"`{name}`", f"{max(row.parameters for row in profile.rows if row.choice == choice):,}"]
        for choice, name in zip(profile.choices, choice_labels(profile.choices), strict=True)
    ]
    order: list[int] = []
    for side in profile.sides:
        scores = list(overall(profile, side).values())
        for row, values, (rank, best, worst) in zip(rows, scores, rank_intervals(scores), strict=True):
            row += [interval_text(values), f"{rank} [{best}, {worst}]"]
        order = order or sorted(range(len(rows)), key=lambda own: -fmean(scores[own]))
    heads = [text for side in profile.sides for text in (f"{side} x {side} cells", "rank")]
    return [("choice", "parameters", *heads), *(tuple(rows[own]) for own in order)]


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


def write_card(profile: Profile, table: Profile | None, file: Path, notes: Sequence[str]) -> Path:
    """Write the card of the only choice of a profile, as Markdown beside `gym.png`.

    Args:
        profile: the scores of the choice.
        table: those of other choices, `complete` for the same tasks, seeds and sizes.
        file: of the card.
        notes: lines on the origin of the scores.
    """
    (choice,) = profile.choices
    others = [row for row in table.rows if row.choice != choice] if table is not None else []
    beside = Profile((*profile.rows, *others))
    name = choice_labels(beside.choices)[0]
    header, *rows = ranks(beside)
    tasks: Rows = [("task", *header[2::2])]
    for task in profile.tasks:
        percents = ([100 * score for score in profile.scores(choice, task, side)] for side in profile.sides)
        tasks.append((task, *map(interval_text, percents)))
    said = (
        f"Means of {len(profile.seeds)} seeds with 95 % intervals; 0 is chance, 100 a perfect answer. Ranks are among "
    )
    said += f"{len(beside.choices)} choices, by the mean over tasks."
    own = [row for row in rows if row[0] == f"`{name}`"]
    parts = [f"# {name}", markdown([header, *own]), said, markdown(tasks), f"![Scores of {name}](gym.png)", *notes]
    return write_text(file, "\n\n".join(parts) + "\n")
