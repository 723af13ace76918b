"""Tables and pictures of docs/gym.md and docs/results/gym.md, rebuilt from docs/data/gym*.csv.

`python -m evidence.gym_page` writes the tables between the markers of the pages, and the pictures.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from graticule.lab.figures.save import save_figure
from graticule.lab.figures.style import PALETTE
from graticule.lab.gym.base import (
    CELL,
    LEAST,
    TASKS,
    A,
    B,
    Cell,
    Classes,
    GymTask,
    Mask,
    build_task,
    generators,
    task_rows,
)
from graticule.lab.gym.profile import Profile, choice_labels, heat_map, interval, read_profile
from graticule.lab.studies.tables import between, markdown
from graticule.system.files import write_text

#: The choices of README's picture, if they were measured.
SHORT = (
    "encoding=none",
    "encoding=learnable",
    "encoding=learnable,joining=lape",
    "encoding=sinusoidal_2d",
    "encoding=peg",
    "encoding=relative_bias",
    "encoding=alibi",
    "encoding=rope",
)


def page_text(text: str, profile: Profile, places: Profile) -> str:
    """Return the text of a page with its tables rebuilt: the tasks, the ranks, and the scores of five places."""
    tables = {
        "tasks": lambda: markdown(task_rows()),
        "ranks": lambda: markdown(profile.ranks()),
        "places": places.markdown,
    }
    for name, table in tables.items():
        if f"<!-- {name}: begin" in text:
            text = between(text, name, table())
    return text


def kept_profile(docs: Path, name: str = "gym") -> Profile:
    """Read recorded scores of the page, with the tasks in the order of the registry."""
    profile = read_profile(docs / "data" / f"{name}.csv")
    return profile.select(tasks=[task for task in TASKS if task in profile.tasks])


def write_page(docs: Path) -> list[Path]:
    """Rebuild both pages and the pictures; returns the paths."""
    profile, places = (kept_profile(docs, name) for name in ("gym", "gym_place"))
    pages = [docs / "gym.md", docs / "results" / "gym.md"]
    written = [write_text(page, page_text(page.read_text(encoding="utf-8"), profile, places)) for page in pages]
    written.append(save_figure(task_sheet(), docs / "figures" / "gym_tasks.png"))
    if profile.rows:
        short = [choice for choice in SHORT if choice in profile.choices]
        pictures = {"gym.png": profile.select(short)}
        if len(profile.choices) > len(short):
            pictures["gym_profile.png"] = profile
        written += [save_figure(heat_map(shown), docs / "figures" / name) for name, shown in pictures.items()]
        written.append(save_figure(rank_sheet(profile), docs / "figures" / "gym_ranks.png"))
    return written


def rank_sheet(profile: Profile) -> Figure:
    """Draw the mean over all tasks of every choice with its interval, one panel per size, the best choice first."""
    scores = {side: profile.overall(side) for side in profile.sides}
    order = sorted(profile.choices, key=lambda choice: -fmean(scores[profile.trained][choice]))
    names = dict(zip(profile.choices, choice_labels(profile.choices), strict=True))
    figure = Figure(figsize=(8.5, 0.9 + 0.2 * len(order)), layout="constrained")
    panels = figure.subplots(1, len(scores), squeeze=False, sharey=True).flatten()
    for ax, (side, of_choice) in zip(panels, scores.items(), strict=True):
        for row, choice in enumerate(order):
            mean, low, high = interval(of_choice[choice])
            ax.plot([low, high], [row, row], color=PALETTE[0])
            ax.plot(mean, row, "o", color=PALETTE[0], markersize=4)
        where = "as in training" if side == profile.trained else f"trained on {profile.trained} × {profile.trained}"
        ax.set_title(f"{side} × {side} cells, {where}", fontsize=10)
        ax.set(xlabel="mean over tasks (0: chance, 100: perfect)", xlim=(-4, 104))
        ax.set_yticks(range(len(order)), [names[choice] for choice in order], fontsize=8)
        ax.grid(axis="both", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(len(order) - 0.5, -0.5)
    return figure


_COLUMNS = 4
#: Color and letter of the marks.
_LETTERS = {A: ("A", PALETTE[1]), B: ("B", PALETTE[0])}


def task_sheet(seed: int = 0) -> Figure:
    """Draw the first test picture of each task on a plane, with its question, marks and answer."""
    tasks = list(TASKS)
    rows = math.ceil(len(tasks) / _COLUMNS)
    figure = Figure(figsize=(1.9 * _COLUMNS, 3.0 * rows), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for ax in panels:
        ax.set_axis_off()
    for ax, name in zip(panels, tasks, strict=False):
        task = build_task(f"{name}(density=0.1)", LEAST)
        examples = task.sample(1, *generators(seed, "test"))
        _draw(ax, examples.images[0, 0], examples.symbols[0])
        said = _answer(ax, task, examples.target[0])
        ax.set_title(name, fontsize=10, weight="bold")
        question = textwrap.fill((inspect.getdoc(type(task)) or "").partition("\n")[0], 30)
        ax.text(0.5, -0.04, f"{question}\n→ {said}", transform=ax.transAxes, ha="center", va="top", fontsize=8)
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


if __name__ == "__main__":
    print("wrote", *write_page(Path("docs")))
