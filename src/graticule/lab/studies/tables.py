"""Tables of choices: spread over seeds, tests against the first, and their forms in pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TypeVar

from graticule.lab.studies.significance import format_p, holm, holm_note, paired_p

Condition = TypeVar("Condition")
Rows = list[tuple[str, ...]]


def spread_rows(
    scores: Mapping[str, Mapping[Condition, Sequence[float]]],
    name: Callable[[Condition], str],
    decimals: int,
    mark: Callable[[str, Condition], str] = lambda choice, condition: "",
) -> Rows:
    """Return a header, then one row per choice: mean and standard deviation over seeds under each condition.

    Args:
        scores: choice -> condition -> values over seeds.
        name: header of a condition.
        decimals: of the values.
        mark: suffix of the value of a choice under a condition.
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
    """Return a header, then one row per choice: mean difference against the first and p, then p adjusted.

    p is that of a paired t-test over seeds, and then adjusted by Holm's method for all tests of the table.
    """
    first, *others = scores.values()
    tests = _tests(scores)
    adjusted = iter(holm(tests))
    plain = iter(tests)
    rows: Rows = [("against the first", *[name(condition) for condition in first])]
    for choice, by in zip(list(scores)[1:], others, strict=True):
        cells = []
        for condition, reference in first.items():
            p, together = format_p(next(plain)), format_p(next(adjusted))
            cells.append(f"{fmean(by[condition]) - fmean(reference):+.{decimals}f} (p {p}; {together})")
        rows.append((choice, *cells))
    return rows


def difference_note(scores: Mapping[str, Mapping[Condition, Sequence[float]]]) -> str:
    """Describe the number of tests in `difference_rows` and the adjustment of their p values."""
    return holm_note(sum(p is not None for p in _tests(scores)))


def _tests(scores: Mapping[str, Mapping[Condition, Sequence[float]]]) -> list[float | None]:
    """Return p of every choice but the first under every condition, row by row."""
    first, *others = scores.values()
    return [paired_p(by[condition], reference) for by in others for condition, reference in first.items()]


def markdown(*tables: Sequence[Sequence[str]]) -> str:
    """Write tables in Markdown, with an empty line between them."""
    return "\n\n".join(
        "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in [table[0], ["---"] * len(table[0]), *table[1:]])
        for table in tables
    )


def between(text: str, name: str, new: str) -> str:
    """Return a page with `new` between the markers of `name`, NAME: begin and NAME: end in comments of HTML.

    Raises:
        ValueError: if `text` has no such markers.
    """
    marks = f"<!-- {re.escape(name)}: "
    pattern = re.compile(rf"({marks}begin[^>]*-->\n).*?({marks}end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"`text` must have the markers <!-- {name}: begin --> and <!-- {name}: end -->.")
    return pattern.sub(lambda found: f"{found[1]}\n{new}\n\n{found[2]}", text)


def marked(text: str, kind: str) -> list[str]:
    """List the names of a kind that have markers in a page, such as 'precision' of kind 'measured'."""
    return re.findall(rf"<!-- {kind} (\S+): begin", text)


def _cell(text: str) -> str:
    """Escape the character that would end a cell."""
    return text.replace("|", "\\|")
