"""Significance of differences: a paired test over seeds, and a correction for multiple tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from pandas import DataFrame
from scipy import stats

#: A difference is beyond chance if its p, adjusted for all tests of a family, is below this.
LEVEL = 0.05
#: The fewest seeds of a test.
LEAST = 3


@dataclass(frozen=True)
class PairedTest:
    r"""Result of a paired t-test of n seeds: the mean of the differences d_i of two choices, and its significance.

    difference: the mean of the d_i.
    low, high: its 95 % confidence interval.
    p: two-sided, of the hypothesis that the mean is zero.
    """

    difference: float
    low: float
    high: float
    p: float


def paired_test(scores: Sequence[float], reference: Sequence[float], largest: float | None = None) -> PairedTest | None:
    """Test whether the scores differ from the scores of the same seeds in `reference`.

    `largest` is the largest score that was rounded, if `scores` are differences themselves.

    Returns None with fewer than three seeds, if all differences are equal up to the rounding of the scores to float32,
    or if a score is not finite. Two seeds have one degree of freedom: p is below 5 % whenever both differ by nearly the
    same, as by one image of a small test set.
    """
    differences = [a - b for a, b in zip(scores, reference, strict=True)]
    if len(differences) < LEAST or not all(map(math.isfinite, differences)):
        return None
    largest = max(map(abs, (*scores, *reference))) if largest is None else largest
    if np.ptp(differences) <= 4 * float(np.finfo(np.float32).eps) * largest:
        return None
    result = stats.ttest_rel(scores, reference)
    low, high = result.confidence_interval(0.95)
    return PairedTest(fmean(differences), float(low), float(high), float(result.pvalue))


def holm(values: Sequence[float]) -> np.ndarray:
    r"""Adjust the p values of one family of tests, so that at 5 % the chance of any false positive is at most 5 %.

    .. math:: \tilde p_{(i)} = \max_{j \le i} \min(1, (m - j + 1)\, p_{(j)}), \quad p_{(1)} \le \dots \le p_{(m)}

    NaN stands for no test: it remains and is not counted. The tests may depend on each other in any way. SciPy has no
    such function.

    Reference: A Simple Sequentially Rejective Multiple Test Procedure (Holm, 1979).
    """
    adjusted = np.array(values, dtype=np.float64)
    order = adjusted.argsort(kind="stable")[: np.isfinite(adjusted).sum()]  # NaN is the last
    scaled = adjusted[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.maximum.accumulate(np.minimum(1, scaled))
    return adjusted


def paired(rows: DataFrame, reference: str) -> DataFrame:
    """Test every other choice against `reference`, over the seeds that both have, at each condition; as one family.

    Args:
        rows: scores of one metric, with the columns choice, seed, at and value.
        reference: a choice.

    Returns:
        a row per choice and condition: choice, at, seeds, difference, low, high, p, p (Holm). Limits and p are NaN
        where nothing is tested (`paired_test`).
    """
    tests = []
    first = rows[rows.choice == reference]
    for (choice, at), scores in rows[rows.choice != reference].groupby(["choice", "at"], sort=False):
        both = scores.merge(first[first["at"] == at], on="seed", suffixes=("", "_reference"))
        if len(both):
            test = paired_test([*both.value], [*both.value_reference])
            limits = (math.nan,) * 3 if test is None else (test.low, test.high, test.p)
            tests.append((choice, at, len(both), (both.value - both.value_reference).mean(skipna=False), *limits))
    table = DataFrame(tests, columns=["choice", "at", "seeds", "difference", "low", "high", "p"])
    return table.assign(**{"p (Holm)": holm([*table.p])})


def conclusion(seeds: int, difference: float, p: float, adjusted: float, tests: int) -> str:
    """Return the conclusion of a row of `paired` in a few words, among a number of tests.

    If the 95 % interval excludes zero but the adjusted p is not below 5 %, the data neither show a difference nor rule
    one out, and the conclusion says so.
    """
    if math.isnan(p):
        reason = f"fewer than {LEAST} seeds" if seeds < LEAST else "the same difference in all seeds"
        return f"not tested: {reason}" if math.isfinite(difference) else "not tested"
    if adjusted < LEVEL:
        return "a difference beyond chance"
    return "no difference found" if p >= LEVEL else f"not significant after correction for {tests} tests"


def spread(values: Sequence[float], decimals: int) -> str:
    """Write the mean of values, and their standard deviation if there are several; empty for no values."""
    if not all(map(math.isfinite, values)):
        return "not finite"
    if not values:
        return ""
    return f"{fmean(values):.{decimals}f}" + (f" ± {stdev(values):.{decimals}f}" if len(values) > 1 else "")


def format_p(p: float) -> str:
    """Write p with three digits, or as many as distinguish it from `LEVEL` if it is below; a dash for NaN.

    >>> [format_p(p) for p in (math.nan, 0.0004, 0.0312, 0.0497, 0.0502)]
    ['-', '< 0.001', '0.031', '0.0497', '0.050']
    """
    if math.isnan(p):
        return "-"
    if p < 0.001:
        return "< 0.001"
    digits = 3
    while p < LEVEL <= float(f"{p:.{digits}f}"):
        digits += 1
    return f"{p:.{digits}f}"
