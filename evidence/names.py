"""What can be chosen, written from the registries and by building models.

`python -m evidence.names` writes the combinations of families, encodings and joinings into docs/backbones.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from graticule.lab.studies.matrix import combinations, ordered, rows
from graticule.lab.studies.tables import markdown
from graticule.position.position import ENCODINGS


def table(cases: dict[tuple[str, str, str], str]) -> str:
    """Write `combinations()` as Markdown: encodings in rows, families in columns, the joinings in each cell.

    Encodings with the same cells share a row, and families a column.
    """
    names, *columns = zip(*rows(cases), strict=True)
    families = group(zip(columns, dict.fromkeys(case[0] for case in cases), strict=True))
    encodings = group(zip(zip(*families, strict=True), names, strict=True))
    lines = [[", ".join(f"`{name}`" for name in named), *cells] for cells, named in encodings.items()]
    return markdown([["encoding", *("; ".join(column) for column in families.values())], *lines]) + "\n"


def group(pairs: Iterable[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], list[str]]:
    """Return key -> the values that have it."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def options_table() -> str:
    """Return the table of signatures: name and options, first line of the docstring, reference."""
    lines = [["encoding", "what it does", "reference"]]
    for name in ordered():
        kind = ENCODINGS[name]
        options = ", ".join(f"{option}={parameter.default!r}" for option, parameter in kind.option_types().items())
        text = f"`{name}({options})`" if options else f"`{name}`"
        lines.append([text, summary(kind), reference(kind)])
    return markdown(lines) + "\n"


def summary(kind: type) -> str:
    """Return the first line of the docstring of a class."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def reference(kind: type) -> str:
    """Return the first reference in the docstring of a class or of its base classes."""
    for base in kind.__mro__:
        text = " ".join((base.__doc__ or "").split())
        if match := re.search(r"Reference: (.*?\(.*?\d{4}\))", text):
            return match[1]
    return ""


def replace_table(path: Path, heading: str, written: str) -> None:
    """Replace the first table after a line of a page."""
    before, heading_line, after = path.read_text(encoding="utf-8").partition(f"{heading}\n")
    if not heading_line:
        raise ValueError(f"`path` must be a page with the line {heading!r}, got {str(path)!r}.")
    path.write_text(
        before + heading_line + re.sub(r"(^\|.*\n)+", lambda _: written, after, count=1, flags=re.M), encoding="utf-8"
    )


if __name__ == "__main__":
    replace_table(Path(__file__).parents[1] / "docs" / "backbones.md", "## Compatibility", table(combinations()))
