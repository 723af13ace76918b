"""Where tokens are: the one home of coordinates, flattened order, prefix tokens and resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.memory import check_memory
from graticule.resampling import Bicubic, Resampler

#: How tables are resampled for another grid if nothing else is said: as timm does it.
BICUBIC = Bicubic()
#: Tokens that no machine can hold the pairs of.
_MOST = 2**24


@dataclass(frozen=True)
class Grid:
    """`prefix` tokens (class, distillation, registers), then `height * width` patches, row by row.

    Row before column, (y, x), always. A text is a grid of height 1.

    Args:
        height: H, in patches.
        width: W, in patches.
        prefix: tokens without a position, before the patches.
        sequence: whether it is the row of a text, and not an image of one row.
        windows: (rows, columns) of the windows within which tokens see each other, for this stage of a pyramid and for
            each later one; empty where they see the whole grid.

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

    def __post_init__(self) -> None:
        for name, count, least in (("height", self.height, 1), ("width", self.width, 1), ("prefix", self.prefix, 0)):
            if isinstance(count, bool) or not hasattr(count, "__index__"):
                raise TypeError(f"`{name}` must be a whole number, got {count!r}.")
            if count < least:
                raise ValueError(f"`{name}` must be at least {least}, got {count}.")
        if self.tokens > _MOST:
            raise ValueError(f"`height` x `width` must be at most {_MOST:,} patches, got {self.height} x {self.width}.")

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
        """Infer the grid that `patches` rows of a checkpoint are for; None if that cannot be known.

        It is `shape` where the checkpoint says it, if it has as many patches. Without it, as in checkpoints of others,
        it is a row for a text, and for an image a square, as that is what is published; a number that has no root is
        taken for this grid, if it has as many patches.
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
        """Return this grid and those of half the sides each, `stages` in all; the last has `prefix` prefix tokens.

        Each has the windows of its stage and of those after it.

        Args:
            stages: how many.
            prefix: prefix tokens of the last.
            pad: round half sides up, where an odd side is filled up before it is halved.

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
        for stage in range(stages):
            ahead = prefix if stage == stages - 1 else 0
            grids.append(Grid(height, width, ahead, windows=self.windows[stage:]))
            height, width = (height + 1) // 2, (width + 1) // 2
        return grids

    @property
    def within(self) -> Grid:
        """The grid within which tokens see each other: that of a window, or this one without windows."""
        return Grid(*self.windows[0]) if self.windows else self

    def with_windows(self, windows: Sequence[tuple[int, int]]) -> Grid:
        """Return this grid with windows of (rows, columns) for it and for the later stages."""
        return Grid(self.height, self.width, self.prefix, self.sequence, tuple(windows))

    def in_windows(self, sides: Sequence[int], pad: bool = False) -> Grid:
        """Return this grid with windows of `sides` for it and the later stages, none larger than the grid of its stage.

        Raises:
            ValueError: if a side is less than 1, or the grid has no such stages (`pyramid`).
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
        return Grid(min(side, self.height), min(side, self.width))

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Return the (y, x) of every patch, (H * W, 2), int64, in flattened order."""
        y, x = torch.meshgrid(
            torch.arange(self.height, device=device), torch.arange(self.width, device=device), indexing="ij"
        )
        return torch.stack([y, x], -1).flatten(0, 1)

    def offsets(self, device: torch.device | str | None = None) -> Tensor:
        """Return p_i - p_j for every pair of patches, (H * W, H * W, 2), int64, as (dy, dx)."""
        patch = self.coordinates(device)
        check_memory("grid", f"the values of all pairs of its {self.patches:,} patches", 16 * self.patches**2)
        return patch[:, None] - patch[None, :]

    def offset_index(self, device: torch.device | str | None = None) -> Tensor:
        """Return the row of p_i - p_j in a table of all (2H-1)(2W-1) offsets, (H * W, H * W), int64."""
        dy, dx = self.offsets(device).unbind(-1)
        index: Tensor = (dy + self.height - 1) * (2 * self.width - 1) + dx + self.width - 1
        return index

    def distances(self, device: torch.device | str | None = None) -> Tensor:
        """Return the Euclidean distance of every pair of patches, (H * W, H * W), float32, in patches."""
        distances: Tensor = self.offsets(device).float().norm(dim=-1)
        return distances

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Cut tokens (..., N, D) into prefix (..., prefix, D) and patches (..., H * W, D)."""
        return tokens[..., : self.prefix, :], tokens[..., self.prefix :, :]

    def to_map(self, tokens: Tensor) -> Tensor:
        """Lay the patches of tokens (B, N, D) out as a feature map, (B, D, H, W); prefix tokens are left out."""
        features: Tensor = self.split(tokens)[1].transpose(-2, -1).unflatten(-1, self.shape)
        return features

    def from_map(self, features: Tensor) -> Tensor:
        """Flatten a feature map (B, D, H, W) into patches (B, H * W, D); the inverse of `to_map`."""
        return features.flatten(-2).transpose(-2, -1)

    def with_prefix_rows(self, table: Tensor) -> Tensor:
        """Put `prefix` zero rows before a table of the patches, (H * W, D) -> (N, D)."""
        return F.pad(table, (0, 0, self.prefix, 0))

    def with_prefix_bias(self, bias: Tensor) -> Tensor:
        """Put zero rows and columns for the prefix tokens before a bias, (..., H * W, H * W) -> (..., N, N)."""
        return F.pad(bias, (self.prefix, 0, self.prefix, 0))

    def resize(self, table: Tensor, new: Grid, resampler: Resampler = BICUBIC) -> Tensor:
        """Resample a table of this grid, (N, D), for another one, (N', D).

        The grid rows go through `resize_map`; prefix rows are kept as they are.

        Raises:
            ValueError: if the grids differ in their number of prefix tokens.
        """
        if new.prefix != self.prefix:
            raise ValueError(f"`new` must have as many prefix tokens as the table ({self.prefix}), got {new.prefix}.")
        if new == self:
            return table
        prefix, patches = self.split(table)
        return torch.cat([prefix, resize_map(patches.T.unflatten(-1, self.shape), new.shape, resampler).flatten(1).T])


class Tile(NamedTuple):
    """A rectangle of a grid that holds windows of one kind: whole ones, or the same part of a window each.

    rows, columns: where it is in the grid.
    window_rows, window_columns: the part of a window that its windows have.
    """

    rows: slice
    columns: slice
    window_rows: slice
    window_columns: slice

    @property
    def part(self) -> Grid:
        """The grid of one of its windows."""
        return Grid(*(cut.stop - cut.start for cut in (self.window_rows, self.window_columns)))


@dataclass(frozen=True)
class Windows:
    """Windows that cut a grid without overlap and never reach beyond its border.

    Where windows do not tile the grid, or are shifted, those at the border are parts of a window. So a rolled and
    padded map is never made: tokens of opposite borders do not meet, and nothing is padding. There are at most nine
    kinds of windows, one per tile.

    Args:
        grid: the grid that is cut.
        window: the grid of a whole window, no larger.
        shift: by how many (rows, columns) the windows are shifted, less than a window; those that begin at 0 then begin
            at `shift`, and a part of a window comes before them.
    """

    grid: Grid
    window: Grid
    shift: tuple[int, int] = (0, 0)

    def tiles(self) -> list[list[Tile]]:
        """Return the tiles, a list for each strip of rows from the top, each from the left."""
        rows, columns = (
            _cuts(side, step, shift)
            for side, step, shift in zip(self.grid.shape, self.window.shape, self.shift, strict=True)
        )
        return [[Tile(at, across, part, part_across) for across, part_across in columns] for at, part in rows]


def _cuts(side: int, step: int, shift: int) -> list[tuple[slice, slice]]:
    """Cut an axis into what comes before the first whole window, the whole windows, and the rest.

    Each has its part of a window.
    """
    end = shift + (side - shift) // step * step
    cuts = [
        (slice(0, shift), slice(step - shift, step)),
        (slice(shift, end), slice(0, step)),
        (slice(end, side), slice(0, side - end)),
    ]
    return [(at, part) for at, part in cuts if at.stop > at.start]


def resize_map(image: Tensor, size: tuple[int, int], resampler: Resampler = BICUBIC) -> Tensor:
    """Resample (C, H, W) to (C, H', W') by `resampler`; bicubic with antialias, as timm does it, by default."""
    return resampler(image, size)
