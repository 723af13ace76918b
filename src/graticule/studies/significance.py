"""Differences that chance explains: a paired test over seeds, and a correction for making many tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def paired_p(scores: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return the two-sided p of a paired t-test over seeds; None with fewer than two, or if all differ by the same."""
    differences = [a - b for a, b in zip(scores, reference, strict=True)]
    if len(differences) < 2 or max(differences) - min(differences) < 1e-12:
        return None
    p = float(stats.ttest_rel(scores, reference).pvalue)
    return None if math.isnan(p) else p


def holm(values: Sequence[float | None]) -> list[float | None]:
    r"""Adjust the p values of one family of tests, so that below 5 % all of them together are wrong in 5 % at most.

    .. math:: \tilde p_{(i)} = \max_{j \le i} \min(1, (m - j + 1)\, p_{(j)}), \quad p_{(1)} \le \dots \le p_{(m)}

    Values that are None, where there was no test, stay None and do not count. It assumes nothing of how the tests
    depend on each other. Written out in numpy: scipy has no such function, and the one of statsmodels
    (`multipletests(..., method="holm")`) would be a dependency for these lines.

    Reference: A Simple Sequentially Rejective Multiple Test Procedure (Holm, 1979).
    """
    given = np.array([p for p in values if p is not None])
    order = given.argsort(kind="stable")
    adjusted = np.empty_like(given)
    adjusted[order] = np.maximum.accumulate(np.minimum(1, given[order] * (len(given) - np.arange(len(given)))))
    rest = iter(adjusted.tolist())
    return [None if p is None else next(rest) for p in values]


def format_p(p: float | None) -> str:
    """Write p with three digits, or a dash for None."""
    return "-" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def holm_note(tests: int) -> str:
    """Say of a table how many tests it has and how their p values are adjusted."""
    if tests == 0:
        return "no test: too few seeds, or the same difference in all"
    return f"p of a paired t-test over seeds, then adjusted by Holm's method for {tests} comparison{'s' * (tests > 1)}"
