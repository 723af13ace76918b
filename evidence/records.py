"""Records of the pages, dataclasses as rows of a CSV file, and the markers between which tables are written."""

from __future__ import annotations

import dataclasses
import re
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


def between(text: str, name: str, new: str) -> str:
    """Return a page with `new` between the markers of `name`, NAME: begin and NAME: end in comments of HTML."""
    marks = f"<!-- {re.escape(name)}: "
    pattern = re.compile(rf"({marks}begin[^>]*-->\n).*?({marks}end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"`text` must have the markers <!-- {name}: begin --> and <!-- {name}: end -->.")
    return pattern.sub(lambda match: f"{match[1]}\n{new}\n\n{match[2]}", text)
