"""Tasks of the gym: images whose answer needs one kind of knowledge of position, and the kinds of answers."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import hadamard
from torch import Tensor

from graticule.position.places import by
from graticule.registry.registry import Registry, options_of

#: Symbols of a cell: nothing, the two marks of the tasks, and distractors without information.
BLANK, A, B, DISTRACTORS = 0, 1, 2, (3, 4, 5)
#: Side of a cell in pixels, which is the patch size of a model.
CELL = 4
#: Rows of the Hadamard matrix that are the images of the symbols 1 to 5.
_ROWS = (5, 10, 3, 12, 6)


def glyphs() -> Tensor:
    """Return images of the symbols, (6, 4, 4): a blank cell is 0, the others are 1 and -1, orthogonal, of mean 0."""
    matrix = torch.from_numpy(hadamard(CELL * CELL)).float()
    return torch.cat([torch.zeros(1, CELL * CELL), matrix[list(_ROWS)]]).unflatten(1, (CELL, CELL))


def paint(symbols: Tensor) -> Tensor:
    """Return the images (count, 1, 4 H, 4 W) of symbols (count, H, W)."""
    return glyphs()[symbols].transpose(-3, -2).flatten(-2).flatten(-3, -2).unsqueeze(1)


def displacements(first: Tensor, second: Tensor, grid: tuple[int, int], torus: bool) -> tuple[Tensor, Tensor]:
    """Return the displacement from `first` to `second`, in rows and columns.

    On a torus it is the shortest one, from -(side - 1) // 2 to side // 2.
    """
    ways = []
    starts, ends = torch.unravel_index(first, grid), torch.unravel_index(second, grid)
    for start, end, side in zip(starts, ends, grid, strict=True):
        way = end - start
        ways.append((way + (side - 1) // 2) % side - (side - 1) // 2 if torus else way)
    return ways[0], ways[1]


def shift_cells(cells: Tensor, by: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Return the cells shifted by `by` = (rows, columns), around the torus."""
    y, x = torch.unravel_index(cells, grid)
    return (y + by[0]) % grid[0] * grid[1] + (x + by[1]) % grid[1]


class Answer(ABC):
    """A kind of answer that a model returns for an image, with its loss and score.

    outputs: the number of values that a model returns, for an image or for each token.
    per_token: whether a model returns them for each token.
    chance: the highest expected score of a model that cannot distinguish arrangements of the same patches.
    measure: name of the score, of which 1 is the best.
    """

    outputs: int
    per_token: bool = False
    chance: float
    measure: str = "accuracy"

    def loss(self, answers: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of the `answers` of a model, by default the cross-entropy."""
        return F.cross_entropy(answers, target)

    @abstractmethod
    def score(self, answers: Tensor, target: Tensor) -> float:
        """Return the score of the `answers` of a model; 1 is the best."""

    def normalize(self, score: float) -> float:
        """Return a score on a scale where chance is 0 and a perfect answer is 1."""
        return (score - self.chance) / (1 - self.chance)


class Classes(Answer):
    """One of several classes: logits (count, classes), target (count,)."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.outputs = len(names)
        self.chance = 1 / len(names)

    def score(self, answers: Tensor, target: Tensor) -> float:
        """Return the accuracy."""
        return float((answers.argmax(1) == target).double().mean())


class CellAnswer(Answer):
    """One of the cells: one logit per token, (count, N); the target (count,) is the index of a cell.

    If several cells have the highest logit, each counts as chosen equally often. Chance is 1 / (N - 1): a model that
    cannot distinguish cells with the same patch returns the same logit for them.
    """

    outputs = 1
    per_token = True

    def __init__(self, cells: int) -> None:
        self.chance = 1 / (cells - 1)

    def score(self, answers: Tensor, target: Tensor) -> float:
        """Return the share of images whose cell is found."""
        highest = answers == answers.amax(1, keepdim=True)
        right = highest.gather(1, target[:, None])[:, 0] / highest.sum(1)
        return float(right.double().mean())


class Mask(Answer):
    r"""A region, cell by cell: one logit per token, target (count, N) in {0, 1}, or -1 for cells that do not count.

    The score is the share of variance that the probabilities p explain, :math:`1 - E(p - t)^2 / (q (1 - q))`, where q
    is the share of cells of the region. A model that cannot distinguish cells returns the same p for all, and its score
    is at most 0, for p = q.

    Args:
        share: q.
    """

    measure = "variance explained"
    outputs = 1
    per_token = True
    chance = 0.0

    def __init__(self, share: float) -> None:
        self.variance = share * (1 - share)

    def loss(self, answers: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross-entropy over the cells that are asked for."""
        labelled = target >= 0
        return F.binary_cross_entropy_with_logits(answers[labelled], target[labelled].to(answers.dtype))

    def score(self, answers: Tensor, target: Tensor) -> float:
        """Return the share of variance that is explained."""
        labelled = target >= 0
        error = answers[labelled].double().sigmoid() - target[labelled]
        return float(1 - error.square().mean() / self.variance)


class Values(Answer):
    r"""Several numbers, (count, values): the score is the mean share of their variances that is explained.

    .. math:: R^2 = 1 - \operatorname{mean}_k E(v_k - t_k)^2 / \operatorname{Var}(t_k)

    The variances are exact, over all arrangements. A model that knows nothing of t returns its mean, and scores 0.

    Args:
        names: of the values.
        variance: Var(t), (values,).
    """

    measure = "variance explained"
    chance = 0.0

    def __init__(self, names: tuple[str, ...], variance: Tensor) -> None:
        self.names = names
        self.outputs = len(names)
        self.variance = variance

    def loss(self, answers: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error, as a share of the variances."""
        return ((answers - target).square() / self.variance).mean()

    def score(self, answers: Tensor, target: Tensor) -> float:
        """Return the share of the variances that is explained."""
        with torch.no_grad():
            return 1 - float(self.loss(answers.double(), target))


Surface = Literal["plane", "torus"]
#: Arguments that the caller passes to a task; all other arguments of its class are options.
_CONTEXT = frozenset({"self", "grid", "surface"})
#: The smallest side of a grid that every task is defined on.
LEAST = 6


class GymExamples(NamedTuple):
    """Images and their answers.

    symbols: (count, H, W), the symbol of each cell.
    target: the answers, in the shape that the task's `answer` defines.
    """

    symbols: Tensor
    target: Tensor

    @property
    def images(self) -> Tensor:
        """Return the images, (count, 1, 4 H, 4 W)."""
        return paint(self.symbols)


class GymTask(ABC):
    """Draws arrangements of marks on a grid, with answers that depend on the positions of the marks.

    The number of cells with each mark is the same in all arrangements. The other cells show distractors or nothing,
    drawn one after the other independently of the arrangement. So the multiset of the patches of an image is
    independent of the answer, and a model that sees no more than this multiset is at chance.

    knows: the knowledge that the answer needs, in words.
    frame: 'relative' if shifting the whole image around a torus does not change the answer; else 'absolute'.
    surfaces: the surfaces that the task is defined on.
    symbols: the symbols of the marks of an arrangement.
    answer: the kind of answer.

    Args:
        grid: (H, W), at least 6 each.
        surface: on a torus, the neighbor of the last cell of a row or column is the first one.
        density: share of the other cells that show a distractor; none by default, since models then learn several times
            as fast.
    """

    knows: ClassVar[str]
    frame: ClassVar[Literal["absolute", "relative"]]
    surfaces: ClassVar[tuple[Surface, ...]] = ("plane", "torus")
    symbols: ClassVar[tuple[int, ...]]
    answer: Answer

    def __init__(self, grid: tuple[int, int], surface: Surface = "plane", density: float = 0.0) -> None:
        if min(grid) < LEAST:
            raise ValueError(f"`grid` must have sides of at least {LEAST} cells, got {by(grid)}.")
        if surface not in self.surfaces:
            raise ValueError(
                f"`surface` must be {' or '.join(self.surfaces)} for the task {type(self).__name__}, got {surface!r}."
            )
        if not 0 <= density <= 1:
            raise ValueError(f"`density` must be in [0, 1], got {density}.")
        self.grid, self.surface, self.density = grid, surface, density

    @property
    def cells(self) -> int:
        """Return the number of cells, N."""
        return math.prod(self.grid)

    @property
    def torus(self) -> bool:
        """Return whether the surface is a torus."""
        return self.surface == "torus"

    def coordinates(self) -> tuple[Tensor, ...]:
        """Return the rows and the columns of all cells, (N,) each."""
        return torch.unravel_index(torch.arange(self.cells), self.grid)

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the cells of the marks, (count, marks), as indices row by row, and the answers."""

    def sample(self, count: int, scenes: torch.Generator, background: torch.Generator) -> GymExamples:
        """Draw images: the arrangements and answers by one generator, the other cells by another one.

        The symbols of the other cells are filled in row by row, so that they are the same multiset for every
        arrangement.
        """
        cells, target = self.draw(count, scenes)
        free = self.cells - len(self.symbols)
        occupied = torch.rand(count, free, generator=background) < self.density
        which = torch.randint(len(DISTRACTORS), (count, free), generator=background)
        around = torch.where(occupied, torch.tensor(DISTRACTORS)[which], BLANK)
        symbols = torch.empty(count, self.cells, dtype=torch.long)
        is_taken = torch.zeros(count, self.cells, dtype=torch.bool).scatter_(1, cells, True)
        symbols[~is_taken] = around.flatten()
        symbols.scatter_(1, cells, torch.tensor(self.symbols).expand(count, -1))
        return GymExamples(symbols.unflatten(1, self.grid), target)


class Arrangements(NamedTuple):
    """All arrangements of a task: cells (P, marks), answers (P, ...), and probabilities (P,), which sum to 1."""

    cells: Tensor
    target: Tensor
    weights: Tensor


class ListedTask(GymTask):
    """A task that lists all its arrangements, so that statements about their distribution are exact."""

    @abstractmethod
    def arrangements(self) -> Arrangements:
        """List all arrangements with their answers and probabilities."""

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw arrangements by their probabilities."""
        if not hasattr(self, "_listed"):
            self._listed = self.arrangements()
        chosen = torch.multinomial(self._listed.weights, count, replacement=True, generator=generator)
        return self._listed.cells[chosen], self._listed.target[chosen]

    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all ordered pairs of different cells, (P, 2), and their displacements in rows and in columns, (P,)."""
        pairs = torch.cartesian_prod(torch.arange(self.cells), torch.arange(self.cells))
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        return pairs, *displacements(pairs[:, 0], pairs[:, 1], self.grid, self.torus)


def equal(cells: Tensor, target: Tensor) -> Arrangements:
    """Return arrangements, each of which is drawn equally often."""
    return Arrangements(cells, target, torch.full((len(cells),), 1 / len(cells), dtype=torch.float64))


def balance(cells: Tensor, labels: Tensor, chosen: Tensor | slice = slice(None)) -> Arrangements:
    """Return the `chosen` arrangements, each of whose answers is drawn equally often."""
    return Arrangements(cells[chosen], labels[chosen], even(labels[chosen]))


def even(labels: Tensor, within: Tensor | None = None) -> Tensor:
    """Return weights (P,) by which all labels are equally probable, and all arrangements of a label are.

    Args:
        labels: (P,), from 0.
        within: (P,) integers: all labels are then equally probable among the arrangements of each integer.
    """
    group = torch.zeros_like(labels) if within is None else within
    of_pair = group * (int(labels.max()) + 1) + labels
    _, inverse, sizes = of_pair.unique(return_inverse=True, return_counts=True)
    weights: Tensor = sizes.double().reciprocal()[inverse]
    if within is not None:  # each integer as probable as the number of its arrangements
        _, inverse, sizes = group.unique(return_inverse=True, return_counts=True)
        weights = weights * sizes.double()[inverse]
    return weights / weights.sum()


def generators(seed: int, stream: str) -> tuple[torch.Generator, torch.Generator]:
    """Return the generators of the scenes and of the background of a stream of examples, such as 'train'."""
    words = np.random.SeedSequence([seed, *stream.encode()]).generate_state(2, np.uint64)
    scenes, background = (torch.Generator().manual_seed(int(word) >> 1) for word in words)
    return scenes, background


#: The tasks by name.
TASKS: Registry[Any] = Registry("tasks", GymTask, lambda kind: options_of(kind.__init__, _CONTEXT), "graticule.lab.gym")


def build_task(task: str, grid: int | tuple[int, int], surface: Surface = "plane") -> GymTask:
    """Build a task from its name with options, such as 'place' or 'place(density=0.5)'; `grid` can be its side.

    Raises:
        ValueError: for an unknown name or option, or a value that the task refuses.
    """
    specs = TASKS.specs(task)
    if len(specs) > 1:
        raise ValueError(f"`tasks` must be single names, not combined, got {task!r}.")
    grid = (grid, grid) if isinstance(grid, int) else grid
    return TASKS[specs[0].name](grid, surface, **specs[0].options)


def task_rows() -> list[tuple[str, ...]]:
    """Return a header, and one row per task: its question, the knowledge it needs, its surfaces, and chance."""
    rows: list[tuple[str, ...]] = [("task", "question", "needs", "frame", "surfaces", "chance")]
    for name, kind in TASKS.items():
        surface: Surface = kind.surfaces[0]
        chance = build_task(name, LEAST, surface).answer.chance
        share = "0" if chance == 0 else f"1/{round(1 / chance)}"
        question = (inspect.getdoc(kind) or "").partition("\n")[0]
        rows.append((name, question, kind.knows, kind.frame, ", ".join(kind.surfaces), share))
    return rows
