"""Write the tables of docs/conformance.md: `python -m evidence.conformance_page transformers.json`.

The file is the output of `graticule check --sweep transformers --json`.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from graticule.lab.studies.tables import between, markdown
from graticule.system.files import write_text

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"


def failed(one: dict[str, Any]) -> list[str]:
    """Return the names of the laws that a class failed."""
    return [finding["check"] for finding in one["findings"] if finding["outcome"] == "failed"]


def table(classes: list[dict[str, Any]]) -> str:
    """Return a row for each class and a column for each grid of its table or size of its images."""
    sizes = list(dict.fromkeys(one["at"] for one in classes))
    rows: dict[str, dict[str, str]] = {}
    for one in classes:
        said = ", ".join(failed(one)) if failed(one) else "passed" if one["findings"] else "-"
        rows.setdefault(one["name"], {})[one["at"]] = said
    shown = [[f"`{name}`", *(cells.get(size, "") for size in sizes)] for name, cells in rows.items()]
    shown = [row for row in shown if set(row[1:]) - {"-", ""}]
    left = [name for name, cells in rows.items() if not set(cells.values()) - {"-"}]
    text = markdown([["class", *sizes], *shown])
    return f"{text}\n\nNot checked, as they have another interface or no such table: {', '.join(left)}."


def reproducers(classes: list[dict[str, Any]]) -> str:
    """Return the reproducer of each class that fails, once."""
    lines: dict[str, str] = {}
    for one in classes:
        if one["reproducer"]:
            lines.setdefault(one["name"], one["reproducer"])
    return "\n\n".join(f"`{name}`:\n\n    {text.replace(chr(10), chr(10) + '    ')}" for name, text in lines.items())


def main(file: str) -> None:
    """Write the page."""
    transformers = json.loads(Path(file).read_text(encoding="utf-8"))["classes"]
    text = PAGE.read_text(encoding="utf-8")
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
    text = between(text, "versions", f"Measured on {date.today()} with {versions}.")
    text = between(text, "transformers", table(transformers))
    text = between(text, "reproducers", reproducers(transformers))
    write_text(PAGE, text)
    print("wrote", PAGE)


if __name__ == "__main__":
    main(sys.argv[1])
