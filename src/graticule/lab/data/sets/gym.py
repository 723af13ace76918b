"""The gym: images of marks on a grid, whose class needs one kind of position information, without any download.

An image is a grid of 6 x 6 cells of 4 x 4 pixels, the patches of a model. A cell is blank, or shows a mark (A or B) or
a distractor. The class is a function of the cells of the marks.

Images come in groups, one image per class, whose patches are the same up to their order. A model that sees the patches
without their order, such as a ViT without position encoding, therefore gives all images of a group the same class, and
its accuracy is exactly one divided by the number of classes. No image is in both splits, or twice in one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
from scipy.linalg import hadamard

from graticule.lab.data.images import ArrayImages, DatasetInfo, Split
from graticule.lab.data.registry import register_dataset

#: Cells per side of the grid, and pixels per side of a cell.
SIDE, CELL = 6, 4
#: Images per split, which the number of classes of every task divides.
COUNTS: dict[Split, int] = {"train": 7200, "test": 1440}
#: Symbols of a cell: nothing, the two marks, and distractors without information.
BLANK, A, B, DISTRACTORS = 0, 1, 2, (3, 4, 5)
#: Cells of an image that show a distractor.
DISTRACTED = 3
#: The images of the symbols, (6, 4, 4): 0 if blank, otherwise -1 and 1, orthogonal to each other and of mean 0.
GLYPHS = np.concatenate([np.zeros((1, 16), int), hadamard(16)[[5, 10, 3, 12, 6]]]).reshape(6, CELL, CELL)
#: Bytes of the values -1, 0 and 1; mean and standard deviation in `DatasetInfo` turn them into these values again.
_ZERO, _ONE = 128, 127
#: Row and column of each cell.
_Y, _X = np.divmod(np.arange(SIDE * SIDE), SIDE)
_WAYS = {"above": (-1, 0), "left": (0, -1), "right": (0, 1), "below": (1, 0)}


@dataclass(frozen=True)
class Arrangements:
    """Arrangements of the marks of a task.

    cells: (P, marks), the cell of each mark, row by row.
    labels: (P,), the class of each arrangement; a negative one is left out.
    groups: (P,), a property that must not tell the class: within each class, all values are as frequent as they are
        among all arrangements. Arrangements with the same class and value are drawn equally often.
    """

    cells: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None = None

    def probabilities(self, label: int) -> np.ndarray:
        """Return the probability of each arrangement, (P,), in the images of a class."""
        groups = np.zeros_like(self.labels) if self.groups is None else self.groups
        of_label, size = self.labels == label, groups.max() + 1
        every, those = (np.bincount(groups[chosen], minlength=size) for chosen in (self.labels >= 0, of_label))
        weights = np.where(of_label, every[groups] / np.maximum(those, 1)[groups], 0)
        return weights / weights.sum()


@dataclass(frozen=True)
class GymTask:
    """A question about the marks of an image.

    question: in words.
    symbols: the marks of an image.
    class_names: the answers, each of which is equally frequent.
    list_arrangements: lists all arrangements of the marks.
    """

    question: str
    symbols: tuple[int, ...]
    class_names: tuple[str, ...]
    list_arrangements: Callable[[], Arrangements]


#: The tasks by the name of their data set.
TASKS: dict[str, GymTask] = {}


def _task(symbols: tuple[int, ...], *class_names: str) -> Callable[[Callable[[], Arrangements]], GymTask]:
    """Return a decorator that registers a task and its data set, `gym_` and the name of the function."""

    def register(list_arrangements: Callable[[], Arrangements]) -> GymTask:
        name = f"gym_{list_arrangements.__name__}"
        question = (inspect.getdoc(list_arrangements) or "").partition("\n")[0]
        TASKS[name] = task = GymTask(question, symbols, class_names, list_arrangements)

        def load(split: Split, root: Path | None = None) -> tuple[ArrayImages, DatasetInfo]:
            symbols, labels = draw(name, split)
            info = DatasetInfo(name, class_names, 1, (SIDE * CELL, SIDE * CELL), (_ZERO / 255,), (_ONE / 255,))
            return ArrayImages(paint(symbols), labels), info

        register_dataset(name)(load)
        return task

    return register


def draw(name: str, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return the symbols of the images of a data set, (n, 6, 6), and their classes, (n,).

    The images of a group have the same symbols around their marks, in the same order. Since no two groups do, no two
    images are equal.
    """
    task = TASKS[name]
    arrangements, classes = task.list_arrangements(), len(task.class_names)
    random = np.random.RandomState([*name.encode()])  # its stream does not depend on the version of NumPy
    first, last = COUNTS["train"] // classes, sum(COUNTS.values()) // classes
    chosen = [
        random.choice(len(arrangements.cells), last, p=arrangements.probabilities(label)) for label in range(classes)
    ]
    around = np.full((2 * last, SIDE * SIDE - len(task.symbols)), BLANK)
    places = random.random_sample(around.shape).argsort(1)[:, :DISTRACTED]
    np.put_along_axis(around, places, random.choice(DISTRACTORS, places.shape), axis=1)
    _, unlike = np.unique(around, axis=0, return_index=True)
    groups = np.s_[:first] if split == "train" else np.s_[first:last]
    around = around[np.sort(unlike)[groups]].repeat(classes, axis=0)
    cells = arrangements.cells[np.stack(chosen, 1)[groups].ravel()]  # (n, marks), the classes in turn
    symbols = np.full((len(cells), SIDE * SIDE), -1)
    np.put_along_axis(symbols, cells, np.array(task.symbols)[None], axis=1)
    symbols[symbols < 0] = around.ravel()
    return symbols.reshape(-1, SIDE, SIDE), np.tile(np.arange(classes), len(cells) // classes)


def paint(symbols: np.ndarray) -> np.ndarray:
    """Return the images (n, 24, 24), uint8, of symbols (n, 6, 6)."""
    values = GLYPHS[symbols].transpose(0, 1, 3, 2, 4).reshape(-1, SIDE * CELL, SIDE * CELL)
    return (_ZERO + _ONE * values).astype(np.uint8)


def _pairs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all ordered pairs of different cells, (P, 2), and the rows and columns from the first to the second."""
    pairs = np.array(list(permutations(range(SIDE * SIDE), 2)))
    return pairs, *(np.diff(axis[pairs])[:, 0] for axis in (_Y, _X))


@_task((A,), *(f"{y} {x}" for y in ("top", "middle", "bottom") for x in ("left", "center", "right")))
def place() -> Arrangements:
    """In which of nine regions, thirds of the height by thirds of the width, is the mark?"""
    return Arrangements(np.arange(SIDE * SIDE)[:, None], 3 * (3 * _Y // SIDE) + 3 * _X // SIDE)


@_task((A,), "inside", "border")
def border() -> Arrangements:
    """Is the mark in the outermost rows or columns?"""
    outermost = (_Y % (SIDE - 1) == 0) | (_X % (SIDE - 1) == 0)
    return Arrangements(np.arange(SIDE * SIDE)[:, None], outermost.astype(int))


@_task((A, A), "no", "mirrored")
def symmetry() -> Arrangements:
    """Are two equal marks in one row mirror images of each other about the middle of the image?

    Both answers have the same distances between the marks, equally often.
    """
    pairs, dy, dx = _pairs()
    mirrored = (_X[pairs].sum(1) == SIDE - 1).astype(int)
    row = (dy == 0) & (dx > 0)
    both = [distance for distance in range(SIDE) if len({*mirrored[row & (dx == distance)]}) == 2]
    return Arrangements(pairs, np.where(row & np.isin(dx, both), mirrored, -1), abs(dx))


@_task((A, B), "A first", "B first")
def order() -> Arrangements:
    """Which of two different marks comes first when the image is read row by row?"""
    pairs, *_ = _pairs()
    return Arrangements(pairs, (pairs[:, 1] < pairs[:, 0]).astype(int))


@_task((A, A, A, A), *map(str, range(5)))
def region() -> Arrangements:
    """How many of four marks are in the upper half of the image?"""
    cells = np.array(list(combinations(range(SIDE * SIDE), 4)))
    return Arrangements(cells, (_Y[cells] < SIDE // 2).sum(1))


@_task((A, A, A, B), *map(str, range(4)))
def neighbors() -> Arrangements:
    """How many of three marks A touch the mark B, at a side or a corner?

    B is equally often in each cell, for every answer.
    """
    marks = np.array(list(combinations(range(SIDE * SIDE), 3)))
    cells = np.concatenate([np.insert(marks[(marks != b).all(1)], 3, b, axis=1) for b in range(SIDE * SIDE)])
    dy, dx = (abs(axis[cells[:, :3]] - axis[cells[:, 3:]]) for axis in (_Y, _X))
    return Arrangements(cells, (np.maximum(dy, dx) == 1).sum(1), cells[:, 3])


@_task((A, B), *(f"{steps} {way}" for way in _WAYS for steps in (1, 2)))
def displacement() -> Arrangements:
    """Where is B from A: one or two cells above, left, right or below?"""
    pairs, dy, dx = _pairs()
    labels = np.full(len(pairs), -1)
    for label, (down, right, steps) in enumerate((*way, steps) for way in _WAYS.values() for steps in (1, 2)):
        labels[(dy == steps * down) & (dx == steps * right)] = label
    return Arrangements(pairs, labels)


@_task((A, B), *_WAYS)
def direction() -> Arrangements:
    """Is B above, left, right or below A, at any distance?

    Pairs that are as far apart in rows as in columns are left out.
    """
    pairs, dy, dx = _pairs()
    labels = np.where(abs(dy) > abs(dx), np.where(dy < 0, 0, 3), np.where(dx < 0, 1, 2))
    return Arrangements(pairs, np.where(abs(dy) == abs(dx), -1, labels))


@_task((A, B), "1", "2", "3 or more")
def distance() -> Arrangements:
    """How far is B from A, in rows or columns, whichever is more: one, two, or more cells?"""
    pairs, dy, dx = _pairs()
    return Arrangements(pairs, np.maximum(abs(dy), abs(dx)).clip(max=3) - 1)


@_task((A, A, A, A), "1", "2", "3")
def scale() -> Arrangements:
    """How large is the square with four marks as corners: one, two or three cells per side?"""
    sides = (1, 2, 3)
    corners = [np.flatnonzero((_Y + side < SIDE) & (_X + side < SIDE)) for side in sides]
    squares = [
        cell[:, None] + np.array([0, side, SIDE * side, (SIDE + 1) * side])
        for cell, side in zip(corners, sides, strict=True)
    ]
    return Arrangements(np.concatenate(squares), np.repeat([0, 1, 2], [*map(len, squares)]))
