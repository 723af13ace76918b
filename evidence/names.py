"""What can be chosen, written from the registries and by building models.

`python -m evidence.names` writes docs/matrix.md, the combinations of families, encodings and joinings.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from graticule.lab.studies.matrix import combinations, initials, ordered, rows
from graticule.lab.studies.tables import markdown
from graticule.position.position import ENCODINGS


def table(found: dict[tuple[str, str, str], str]) -> str:
    """Write `combinations()` as Markdown: one row per encoding, one column per family, the joinings in each cell."""
    short, named = initials(), dict.fromkeys(case[0] for case in found)
    legend = ", ".join(f"{letters} = {name}" for name, letters in short.items())
    lines = [
        "# Compatibility",
        "",
        f"Every family with every encoding alone and every joining: {legend}.",
        "A dash marks what is refused, with a reason. Several encodings together (`learnable+relative_bias+peg`) are",
        "allowed where each is, with at most one absolute, one rotary and one mixing encoding. Written by",
        "`python -m evidence.names`; `tests/lab/studies/test_matrix.py` compares.",
        "",
        markdown([["encoding", *named], *([f"`{encoding}`", *cells] for encoding, *cells in rows(found))]),
    ]
    return "\n".join(lines) + "\n"


def options_table() -> str:
    """Return the table of signatures: name and options, first line of the docstring, reference."""
    lines = [["encoding", "what it does", "reference"]]
    for name in ordered():
        kind = ENCODINGS[name]
        options = ", ".join(f"{option}={each.default!r}" for option, each in kind.option_types().items())
        shown = f"`{name}({options})`" if options else f"`{name}`"
        lines.append([shown, summary(kind), reference(kind)])
    return markdown(lines) + "\n"


def summary(kind: type) -> str:
    """Return the first line of the docstring of a class."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def reference(kind: type) -> str:
    """Return the first reference in the docstring of a class or of its base classes."""
    for each in kind.__mro__:
        text = " ".join((each.__doc__ or "").split())
        if found := re.search(r"Reference: (.*?\(.*?\d{4}\))", text):
            return found[1]
    return ""


def write_tables(root: Path) -> None:
    """Write the tables into the checkout of the repository at `root`."""
    (root / "docs" / "matrix.md").write_text(table(combinations()), encoding="utf-8")


def replace_table(path: Path, heading: str, written: str) -> None:
    """Replace the first table after a line of a page."""
    before, found, after = path.read_text(encoding="utf-8").partition(f"{heading}\n")
    if not found:
        raise ValueError(f"`path` must be a page with the line {heading!r}, got {str(path)!r}.")
    path.write_text(
        before + found + re.sub(r"(^\|.*\n)+", lambda _: written, after, count=1, flags=re.M), encoding="utf-8"
    )


if __name__ == "__main__":
    write_tables(Path(__file__).parents[1])
