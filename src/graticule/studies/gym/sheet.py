"""Sheet of examples: one picture of each task, with its answer."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from graticule.analysis.plots import PALETTE
from graticule.studies.gym.answers import Cell, Classes, Mask
from graticule.studies.gym.base import LEAST, GymTask, generators
from graticule.studies.gym.marks import CELL, A, B
from graticule.studies.gym.tasks import TASKS, build_task

_COLUMNS = 5
#: Color and letter of the marks.
_LETTERS = {A: ("A", PALETTE[1]), B: ("B", PALETTE[0])}


def task_sheet(seed: int = 0) -> Figure:
    """Draw the first test picture of each task on a plane, with the names of its marks, and its answer."""
    rows = math.ceil(len(TASKS) / _COLUMNS)
    figure = Figure(figsize=(1.75 * _COLUMNS, 2.1 * rows), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for ax in panels:
        ax.set_axis_off()
    for ax, name in zip(panels, TASKS, strict=False):
        task = build_task(f"{name}(density=0.1)", (LEAST, LEAST))
        examples = task.sample(1, *generators(seed, "test"))
        _draw(ax, examples.images[0, 0], examples.symbols[0])
        said = _answer(ax, task, examples.target[0])
        ax.set_title(f"{name}: {said}", fontsize=9)
    return figure


def _draw(ax: Axes, image: Tensor, symbols: Tensor) -> None:
    """Draw a picture with the borders of its cells and the names of its marks."""
    height, width = image.shape
    shown = np.where(image.numpy() == 0, -3, -image.numpy())  # blank cells white, for people
    ax.imshow(shown, cmap="Greys", vmin=-3, vmax=3, extent=(0, width / CELL, height / CELL, 0))
    for y in range(height // CELL):
        for x in range(width // CELL):
            ax.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor="#bbbbbb", linewidth=0.6))
            if (mark := int(symbols[y, x])) in _LETTERS:
                letter, color = _LETTERS[mark]
                ax.text(x + 0.5, y + 0.53, letter, color=color, weight="bold", fontsize=11, ha="center", va="center")


def _answer(ax: Axes, task: GymTask, target: Tensor) -> str:
    """Outline the cells of an answer if it has any, and return the answer in words."""
    height, width = task.grid
    if isinstance(task.answer, Classes):
        return task.answer.names[int(target)]
    if isinstance(task.answer, Cell):
        _outline(ax, int(target) % width, int(target) // width, 1, 1)
        return "this cell"
    if isinstance(task.answer, Mask):
        for cell in (target == 1).nonzero()[:, 0].tolist():
            _outline(ax, cell % width, cell // width, 1, 1)
        return "these cells"
    top, left, bottom, right = (target.cpu() * target.new_tensor([height, width, height, width])).tolist()
    _outline(ax, left, top, right - left + 1, bottom - top + 1)
    return "this rectangle"


def _outline(ax: Axes, x: float, y: float, width: float, height: float) -> None:
    ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=PALETTE[2], linewidth=2.2, clip_on=False))
