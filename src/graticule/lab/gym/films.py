"""Tasks on films of 6 x 6 x 6 cells or more: place, order and distance in time, direction, count within a frame."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from graticule.lab.gym.absolute import Counting
from graticule.lab.gym.base import TASKS, A, Arrangements, B, Classes, ListedTask, coordinates, even, ordered_pairs


@TASKS.register("film_place")
class FilmPlace(ListedTask):
    """In which of eight parts, halves of the time, the height and the width, is the mark?

    Needs: the absolute position on three axes. Chance: 1/8.

    Each part is drawn equally often, and every film has one mark A.
    """

    knows = "absolute position in a film"
    frame = "absolute"
    surfaces = ("film",)
    symbols = (A,)
    answer = Classes(
        tuple(f"{t} {y} {x}" for t in ("early", "late") for y in ("top", "bottom") for x in ("left", "right"))
    )

    def arrangements(self) -> Arrangements:
        """List the cells of the mark; of an odd side, the middle belongs to the second half."""
        cells = torch.arange(self.cells)
        each = zip(coordinates(cells, self.grid), self.grid, strict=True)
        halves = [(2 * at >= side - side % 2).long() for at, side in each]
        label = 4 * halves[0] + 2 * halves[1] + halves[2]
        return Arrangements(cells[:, None], label, even(label))


class FilmPair(ListedTask):
    """A task on a mark A and a mark B in different frames, whose answer depends on their displacement."""

    frame = "relative"
    surfaces = ("film",)
    symbols = (A, B)

    @abstractmethod
    def label(self, steps: list[Tensor]) -> Tensor:
        """Return the class of displacements from A to B, (P,) on each axis; -1 for pairs that are not used."""

    def arrangements(self) -> Arrangements:
        """List the pairs of different cells that have a class."""
        first, second = ordered_pairs(self.cells)
        each = zip(coordinates(first, self.grid), coordinates(second, self.grid), strict=True)
        label = self.label([end - start for start, end in each])
        kept = label >= 0
        return Arrangements(torch.stack([first, second], 1)[kept], label[kept], even(label[kept]))


@TASKS.register("film_order")
class FilmOrder(FilmPair):
    """Which of two different marks comes first in time?

    Needs: the order of the frames. Chance: 1/2. The marks are in different frames.

    Either answer is drawn equally often, and every film has one mark A and one B.
    """

    knows = "order in time"
    answer = Classes(("A first", "B first"))

    def label(self, steps: list[Tensor]) -> Tensor:
        """Return 0 if B is later, 1 if it is earlier."""
        return torch.where(steps[0] == 0, -1, (steps[0] < 0).long())


@TASKS.register("film_distance")
class FilmDistance(FilmPair):
    """How many frames are between two marks, wherever they are: one, two, or more steps?

    Needs: the distance in time, whatever the direction and the place. Chance: 1/3.

    Each answer is drawn equally often, and every film has one mark A and one B.
    """

    knows = "distance in time"
    answer = Classes(("1", "2", "3 or more"))

    def label(self, steps: list[Tensor]) -> Tensor:
        """Return the number of steps in time, less one; pairs in one frame are not used."""
        return steps[0].abs().clamp(max=3) - 1


@TASKS.register("film_direction")
class FilmDirection(FilmPair):
    """Is B before, after, above, below, left or right of A, at any distance?

    Needs: the direction on three axes. Pairs whose largest step is on several axes are left out. Chance: 1/6.

    Each direction is drawn equally often, and every film has one mark A and one B.
    """

    knows = "direction in a film"
    answer = Classes(("before", "after", "above", "below", "left", "right"))

    def label(self, steps: list[Tensor]) -> Tensor:
        """Return twice the axis of the largest step, and one more if it is positive."""
        step = torch.stack(steps)
        largest, axis = step.abs().max(0)
        label = 2 * axis + (step.gather(0, axis[None])[0] > 0)
        return torch.where((step.abs() == largest).sum(0) > 1, -1, label)


@TASKS.register("film_count")
class FilmCount(Counting):
    """How many of three marks are in the frame of another one?

    Needs: counting within a frame that is given by a mark. Chance: 1/4.

    Each count is drawn equally often, and every film has three marks A and one B.
    """

    knows = "counting in the frame of a mark"
    frame = "relative"
    surfaces = ("film",)
    symbols = (A, A, A, B)
    counted = 3
    answer = Classes(tuple(map(str, range(4))))

    def regions(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a cell for B; the region is the other cells of its frame."""
        given = torch.randint(self.cells, (count, 1), generator=generator)
        time = coordinates(torch.arange(self.cells), self.grid)[0]
        return given, time == time[given]
