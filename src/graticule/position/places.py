"""TokenCoordinates of tokens: shapes, coordinates along an axis, the interface of grids, and points without a grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.position.resampling import BICUBIC
from graticule.registry.checks import check, format_value
from graticule.system.memory import check_memory

Shape = tuple[int, ...]


def ravel(index: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return the flattened index, the last axis fastest, of an index on each axis of `shape`, numbers or tensors."""
    flat = index[0]
    for place, side in zip(index[1:], shape[1:], strict=True):
        flat = flat * side + place
    return flat


def by(shape: Sequence[float]) -> str:
    """Return a shape as text, such as '14 x 14'."""
    return " x ".join(map(str, shape))


def check_counts(name: str, counts: Sequence[Any], least: int) -> None:
    """Check that each of `counts` is a whole number, at least `least`; tensors without axes are, as in traces."""
    for count in counts:
        whole_number = isinstance(count, int) or (  # compilation asks a symbolic side for no other attribute
            hasattr(count, "__index__")
            and not getattr(count, "ndim", 0)
            and "float" not in str(getattr(count, "dtype", ""))
        )
        if isinstance(count, bool) or not whole_number:
            raise TypeError(f"`{name}` must be a whole number on each axis, got {count!r}.")
        if count < least:
            raise ValueError(f"`{name}` must be at least {least}, got {count}.")


def axis_letters(axes: int) -> Sequence[str]:
    """Return the letters of the axes: x of a text, (y, x) of an image, (t, y, x) of a video or volume."""
    return [*(f"axis{axis}" for axis in range(axes - 3)), *"tyx"[max(3 - axes, 0) :]]


def axis_names(axes: int) -> Sequence[str]:
    """Return the names of the axes: row and column of an image, with the frame of a video or the slice of a volume."""
    return [*(f"axis {axis}" for axis in range(axes - 3)), *("frame", "row", "column")[max(3 - axes, 0) :]]


class TokenCoordinates(ABC):
    """`prefix` tokens without a position, then tokens with coordinates: the patches of a `Grid`, or `Points`."""

    prefix: int
    crop: Any = None
    spacing: tuple[float, ...] | None = None
    windows: tuple[Shape, ...] = ()

    @property
    @abstractmethod
    def ndim(self) -> int:
        """The number of axes."""

    @property
    @abstractmethod
    def patches(self) -> int:
        """The number of tokens with coordinates."""

    @abstractmethod
    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Return the coordinates of these tokens, (N, axes)."""

    @abstractmethod
    def offsets(self, device: torch.device | str | None = None) -> Tensor:
        """Return p_i - p_j for every pair of these tokens, (N, N, axes)."""

    @abstractmethod
    def unique_offsets(self, device: torch.device | str | None = None) -> Tensor:
        """Return offsets, (..., axes), for a function that is computed once for each; see `expand_offsets`."""

    @abstractmethod
    def expand_offsets(self, values: Tensor) -> Tensor:
        """Return the values of all pairs, (heads, N, N), from the values of all offsets, (heads, offsets)."""

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    def check_pairs(self, size: int, device: torch.device | str | None = None) -> None:
        """Check that values of `size` bytes for each pair of patches fit into the memory of a device."""
        check_memory("grid", f"the values of all pairs of its {self.patches} patches", size * self.patches**2, device)

    def distances(self, device: torch.device | str | None = None) -> Tensor:
        """Return the Euclidean distance of every pair of patches, (H * W, H * W), float32, in patches of the whole."""
        return self.offsets(device).float().norm(dim=-1)

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Split tokens (..., N, D) into prefix (..., prefix, D) and patches (..., H * W, D)."""
        return tokens[..., : self.prefix, :], tokens[..., self.prefix :, :]

    def with_prefix_rows(self, table: Tensor) -> Tensor:
        """Prepend `prefix` zero rows to a table of the patches, (H * W, D) -> (N, D)."""
        return F.pad(table, (0, 0, self.prefix, 0))

    def with_prefix_bias(self, bias: Tensor) -> Tensor:
        """Prepend zero rows and columns for the prefix tokens to a bias, (..., H * W, H * W) -> (..., N, N)."""
        return F.pad(bias, (self.prefix, 0, self.prefix, 0))


@dataclass(frozen=True, eq=False)
class Points(TokenCoordinates):
    """`prefix` tokens, then tokens at any coordinates: merged or irregular tokens, sensors, tiles of a map.

    Points have no order and no neighbors, so only encodings that are functions of coordinates take them. The encoding
    is built for a grid, whose coordinates it uses, and their range if they are relative ('separate', 'unit').

    Args:
        places: the coordinates, (N, axes), or (B, N, axes) for other points of each sample, in patches of the grid, or
            in the unit of its spacing.
        prefix: tokens without a position, before them.
        extent: the length of each axis of the whole image, numbers or a tensor (axes,), in the unit of `places`, for
            the `scaling` of rotary encodings and for relative coordinates.

    Example:
        >>> Points(torch.tensor([[0.5, 2.0], [3.25, 1.0]]), prefix=1).tokens
        3
    """

    places: Tensor
    prefix: int = 0
    extent: tuple[float, ...] | Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.places, Tensor):
            raise ValueError(f"`places` must be a tensor of coordinates, (N, axes), got {format_value(self.places)}.")
        if self.places.ndim not in (2, 3) or not self.places.shape[-1] or not len(self.places):
            raise ValueError(
                f"`places` must be (N, axes), one row per token, or (B, N, axes), got {tuple(self.places.shape)}."
            )
        known = not (torch.compiler.is_compiling() or self.places.is_meta)
        if known and not self.places.isfinite().all():
            raise ValueError("`places` must be finite numbers, got infinite ones or NaN.")
        check_counts("prefix", (self.prefix,), 0)
        if self.extent is not None:
            if not isinstance(self.extent, Tensor):
                check("extent", self.extent, Sequence[float])
            lengths, axes = torch.as_tensor(self.extent), self.places.shape[-1:]
            if lengths.shape != axes or (known and not ((lengths > 0) & lengths.isfinite()).all()):
                raise ValueError(f"`extent` must be a positive length for each of {axes[0]} axes, got {self.extent}.")

    @property
    def ndim(self) -> int:
        return self.places.shape[-1]

    @property
    def patches(self) -> int:
        return self.places.shape[-2]

    @property
    def samples(self) -> list[Points] | None:
        """The points of each sample; None if they are the same for all."""
        return None if self.places.ndim == 2 else [self._sample(sample) for sample in self.places]

    def _sample(self, places: Tensor) -> Points:
        """Return some of the points, without a second check of their values, which waits for a GPU."""
        points = object.__new__(Points)
        for name, value in (("places", places), ("prefix", self.prefix), ("extent", self.extent)):
            object.__setattr__(points, name, value)
        return points

    @property
    def shape(self) -> Shape:
        """Refused: points have no shape.

        Raises:
            ValueError: naming the encodings that take points.
        """
        raise ValueError(
            "`grid` must be a Grid, got Points: this encoding has a table for the patches of a grid, or uses their "
            "order or neighbors. Encodings that are functions of coordinates take points: sinusoidal_2d, fourier, "
            "coordinates, rope, rope_mixed, rope_golden_gate, liere, mrope, pope, alibi, fire, kerple, sandwich, "
            "continuous_bias, mlp_bias, gqpe_bias, irpe, gpsa and log_n."
        )

    image_grid = table = axes = shape

    def has_shape(self, shape: Shape) -> bool:
        """Return False: points have no shape."""
        return False

    @property
    def within(self) -> Points:
        """These points: there are no windows."""
        return self

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        return self.places.to(device)

    def offsets(self, device: torch.device | str | None = None) -> Tensor:
        places = self.coordinates(device)
        return places[:, None] - places

    unique_offsets = offsets

    def expand_offsets(self, values: Tensor) -> Tensor:
        return values.unflatten(1, (self.patches, self.patches))

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Refused: points have no order."""
        return torch.tensor(self.shape)

    displacements = offset_index = order


class Axis(NamedTuple):
    """Equally spaced coordinates: first, first + step, ...; whole numbers are ints."""

    first: float = 0
    step: float = 1

    @property
    def is_integral(self) -> bool:
        return isinstance(self.first, int | torch.SymInt) and isinstance(self.step, int)

    def displacements(self, count: int) -> Axis:
        """Return the displacements between `count` coordinates, from the lowest to the highest."""
        return Axis((1 - count) * self.step, self.step)

    def coordinates(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Return the first `count` coordinates, int64 if they are whole numbers, else float64."""
        index = torch.arange(count, device=device)
        return (index if self.is_integral else index.double()) * self.step + self.first

    def sample(self, values: Tensor, count: int) -> Tensor:
        """Return values (..., n) at `count` coordinates, (..., count), interpolated by cubic convolution.

        Beyond the ends the values at the ends are repeated. Within them, quadratic functions are interpolated exactly.
        """
        if self.is_integral:
            return values[..., self.first : self.first + self.step * (count - 1) + 1 : self.step]
        last = values.shape[-1] - 1
        center = self.coordinates(count, values.device)[:, None]  # (count, 1), float64
        index = center.floor() + torch.arange(-1, 3, device=values.device)  # (count, 4)
        entries = torch.arange(last + 1, device=values.device)
        chosen = index.clamp(0, last)[..., None] == entries  # (count, 4, n)
        weights = (BICUBIC.filter((center - index).abs(), antialias=True)[..., None] * chosen).sum(1)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return (wide @ weights.to(wide.dtype).T).to(values.dtype)


def axis_of(start: float, size: float, count: int) -> Axis:
    """Return the centers of `count` patches that cover `size` from `start` on."""
    if size == count:
        return Axis(_int_if_whole(start), 1)
    step = size / count
    return Axis(_int_if_whole(start + (step - 1) / 2), _int_if_whole(step))


def _int_if_whole(number: float) -> float:
    return number if isinstance(number, int) or not number.is_integer() else int(number)


def lattice(*axes: Tensor) -> Tensor:
    """Return all combinations of coordinates on each axis, the last axis fastest, (H * W, 2) for rows and columns."""
    dtype = axes[0].dtype
    for axis in axes[1:]:
        dtype = torch.promote_types(dtype, axis.dtype)
    return torch.stack(torch.meshgrid(*(axis.to(dtype) for axis in axes), indexing="ij"), -1).flatten(0, -2)


def sample_map(image: Tensor, axes: Sequence[Axis], shape: Sequence[int]) -> Tensor:
    """Return a map (..., H', W') at the coordinates of `axes`, (..., *shape)."""
    for dim, (axis, side) in enumerate(zip(axes, shape, strict=True), -len(axes)):
        image = axis.sample(image.movedim(dim, -1), side).movedim(-1, dim)
    return image
