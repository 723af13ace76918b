"""Tables of docs/results/gym.md, from the scores of docs/data/gym*.csv.

A command that the package no longer has made these scores. It trained a tiny model on every task and tested it on two
sizes of the grid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from evidence.records import read_records
from graticule.analysis.share import mean_estimate
from graticule.lab.data.sets.gym import TASKS
from graticule.lab.studies.results import TRAINED
from graticule.system.tables import Rows, markdown

#: (choice, task, at) -> seed -> score in percent, from chance to a perfect answer; the task "mean" is over all tasks.
Scores = dict[tuple[str, str, str], dict[int, float]]
#: Condition of a score -> the size of the grid.
GRIDS = {TRAINED: "6 x 6 cells", "9 cells": "9 x 9 cells"}


@dataclass(frozen=True)
class GymScore:
    """Score of a trained model at one size.

    trained, side: cells per side, in training and in this test.
    score, chance: in the measure of the task.
    normalized: the score on a scale on which chance is 0 and a perfect answer is 1.
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


def gym_scores(rows: Sequence[GymScore]) -> Scores:
    """Return the scores of all tasks, and their mean for the seeds that have all tasks.

    In the mean, a score below chance counts as chance, since scores of `box` have no lower bound.
    """
    scores: Scores = {}
    for row in rows:
        if not math.isnan(row.normalized):
            at = TRAINED if row.side == row.trained else f"{row.side} cells"
            scores.setdefault((row.choice, row.task, at), {})[row.seed] = 100 * row.normalized
    tasks = {task for _, task, _ in scores}
    for choice, at in dict.fromkeys((choice, at) for choice, _, at in scores):
        by_task = [scores.get((choice, task, at), {}) for task in tasks]
        seeds = sorted(set.intersection(*map(set, by_task)))
        scores[choice, "mean", at] = {seed: fmean(max(0.0, by[seed]) for by in by_task) for seed in seeds}
    return scores


def gym_part(name: str, folder: Path) -> str:
    """Return the table 'tasks', 'ranks' or 'places' of the page."""
    if name == "tasks":
        rows = [(f"`{name}`", task.question, f"1/{len(task.class_names)}") for name, task in TASKS.items()]
        return markdown([("data", "question", "chance"), *rows])
    records = read_records(folder / f"{'gym' if name == 'ranks' else 'gym_place'}.csv", GymScore)
    scores, choices = gym_scores(records), list(dict.fromkeys(row.choice for row in records))
    labels = dict(zip(choices, choice_labels(choices), strict=True))
    if name == "places":
        return _means(scores, TRAINED, labels)
    values = {choice: [[*scores[choice, "mean", at].values()] for at in GRIDS] for choice in choices}
    choices.sort(key=lambda choice: -fmean(values[choice][0]))
    rows = [(f"`{labels[choice]}`", *(f"{fmean(scores):.1f}" for scores in values[choice])) for choice in choices]
    halves = [max(mean_half(by_grid[n]) for by_grid in values.values()) for n in range(len(GRIDS))]
    widest = " and ".join(f"{half:.1f} on {grid}" for half, grid in zip(halves, GRIDS.values(), strict=True))
    return (
        f"Half of a 95 % interval over seeds is at most {widest}.\n\n{markdown([('choice', *GRIDS.values()), *rows])}"
    )


def _means(scores: Scores, at: str, labels: Mapping[str, str]) -> str:
    """Return a table with a row per choice and a column per task: mean and standard deviation over seeds."""
    tasks = [task for task in dict.fromkeys(task for _, task, _ in scores) if task != "mean"]
    rows: Rows = [("choice", *tasks)]
    for choice, label in labels.items():
        values = [[*scores[choice, task, at].values()] for task in tasks]
        cells = (f"{round(fmean(of_task))} ± {round(stdev(of_task))}" for of_task in values)
        rows.append((label, *cells))
    return markdown(rows)


def mean_half(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean, by Student's t."""
    mean, _, high = mean_estimate(np.array(values))
    return float(high - mean)


def choice_labels(choices: Sequence[str]) -> list[str]:
    """Write choices in the words of the docs: without the names of their values and, if they differ, model_kwargs.

    >>> choice_labels(["encoding=learnable(std=1),joining=lape", "encoding=sgu,model=gmlp,model_kwargs=num_blocks=2"])
    ['learnable(std=1), lape', 'sgu, gmlp']
    """
    words = [re.sub(r",(joining|model)=", ", ", choice.removeprefix("encoding=")) for choice in choices]
    short = [word.partition(",model_kwargs=")[0] for word in words]
    return short if len(set(short)) == len(short) else words
