"""The grid of tokens: coordinates, flattened order, prefix tokens and resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from graticule.position.places import (
    Axis,
    Shape,
    TokenCoordinates,
    axis_of,
    by,
    check_counts,
    lattice,
    ravel,
    sample_map,
)
from graticule.position.resampling import BICUBIC, Resampler
from graticule.registry.checks import check_sides, format_value
from graticule.system.symbolic import ceiling, is_statically_true

#: Maximum number of tokens: no machine can hold the pairs of more.
_MOST = 2**24
#: Tolerance of a crop at the border of the whole image, in patches: boxes computed from pixels are rounded.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Crop:
    """A rectangle of a larger image, or a box of a larger volume, in patches of the whole image.

    It may begin between two patches. If its own grid has another number of patches than the rectangle covers, the crop
    is scaled.

    Args:
        image: the shape of the whole image, (H, W), or of a volume, in patches.
        box: the first coordinate on each axis, then the size on each axis, such as (top, left, height, width), in
            patches of the whole image.

    Example:
        >>> Grid(2, 2, crop=Crop((14, 14), (3, 5, 2, 2))).coordinates().tolist()
        [[3, 5], [3, 6], [4, 5], [4, 6]]
    """

    image: Shape
    box: tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.box, Tensor) or isinstance(self.image, Tensor) or len(self.box) != 2 * len(self.image):
            raise ValueError(
                "`box` must have a start and a size for each axis of `image`, such as (top, left, height, width) for "
                f"(height, width), in patches, got {self.box} for {self.image}."
            )
        Grid(*self.image)  # raises for invalid sides
        for start, side, length in zip(self.starts, self.sizes, self.image, strict=True):
            if not (start >= 0 and side > 0 and start + side <= length + _ROUNDING):
                raise ValueError(
                    "`box` must be (top, left, height, width), or starts and sizes on more axes, within the whole "
                    f"image of {by(self.image)} patches, got {tuple(self.box)}."
                )

    @property
    def starts(self) -> tuple[float, ...]:
        return self.box[: len(self.image)]

    @property
    def sizes(self) -> tuple[float, ...]:
        return self.box[len(self.image) :]

    @classmethod
    def of_pixels(cls, image: Shape, box: tuple[float, ...], patch: Shape) -> Crop:
        """Build the crop of `box` = (top, left, height, width) from an image of (height, width), all in pixels.

        Raises:
            ValueError: if a side of the image is not a multiple of the patch's, or the box is not within the image.
        """
        sides = Grid.of_image(image, patch).shape
        return cls(sides, tuple(pixels / step for pixels, step in zip(box, (*patch, *patch), strict=True)))

    def axes(self, shape: Shape) -> tuple[Axis, ...]:
        """Return the coordinates of the patches of a crop of `shape` patches on each axis of the whole image."""
        return tuple(axis_of(*axis) for axis in zip(self.starts, self.sizes, shape, strict=True))

    def halved(self) -> Crop:
        """Return the same rectangle on the grid of half the sides."""
        if any(side % 2 for side in self.image):
            raise ValueError(f"`image` must have even sides to merge patches, got {by(self.image)}.")
        return Crop(tuple(side // 2 for side in self.image), tuple(number / 2 for number in self.box))


@dataclass(frozen=True, init=False, repr=False)
class Grid(TokenCoordinates):
    """`prefix` tokens (class, distillation, registers), then the patches of a grid, the last axis fastest.

    It has any number of axes, the first the slowest: `Grid(7)` is a text, `Grid(14, 14)` an image of rows and columns,
    `Grid(8, 14, 14)` a video or a volume. Row before column, (y, x), always.

    Args:
        sides: the number of patches on each axis.
        shape: the same as a tuple.
        prefix: tokens without a position, before the patches.
        crop: the part of a larger image that the patches cover; None for a whole image.
        spacing: distance of neighbors on each axis, for coordinates in other units than patches, such as millimeters
            of a volume; None for patches. Tables are of patches, whatever their distance.
        windows: the shapes of the windows within which tokens interact, for this stage of a pyramid and for each later
            one; empty for the whole grid.

    Two grids are equal if their tokens are equal, with any `windows`.

    Example:
        >>> Grid(2, 3, prefix=1).tokens
        7
    """

    shape: Shape
    prefix: int
    crop: Crop | None
    spacing: tuple[float, ...] | None
    windows: tuple[Shape, ...] = field(compare=False)

    def __init__(
        self,
        *sides: int,
        shape: Shape = (),
        prefix: int = 0,
        crop: Crop | None = None,
        spacing: Sequence[float] | None = None,
        windows: Sequence[Shape] = (),
    ) -> None:
        shape = sides or tuple(shape)
        spacing = None if spacing is None else tuple(spacing)
        assign = object.__setattr__
        assign(self, "shape", shape)
        assign(self, "prefix", prefix)
        assign(self, "crop", crop)
        assign(self, "spacing", spacing)
        assign(self, "windows", tuple(windows))
        if not shape:
            raise ValueError("`shape` must have at least one axis, got none.")
        check_counts("shape", shape, 1)
        check_counts("prefix", (prefix,), 0)
        if prefix + math.prod(shape) > _MOST:
            raise ValueError(f"`shape` must be at most {_MOST:,} patches, got {by(shape)}.")
        if crop is not None and not isinstance(crop, Crop):
            raise TypeError(f"`crop` must be a graticule.Crop, got {format_value(crop)}.")
        if crop is not None and len(crop.image) != len(shape):
            raise ValueError(f"`crop` must have {len(shape)} axes, as many as the grid, got {len(crop.image)}.")
        if spacing is not None and (len(spacing) != len(shape) or not all(0 < unit < math.inf for unit in spacing)):
            raise ValueError(f"`spacing` must be a positive number for each of {len(shape)} axes, got {spacing}.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grid):
            return NotImplemented
        same = self.prefix == other.prefix and self.crop == other.crop and self.spacing == other.spacing
        return same and self.has_shape(other.shape)

    def __repr__(self) -> str:
        named = (("prefix", self.prefix), ("crop", self.crop), ("spacing", self.spacing))
        parts = [*map(str, self.shape), *(f"{name}={value}" for name, value in named if value)]
        return f"Grid({', '.join(parts)})"

    def has_shape(self, shape: Shape) -> bool:
        """Return whether its shape is `shape`; in a program exported for any size, whether it always is."""
        return len(self.shape) == len(shape) and all(
            is_statically_true(a == b) for a, b in zip(self.shape, shape, strict=True)
        )

    @classmethod
    def of_image(cls, image: Shape, patch: Shape, prefix: int = 0) -> Grid:
        """Build the grid of an image of `image` = (height, width) pixels cut into `patch` = (height, width).

        A video or a volume has one more axis, before these.

        Raises:
            ValueError: if a side of the image is not a positive multiple of the patch's.
        """
        if len(image) != len(patch):
            raise ValueError(f"`patch_size` must have {len(image)} axes, as many as the image, got {patch}.")
        if min(patch) < 1:
            raise ValueError(f"`patch_size` must be at least 1, got {by(patch)}.")
        check_sides(image, patch)
        return cls(*(pixels // step for pixels, step in zip(image, patch, strict=True)), prefix=prefix)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def height(self) -> int:
        """H, the number of rows of an image, the second last axis; a text is one row."""
        return self.shape[-2] if len(self.shape) > 1 else 1

    @property
    def width(self) -> int:
        """W, the number of columns of an image, the last axis."""
        return self.shape[-1]

    @property
    def plane(self) -> Grid:
        """This grid with rows and columns, to be drawn; a text is one row."""
        return self if len(self.shape) > 1 else Grid(1, *self.shape, prefix=self.prefix)

    @property
    def patches(self) -> int:
        """The number of patches, H * W of an image."""
        return math.prod(self.shape)

    @property
    def center(self) -> int:
        """Flattened index, among the patches, of the one at half of each side, (H // 2, W // 2) in an image."""
        return int(ravel([side // 2 for side in self.shape], self.shape))

    def infer_grid(self, patches: int, shape: Shape | None = None) -> Grid | None:
        """Infer the grid of `patches` rows of a checkpoint; None if it cannot be inferred.

        It is `shape`, if one is recorded or given and it has as many patches. Without it, as in checkpoints of other
        libraries, it is this grid, if that has as many patches; else all its sides are the same, as in published
        models: one row for a text, a square for an image.
        """
        if patches < 1:
            return None
        axes = len(self.shape)
        if shape is not None and len(shape) == axes and math.prod(shape) == patches:
            return Grid(*shape)
        if patches == self.patches:
            return Grid(*self.shape)
        side = round(patches ** (1 / axes))
        return Grid(*[side] * axes) if side**axes == patches else None

    def infer_grid_from_offsets(self, rows: int, shape: Shape | None = None) -> Grid | None:
        """Infer the grid of a table of `rows` offsets, as `infer_grid` does; None if it cannot be inferred."""
        table = Grid(*self.table).infer_grid(rows, shape and Grid(*shape).table)
        if table is None or not all(side % 2 for side in table.shape):
            return None
        return Grid(*((side + 1) // 2 for side in table.shape))

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
        if not pad and any(side % step for side in self.shape):
            raise ValueError(
                f"`grid` must have sides that are multiples of {step}, to be halved {stages - 1} times, "
                f"got {by(self.shape)}."
            )
        grids = [self]
        for stage in range(1, stages):
            last = grids[-1]
            grids.append(
                Grid(
                    *(ceiling(side, 2) for side in last.shape),
                    prefix=self.prefix,
                    crop=last.crop and last.crop.halved(),
                    spacing=last.spacing and tuple(2 * distance for distance in last.spacing),
                    windows=self.windows[stage:],
                )
            )
        if prefix > self.prefix:
            grids[-1] = replace(grids[-1], prefix=prefix)
        return grids

    @property
    def within(self) -> Grid:
        """The grid within which tokens interact: a window's, or this one if there are no windows."""
        return Grid(*self.windows[0], spacing=self.spacing) if self.windows else self

    def with_windows(self, windows: Sequence[Shape]) -> Grid:
        """Return this grid with windows of these shapes for it and for the later stages."""
        return replace(self, windows=tuple(windows))

    def in_windows(self, sides: Sequence[int | Shape], pad: bool = False) -> Grid:
        """Return this grid with windows of `sides` for it and later stages, each no larger than its grid."""
        stages = zip(self.pyramid(len(sides), pad=pad), sides, strict=True)
        return self.with_windows([stage.window(side).shape for stage, side in stages])

    def window(self, sides: int | Shape) -> Grid:
        """Return the grid of a window of `sides` patches, of all axes or of each, no larger than this grid."""
        window = (sides,) * self.ndim if isinstance(sides, int) else tuple(sides)
        if len(window) != self.ndim or not all(isinstance(side, int) and side > 0 for side in window):
            raise ValueError(
                f"`window_size` must be a whole number of at least 1, or one for each of {self.ndim} axes, got {sides}."
            )
        pairs = zip(window, self.shape, strict=True)
        return Grid(*(side if is_statically_true(side <= most) else min(side, most) for side, most in pairs))

    def cropped(self, crop: Crop | None) -> Grid:
        """Return this grid as a part of a larger image; unchanged if None."""
        if crop is None:
            return self
        if not isinstance(crop, Crop):
            raise ValueError(f"`crop` must be a graticule.Crop or None, got {format_value(crop)}.")
        return replace(self, crop=crop)

    @property
    def image_grid(self) -> Grid:
        """The grid of the whole image; for a crop, the grid of the image that it is cut from."""
        return self if self.crop is None else Grid(*self.crop.image, prefix=self.prefix, spacing=self.spacing)

    @property
    def extent(self) -> tuple[float, ...]:
        """The length of each axis of the whole image, in the unit of the coordinates."""
        sides = self.image_grid.shape
        return sides if self.spacing is None else tuple(a * b for a, b in zip(sides, self.spacing, strict=True))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The index on each axis of the whole image."""
        return (Axis(),) * len(self.shape) if self.crop is None else self.crop.axes(self.shape)

    def _spaced(self, axes: Sequence[Axis]) -> Sequence[Axis]:
        """Return coordinates in the unit of `spacing`."""
        if self.spacing is None:
            return axes
        return [Axis(axis.first * unit, axis.step * unit) for axis, unit in zip(axes, self.spacing, strict=True)]

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Return the coordinates of every patch in the whole image, (H * W, 2) as (y, x), in flattened order.

        int64; float64 if they are not whole numbers, such as in a crop that begins between two patches or is scaled.
        """
        return self._lattice(self._spaced(self.axes), device)

    def _lattice(self, axes: Sequence[Axis], device: torch.device | str | None) -> Tensor:
        return lattice(*(axis.coordinates(side, device) for axis, side in zip(axes, self.shape, strict=True)))

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Return the index of every patch in the whole image, in flattened order, (H * W,), int64.

        Raises:
            ValueError: if the patches of a crop do not coincide with patches of the whole image.
        """
        if self.crop is not None and not all(axis.is_integral for axis in self.axes):
            raise ValueError(
                "`crop` must consist of whole patches of the whole image for an encoding of their order, got the box "
                f"{self.crop.box} for {by(self.shape)} patches."
            )
        return ravel(self._lattice(self.axes, device).unbind(-1), self.image_grid.shape)

    def displacements(self, device: torch.device | str | None = None) -> tuple[Tensor, ...]:
        """Return all displacements on each axis, from the lowest to the highest, (2H-1,) and (2W-1,) of an image.

        int64, or float64 in a crop that is scaled.
        """
        axes = self._spaced([axis.displacements(side) for axis, side in zip(self.axes, self.shape, strict=True)])
        return tuple(axis.coordinates(2 * side - 1, device) for axis, side in zip(axes, self.shape, strict=True))

    def offsets(self, device: torch.device | str | None = None) -> Tensor:
        """Return p_i - p_j for every pair of patches, (H * W, H * W, 2), as (dy, dx): int64, or float64 if scaled."""
        patch = self._lattice(self._spaced([Axis(0, axis.step) for axis in self.axes]), device)
        self.check_pairs(8 * len(self.shape), device)
        return patch[:, None] - patch[None, :]

    @property
    def table(self) -> Shape:
        """The shape of a table of all offsets, (2H-1, 2W-1) in an image."""
        return tuple(2 * side - 1 for side in self.shape)

    def table_rows(self, device: torch.device | str | None = None) -> tuple[Tensor, int]:
        """Return the row of each patch in a table of offsets, (H * W,), int64, and the row of offset 0.

        Differences of rows from the row of offset 0 are the rows of offsets.
        """
        places = self._lattice((Axis(),) * len(self.shape), device).unbind(-1)
        return ravel(places, self.table), ravel([side - 1 for side in self.shape], self.table)

    def offset_index(self, device: torch.device | str | None = None) -> Tensor:
        """Return the row of p_i - p_j in a table of all (2H-1)(2W-1) offsets, (H * W, H * W), int64."""
        self.check_pairs(8 * len(self.shape), device)
        row, middle = self.table_rows(device)
        return (row + middle)[:, None] - row

    def unique_offsets(self, device: torch.device | str | None = None) -> Tensor:
        """Return every different offset once, as a map, (2H-1, 2W-1, 2) of an image."""
        return lattice(*self.displacements(device)).unflatten(0, self.table)

    def expand_offsets(self, values: Tensor) -> Tensor:
        index = self.offset_index(values.device)
        return values.index_select(1, index.flatten()).unflatten(1, index.shape)

    def to_map(self, tokens: Tensor) -> Tensor:
        """Return the patches of tokens (B, N, D) as a feature map, (B, D, H, W); prefix tokens are left out."""
        return self.split(tokens)[1].transpose(-2, -1).unflatten(-1, self.shape)

    def from_map(self, features: Tensor) -> Tensor:
        """Flatten a feature map (B, D, H, W) into patches (B, H * W, D); the inverse of `to_map`."""
        return features.flatten(-len(self.shape)).transpose(-2, -1)

    def resize(self, table: Tensor, new: Grid, resampler: Resampler = BICUBIC) -> Tensor:
        """Resample a table of this grid, (N, D), for another one, (N', D); a crop takes its part of the table.

        The rows of the patches are resampled by `resampler`; prefix rows are unchanged.

        Raises:
            ValueError: if the grids differ in their number of prefix tokens or of axes.
        """
        if new.prefix != self.prefix:
            raise ValueError(f"`new` must have as many prefix tokens as the table ({self.prefix}), got {new.prefix}.")
        if len(new.shape) != len(self.shape):
            raise ValueError(f"`new` must have {len(self.shape)} axes, as many as the table, got {len(new.shape)}.")
        if new == self:
            return table
        prefix, patches = self.split(table)
        image = resampler(patches.T.unflatten(-1, self.shape), new.image_grid.shape)
        return torch.cat([prefix, new.cut(image).flatten(1).T])

    def cut(self, image: Tensor) -> Tensor:
        """Return the part of a map of the whole image, (..., H', W'), that this grid covers, (..., H, W)."""
        return image if self.crop is None else sample_map(image, self.axes, self.shape)

    def cut_displacements(self, image: Tensor) -> Tensor:
        """Return from a map of the displacements of the whole image, (..., 2H'-1, 2W'-1), those in this grid.

        Returns (..., 2H-1, 2W-1), interpolated if displacements are not whole numbers.
        """
        if self.crop is None:
            return image
        displacements = (axis.displacements(side) for axis, side in zip(self.axes, self.shape, strict=True))
        axes = [Axis(a.first + length - 1, a.step) for a, length in zip(displacements, self.crop.image, strict=True)]
        return sample_map(image, axes, self.table)
