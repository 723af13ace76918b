"""Tables of text: the one form in which results and commands print rows."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

#: The size of a printed result.
LINES, COLUMNS = 20, 110
Rows = list[tuple[str, ...]]
#: The letters of a name that are kept as long as numbers fit beside it.
_NAME = 16


def format_table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows, of which the first is the header, with all columns but the first `left` right-aligned."""
    rows = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *body = rows
    lines = []
    for row in (header, ["-" * width for width in widths], *body):
        cells = [f"{cell:{'<' if at < left else '>'}{widths[at]}}" for at, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """Return numbers, arrays and the fields of results as plain values; NaN and infinities become None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    fields = value._asdict() if hasattr(value, "_asdict") else getattr(value, "__dict__", value)
    if dataclasses.is_dataclass(value):  # its `__dict__` also has the properties that are cached
        fields = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
    if isinstance(fields, Mapping):
        return {str(name): plain(part) for name, part in fields.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_json(report: object) -> str:
    """Return a report, such as a dataclass with tensors, as JSON; numbers that are not finite become null."""
    return json.dumps(plain(report), indent=1, default=str)


def _narrow(rows: list[tuple[str, ...]], left: int) -> list[tuple[str, ...]]:
    """Cut names in the first `left` columns, then the widest cells, until a line has at most `COLUMNS` letters."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > COLUMNS:
        names = [at for at in range(left) if widths[at] > _NAME]
        widths[max(names or range(len(widths)), key=widths.__getitem__)] -= 1
    cells = (zip(row, widths, strict=True) for row in rows)
    return [tuple(cell if len(cell) <= most else f"{cell[: most - 3]}..." for cell, most in row) for row in cells]


class PrintedTable(ABC):
    """A result that prints itself as a table of at most 20 lines and 110 columns, also in notebooks.

    Its arrays are attributes, and `summary` has all rows. A dataclass needs `repr=False`.

    left: the number of columns that are aligned on the left.
    """

    left: ClassVar[int] = 1

    @property
    def heading(self) -> str:
        """Lines above the table; empty for none."""
        return ""

    @property
    def footer(self) -> Sequence[str]:
        """Lines below the table."""
        return ()

    @abstractmethod
    def summary(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, of which the first is the header."""

    to_json = report_json

    def _parts(self) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
        """Return heading, rows and footer, without the rows in the middle that are too many."""
        above, below = ([part for line in lines for part in textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]
                        for lines in (self.heading.splitlines(), self.footer))  # fmt: skip
        header, *rows = self.summary()
        below = [*below[: LINES // 2 - 1], "..."] if len(below) > LINES // 2 else below
        if (more := len(rows) - (LINES - 2 - len(above) - len(below))) > 0:
            start = (len(rows) - more) // 2
            rows[start : start + more + 1] = [(f"... {more + 1}", *[""] * (len(header) - 1))]
        return above, [header, *rows], below

    def __str__(self) -> str:
        above, rows, below = self._parts()
        return "\n".join([*above, format_table(_narrow(rows, self.left), self.left), *below])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        above, rows, below = self._parts()
        header, *cells = [[html.escape(cell) for cell in row] for row in rows]
        parts = [f"<th>{'</th><th>'.join(header)}</th>", *(f"<td>{'</td><td>'.join(row)}</td>" for row in cells)]
        texts = [f"<p>{'<br>'.join(map(html.escape, lines))}</p>" * bool(lines) for lines in (above, below)]
        return f"{texts[0]}<table><tr>{'</tr><tr>'.join(parts)}</tr></table>{texts[1]}"


def markdown(*tables: Sequence[Sequence[str]]) -> str:
    """Write tables in Markdown, with an empty line between them."""
    lines = [[table[0], ["---"] * len(table[0]), *table[1:]] for table in tables]
    cells = [[[text.replace("|", "\\|") for text in row] for row in rows] for rows in lines]
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in rows) for rows in cells)
