"""What can be chosen, written from the registries and by building models.

`python -m evidence.names` writes the combinations of families, encodings and joinings into docs/backbones.md, and the
tables of docs/encodings.md with the small images in them.
"""

from __future__ import annotations

import csv
import inspect
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from matplotlib.figure import Figure

from graticule.backbones.registry import create_model
from graticule.lab.studies.matrix import GROUPS, combinations, group_of, order_encodings, rows
from graticule.position.position import ENCODINGS
from graticule.system.tables import markdown

DOCS = Path(__file__).parents[1] / "docs"
with Path(__file__).with_name("uses.csv").open(encoding="utf-8") as _file:
    #: Encoding -> when to take it; others are described by the first line of their class.
    USES = {cells["encoding"]: cells["use"] for cells in csv.DictReader(_file)}


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
    for name in order_encodings():
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


def gallery_table(kind: str, docs: Path = DOCS) -> str:
    """Return the table of a group of encodings: image, when to take it, cost, other sizes."""
    lines = [["map", "encoding", "take it if", "parameters", "other sizes"]]
    for name in order_encodings():
        if group_of(name) == kind:
            drawn = (docs / "figures" / "encodings" / f"{name}.png").exists()
            image = f"![center-token map: {name}](figures/encodings/{name}.png)" if drawn else ""
            use = USES.get(name) or summary(ENCODINGS[name])
            file = Path(inspect.getfile(ENCODINGS[name])).relative_to(DOCS.parent).as_posix()
            lines.append([image, f"[`{name}`](../{file})", use, f"{parameters(name):,}", other_sizes(name)])
    return markdown(lines) + "\n"


@cache
def parameters(name: str) -> int:
    """Return the learned parameters of an encoding in DeiT-Ti, or in gMLP-S if it mixes tokens."""
    backbone = "gmlp_s16_224" if group_of(name) == "token mixing" else "deit_tiny_patch16_224"
    with torch.device("meta" if name != "liere" else "cpu"):
        position = create_model(backbone, encoding=name).position
        return sum(parameter.numel() for parameter in position.parameters() if parameter.requires_grad)


def other_sizes(name: str) -> str:
    """Return how an encoding gets its position for another grid than in training."""
    kind = ENCODINGS[name]
    if "resampler" in kind.option_types() or getattr(kind, "resampled", False):
        return "resampled"
    return "any" if group_of(name) == "other" else "computed"


def thumbnail(name: str) -> Figure | None:
    """Draw the map of one head at the center of 7 x 7 patches; None for an encoding without maps."""
    sys.path.append(str(DOCS / "_ext"))
    import gallery
    import says

    position, _ = says.build(name)
    maps = says.says_at_center(name, gallery.GRIDS[0], position)
    if not maps:
        return None
    (drawn, *_) = says.common_scale(maps)
    figure = Figure(figsize=(0.64, 0.64))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.imshow(drawn.values, cmap=drawn.colors, vmin=drawn.lowest, vmax=drawn.highest)
    ax.plot(3, 3, "o", markersize=3, mfc="none", mec="white", mew=2)
    ax.plot(3, 3, "o", markersize=3, mfc="none", mec="black", mew=0.8)
    ax.set_axis_off()
    return figure


def main() -> None:
    """Write the images and the tables."""
    replace_table(DOCS / "backbones.md", "## Compatibility", table(combinations()))
    for name in order_encodings():
        if (figure := thumbnail(name)) is not None:
            figure.savefig(DOCS / "figures" / "encodings" / f"{name}.png", dpi=100, metadata={"Software": None})
    for kind, _, _ in GROUPS:
        replace_table(DOCS / "encodings.md", f"<!-- gallery {kind} -->", gallery_table(kind))


if __name__ == "__main__":
    main()
