"""Recorded measurements: a CSV file per table in docs/data/measured, from which tables are written.

`python -m evidence.measured` writes the tables between their markers in the pages of docs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graticule.lab.studies.tables import Rows, between, markdown, marked, read_records
from graticule.system.files import write_text


@dataclass(frozen=True)
class Cell:
    """A cell of a table, with its origin; numbers as they were printed.

    keys: the headers of the columns that name a row, separated by ' | '.
    row, column: the names of its row and column; several keys of a row are separated in the same way.
    value: a number, or a word; empty if nothing was measured.
    unit: of the value, or a mark after it.
    low, high: quartiles, or the smallest and the largest value.
    deviation: standard deviation over seeds.
    p, adjusted: of a paired t-test over seeds, and adjusted by Holm's method.
    command, date, machine: the command that printed it, the date and the machine.
    """

    keys: str
    row: str
    column: str
    value: str
    unit: str
    low: str
    high: str
    deviation: str
    p: str
    adjusted: str
    command: str
    date: str
    machine: str

    def __str__(self) -> str:
        """Return its text in a table."""
        text = grouped(self.value)
        if self.low:
            text += f" ({grouped(self.low)} to {grouped(self.high)})"
        if self.deviation:
            text += f" ± {self.deviation}"
        if self.p:
            text += f" (p {self.p}; {self.adjusted})"
        return f"{text} {self.unit}".strip()


def grouped(number: str) -> str:
    """Separate the thousands of a number; other text is returned as it is.

    >>> [grouped(text) for text in ("12544.0", "+1.50", "999", "six")]
    ['12,544.0', '+1.50', '999', 'six']
    """
    found = re.fullmatch(r"([+-]?)(\d{4,})(\.\d+)?", number)
    return f"{found[1]}{int(found[2]):,}{found[3] or ''}" if found else number


def table_of(cells: Sequence[Cell]) -> Rows:
    """Return a header and the rows of a table, in the order of the cells."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(cell.row, {})[cell.column] = str(cell)
    table: Rows = [(*cells[0].keys.split(" | "), *columns)]
    return [*table, *((*row.split(" | "), *(by.get(column, "") for column in columns)) for row, by in rows.items())]


def page_text(text: str, data: Path) -> str:
    """Return the text of a page with the tables between its markers rebuilt from the files in `data`."""
    for name in marked(text, "measured"):
        text = between(text, f"measured {name}", markdown(table_of(read_records(data / f"{name}.csv", Cell))))
    return text


def write_pages(docs: Path) -> list[Path]:
    """Rebuild the tables of all pages of `docs`; returns the paths.

    Raises:
        ValueError: if a file of `docs`/data/measured is in no page.
    """
    data, written, shown = docs / "data" / "measured", [], set()
    for page in sorted(docs.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        if names := marked(before, "measured"):
            shown |= set(names)
            written.append(write_text(page, page_text(before, data)))
    if lost := sorted({path.stem for path in data.glob("*.csv")} - shown):
        raise ValueError(f"`docs` must have a page with the markers of every table, got none for {', '.join(lost)}.")
    return written


if __name__ == "__main__":
    print("wrote", *write_pages(Path("docs")))
