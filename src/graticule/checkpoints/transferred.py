"""Report of a transfer: the source or use of each tensor of a model and of a checkpoint, as rows and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Transferred(NamedTuple):
    """Status and source of a tensor of the model, or of several tensors that share them.

    name: its name in the model; for unused tensors, in the checkpoint. Neighbors are combined as `blocks.0-11`.
    status: 'loaded' (same shape), 'resized' (resampled for another grid, window or patch), 'adapted' (to another
        number of channels), 'copied' (from the single table of all layers), 'new' (initialized by the model)
        or 'unused' (only in the checkpoint).
    detail: sizes before and after, or the reason for which it was not loaded.
    values: number of values.
    source: name in the checkpoint; '' if there is none, or several.
    """

    name: str
    status: str
    detail: str
    values: int
    source: str = ""


@dataclass(frozen=True)
class Transfer:
    """Report of the source of every tensor of a model, and of the use of every tensor of the checkpoint.

    Args:
        rows: every parameter and persistent buffer of the model once, in its order, then the unused tensors.
    """

    rows: tuple[Transferred, ...]

    def table(self) -> list[Transferred]:
        """Return the rows, combined by module where status and detail are equal, with unused tensors last.

        Blocks whose rows are all equal are combined, such as `blocks.0-11`.
        """
        taken = [row for row in self.rows if row.status != "unused"]
        # used tensors are grouped with unused ones, so that a partly used module is not shown as unused
        used = [Transferred(source, "used", "", 0) for source in dict.fromkeys(row.source for row in taken) if source]
        left = _grouped([*used, *(row for row in self.rows if row.status == "unused")])
        return _grouped(taken) + [row for row in left if row.status != "used"]

    @property
    def totals(self) -> dict[str, int]:
        """Return the number of values per status, in the order of the rows."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[row.status] += row.values
        return dict(totals)

    def __str__(self) -> str:
        """Return the table as text, one line per group, followed by the totals."""
        lines = [(row.name, row.status, f"{row.values:,}", row.detail) for row in self.table()]
        name, status, values = (max((len(line[i]) for line in lines), default=0) for i in range(3))
        shown = [f"{a:<{name}}  {b:<{status}}  {c:>{values}}  {d}".rstrip() for a, b, c, d in lines]
        return "\n".join([*shown, "values: " + ", ".join(f"{n:,} {status}" for status, n in self.totals.items())])


def _grouped(rows: Iterable[Transferred]) -> list[Transferred]:
    return _lines("", [(tuple(row.name.split(".")), row) for row in rows])


#: Rows, each with the remaining parts of its name.
_Rows = list[tuple[tuple[str, ...], Transferred]]


def _lines(prefix: str, rows: _Rows) -> list[Transferred]:
    """Combine rows from the top down; each is given with the parts of its name below `prefix`."""
    children: dict[str, _Rows] = {}
    for parts, row in rows:  # a name may be the start of another
        children.setdefault(parts[0] if parts else "", []).append((parts[1:], row))
    lines = []
    for labels in _alike(children):
        held = [row for label in labels for row in children[label]]
        name = (prefix + _span(labels)).rstrip(".")
        kinds = {(row.status, row.detail) for _, row in held}
        if len(kinds) > 1:
            lines += _lines(f"{name}.", held)
            continue
        inner = list(dict.fromkeys(rest[0] if rest else "" for rest, _ in held))
        if len(inner) > 1 and all(_follows(a, b) for a, b in pairwise(inner)):
            name += f".{_span(inner)}"
        sources = {row.source for _, row in held}
        source = sources.pop() if len(sources) == 1 else ""
        lines.append(Transferred(name, *kinds.pop(), sum(row.values for _, row in held), source))
    return lines


def _alike(children: Mapping[str, _Rows]) -> list[list[str]]:
    """Group consecutively numbered neighbors whose parts all have the same status and detail."""
    went = {label: {(rest, row.status, row.detail) for rest, row in held} for label, held in children.items()}
    groups: list[list[str]] = []
    for label in children:
        before = groups[-1][-1] if groups else ""
        if _follows(before, label) and went[before] == went[label]:
            groups[-1].append(label)
        else:
            groups.append([label])
    return groups


def _follows(before: str, label: str) -> bool:
    return before.isdecimal() and label.isdecimal() and int(label) == int(before) + 1


def _span(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]}-{labels[-1]}"
