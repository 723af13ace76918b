"""Significance of differences: a paired test over seeds, and a correction for multiple tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy import stats

#: A difference is beyond chance if its p, adjusted for all tests of a family, is below this.
LEVEL = 0.05
#: The fewest seeds of a test.
LEAST = 3
#: The probability with which a planned test should find a difference.
POWER = 0.8


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
    """Test whether the scores differ from those of the same seeds in `reference`.

    `largest` is the largest score that was rounded, if `scores` are differences themselves.

    Returns None with fewer than three seeds, if all differences are equal up to the rounding of the scores to float32,
    or if a score is not finite. Two seeds have one degree of freedom: p is below 5 % whenever both differ by nearly the
    same, as by one image of a small test set.
    """
    differences = [a - b for a, b in zip(scores, reference, strict=True)]
    if len(differences) < LEAST or not all(map(math.isfinite, differences)):
        return None
    if np.ptp(differences) <= rounding(max(map(abs, (*scores, *reference))) if largest is None else largest):
        return None
    result = stats.ttest_rel(scores, reference)
    low, high = result.confidence_interval(0.95)
    return PairedTest(fmean(differences), float(low), float(high), float(result.pvalue))


def rounding(largest: float) -> float:
    """Return the most by which equal differences of scores differ that were rounded to float32."""
    return 4 * float(np.finfo(np.float32).eps) * largest


def power(deviation: float, difference: float, seeds: int, level: float = LEVEL) -> float:
    """Return the probability that a paired t-test finds a true difference.

    Args:
        deviation: standard deviation of the differences over seeds.
        difference: the true difference.
        seeds: number of seeds, at least two.
        level: p is below this if the difference is found.
    """
    limit, shift = stats.t.isf(level / 2, seeds - 1), difference * math.sqrt(seeds) / deviation
    # the lower tail by symmetry: `nct.cdf` of SciPy 1.17 is NaN far from the mean
    return float(stats.nct.sf(limit, seeds - 1, shift) + stats.nct.sf(limit, seeds - 1, -shift))


def seeds_needed(deviation: float, difference: float, level: float = LEVEL, most: int = 1000) -> int:
    """Return the smallest number of seeds, up to `most`, with which the power is at least `POWER`."""
    return next((seeds for seeds in range(LEAST, most) if power(deviation, difference, seeds, level) >= POWER), most)


def holm(values: Sequence[float | None]) -> list[float | None]:
    r"""Adjust the p values of one family of tests, so that at 5 % the chance of any false positive is at most 5 %.

    .. math:: \tilde p_{(i)} = \max_{j \le i} \min(1, (m - j + 1)\, p_{(j)}), \quad p_{(1)} \le \dots \le p_{(m)}

    Values that are None (no test) remain None and are not counted. The tests may depend on each other in any way. It is
    written in numpy, since scipy has no such function, and the one of statsmodels
    (`multipletests(..., method="holm")`) would be a dependency for these lines.

    Reference: A Simple Sequentially Rejective Multiple Test Procedure (Holm, 1979).
    """
    known = np.array([p for p in values if p is not None])
    order = known.argsort(kind="stable")
    adjusted = np.empty_like(known)
    adjusted[order] = np.maximum.accumulate(np.minimum(1, known[order] * (len(known) - np.arange(len(known)))))
    rest = iter(adjusted.tolist())
    return [None if p is None else next(rest) for p in values]


@dataclass(frozen=True)
class Outcome:
    """A test of a family, and its significance.

    test: None if there was none.
    adjusted: p adjusted by Holm's method for all tests of the family; None without a test.
    tests: number of tests in the family.
    """

    test: PairedTest | None
    adjusted: float | None
    tests: int

    @property
    def p(self) -> float | None:
        """Return p before the adjustment; None without a test."""
        return None if self.test is None else self.test.p

    @property
    def supported(self) -> bool:
        """Return whether there is a difference beyond chance."""
        return self.adjusted is not None and self.adjusted < LEVEL

    @property
    def conclusion(self) -> str:
        """Return the conclusion in a few words.

        If the 95 % interval excludes zero but the adjusted p is not below 5 %, the data neither show a difference nor
        rule one out, and the conclusion says so.
        """
        if self.test is None:
            return "not tested"
        if self.supported:
            return "a difference beyond chance"
        return (
            "no difference found"
            if self.test.p >= LEVEL
            else f"not significant after correction for {self.tests} tests"
        )


def paired_outcomes(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Outcome]:
    """Test each pair of scores and reference, over the same seeds, as one family."""
    tests = [paired_test(scores, reference) for scores, reference in pairs]
    count = sum(test is not None for test in tests)
    adjusted = holm([None if test is None else test.p for test in tests])
    return [Outcome(test, p, count) for test, p in zip(tests, adjusted, strict=True)]


def spread(values: Sequence[float], decimals: int) -> str:
    """Write the mean of values, and their standard deviation if there are several; empty for no values."""
    if not all(map(math.isfinite, values)):
        return "not finite"
    if not values:
        return ""
    return f"{fmean(values):.{decimals}f}" + (f" ± {stdev(values):.{decimals}f}" if len(values) > 1 else "")


def format_p(p: float | None) -> str:
    """Write p with three digits, or as many as distinguish it from `LEVEL` if it is below; a dash for None.

    >>> [format_p(p) for p in (None, 0.0004, 0.0312, 0.0497, 0.0502)]
    ['-', '< 0.001', '0.031', '0.0497', '0.050']
    """
    if p is None:
        return "-"
    if p < 0.001:
        return "< 0.001"
    digits = 3
    while p < LEVEL <= float(f"{p:.{digits}f}"):
        digits += 1
    return f"{p:.{digits}f}"
