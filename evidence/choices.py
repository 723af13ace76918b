"""Answers by task, in the figure of docs/which.md, and the table of docs/why_lape.md."""

from __future__ import annotations

import re
from statistics import fmean

from evidence.contrasts import Asked, Contrast, Registry
from evidence.gym import GRIDS
from graticule.lab.studies.results import TRAINED
from graticule.system.tables import markdown

#: Tasks on digits -> the name of their condition.
CLASSIFY = {"same size": "trained size", "zoomed": "zoomed", "canvas": "empty canvas"}


def ranked(registry: Registry, task: str) -> list[tuple[str, str, Asked, Contrast]]:
    """Return (label, column, row, contrast with the reference of the task) of its rows, the largest mean first."""
    rows = registry.of(task=task)
    reference = set.intersection(*({choice for _, choice, *_ in row.terms} for row, _ in rows))
    labeled = []
    for row, contrast in rows:
        (_, first, variant, at), (_, second, *_) = row.terms
        if len(reference) == 1 and first in reference:
            first, second, contrast = second, first, contrast.reversed()
        text, less = (re.sub("encoding=|joining=", "", re.sub(r",(?=joining)", ", ", name)) for name in (first, second))
        size = GRIDS[at] if row.data == "gym" else variant
        column = CLASSIFY.get(task, size) or "difference"
        label = f"`{text}`" if len(reference) == 1 else f"`{text}` less `{less}`"
        labeled.append((label, column, row, contrast))
    return sorted(labeled, key=lambda item: -fmean(item[3].values or [0.0]))


#: Rows of the table of docs/why_lape.md: title -> study and condition.
WHERE = {
    "Fashion-MNIST": ("lape_place_fashion", TRAINED),
    "Fashion-MNIST, zoomed": ("lape_place_fashion", "zoom 40"),
    "CIFAR-10": ("lape_place_cifar10", TRAINED),
    "CIFAR-10, zoomed": ("lape_place_cifar10", "zoom 48"),
    "CIFAR-10, empty canvas": ("lape_place_cifar10", "canvas 48"),
    "digits": ("lape_place", TRAINED),
    "digits, zoomed": ("lape_place", "zoom 40"),
    "digits, empty canvas": ("lape_place", "canvas 40"),
    "digits, 24 layers": ("lape_place_deep", TRAINED),
    "digits, 24 layers, zoomed": ("lape_place_deep", "zoom 40"),
}
#: Its columns: title -> contrast. LaPE's table starts at 0.02, but on CIFAR-10 at 0.2, as in ViT-Lite.
EFFECTS = {
    "LaPE - the same table once": "beside, LN chain - once, std 0.02",
    "LaPE - a table of 1 once": "beside, LN chain - once, std 1",
    "amplitude, 1 - 0.02": "once, std 1 - once, std 0.02",
    "place, table of 1": "beside, std 1 - once, std 1",
    "place, table of 0.2": "beside, std 0.2 - once, std 0.2",
    "interaction": "beside, std 1 - once, std 1 - beside, std 0.2 + once, std 0.2",
    "norms": "beside, LN chain - beside, std 1",
    "learning rate": "beside, LN chain - beside, LN chain, std 1",
}

#: Study -> the columns whose table starts otherwise there.
OTHER_STARTS = {"lape_place_cifar10": {"LaPE - the same table once": "beside, LN chain - once, std 0.2"}}
#: (data, condition, contrast) of its cells.
CELLS = {(data, at, text) for data, at in WHERE.values() for text in (EFFECTS | OTHER_STARTS.get(data, {})).values()}


def why_part(_: str, registry: Registry) -> str:
    """Return the table of answers by data set."""
    rows = {(row.data, row.at, row.contrast): (row, contrast) for row, contrast in registry.of(variant="")}
    table = [("data", *EFFECTS)]
    for title, (data, at) in WHERE.items():
        effects = {**EFFECTS, **OTHER_STARTS.get(data, {})}
        found = [rows.get((data, at, contrast)) for contrast in effects.values()]
        table.append((title, *(pair[1].short() + pair[0].mark if pair else "" for pair in found)))
    return markdown(table)
