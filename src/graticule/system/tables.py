"""Tables of text: the one form in which results and commands print rows."""

from __future__ import annotations

import html
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, of which the first is the header, with all columns but the first right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *body = rows
    lines = []
    for first, *others in (header, ["-" * width for width in widths], *body):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """Return numbers, arrays and the fields of results as plain values; NaN and infinities become None."""
    fields = value._asdict() if hasattr(value, "_asdict") else getattr(value, "__dict__", value)
    if isinstance(fields, Mapping):
        return {str(name): plain(part) for name, part in fields.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_json(report: object) -> str:
    """Return the fields of a report as JSON."""
    return json.dumps(plain(report), indent=1)


class PrintedTable(ABC):
    """A result that prints itself as a line and a table, also in notebooks; its arrays are attributes."""

    @property
    def heading(self) -> str:
        """A line above the table; empty for none."""
        return ""

    @abstractmethod
    def summary(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, of which the first is the header."""

    to_json = report_json

    def __str__(self) -> str:
        return f"{self.heading}\n{format_table(self.summary())}".lstrip("\n")

    def _repr_html_(self) -> str:
        header, *rows = [[html.escape(cell) for cell in row] for row in self.summary()]
        cells = [f"<th>{'</th><th>'.join(header)}</th>", *(f"<td>{'</td><td>'.join(row)}</td>" for row in rows)]
        return f"<p>{html.escape(self.heading)}</p><table><tr>{'</tr><tr>'.join(cells)}</tr></table>"
