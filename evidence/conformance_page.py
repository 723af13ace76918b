"""Write the tables of docs/conformance.md: `python -m evidence.conformance_page transformers.json timm.json`.

The files are the outputs of `graticule check --sweep LIBRARY --json`; the tables of one that is left out stay.
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
from graticule.testing.models import STOPPED

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


def table_of_models(models: list[dict[str, Any]]) -> str:
    """Return a row for each model that was checked, and the reasons of the others."""
    shown, left = [], []
    for one in models:
        counts = [sum(each["outcome"] == kind for each in one["findings"]) for kind in ("passed", "not applicable")]
        stopped = [each["check"] for each in one["findings"] if each["detail"].startswith(STOPPED)]
        if one["findings"]:
            counted = [str(counts[0]), ", ".join(failed(one)) or "-", str(counts[1] - len(stopped))]
            shown.append([f"`{one['name']}`", one["at"] or "its defaults", *counted, ", ".join(stopped) or "-"])
        else:
            left.append([f"`{one['name']}`", one["reason"].removeprefix("cannot be checked: ").replace("|", "/")[:160]])
    text = markdown([["model", "built with", "passed", "failed", "not applicable", "stopped"], *shown])
    none = [name for name, why in left if why == "it has no attention"]
    others = markdown([["not checked", "why"], *(row for row in left if row[0] not in none)])
    return f"{text}\n\n{others}\n\nWithout attention: {', '.join(none)}."


def main(*files: str) -> None:
    """Write the page."""
    text = PAGE.read_text(encoding="utf-8")
    for file in files:
        swept = json.loads(Path(file).read_text(encoding="utf-8"))
        library, classes = swept["sweep"], swept["classes"]
        said = ", ".join(f"{name} {version(name)}" for name in (library, "torch"))
        text = between(text, f"versions of {library}", f"Measured on {date.today()} with {said}.")
        text = between(text, library, table(classes) if library == "transformers" else table_of_models(classes))
        text = between(text, f"reproducers of {library}", reproducers(classes) or "No model failed.")
    write_text(PAGE, text)
    print("wrote", PAGE)


if __name__ == "__main__":
    main(*sys.argv[1:])
