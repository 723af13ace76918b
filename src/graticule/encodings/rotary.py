"""Base classes of rotary encodings: rotations of queries and keys by angles that are linear in the coordinates."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from graticule.encodings.base import FROM_SITE, Encoding, Position, Site
from graticule.encodings.coordinates import Coordinates, Noise
from graticule.encodings.scaling import Scaling
from graticule.grid import Grid
from graticule.joined_layers import Layers, joined_layers, spread
from graticule.joining import Joining
from graticule.layer_position import LayerPosition
from graticule.names import known_name
from graticule.registries import Option, options_of
from graticule.rotation import PairRotation, Rotation

#: The channels of a pair: neighbors, or channel i and i + d / 2.
Layout = Literal["interleaved", "half"]


class RotaryEncoding(Encoding):
    """Makes the rotations of queries and keys: one for all layers, or one per layer.

    If a parameter of the constructor is a dataclass, such as `Coordinates`, its fields are options of the encoding.
    """

    #: Options of released models, by name.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    grid: Grid

    @abstractmethod
    def rotations(self, grid: Grid) -> list[Rotation]:
        """Return one rotation for all layers, or one per layer, for `grid`."""

    def query_scale(self, grid: Grid) -> Tensor | None:
        """Return the factor of the queries of each token at `grid`, (N,); None for 1."""
        return None

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the encoding; here no parameter depends on it."""
        self.grid = grid

    @classmethod
    def position(cls, site: Site, joining: Joining, *, preset: str | None = None, **options: Any) -> Position:
        """Build one instance for all joined layers.

        Args:
            site: the sizes of the backbone.
            joining: decides which layers are joined.
            preset: name of a released model, whose options are the defaults.
            options: of the constructor.

        Raises:
            ValueError: if there is no such preset.
        """
        if preset is not None:
            if not cls.presets:
                raise ValueError(f"`preset` must be left out with {cls.__name__}, which has none, got {preset!r}.")
            options = {**cls.presets[known_name("preset", preset, cls.presets)], **options}
        encoding = cls.build(replace(site, depth=joining.layers), site.within, options)
        return RotaryPosition(encoding, site.depth, joining.joined)

    @classmethod
    def option_types(cls) -> dict[str, Option]:
        """Return the options by name: those of the constructor, with the fields of its parts, and `preset`."""
        found: dict[str, Option] = {}
        for name, option in options_of(cls.__init__, FROM_SITE).items():
            if dataclasses.is_dataclass(option.kind):
                holder: Any = option.kind
                parts = options_of(holder.__init__, FROM_SITE)
                found |= {part: Option(kind.kind, getattr(option.default, part)) for part, kind in parts.items()}
            else:
                found[name] = option
        return {**({"preset": Option(str | None, None)} if cls.presets else {}), **found}

    @classmethod
    def build(cls, site: Site, grid: Grid, options: Mapping[str, Any]) -> Self:
        """Build one instance for `grid` from options; those of parts are combined into dataclasses."""
        given = dict(options)
        for name, option in options_of(cls.__init__, FROM_SITE).items():
            if dataclasses.is_dataclass(option.kind):
                fields = [field.name for field in dataclasses.fields(option.kind)]
                part = {field: given.pop(field) for field in fields if field in given}
                if part:
                    given[name] = replace(option.default, **part)
        return super().build(site, grid, given)


class PlaneRotary(RotaryEncoding):
    r"""Rotates each pair of channels by an angle that is a linear function of the coordinates (y, x).

    .. math:: \theta_k = y\,f^y_k + x\,f^x_k

    So the logits depend on the displacement of query and key alone. Prefix tokens are not rotated. Angles are computed
    in float32 at least, in any model and under autocast.
    """

    crops = True
    #: None if each channel has its own angle, without pairs.
    layout: Layout | None = "interleaved"
    coordinates: Coordinates = Coordinates()
    noise: Noise = Noise()
    scaling: Scaling = Scaling()

    @abstractmethod
    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors (f^y, f^x), (..., d / 2, 2), float32 at least, in radians."""

    def forward(self, grid: Grid) -> Tensor:
        """Return sines, then cosines, for `grid`, (..., N, 2d)."""
        return waves(self.angles(grid, noisy=self.noisy), grid, self.layout)

    def rotations(self, grid: Grid) -> list[Rotation]:
        """Return one rotation for all layers."""
        return [PairRotation(self(grid), self.layout == "half")]

    @property
    def noisy(self) -> bool:
        """Return whether the coordinates are changed at random: in training, if there is noise."""
        return self.training and self.noise.active

    def angles(self, grid: Grid, device: torch.device | None = None, noisy: bool = False) -> Tensor:
        """Return the angle of every pair of channels at every patch, (..., H * W, d / 2), in radians."""
        vectors = self.scaling.frequencies(self.vectors(device), grid)
        places = self.coordinates(grid, vectors.device, self.grid)
        if noisy:
            places = self.noise(places)
        y, x = places.to(vectors.dtype)[..., None].unbind(1)  # (H * W, 1)
        # elementwise products: autocast would round a matrix product
        return y * vectors[..., None, :, 0] + x * vectors[..., None, :, 1]

    def _check_scaling(self) -> None:
        if self.scaling.scaling is not None and self.coordinates.coordinates != "patches":
            raise ValueError(
                f"`scaling` must go with coordinates 'patches', as others are relative to the grid, got "
                f"{self.coordinates.coordinates!r}."
            )


class FixedRotary(PlaneRotary):
    """A rotary encoding with frequencies from a formula: nothing is learned, and another grid is computed.

    The table is computed in float64 and stored in float32 at least; in training with `noise` it is computed in each
    forward pass. A constructor must set the attributes for `vectors` before it calls the constructor of this class.
    """

    def __init__(
        self, grid: Grid, coordinates: Coordinates, noise: Noise, scaling: Scaling, layout: Layout | None
    ) -> None:
        super().__init__()
        self.grid = grid
        self.coordinates = coordinates
        self.noise = noise
        self.layout = layout
        self.scaling = scaling.at(grid)
        self._check_scaling()
        if scaling.scaling == "ntk":
            with torch.device("cpu"):  # on the meta device, where only sizes are computed, there would be no values
                frequencies = self.vectors().norm(dim=-1).unique()
            if len(frequencies) < 2:
                raise ValueError("`scaling` must not be 'ntk' with one frequency; use heads of more channels.")
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("table", self._formula(grid).to(wide), persistent=False)
        self.table: Tensor

    def forward(self, grid: Grid) -> Tensor:
        """Return sines, then cosines, for `grid`, (N, 2d) or (h, N, 2d)."""
        if grid == self.grid and not self.noisy:
            return self.table
        return self._formula(grid, self.table.device, self.noisy).to(self.table.dtype)

    def query_scale(self, grid: Grid) -> Tensor | None:
        """Return the temperature of 'yarn' at a larger grid, (N,)."""
        factor = self.scaling.logit_factor(grid, self.table)
        return None if factor is None else factor.expand(grid.tokens)

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the encoding."""
        self.grid = grid
        self.table = self._formula(grid, self.table.device).to(self.table.dtype)

    def _formula(self, grid: Grid, device: torch.device | None = None, noisy: bool = False) -> Tensor:
        return waves(self.angles(grid, device, noisy), grid, self.layout)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FixedRotary:
        """Compute the table again after a change of dtype, so that it is rounded once, and never below float32."""
        before = self.table.dtype
        nn.Module._apply(self, fn, recurse)
        if self.table.dtype != before:
            wide = torch.promote_types(self.table.dtype, torch.float32)
            self.table = self._formula(self.grid, self.table.device).to(wide)
        return self

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, layout={self.layout}"


class RotaryPosition(Position):
    """A rotary encoding: one rotation for all layers, or one per layer.

    Args:
        encoding: built for the grid, or for a window of it.
        depth: number of layers.
        layers: the number of the first layers that are joined, or the indices of any layers; all by default.
    """

    def __init__(self, encoding: RotaryEncoding, depth: int, layers: Layers = None) -> None:
        super().__init__()
        self.encoding = encoding
        self.depth = depth
        self.joined = joined_layers(depth, layers)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the rotation of each layer for `grid`, or for its windows."""
        grid = grid.within
        scale = self.encoding.query_scale(grid)
        joined = [LayerPosition(rotary=one, query_scale=scale) for one in self.encoding.rotations(grid)]
        joined = joined * len(self.joined) if len(joined) == 1 else joined
        return spread(joined, self.joined, self.depth)

    def set_grid(self, grid: Grid) -> None:
        """Compute the rotations for `grid`, or for its windows."""
        self.encoding.set_grid(grid.within)

    def published_names(self) -> dict[str, str]:
        """Map `rope.freqs`, timm's name of learned frequencies."""
        return {f"rope.{name}": f"encoding.{name}" for name, _ in self.encoding.named_parameters()}


def check_head_dim(head_dim: int, multiple: int, why: str) -> None:
    """Check that the channels per head can be divided.

    Raises:
        ValueError: if they cannot.
    """
    if head_dim < multiple or head_dim % multiple:
        raise ValueError(
            f"`head_dim` must be a multiple of {multiple} with rotary encodings ({why}), got {head_dim}; "
            "it is embed_dim / num_heads."
        )


def geometric(base: float, count: int, device: torch.device | None = None) -> Tensor:
    """Return the frequencies base^(-k / count), k from 0, (count,), float64."""
    return base ** -(torch.arange(count, device=device, dtype=torch.float64) / count)


def axial(first: Tensor, second: Tensor) -> Tensor:
    """Return the vectors (f, 0) of the frequencies `first`, then (0, f) of `second`, (n, 2)."""
    along = torch.stack([first, torch.zeros_like(first)], -1)
    across = torch.stack([torch.zeros_like(second), second], -1)
    return torch.cat([along, across])


def waves(angles: Tensor, grid: Grid, layout: Layout | None) -> Tensor:
    """Turn the angles of patches (..., H W, n) into sines and cosines for each channel of all tokens, (..., N, 2d)."""
    sines, cosines = angles.sin(), angles.cos()
    if grid.prefix:  # an angle of 0
        shape = (*angles.shape[:-2], grid.prefix, angles.shape[-1])
        sines = torch.cat([sines.new_zeros(shape), sines], -2)
        cosines = torch.cat([cosines.new_ones(shape), cosines], -2)
    if layout == "half":
        return torch.cat([sines, sines, cosines, cosines], -1)
    if layout == "interleaved":
        sines, cosines = sines.repeat_interleave(2, -1), cosines.repeat_interleave(2, -1)
    return torch.cat([sines, cosines], -1)
