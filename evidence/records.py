"""Records of the pages: dataclasses as rows of a CSV file."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graticule.registry.fields import check_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")


def csv_of_records(kind: type[Any], records: Iterable[Any]) -> str:
    """Return instances of a dataclass as CSV, one line each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(kind))
    writer.writerows(map(dataclasses.astuple, records))
    return text.getvalue()


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Read a CSV file with a column per field of the dataclass `kind`; an absent file has no records."""
    names = [field.name for field in dataclasses.fields(kind)]
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    if header != names:
        wrong = f"must have the columns {', '.join(names)}, got {', '.join(header) or 'none'}"
        raise ValueError(f"{path} {wrong}; restore it, or move it away.")
    return [
        check_value(kind, dict(zip(names, cells, strict=True)), f"{path} is damaged: line {number}")
        for number, cells in enumerate(rows, 2)
    ]
