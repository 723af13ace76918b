"""Tables of choices under several conditions, as sizes or lengths: what seeds make of them, and of the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TypeVar

from graticule.studies.compare import format_p, paired_p

Condition = TypeVar("Condition")
Rows = list[tuple[str, ...]]


def spread_rows(
    scores: Mapping[str, Mapping[Condition, Sequence[float]]],
    name: Callable[[Condition], str],
    decimals: int,
    mark: Callable[[str, Condition], str] = lambda choice, condition: "",
) -> Rows:
    """Return a header, then a row a choice: mean and standard deviation over seeds under each condition.

    Args:
        scores: choice -> condition -> values over seeds.
        name: what stands above a condition.
        decimals: of the values.
        mark: what stands behind the value of a choice under a condition.
    """
    rows: Rows = [("choice", *[name(condition) for condition in next(iter(scores.values()))])]
    for choice, by in scores.items():
        cells = []
        for condition, values in by.items():
            deviation = f" ± {stdev(values):.{decimals}f}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):.{decimals}f}{deviation}{mark(choice, condition)}")
        rows.append((choice, *cells))
    return rows


def difference_rows(
    scores: Mapping[str, Mapping[Condition, Sequence[float]]], name: Callable[[Condition], str], decimals: int
) -> Rows:
    """Return a header, then a row a choice: mean difference against the first, and p of a paired t-test."""
    first = next(iter(scores.values()))
    rows: Rows = [("against the first", *[name(condition) for condition in first])]
    for choice, by in list(scores.items())[1:]:
        cells = []
        for condition, reference in first.items():
            p = format_p(paired_p(by[condition], reference))
            cells.append(f"{fmean(by[condition]) - fmean(reference):+.{decimals}f} (p {p})")
        rows.append((choice, *cells))
    return rows


def markdown(*tables: Sequence[Sequence[str]]) -> str:
    """Write tables in Markdown, an empty line between them."""
    return "\n\n".join(
        "\n".join("| " + " | ".join(row) + " |" for row in [table[0], ["---"] * len(table[0]), *table[1:]])
        for table in tables
    )
