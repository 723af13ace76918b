"""The grid of tokens: coordinates, flattened order, prefix tokens and resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.position.axis import Axis, axis_of, pairs, sampled
from graticule.position.resampling import BICUBIC, Resampler
from graticule.system.memory import check_memory
from graticule.system.symbolic import ceiling, holds

#: Maximum number of tokens: no machine can hold the pairs of more.
_MOST = 2**24
#: Tolerance of a crop at the border of the whole image, in patches: boxes computed from pixels are rounded.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Crop:
    """A rectangle of a larger image, in patches of the grid of the whole image.

    It may begin between two patches. If its own grid has another number of patches than the rectangle covers, the crop
    is scaled.

    Args:
        whole: (H, W) of the whole image, in patches.
        box: (top, left, height, width) of the rectangle, in patches of the whole image.

    Example:
        >>> Grid(2, 2, crop=Crop((14, 14), (3, 5, 2, 2))).coordinates().tolist()
        [[3, 5], [3, 6], [4, 5], [4, 6]]
    """

    whole: tuple[int, int]
    box: tuple[float, float, float, float]

    def __post_init__(self) -> None:
        if len(self.whole) != 2 or len(self.box) != 4:
            raise ValueError(
                "`whole` must be (height, width) and `box` (top, left, height, width), in patches, "
                f"got {self.whole} and {self.box}."
            )
        Grid(*self.whole)  # raises for invalid sides
        for start, side, whole in zip(self.box[:2], self.box[2:], self.whole, strict=True):
            if not (start >= 0 and side > 0 and start + side <= whole + _ROUNDING):
                raise ValueError(
                    f"`box` must be (top, left, height, width) within the whole image of {self.whole[0]} x "
                    f"{self.whole[1]} patches, got {tuple(self.box)}."
                )

    @classmethod
    def of_pixels(cls, image: tuple[int, int], box: tuple[float, float, float, float], patch: tuple[int, int]) -> Crop:
        """Build the crop of `box` = (top, left, height, width) from an image of (height, width), all in pixels.

        Raises:
            ValueError: if a side of the image is not a multiple of the patch's, or the box is not within the image.
        """
        rows, columns = patch
        whole = Grid.of_image(image, patch).shape
        return cls(whole, (box[0] / rows, box[1] / columns, box[2] / rows, box[3] / columns))

    def axes(self, shape: tuple[int, int]) -> tuple[Axis, Axis]:
        """Return the coordinates of the patches of a crop of `shape` patches on both axes of the whole image."""
        top, left, height, width = self.box
        return axis_of(top, height, shape[0]), axis_of(left, width, shape[1])

    def halved(self) -> Crop:
        """Return the same rectangle on the grid of half the sides.

        Raises:
            ValueError: if a side of the whole image is odd.
        """
        if self.whole[0] % 2 or self.whole[1] % 2:
            raise ValueError(f"`whole` must have even sides to merge patches, got {self.whole[0]} x {self.whole[1]}.")
        top, left, height, width = self.box
        return Crop((self.whole[0] // 2, self.whole[1] // 2), (top / 2, left / 2, height / 2, width / 2))


@dataclass(frozen=True)
class Grid:
    """`prefix` tokens (class, distillation, registers), then `height * width` patches, row by row.

    Row before column, (y, x), always. A text is a grid of height 1.

    Args:
        height: H, in patches.
        width: W, in patches.
        prefix: tokens without a position, before the patches.
        sequence: whether it is the row of a text, and not an image of one row.
        windows: (rows, columns) of the windows within which tokens interact, for this stage of a pyramid and for
            each later one; empty for the whole grid.
        crop: the part of a larger image that the patches cover; None for a whole image.

    Two grids are equal if their tokens are, whatever `sequence` and `windows` are.

    Example:
        >>> Grid(2, 3, prefix=1).tokens
        7
    """

    height: int
    width: int
    prefix: int = 0
    sequence: bool = field(default=False, compare=False, repr=False)
    windows: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)
    crop: Crop | None = None

    def __post_init__(self) -> None:
        for name, count, least in (("height", self.height, 1), ("width", self.width, 1), ("prefix", self.prefix, 0)):
            if isinstance(count, bool) or not hasattr(count, "__index__"):
                raise TypeError(f"`{name}` must be a whole number, got {count!r}.")
            if count < least:
                raise ValueError(f"`{name}` must be at least {least}, got {count}.")
        if self.tokens > _MOST:
            raise ValueError(f"`height` x `width` must be at most {_MOST:,} patches, got {self.height} x {self.width}.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grid):
            return NotImplemented
        return self.prefix == other.prefix and self.crop == other.crop and self.has_shape(other.shape)

    def has_shape(self, shape: tuple[int, int]) -> bool:
        """Return whether its shape is `shape`; in a program exported for any size, whether it always is."""
        return holds(self.height == shape[0]) and holds(self.width == shape[1])

    @classmethod
    def of_text(cls, length: int) -> Grid:
        """Build the grid of a text of `length` tokens."""
        return cls(1, length, sequence=True)

    @classmethod
    def of_image(cls, image: tuple[int, int], patch: tuple[int, int], prefix: int = 0) -> Grid:
        """Build the grid of an image of `image` = (height, width) pixels cut into `patch` = (height, width).

        Raises:
            ValueError: if a side of the image is not a positive multiple of the patch's.
        """
        if min(patch) < 1:
            raise ValueError(f"`patch_size` must be at least 1, got {patch[0]} x {patch[1]}.")
        for side, pixels, step in zip(("height", "width"), image, patch, strict=True):
            if pixels < step or pixels % step:
                above = (pixels // step + 1) * step
                near = f"sizes are {above - step} and {above}" if pixels > step else f"size is {step}"
                raise ValueError(
                    f"`img_size` must be a positive multiple of the patch size, got {side} {pixels} with a patch of "
                    f"{step}; the nearest {near}."
                )
        return cls(image[0] // patch[0], image[1] // patch[1], prefix)

    @property
    def shape(self) -> tuple[int, int]:
        """(H, W), in patches."""
        return self.height, self.width

    @property
    def patches(self) -> int:
        """H * W."""
        return self.height * self.width

    @property
    def tokens(self) -> int:
        """N = prefix + H * W."""
        return self.prefix + self.patches

    @property
    def center(self) -> int:
        """Flattened index, among the patches, of the one at (H // 2, W // 2)."""
        return (self.height // 2) * self.width + self.width // 2

    def alike(self, patches: int, shape: tuple[int, int] | None = None) -> Grid | None:
        """Infer the grid of `patches` rows of a checkpoint; None if it cannot be inferred.

        It is `shape`, if the checkpoint records one and it has as many patches. Without it, as in checkpoints of other
        libraries, it is one row for a text, and a square for an image, as in published models; if the number is not a
        square, it is this grid, if that has as many patches.
        """
        if patches < 1:
            return None
        if self.sequence:
            return Grid.of_text(patches)
        if shape is not None and shape[0] * shape[1] == patches:
            return Grid(*shape)
        side = math.isqrt(patches)
        if side * side == patches:
            return Grid(side, side)
        return Grid(*self.shape) if patches == self.patches else None

    def pyramid(self, stages: int, prefix: int = 0, pad: bool = False) -> list[Grid]:
        """Return the grids of `stages` stages, this one first, each with half the sides of the one before.

        Each has the windows of its stage and of later ones. Prefix tokens of this grid are in every stage.

        Args:
            stages: number of stages.
            prefix: number of prefix tokens of the last stage.
            pad: whether half sides are rounded up, because odd sides are padded before they are halved.

        Raises:
            ValueError: if a side cannot be halved that often, unless `pad`.
        """
        step = 1 << (stages - 1)
        if not pad and (self.height % step or self.width % step):
            raise ValueError(
                f"`grid` must have sides that are multiples of {step}, to be halved {stages - 1} times, "
                f"got {self.height} x {self.width}."
            )
        grids: list[Grid] = []
        height, width = self.shape
        crop = self.crop
        for stage in range(stages):
            ahead = max(self.prefix, prefix if stage == stages - 1 else 0)
            grids.append(Grid(height, width, prefix=ahead, windows=self.windows[stage:], crop=crop))
            height, width = ceiling(height, 2), ceiling(width, 2)
            crop = crop.halved() if crop is not None and stage < stages - 1 else None
        return grids

    @property
    def within(self) -> Grid:
        """The grid within which tokens interact: that of a window, or this one if there are no windows."""
        return Grid(*self.windows[0]) if self.windows else self

    def with_windows(self, windows: Sequence[tuple[int, int]]) -> Grid:
        """Return this grid with windows of (rows, columns) for it and for the later stages."""
        return replace(self, windows=tuple(windows))

    def in_windows(self, sides: Sequence[int], pad: bool = False) -> Grid:
        """Return this grid with windows of `sides` for it and later stages, each no larger than its grid.

        Raises:
            ValueError: if a side is less than 1, or the grid does not have so many stages (`pyramid`).
        """
        stages = zip(self.pyramid(len(sides), pad=pad), sides, strict=True)
        return self.with_windows([stage.window(side).shape for stage, side in stages])

    def window(self, side: int) -> Grid:
        """Return the grid of a square window of `side` patches, no larger than this grid.

        Raises:
            ValueError: if `side` is less than 1.
        """
        if not isinstance(side, int) or side < 1:
            raise ValueError(f"`window_size` must be a whole number of at least 1, got {side}.")
        rows, columns = (side if holds(side <= most) else min(side, most) for most in self.shape)
        return Grid(rows, columns)

    def pooled(self, step: int) -> Grid:
        """Return the grid of every `step`-th row and column, from the first on, with the same prefix tokens."""
        return self if step == 1 else Grid(ceiling(self.height, step), ceiling(self.width, step), prefix=self.prefix)

    def every(self, step: int, device: torch.device | str | None = None) -> Tensor:
        """Return the index of each token of `pooled(step)` among the tokens of this grid, (N',), int64."""
        y, x = (step * torch.arange(side, device=device) for side in self.pooled(step).shape)
        patches = (y[:, None] * self.width + x).flatten() + self.prefix
        return torch.cat([torch.arange(self.prefix, device=device), patches])

    def cropped(self, crop: Crop | None) -> Grid:
        """Return this grid as a part of a larger image; unchanged if None."""
        return self if crop is None else replace(self, crop=crop)

    @property
    def whole(self) -> Grid:
        """The grid of the whole image, of which this one may be a crop."""
        return self if self.crop is None else Grid(*self.crop.whole, prefix=self.prefix)

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """The coordinates of the rows and the columns in the whole image."""
        return (Axis(), Axis()) if self.crop is None else self.crop.axes(self.shape)

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Return the (y, x) of every patch in the whole image, (H * W, 2), in flattened order.

        int64; float64 if they are not whole numbers, such as in a crop that begins between two patches or is scaled.
        """
        y, x = (axis.coordinates(side, device) for axis, side in zip(self.axes, self.shape, strict=True))
        return pairs(y, x)

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Return the index of every patch in the whole image, row by row, (H * W,), int64.

        Raises:
            ValueError: if the patches of a crop do not coincide with patches of the whole image.
        """
        if self.crop is not None and not all(axis.whole for axis in self.axes):
            raise ValueError(
                "`crop` must consist of whole patches of the whole image for an encoding of their order, got the box "
                f"{self.crop.box} for {self.height} x {self.width} patches."
            )
        y, x = self.coordinates(device).unbind(-1)
        return y * self.whole.width + x

    def displacements(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Return all displacements of rows and of columns, from the lowest to the highest, (2H-1,) and (2W-1,).

        int64, or float64 in a crop that is scaled.
        """
        rows, columns = (
            axis.displacements(side).coordinates(2 * side - 1, device)
            for axis, side in zip(self.axes, self.shape, strict=True)
        )
        return rows, columns

    def offsets(self, device: torch.device | str | None = None) -> Tensor:
        """Return p_i - p_j for every pair of patches, (H * W, H * W, 2), as (dy, dx): int64, or float64 if scaled."""
        y, x = (Axis(0, axis.step).coordinates(side, device) for axis, side in zip(self.axes, self.shape, strict=True))
        patch = pairs(y, x)
        self._check_pairs()
        return patch[:, None] - patch[None, :]

    def offset_index(self, device: torch.device | str | None = None) -> Tensor:
        """Return the row of p_i - p_j in a table of all (2H-1)(2W-1) offsets, (H * W, H * W), int64."""
        self._check_pairs()
        y, x = Grid(*self.shape).coordinates(device).unbind(-1)
        row = y * (2 * self.width - 1) + x  # of p_i in a table; differences of it, from the middle on, are rows, too
        middle = 2 * self.patches - self.height - self.width
        return (row + middle)[:, None] - row

    def _check_pairs(self) -> None:
        """Check that two whole numbers for each pair of patches fit into memory."""
        check_memory("grid", f"the values of all pairs of its {self.patches} patches", 16 * self.patches**2)

    def distances(self, device: torch.device | str | None = None) -> Tensor:
        """Return the Euclidean distance of every pair of patches, (H * W, H * W), float32, in patches of the whole."""
        distances: Tensor = self.offsets(device).float().norm(dim=-1)
        return distances

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Split tokens (..., N, D) into prefix (..., prefix, D) and patches (..., H * W, D)."""
        return tokens[..., : self.prefix, :], tokens[..., self.prefix :, :]

    def to_map(self, tokens: Tensor) -> Tensor:
        """Return the patches of tokens (B, N, D) as a feature map, (B, D, H, W); prefix tokens are left out."""
        features: Tensor = self.split(tokens)[1].transpose(-2, -1).unflatten(-1, self.shape)
        return features

    def from_map(self, features: Tensor) -> Tensor:
        """Flatten a feature map (B, D, H, W) into patches (B, H * W, D); the inverse of `to_map`."""
        return features.flatten(-2).transpose(-2, -1)

    def with_prefix_rows(self, table: Tensor) -> Tensor:
        """Prepend `prefix` zero rows to a table of the patches, (H * W, D) -> (N, D)."""
        return F.pad(table, (0, 0, self.prefix, 0))

    def with_prefix_bias(self, bias: Tensor) -> Tensor:
        """Prepend zero rows and columns for the prefix tokens to a bias, (..., H * W, H * W) -> (..., N, N)."""
        return F.pad(bias, (self.prefix, 0, self.prefix, 0))

    def resize(self, table: Tensor, new: Grid, resampler: Resampler = BICUBIC) -> Tensor:
        """Resample a table of this grid, (N, D), for another one, (N', D); a crop takes its part of the table.

        The rows of the patches are resampled by `resampler`; prefix rows are unchanged.

        Raises:
            ValueError: if the grids differ in their number of prefix tokens.
        """
        if new.prefix != self.prefix:
            raise ValueError(f"`new` must have as many prefix tokens as the table ({self.prefix}), got {new.prefix}.")
        if new == self:
            return table
        prefix, patches = self.split(table)
        whole = resampler(patches.T.unflatten(-1, self.shape), new.whole.shape)
        return torch.cat([prefix, new.cut(whole).flatten(1).T])

    def cut(self, image: Tensor) -> Tensor:
        """Return the part of a map of the whole image, (..., H', W'), that this grid covers, (..., H, W)."""
        return image if self.crop is None else sampled(image, self.axes, self.shape)

    def cut_displacements(self, image: Tensor) -> Tensor:
        """Return from a map of the displacements of the whole image, (..., 2H'-1, 2W'-1), those in this grid.

        Returns (..., 2H-1, 2W-1), interpolated if displacements are not whole numbers.
        """
        if self.crop is None:
            return image
        each = (axis.displacements(side) for axis, side in zip(self.axes, self.shape, strict=True))
        rows, columns = (Axis(a.first + whole - 1, a.step) for a, whole in zip(each, self.crop.whole, strict=True))
        return sampled(image, (rows, columns), (2 * self.height - 1, 2 * self.width - 1))


class Tile(NamedTuple):
    """A rectangle of a grid with windows of one kind: whole windows, or the same part of each window.

    rows, columns: its slices of the grid.
    window_rows, window_columns: the part of a whole window that its windows cover.
    """

    rows: slice
    columns: slice
    window_rows: slice
    window_columns: slice

    @property
    def part(self) -> Grid:
        """The grid of one of its windows."""
        return Grid(*(cut.stop - cut.start for cut in (self.window_rows, self.window_columns)))

    @property
    def repeats(self) -> tuple[int, int]:
        """Return the number of windows per axis."""
        rows, columns = (cut.stop - cut.start for cut in (self.rows, self.columns))
        return rows // self.part.height, columns // self.part.width


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows of a grid that never reach beyond its border.

    If windows do not tile the grid, or are shifted, those at the border are parts of a window. So the map is neither
    rolled nor padded, and tokens of opposite borders do not attend to each other. There are at most nine kinds of
    windows, one per tile.

    Args:
        grid: the grid of the windows.
        window: the grid of a whole window, no larger than `grid`.
        shift: shift of the windows, (rows, columns), less than a window; the window at 0 then begins at `shift`, and a
            part of a window precedes it.
        rolled: whether tokens are mixed in the windows of the rolled map instead (`kinds`), where those of the last row
            and column contain tokens of opposite borders.
    """

    grid: Grid
    window: Grid
    shift: tuple[int, int] = (0, 0)
    rolled: bool = False

    def tiles(self) -> list[list[Tile]]:
        """Return the tiles: one list per strip of rows, from the top, each from left to right."""
        rows, columns = (
            _cuts(side, step, shift)
            for side, step, shift in zip(self.grid.shape, self.window.shape, self.shift, strict=True)
        )
        return [[Tile(at, across, part, part_across) for across, part_across in columns] for at, part in rows]

    def rolled_map(self, x: Tensor) -> Tensor:
        """Roll the map of tokens x: (B, N, D) by the shift, and pad it with zeros to whole windows, (B, H, W, D)."""
        y = x.unflatten(1, self.grid.shape)
        if any(self.shift):
            y = y.roll([-by for by in self.shift], (1, 2))
        below, beside = (-side % step for side, step in zip(self.grid.shape, self.window.shape, strict=True))
        return F.pad(y, (0, 0, 0, beside, 0, below)) if below or beside else y

    def kinds(self, x: Tensor) -> list[list[tuple[Tensor, Tensor | None]]]:
        """Cut the rolled map of tokens x: (B, N, D) into rectangles (B, H, W, D) of one kind of window each.

        Each comes with its mask, (M, M), True for tokens of a window that were neighbors before the map was rolled; it
        is None if all were. A map that windows do not tile is padded with zeros at the bottom and on the right.
        """
        y, window = self.rolled_map(x), self.window
        lower, upper = (
            [(0, side, 0)] if not shift else [(0, side - step, 0), (side - step, side, shift)]
            for side, step, shift in zip(y.shape[1:3], window.shape, self.shift, strict=True)
        )
        return [
            [
                (y[:, top:end, left:right], _near(window, down, across, x.device))
                for left, right, across in upper
                if right
            ]
            for top, end, down in lower
            if end
        ]


def _near(window: Grid, down: int, across: int, device: torch.device) -> Tensor | None:
    """Return the mask of a window whose last `down` rows and `across` columns come from the opposite edge."""
    if not down and not across:
        return None
    y = torch.arange(window.height, device=device) >= window.height - down
    x = torch.arange(window.width, device=device) >= window.width - across
    kind = (2 * y[:, None] + x).flatten()
    return kind[:, None] == kind


def _cuts(side: int, step: int, shift: int) -> list[tuple[slice, slice]]:
    """Cut an axis into the part before the first whole window, the whole windows, and the rest.

    Each comes with the part of a window that it covers.
    """
    whole = (side - shift) // step * step
    if holds(side % step == 0):  # the same cuts, from which the sizes of the parts can be inferred
        whole = side - step if shift else side
    end = shift + whole
    cuts = [
        (slice(0, shift), slice(step - shift, step)),
        (slice(shift, end), slice(0, step)),
        (slice(end, side), slice(0, side - end)),
    ]
    return [(at, part) for at, part in cuts if at.stop > at.start]
