"""Contrasts of scores paired by seed: each that a page prints is a row of contrasts.csv and has one of four answers.

A contrast is a weighted sum of scores of the same seed, such as `A - B`, or `A @ zoom 40 - A - B @ zoom 40 + B` with
conditions of the measurement. Its answer is

- *larger* or *smaller*: its mean is not zero, with p below 5 %, adjusted by Benjamini and Yekutieli's method for all
  rows of its family (a paper, or the page of choices), which may depend on each other in any way;
- *within the margin*: two one-sided tests show that it is smaller than the margin, on either side (a contrast can be
  both, larger than zero and within the margin);
- *no difference found* in n seeds: neither is shown.

References: The Control of the False Discovery Rate in Multiple Testing under Dependency (Benjamini and Yekutieli,
2001); A Comparison of the Two One-Sided Tests Procedure and the Power Approach (Schuirmann, 1987).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from scipy import stats

from evidence.gym import GymScore, gym_scores
from evidence.records import read_records
from evidence.studies import CELL, read_table
from graticule.lab.studies.results import TRAINED
from graticule.lab.studies.significance import LEVEL, PairedTest, paired_test

ROWS = Path(__file__).parent / "contrasts.csv"
#: Study -> factor of p for looks at its scores that were declared before the last one.
LOOKS = {"more_seeds": 1.13}
#: (choice, variant, at) -> seed -> score.
Scores = Mapping[tuple[str, str, str], Mapping[int, float]]
#: A weighted score: weight, choice, variant, and the condition of the measurement ("trained", "zoom 40", ...).
Term = tuple[float, str, str, str]


def parse(contrast: str, variant: str = "", at: str = TRAINED) -> tuple[Term, ...]:
    """Return the weighted scores of the text of a contrast.

    >>> parse("LaPE @ zoom 40 - LaPE", "6 layers")
    ((1.0, 'LaPE', '6 layers', 'zoom 40'), (-1.0, 'LaPE', '6 layers', 'trained'))
    """
    terms = []
    for sign, term in re.findall(r"(?:^| ([+-]) )(.+?)(?= [+-] |$)", contrast):
        choice, _, condition = term.partition(" @ ")
        terms.append((-1.0 if sign == "-" else 1.0, choice, variant, condition or at))
    return tuple(terms)


def read_scores(name: str, folder: Path) -> dict[tuple[str, str, str], dict[int, float]]:
    """Read the scores of a study, or of the gym (in percent), from docs/data.

    The condition of a metric that is not the accuracy or loss of the recipe begins with the metric.
    """
    if name.startswith("gym"):
        return gym_scores(read_records(folder / f"{name}.csv", GymScore))
    scores: dict[tuple[str, str, str], dict[int, float]] = {}
    rows = read_table(folder / f"study_{name}.csv")
    for choice, variant, seed, metric, at, value in rows[[*CELL, "metric", "at", "value"]].itertuples(index=False):
        if metric != "loss":
            where = at if metric in ("top1", "miou", "bits") else f"{metric}, {at}"
            scores.setdefault((choice, variant, where), {})[seed] = value
    return scores


def differences(terms: Iterable[Term], scores: Scores) -> tuple[float, ...]:
    """Return the weighted sum of the scores of every seed that has them all."""
    parts = [(weight, scores.get((choice, variant, at), {})) for weight, choice, variant, at in terms]
    seeds = sorted(set.intersection(*(set(by) for _, by in parts)))
    return tuple(sum(weight * by[seed] for weight, by in parts) for seed in seeds)


@dataclass(frozen=True)
class Contrast:
    """A contrast with its answer.

    values: of the seeds.
    margin: the largest difference that would not matter.
    adjusted: p, adjusted for all contrasts of the family; None without a test.
    """

    values: tuple[float, ...]
    margin: float
    adjusted: float | None = None

    @cached_property
    def test(self) -> PairedTest | None:
        """The test of its mean; None with fewer than three seeds, or if all values are equal."""
        return paired_test(self.values, [0.0] * len(self.values), largest=100.0)  # of scores in percent

    @property
    def equivalent(self) -> float:
        """The larger p of the two one-sided tests that the mean is above -margin and below +margin."""
        sides = ((-self.margin, "greater"), (self.margin, "less"))
        return max(float(stats.ttest_1samp(self.values, at, alternative=side).pvalue) for at, side in sides)

    @cached_property
    def answer(self) -> str:
        """One of four answers."""
        if not self.values:
            return "not run"
        if self.test is None or self.adjusted is None:
            few = {1: "not tested: one seed", 2: "not tested: two seeds"}
            return few.get(len(self.values), "not tested: the same in all seeds")
        same = "within the margin" * (self.equivalent < LEVEL)
        if self.adjusted < LEVEL:
            return ", but ".join(filter(None, ("larger" if self.test.difference > 0 else "smaller", same)))
        return same or "no difference found"

    def reversed(self) -> Contrast:
        """Return the contrast with the other sign."""
        return replace(self, values=tuple(-value for value in self.values))

    def short(self, decimals: int = 1) -> str:
        """Return difference, interval and the sign of the answer, for a cell of a table."""
        marks = {"larger": "+", "smaller": "-", "within": "=", "no difference": "?", "not run": "not run"}
        mark = "".join(sign for answer, sign in marks.items() if answer in self.answer)
        if self.test is None:
            mean = f"{fmean(self.values):+.{decimals}f}" if self.values else ""
            return f"{mean} {mark}".strip()
        mean, low, high = (
            f"{round(x, decimals) + 0.0:+.{decimals}f}" for x in (self.test.difference, self.test.low, self.test.high)
        )
        return f"{mean} [{low}, {high}] {mark}".strip()


def adjust(contrasts: Sequence[Contrast], factors: Sequence[float] = ()) -> list[Contrast]:
    """Adjust contrasts as one family; `factors` of p are for looks at the scores, 1 by default."""
    factors = factors or [1.0] * len(contrasts)
    tests = [(contrast.test, factor) for contrast, factor in zip(contrasts, factors, strict=True)]
    tested = [min(1.0, test.p * factor) for test, factor in tests if test is not None]
    adjusted = iter(stats.false_discovery_control(tested, method="by") if tested else ())
    return [
        contrast if test is None else replace(contrast, adjusted=float(next(adjusted)))
        for contrast, (test, _) in zip(contrasts, tests, strict=True)
    ]


@dataclass(frozen=True)
class Asked:
    """A row of contrasts.csv.

    family: whose rows are adjusted together: a paper, or 'which'.
    where: the table or section of the paper.
    question: of docs/papers.md; empty for a row that is not printed there.
    label: the data set or condition there.
    task: of docs/which.md; empty for a row that is not printed there.
    data: study, or 'extrapolation', or a name that begins with gym: the file in docs/data.
    variant: of the study, or task of the gym.
    at: condition of the scores that name none.
    contrast: as text; on docs/papers.md it is positive if the paper is right.
    margin: the largest difference that would not matter.
    control: what makes the two sides equal in the other respects.
    declared: the commit that fixed it before the last of its scores was read; empty if it was chosen later.
    """

    family: str
    where: str
    question: str
    label: str
    task: str
    data: str
    variant: str
    at: str
    contrast: str
    margin: float
    control: str
    declared: str

    @property
    def terms(self) -> tuple[Term, ...]:
        """The weighted scores."""
        return parse(self.contrast, self.variant, self.at)

    @property
    def mark(self) -> str:
        """What marks it if it was chosen later."""
        return "" if self.declared else " †"


class Registry:
    """The rows of contrasts.csv with their answers from docs/data, each of which exists once.

    Args:
        folder: docs/data.
        rows: other rows.
    """

    def __init__(self, folder: Path, rows: Sequence[Asked] | None = None) -> None:
        self.folder = folder
        self.rows = list(read_records(ROWS, Asked) if rows is None else rows)
        self._scores: dict[str, Scores] = {}
        self._index: dict[tuple[str, frozenset[Term]], Asked] = {}
        for row in self.rows:
            for sign in (1, -1):
                if twin := self._index.get(_key(row.data, row.terms, sign)):
                    raise ValueError(f"{ROWS.name} must have a contrast once, with one sign, got {twin} and {row}.")
            self._index[_key(row.data, row.terms)] = row

    @cached_property
    def answers(self) -> dict[Asked, Contrast]:
        """The answer of every row."""
        answers: dict[Asked, Contrast] = {}
        for family in dict.fromkeys(row.family for row in self.rows):
            rows = [row for row in self.rows if row.family == family]
            plain = [Contrast(differences(row.terms, self.scores(row.data)), row.margin) for row in rows]
            answers |= zip(rows, adjust(plain, [LOOKS.get(row.data, 1.0) for row in rows]), strict=True)
        return answers

    def scores(self, data: str) -> Scores:
        """Return the scores of a file of docs/data."""
        if data not in self._scores:
            self._scores[data] = read_scores(data, self.folder)
        return self._scores[data]

    def find(self, data: str, terms: Iterable[Term]) -> Contrast:
        """Return the answer of a contrast, also with the other sign.

        Raises:
            ValueError: for one that is no row.
        """
        terms = tuple(terms)
        for sign in (1, -1):
            if row := self._index.get(_key(data, terms, sign)):
                return self.answers[row] if sign == 1 else self.answers[row].reversed()
        raise ValueError(f"`terms` must be a row of {ROWS.name}, got {data}: {terms}.")

    def of(self, **fields: str) -> list[tuple[Asked, Contrast]]:
        """Return the rows with these values, and their answers."""
        rows = [row for row in self.rows if all(getattr(row, name) == value for name, value in fields.items())]
        return [(row, self.answers[row]) for row in rows]


def _key(data: str, terms: Iterable[Term], sign: int = 1) -> tuple[str, frozenset[Term]]:
    return data, frozenset((sign * weight, choice, variant, at) for weight, choice, variant, at in terms)
