"""Write the gallery: one page and one figure per registered encoding."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import says
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.utils.flop_counter import FlopCounterMode

import graticule
from evidence.names import reference, summary
from graticule.encodings.forms.mixing import MixingEncoding
from graticule.lab.studies.matrix import initials
from graticule.position.grid import Grid
from graticule.position.position import ENCODINGS

#: The grids of the figures.
GRIDS = (Grid(7, 7), Grid(7, 11))
#: The model for the cost of an encoding: whether the encoding mixes tokens -> name.
MODELS = {False: "deit_tiny_patch16_224", True: "gmlp_s16_224"}


def pages(root: Path) -> dict[str, str]:
    """Write the figures; returns path -> text of each page."""
    (root / "gallery").mkdir(exist_ok=True)
    rows = _rows_of_matrix(root / "backbones.md")
    texts = {}
    for name in sorted(ENCODINGS):
        texts[f"gallery/{name}.md"] = _page(name, rows[name], root)
    return texts


def _page(name: str, goes_with: list[tuple[str, list[str]]], root: Path) -> str:
    kind = ENCODINGS[name]
    maps, drawn = draw_map(name)
    parts = [f"# {name}\n\n{summary(kind)}\n\n"]
    if source := reference(kind):
        parts.append(f"{source}\n\n")
    parts.append(f"{_example(name)}\n")
    if maps is not None:
        maps.savefig(root / "gallery" / f"{name}.png", dpi=110)
        parts.append(f"## At the center of two grids\n\n![{_alternative(name)}]({name}.png)\n\n{_caption(drawn)}\n\n")
    parts.append(_options(kind))
    parts.append(_cost(name))
    parts.append(_where(name, goes_with))
    parts.append(_results(root))
    parts.append(f"## Definition\n\n```{{eval-rst}}\n.. autoclass:: graticule.encodings.{kind.__name__}\n```\n\n")
    file = Path(inspect.getfile(kind)).relative_to(Path(graticule.__file__).parents[1]).as_posix()
    parts.append(
        f"```{{dropdown}} Source: src/{file}\n:::{{literalinclude}} ../../src/{file}\n:language: python\n:::\n```\n"
    )
    return "".join(parts)


def _example(name: str) -> str:
    mixing = issubclass(ENCODINGS[name], MixingEncoding)
    return (
        f'```python\nimport graticule\n\nmodel = graticule.create_model("{MODELS[mixing]}", encoding="{name}")\n```\n'
    )


def draw_map(name: str) -> tuple[Figure | None, bool]:
    """Draw the maps of an encoding on both grids, one row per grid; None if it has no position information.

    Also returns whether its parameters start at zero and were drawn from a normal distribution instead.
    """
    position, drawn = says.build(name)
    maps = [says.says_at_center(name, grid, position) for grid in GRIDS]
    if not any(maps):
        return None, False
    count = len(maps[0])
    scaled = says.common_scale([panel for row in maps for panel in row])
    widths = [grid.width for grid in GRIDS] if count == 1 else None
    shape = (1, 2) if count == 1 else (2, count)
    size = (6.4, 2.6) if count == 1 else (2.6 * count + 0.6, 4.2)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    axes = figure.subplots(*shape, squeeze=False, gridspec_kw={"width_ratios": widths} if widths else None)
    for index, (ax, panel) in enumerate(zip(axes.flat, scaled, strict=True)):
        image = ax.imshow(panel.values, cmap=panel.colors, vmin=panel.lowest, vmax=panel.highest)
        grid = GRIDS[index // count]
        row, column = divmod(grid.center, grid.width)
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="black", lw=1.5))
        head = re.search(r", (\d+) of \d+$", panel.title)
        where = f"{grid.height} x {grid.width} patches"
        ax.set_title(f"{where}, {_unit(name)} {head[1]}" if head else where, fontsize=9)
        ax.set(xticks=[], yticks=[])
    bar = figure.colorbar(image, ax=list(axes.flat), shrink=0.9)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(re.sub(r", \d+ of \d+$", "", scaled[0].title), fontsize=8)
    if np.ptp([panel.values for panel in scaled[:1]]) == 0 and scaled[0].lowest == scaled[-1].highest:
        bar.set_ticks([scaled[0].lowest])
    return figure, drawn


def _unit(name: str) -> str:
    return "group" if issubclass(ENCODINGS[name], MixingEncoding) else "head"


def _alternative(name: str) -> str:
    return f"Maps of {name} for the token at the center of 7 x 7 and 7 x 11 patches"


def _caption(drawn: bool) -> str:
    state = "parameters drawn from a normal distribution, as they start at zero" if drawn else "as initialized"
    return (
        f"Built for 7 x 7 patches, {says.DIM} channels and {says.HEADS} heads or groups, {state}; the square is the "
        "token at the center. At 7 x 11 patches it is computed or resampled, as for an image of another size."
    )


def _options(kind: Any) -> str:
    types = kind.option_types()
    if not types:
        return "## Options\n\nNone.\n\n"
    texts = option_texts(kind)
    lines = ["## Options", "", "| option | default | values | description |", "| --- | --- | --- | --- |"]
    for option, parameter in types.items():
        if option not in texts:
            raise ValueError(
                f"`{option}` of {kind.__name__} must be described in a docstring, such as 'Args: {option}: ...'."
            )
        lines.append(
            f"| `{option}` | `{parameter.default!r}` | {_cell(_type(parameter.kind))} | {_cell(texts[option])} |"
        )
    if kind.has_layers():
        about = "number of the first layers that use it, or the indices of any layers (default: all)"
        lines.append(f"| `layers` | `None` | `int`, or `int, ...`, or `None` | {about} |")
    return (
        "\n".join(lines)
        + "\n\nA single letter, such as T or K, refers to the formula in the [definition](#definition).\n\n"
    )


def option_texts(kind: Any) -> dict[str, str]:
    """Return the descriptions of its options from the docstrings of an encoding and of its parts."""
    hints = typing.get_type_hints(kind.__init__)
    parts = [hint for hint in hints.values() if inspect.isclass(hint) and dataclasses.is_dataclass(hint)]
    texts = {}
    for described in (*reversed(kind.__mro__), *parts):
        for owner in (described, vars(described).get("position")):
            texts |= _described(inspect.cleandoc(getattr(owner, "__doc__", None) or ""))
    return texts


def _described(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and descriptions of lines 'name: text', including continuation lines."""
    entry = re.compile(r"^( *)([a-z_]\w*(?:, [a-z_]\w*)*): (\S.*(?:\n\1 +\S.*)*)", re.MULTILINE)
    for _, names, about in entry.findall(text):
        plain = re.sub(r":math:`([^`]*)`", r"$\1$", " ".join(about.split()))
        for name in names.split(", "):
            yield name, plain.rstrip(".")


def _type(kind: Any) -> str:
    """Describe the values of a type: 'a' or 'b' for a literal, its name for any other."""
    if typing.get_origin(kind) is tuple:
        return ", ".join("..." if part is ... else _type(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value!r}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Annotated:
        return _type(typing.get_args(kind)[0])
    if inspect.isclass(kind) and not typing.get_args(kind):
        return "None" if kind is type(None) else f"`{kind.__name__}`"
    if typing.get_args(kind) and typing.get_origin(kind) not in (tuple, list, dict):
        return " or ".join(_type(part) for part in typing.get_args(kind))
    return f"`{str(kind).replace('typing.', '')}`"


@cache
def _measured(model: str, encoding: str) -> tuple[int, int]:
    """Return the learned parameters of the position of a model, and its multiply-adds for one image."""
    # the exponential of a matrix (LieRE) is not implemented on the meta device
    device = "cpu" if encoding == "liere" else "meta"
    with torch.device(device):
        built = graticule.create_model(model, encoding=encoding).eval()
        with FlopCounterMode(display=False) as counter:
            built(torch.empty(1, 3, *built.img_size))
    learned = sum(parameter.numel() for parameter in built.position.parameters() if parameter.requires_grad)
    return learned, counter.get_total_flops() // 2


def _cost(name: str) -> str:
    mixing = issubclass(ENCODINGS[name], MixingEncoding)
    parameters, operations = _measured(MODELS[mixing], name)
    text = f"## Cost\n\nIn `{MODELS[mixing]}` it has {parameters:,} learned parameters"
    if mixing:
        return f"{text}; the model takes {operations / 1e6:,.0f} million multiply-adds per image.\n\n"
    more = operations - _measured(MODELS[mixing], "none")[1]
    if more:
        text += f" and adds {more / 1e6:,.1f} million multiply-adds to the {(operations - more) / 1e6:,.0f} of an image"
    else:
        text += " and no matrix products or convolutions"
    folded = " `graticule.fold` computes once what depends on the grid alone." if name != "none" else ""
    return f"{text}.{folded}\n\n"


def _where(name: str, goes_with: list[tuple[str, list[str]]]) -> str:
    lines = ["## Backbones and joinings", "", "| family | joinings |", "| --- | --- |"]
    allowed = [(family, joinings) for family, joinings in goes_with if joinings]
    together: dict[tuple[str, ...], list[str]] = {}
    for family, joinings in allowed:
        together.setdefault(tuple(joinings), []).append(family)
    for joinings, families in together.items():
        lines.append(f"| {'; '.join(families)} | {', '.join(f'`{joining}`' for joining in joinings)} |")
    return "\n".join(lines) + "\n\nWithout further encodings, as in [compatibility](../backbones.md).\n\n"


def _results(root: Path) -> str:
    known = {
        "extrapolation.md": "at other image sizes and lengths than in training",
        "results/gym.md": "on tasks that need one kind of position information",
        "results.md": "all other measurements",
    }
    links = [
        f"- [{Path(name).stem.capitalize()}](../{name}): {about}"
        for name, about in known.items()
        if (root / name).exists()
    ]
    return "## Results\n\n" + "\n".join(links) + "\n\n"


def _rows_of_matrix(path: Path) -> dict[str, list[tuple[str, list[str]]]]:
    """Read the matrix of docs/backbones.md, which a test compares: encoding -> pairs of a family and the joinings."""
    short = {letters: name for name, letters in initials().items()}
    section = path.read_text(encoding="utf-8").partition("## Compatibility\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in section.splitlines()
        if line.startswith("|") and not line.startswith("| ---")
    ]
    (_, *families), *encodings = rows
    return {
        name.strip("`"): [
            (family, [] if cell == "-" else [short[letters] for letters in cell.split()])
            for together, cell in zip(families, cells, strict=True)
            for family in together.split("; ")
        ]
        for names, *cells in encodings
        for name in names.split(", ")
    }


def _cell(text: str) -> str:
    """Escape characters that would end a cell of a table."""
    return text.replace("|", r"\|")
