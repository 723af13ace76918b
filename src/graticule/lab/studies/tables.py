"""Tables as text: in Markdown between the markers of a page, and in CSV files of records."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from graticule.registry.fields import check_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Rows = list[tuple[str, ...]]
Record = TypeVar("Record", bound="DataclassInstance")


def markdown(*tables: Sequence[Sequence[str]]) -> str:
    """Write tables in Markdown, with an empty line between them."""
    lines = [[table[0], ["---"] * len(table[0]), *table[1:]] for table in tables]
    cells = [[[text.replace("|", "\\|") for text in row] for row in rows] for rows in lines]
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in rows) for rows in cells)


def between(text: str, name: str, new: str) -> str:
    """Return a page with `new` between the markers of `name`, NAME: begin and NAME: end in comments of HTML."""
    marks = f"<!-- {re.escape(name)}: "
    pattern = re.compile(rf"({marks}begin[^>]*-->\n).*?({marks}end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"`text` must have the markers <!-- {name}: begin --> and <!-- {name}: end -->.")
    return pattern.sub(lambda match: f"{match[1]}\n{new}\n\n{match[2]}", text)


def size_text(size: tuple[int, int]) -> str:
    """Write a size, (height, width): '40' for a square, otherwise '32x36'."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Read a CSV file with a column per field of the dataclass `kind`; an absent file has no records."""
    if not path.is_file():
        return []
    names = [field.name for field in dataclasses.fields(kind)]
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        if rows.fieldnames != names:
            wrong = f"must have the columns {', '.join(names)}, got {', '.join(rows.fieldnames or ()) or 'none'}"
            raise ValueError(f"{path} {wrong}; restore it, or move it away.")
        return [check_value(kind, row, f"{path} is damaged: line {rows.line_num}") for row in rows]
