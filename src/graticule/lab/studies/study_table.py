"""Table of a study: one row per score of a run, with the recipe, versions, machine and date of the run."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from graticule.system.files import read_bytes, read_json, write_text

_LARGEST = 64 << 20  # bytes of a table


@dataclass(frozen=True)
class Row:
    """A score of a run.

    recipe: the hash of its recipe, `recipe_hash`.
    date: of the end of the training.
    seconds: wall time of the training.
    """

    choice: str
    variant: str
    seed: int
    metric: str
    at: str
    value: float
    parameters: int
    seconds: float
    recipe: str
    date: str
    graticule: str
    torch: str
    timm: str
    machine: str
    threads: int

    @property
    def cell(self) -> tuple[str, str, int]:
        """Choice, variant and seed, which identify a run."""
        return self.choice, self.variant, self.seed


def recipe_hash(recipe: Any) -> str:
    """Return the first 12 digits of the SHA-256 of a recipe: of all fields that differ from their defaults.

    The seed is left out, and so are fields that only describe the machine. A field that a later version adds changes no
    hash as long as it has its default. The plugins that define classes of the recipe are included.
    """
    from graticule.lab.training.recipe import MACHINE
    from graticule.lab.training.task import recipe_plugins

    written = recipe.to_dict()
    kept: dict[str, Any] = {"task": recipe.task}
    if plugins := recipe_plugins(recipe):
        kept["plugins"] = plugins
    for field in dataclasses.fields(recipe):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name not in (*MACHINE, "seed") and getattr(recipe, field.name) != default:
            kept[field.name] = written[field.name]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def origin(run: Any) -> dict[str, Any]:
    """Return the columns of a finished run that describe its origin: recipe, date, versions, machine."""
    described = read_json(run.recipe_file)
    versions, machine = described.get("versions", {}), described.get("machine", {})
    return {
        "recipe": recipe_hash(run.recipe()),
        "date": datetime.fromtimestamp(run.result_file.stat().st_mtime).date().isoformat(),
        **{name: str(versions.get(name, "")) for name in ("graticule", "torch", "timm")},
        "machine": str(machine.get("processor", "")),
        "threads": int(machine.get("threads", 0)),
    }


def read_table(path: Path) -> list[Row]:
    """Read the rows of a table; an absent file has no rows.

    Raises:
        ValueError: if the file is no such table.
    """
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in dataclasses.fields(Row)}
    try:
        reader = csv.DictReader(io.StringIO(read_bytes(path, _LARGEST).decode("utf-8"), newline=""), strict=True)
        if tuple(reader.fieldnames or ()) != tuple(kinds):
            raise ValueError(f"it must have the columns {', '.join(kinds)}")
        return [Row(**{name: _READ[str(kinds[name])](value) for name, value in row.items()}) for row in reader]
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise ValueError(f"{path} must be the table of a study: {error}.") from None


def write_table(path: Path, rows: Iterable[Row]) -> Path:
    """Write rows, completely or not at all; returns `path`."""
    return write_text(path, csv_text(map(dataclasses.asdict, rows), [field.name for field in dataclasses.fields(Row)]))


def csv_text(records: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Return records as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


#: Type of a column -> function that reads a cell.
_READ: Mapping[str, Any] = {"str": str, "int": int, "float": float}
