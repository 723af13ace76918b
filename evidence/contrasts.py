"""Contrasts of scores paired by seed, with one of four answers, and their picture.

A contrast is a weighted sum of scores of the same seed, such as the difference of two choices. Its answer is

- *larger* or *smaller*: its mean is not zero, with p below 5 %, adjusted by Benjamini and Yekutieli's method for all
  contrasts of the question, which may depend on each other in any way;
- *within the margin*: two one-sided tests show that it is smaller than the margin, on either side (a contrast can be
  both, larger than zero and within the margin);
- *undecided*, with the number of seeds that would find the difference seen, or that of the margin if it is larger,
  with a probability of 80 % at the same adjustment.

References: The Control of the False Discovery Rate in Multiple Testing under Dependency (Benjamini and Yekutieli,
2001); A Comparison of the Two One-Sided Tests Procedure and the Power Approach (Schuirmann, 1987).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from graticule.lab.gym.profile import read_profile
from graticule.lab.studies.significance import LEVEL, PairedTest, equivalence, format_p, paired_test, seeds_needed
from graticule.lab.studies.study import TRAINED, read_table

#: What marks a contrast that was not fixed before the scores.
LATER = "†"
#: The variant of a gym that is the mean over all its tasks, where a score below chance counts as chance.
MEAN = "mean"
#: (choice, variant, at) -> seed -> score.
Scores = Mapping[tuple[str, str, str], Mapping[int, float]]
#: A weighted score: weight, choice, variant, and the condition of the measurement ("trained", "zoom 40", ...).
Term = tuple[float, str, str, str]


def read_scores(name: str, folder: Path) -> dict[tuple[str, str, str], dict[int, float]]:
    """Read the scores of a study, of the benchmark 'extrapolation', or of a gym (in percent), from docs/data.

    The condition of a metric that is not the accuracy or loss of the recipe begins with the metric.
    """
    scores: dict[tuple[str, str, str], dict[int, float]] = {}
    if name == "extrapolation":
        with (folder / "extrapolation.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                at = TRAINED if row["height"] == "20" else f"{row['mode']} {row['height']}"
                if row["variant"] == "plain":
                    scores.setdefault((row["choice"], "", at), {})[int(row["seed"])] = float(row["top1"])
    elif name.startswith("gym"):
        profile = read_profile(folder / f"{name}.csv")
        where = {side: TRAINED if side == profile.trained else f"{side} cells" for side in profile.sides}
        for score in profile.rows:
            if not math.isnan(score.normalized):
                of_task = scores.setdefault((score.choice, score.task, where[score.side]), {})
                of_task[score.seed] = 100 * score.normalized
        for side, at in where.items():
            scores |= {(choice, MEAN, at): dict(enumerate(means)) for choice, means in profile.overall(side).items()}
    else:
        for score in read_table(folder / f"study_{name}.csv"):
            if score.metric != "loss":
                at = score.at if score.metric in ("top1", "miou", "bits") else f"{score.metric}, {score.at}"
                scores.setdefault((score.choice, score.variant, at), {})[score.seed] = score.value
    return scores


def differences(terms: Iterable[Term], scores: Scores) -> list[float]:
    """Return the weighted sum of the scores of every seed that has them all."""
    parts = [(weight, scores.get((choice, variant, at), {})) for weight, choice, variant, at in terms]
    seeds = sorted(set.intersection(*(set(by) for _, by in parts)))
    return [sum(weight * by[seed] for weight, by in parts) for seed in seeds]


@dataclass(frozen=True)
class Contrast:
    """A contrast with its answer.

    label: its name in tables and figures.
    values: of the seeds.
    margin: the largest difference that would not matter.
    adjusted: p, adjusted for all contrasts of the question; None without a test.
    level: of p before it is adjusted, at its rank in the family.
    """

    label: str
    values: tuple[float, ...]
    margin: float
    adjusted: float | None = None
    level: float = LEVEL

    @property
    def test(self) -> PairedTest | None:
        """The test of its mean; None with fewer than two seeds, or if all values are equal."""
        return paired_test(self.values, [0.0] * len(self.values))

    @property
    def equivalent(self) -> float:
        """The larger p of the two one-sided tests that the mean is above -margin and below +margin."""
        return equivalence(self.values, self.margin)

    @property
    def answer(self) -> str:
        """One of four answers."""
        if not self.values:
            return "not run"
        if self.test is None or self.adjusted is None:
            return "not tested: the same in all seeds" if len(self.values) > 1 else "undecided: one seed"
        same = "within the margin" * (self.equivalent < LEVEL)
        if self.adjusted < LEVEL:
            return ", but ".join(filter(None, ("larger" if self.test.difference > 0 else "smaller", same)))
        difference = max(self.margin, abs(self.test.difference))
        return same or f"undecided ({seeds_needed(stdev(self.values), difference, self.level)} seeds)"

    def cells(self, decimals: int = 2) -> tuple[str, ...]:
        """Return its difference with interval, number of seeds, adjusted p and answer, for a table."""
        if self.test is None:
            mean = f"{fmean(self.values):+.{decimals}f}" if self.values else ""
            return (mean, str(len(self.values)), "-", self.answer)
        mean, low, high = (
            f"{round(x, decimals) + 0.0:+.{decimals}f}" for x in (self.test.difference, self.test.low, self.test.high)
        )
        return (f"{mean} [{low}, {high}]", str(len(self.values)), format_p(self.adjusted), self.answer)

    def short(self, decimals: int = 1) -> str:
        """Return difference, interval and the sign of the answer, for a cell of a table."""
        marks = {"larger": "+", "smaller": "-", "within the margin": "="}
        mark = "".join(sign for answer, sign in marks.items() if answer in self.answer)
        if self.answer.startswith("undecided ("):
            mark = f"?{self.answer.split()[1][1:]}"
        return f"{self.cells(decimals)[0]} {mark}"


#: Names of the columns of `Contrast.cells`.
COLUMNS = ("difference [95 %]", "seeds", "adjusted p", "answer")


def family(asked: Sequence[tuple[str, Sequence[float], float]]) -> list[Contrast]:
    """Test (label, values, margin) as one family, the contrasts of one question."""
    plain = [Contrast(label, tuple(values), margin) for label, values, margin in asked]
    tested = [contrast.test.p for contrast in plain if contrast.test is not None]
    adjusted = iter(stats.false_discovery_control(tested, method="by") if tested else ())
    ranks = iter(stats.rankdata(tested, "max"))
    share = LEVEL / sum(len(tested) / k for k in range(1, len(tested) + 1)) if tested else LEVEL
    return [
        contrast
        if contrast.test is None
        else replace(contrast, adjusted=float(next(adjusted)), level=share * next(ranks))
        for contrast in plain
    ]


def pooled(contrasts: Sequence[Contrast]) -> tuple[float, float, float]:
    """Return mean, low and high of a random-effects model of several data sets.

    References: DerSimonian and Laird (1986) for the variance between data sets; Hartung and Knapp (2001) for the
    interval.
    """
    means = [fmean(contrast.values) for contrast in contrasts]
    variances = [stdev(contrast.values) ** 2 / len(contrast.values) for contrast in contrasts]
    weights = [1 / contrast for contrast in variances]
    fixed = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    excess = sum(w * (m - fixed) ** 2 for w, m in zip(weights, means, strict=True)) - (len(means) - 1)
    between = max(0.0, excess / (sum(weights) - sum(w * w for w in weights) / sum(weights)))
    weights = [1 / (contrast + between) for contrast in variances]
    mean = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    error = sum(w * (m - mean) ** 2 for w, m in zip(weights, means, strict=True)) / (len(means) - 1) / sum(weights)
    reach = float(stats.t.isf(0.025, len(means) - 1)) * math.sqrt(error)
    return mean, mean - reach, mean + reach
