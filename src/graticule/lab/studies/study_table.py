"""Table of a study: one row per score of a run, with the recipe, versions, machine and date of the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from graticule.lab.studies.tables import csv_of_records, read_records
from graticule.system.files import read_json, write_text


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
    return read_records(path, Row)


def write_table(path: Path, rows: Iterable[Row]) -> Path:
    """Write rows, completely or not at all; returns `path`."""
    return write_text(path, csv_of_records(Row, rows))
