"""Tables as text: in Markdown between the markers of a page, and in CSV files of records."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graticule.registry.fields import check_value
from graticule.system.files import read_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Rows = list[tuple[str, ...]]
Record = TypeVar("Record", bound="DataclassInstance")

_LARGEST = 64 << 20  # bytes of a CSV file


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


def csv_of_records(kind: type[Any], records: Iterable[Any]) -> str:
    """Return instances of a dataclass as CSV, one line each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(kind))
    writer.writerows(map(dataclasses.astuple, records))
    return text.getvalue()


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Read a CSV file with a column per field of the dataclass `kind`; an absent file has no records."""
    try:
        lines = read_bytes(path, _LARGEST).decode("utf-8")
        header, *rows = csv.reader(io.StringIO(lines, newline=""), strict=True) if lines else [[]]
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: it must be a table ({error}).") from None
    names = [field.name for field in dataclasses.fields(kind)]
    if header != names:
        wrong = f"must have the columns {', '.join(names)}, got {', '.join(header) or 'none'}"
        raise ValueError(f"{path} {wrong}; restore it, or move it away.")
    records = []
    for number, cells in enumerate(rows, 2):
        if len(cells) != len(names):
            raise ValueError(f"{path} is damaged: line {number} must have {len(names)} cells, got {len(cells)}.")
        records.append(check_value(kind, dict(zip(names, cells, strict=True)), f"{path} is damaged: line {number}"))
    return records
