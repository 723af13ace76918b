"""Records of the pages: dataclasses as rows of a CSV file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from graticule.registry.fields import check_value

Record = TypeVar("Record")


def csv_of_records(kind: type[Any], records: Iterable[Any]) -> str:
    """Return instances of a dataclass as CSV, one line each."""
    names = [field.name for field in dataclasses.fields(kind)]
    return pd.DataFrame(map(dataclasses.astuple, records), columns=names).to_csv(
        index=False, lineterminator="\n", na_rep="nan"
    )


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Read a CSV file with a column per field of the dataclass `kind`; an absent file has no records."""
    if not path.is_file():
        return []
    rows, names = pd.read_csv(path, dtype=str, keep_default_na=False), [*kind.__annotations__]
    if [*rows] != names:
        raise ValueError(f"{path} must have the columns {', '.join(names)}, got {', '.join(rows)}; restore it.")
    return [
        check_value(kind, values, f"{path} is damaged: line {number}")
        for number, values in enumerate(rows.to_dict("records"), 2)
    ]
