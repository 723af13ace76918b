"""Rotary encodings in two dimensions: queries and keys are turned by angles that grow with the place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graticule.checks import checked
from graticule.encodings.base import Encoding, Position, Site, register_encoding
from graticule.grid import Grid
from graticule.joining import Joining
from graticule.layer_position import LayerPosition
from graticule.rotation import PairRotation


class RotaryEncoding(Encoding):
    """Makes the angles by which queries and keys are rotated: one table for all layers, or one per layer and head."""

    grid: Grid

    @abstractmethod
    def forward(self, grid: Grid) -> Tensor:
        """Return sines, then cosines, for `grid`, (N, 2d) or (depth, heads, N, 2d)."""

    @abstractmethod
    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that it is built for."""

    @classmethod
    def position(cls, site: Site, joining: Joining, **options: Any) -> Position:
        """Build one for the joined layers."""
        encoding = cls.build(replace(site, depth=joining.layers), site.within, options)
        return RotaryPosition(encoding, site.depth, joining.layers, site.window)


class FixedRotary(RotaryEncoding):
    """Angles given by a formula: nothing is learned, and another grid is computed.

    Computed in float64, kept in float32 at least. Prefix tokens are not turned.
    """

    @checked
    def __init__(self, grid: Grid, head_dim: int, temperature: float) -> None:
        super().__init__()
        self.grid = grid
        self.head_dim = head_dim
        self.temperature = temperature
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("table", self._formula(grid).to(wide), persistent=False)
        self.table: Tensor

    @abstractmethod
    def angles(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Return the angle of every pair of channels at every patch, (H * W, d / 2), float64, in radians."""

    def forward(self, grid: Grid) -> Tensor:
        """Return sines, then cosines, for `grid`, (N, 2d)."""
        return self.table if grid == self.grid else self._formula(grid, self.table.device).to(self.table.dtype)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that it is built for."""
        self.table = self(grid)
        self.grid = grid

    def _formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        return _waves(self.angles(grid, device), grid)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FixedRotary:
        """Compute the table anew behind a change of dtype, so that it is rounded once, and never below float32."""
        before = self.table.dtype
        super()._apply(fn, recurse)
        if self.table.dtype != before:
            wide = torch.promote_types(self.table.dtype, torch.float32)
            self.table = self._formula(self.grid, self.table.device).to(wide)
        return self

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, head_dim={self.head_dim}, temperature={self.temperature}"


class RotaryPosition(Position):
    """A rotary encoding: one table for all layers, or one a layer and head.

    Args:
        encoding: built for the grid, or for a window of it.
        depth: number of layers.
        layers: only the first ones are told; all by default.
        window: side of the windows within which tokens attend; the encoding's grid stays that of a window, whatever
            grid is asked about, until `set_grid`.
    """

    def __init__(
        self, encoding: RotaryEncoding, depth: int, layers: int | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.depth = depth
        self.layers = depth if layers is None else layers
        self.window = window

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the rotation of each layer for `grid`."""
        table = self.encoding(grid if self.window is None else self.encoding.grid)
        tables = [table] * self.layers if table.ndim == 2 else list(table)
        joined = [LayerPosition(rotary=PairRotation(one)) for one in tables]
        return joined + [LayerPosition()] * (self.depth - self.layers)

    def set_grid(self, grid: Grid) -> None:
        """Compute everything for `grid`, or for its windows."""
        self.encoding.set_grid(grid.window(self.window))

    def published_names(self) -> dict[str, str]:
        """`rope.freqs`, as timm has learned frequencies."""
        return {f"rope.{name}": f"encoding.{name}" for name, _ in self.encoding.named_parameters()}


@register_encoding("rope")
class AxialRotary(FixedRotary):
    r"""Rotates half of the channel pairs of queries and keys by the row, half by the column; nothing is learned.

    .. math:: \theta_{(y, x)} = (y\,\omega_k, x\,\omega_k), \quad \omega_k = T^{-4k / d}, \quad k < d / 4

    A query and a key so meet at the difference of their angles: the logits depend on the displacement alone.
    Prefix tokens are not turned. At another grid the angles a patch stay as they are, or with `interpolate`
    those of the whole grid do. Computed in float64, kept in float32 at least; timm's computes in float32.

    Reference: RoFormer (Su et al., 2021), Eq. 34; an axis each as in Rotary Position Embedding for Vision
    Transformer (Heo et al., 2024), section 3.1, whose T = 100 is the default.

    Args:
        grid: the grid that the encoding is built for.
        head_dim: d, a multiple of 4.
        temperature: T.
        interpolate: whether another grid is squeezed or stretched to the one that it was made with.
    """

    @checked
    def __init__(self, grid: Grid, head_dim: int, temperature: float = 100.0, interpolate: bool = False) -> None:
        _check(head_dim)
        self.reference = grid
        self.interpolate = interpolate
        super().__init__(grid, head_dim, temperature)

    def angles(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Return the angle of every pair of channels at every patch, (H * W, d / 2), float64, in radians."""
        place = grid.coordinates(device).double()  # (y, x)
        if self.interpolate:
            place = place * (torch.tensor(self.reference.shape) / torch.tensor(grid.shape).double()).to(place.device)
        exponent = torch.arange(0, self.head_dim, 4, device=place.device, dtype=torch.float64) / self.head_dim
        return (place[:, :, None] * self.temperature**-exponent).flatten(1)


@register_encoding("rope_mixed")
class MixedRotary(RotaryEncoding):
    r"""Rotates queries and keys by a learned linear function of the position, per channel pair, head and layer.

    .. math:: \theta_{(y, x)} = x\,f^x_{l, h, k} + y\,f^y_{l, h, k}, \quad k < d / 2

    The logits depend on the displacement alone, which need not lie along an axis. It starts with the speeds
    T^(-4k / d) in two directions at a right angle, turned by a random angle a head. Prefix tokens are not turned; at
    another grid the angles a patch stay as they are. The frequencies have timm's name and shape.

    Reference: Rotary Position Embedding for Vision Transformer (Heo et al., 2024), section 3.2.

    Args:
        grid: the grid that the encoding is built for.
        depth: number of layers.
        num_heads: h.
        head_dim: d, a multiple of 4.
        temperature: T, 10 in the paper.
    """

    @checked
    def __init__(self, grid: Grid, depth: int, num_heads: int, head_dim: int, temperature: float = 10.0) -> None:
        super().__init__()
        _check(head_dim)
        self.grid = grid
        self.head_dim = head_dim
        self.temperature = temperature
        self.freqs = nn.Parameter(torch.empty(2, depth, num_heads, head_dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the directions anew."""
        exponent = torch.arange(0, self.head_dim, 4) / self.head_dim
        speed = self.temperature**-exponent  # (d / 4,)
        turned = torch.rand(*self.freqs.shape[1:3], 1) * 2 * torch.pi
        angle = torch.cat([turned.expand(-1, -1, len(speed)), turned.expand(-1, -1, len(speed)) + torch.pi / 2], -1)
        self.freqs.copy_(torch.stack([angle.cos(), angle.sin()]) * speed.repeat(2))

    def forward(self, grid: Grid) -> Tensor:
        """Return sines, then cosines, for `grid`, (depth, heads, N, 2d), float32 at least."""
        freqs = self.freqs.to(torch.promote_types(self.freqs.dtype, torch.float32))
        y, x = grid.coordinates(freqs.device).to(freqs.dtype).unbind(-1)
        return _waves(x[:, None] * freqs[0, :, :, None] + y[:, None] * freqs[1, :, :, None], grid)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that it is built for; no parameter depends on it."""
        self.grid = grid

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, freqs={tuple(self.freqs.shape)}"


def _check(head_dim: int) -> None:
    if head_dim < 4 or head_dim % 4:
        raise ValueError(
            f"`head_dim` must be a multiple of 4 with rotary encodings (pairs on two axes), got {head_dim}; "
            "it is embed_dim / num_heads."
        )


def _waves(angle: Tensor, grid: Grid) -> Tensor:
    """Turn the angles of patches (..., H W, d / 2) into sines and cosines of all tokens, (..., N, 2d)."""
    sines, cosines = angle.sin(), angle.cos()
    if grid.prefix:  # an angle of 0
        shape = (*angle.shape[:-2], grid.prefix, angle.shape[-1])
        sines = torch.cat([sines.new_zeros(shape), sines], -2)
        cosines = torch.cat([cosines.new_ones(shape), cosines], -2)
    return torch.cat([sines.repeat_interleave(2, -1), cosines.repeat_interleave(2, -1)], -1)
