"""The rotary encodings of a grid along other directions than its axes: learned, or spaced by the golden ratio."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from graticule.encodings.forms.coordinates import Coordinates, Noise, spread_directions
from graticule.encodings.forms.rotary import FixedRotary, PlaneRotary, check_head_dim, geometric
from graticule.encodings.forms.scaling import Scaling
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.position.rotation import PairRotation, Rotation
from graticule.registry.fields import Bounded, Depth, Positive, ShareBelowOne, SmallCount


@register_encoding("rope_mixed")
class MixedRope(PlaneRotary):
    r"""Rotates queries and keys by a learned linear function of the position, per channel pair, head and layer.

    .. math:: \theta_{(y, x)} = x\,f^x_{l, h, k} + y\,f^y_{l, h, k}, \quad k < d / 2

    The logits depend on the displacement alone, in any direction. It starts with the frequencies T^(-4k / d) in two
    perpendicular directions, rotated by a random angle per head; on n axes with T^(-2nk / d) in n of them. Prefix
    tokens are not rotated; at another grid the angles per patch are the same, or interpolated. The frequencies have the
    name and shape of timm, (2, depth, heads, d / 2), x before y, the last axis first.

    Reference: Rotary Position Embedding for Vision Transformer (Heo et al., 2024), section 3.2.

    Args:
        head_dim: d, a multiple of 4, or of twice the number of axes.
        base: T, 10 in the paper.
        coordinates: the coordinates of patches.
        noise: noise of the coordinates in training.
        scaling: scaling of the frequencies at other grids; only 'interpolation', as learned frequencies have no order.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"rope_vit": {"base": 10.0}}
    series = "learned"

    def __init__(
        self,
        grid: Grid,
        depth: Depth,
        num_heads: SmallCount,
        head_dim: Bounded,
        base: Positive = 10.0,
        coordinates: Coordinates = Coordinates(),  # noqa: B008
        noise: Noise = Noise(),  # noqa: B008
        scaling: Scaling = Scaling(),  # noqa: B008
    ) -> None:
        axes = len(grid.shape)
        check_head_dim(head_dim, 2 * axes, f"pairs on {axes} axes")
        super().__init__(grid, coordinates, noise, scaling, "interleaved")
        self.head_dim = head_dim
        self.base = base
        self.freqs = nn.Parameter(torch.empty(axes, depth, num_heads, head_dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        axes, *heads, pairs = self.freqs.shape
        lengths = geometric(self.base, pairs // axes, self.freqs.device).to(self.freqs.dtype)
        if axes != 2:
            like = torch.randn(*heads, axes, axes, dtype=torch.float64, device=self.freqs.device)
            directions = torch.linalg.qr(like)[0].movedim(-1, 0).repeat_interleave(len(lengths), -1)
            self.freqs.copy_(directions * lengths.repeat(axes))
            return
        turn = torch.rand(*heads, 1, device=self.freqs.device) * 2 * torch.pi
        angle = torch.cat([turn.expand(-1, -1, len(lengths)), turn.expand(-1, -1, len(lengths)) + torch.pi / 2], -1)
        self.freqs.copy_(torch.stack([angle.cos(), angle.sin()]) * lengths.repeat(2))

    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors (f^y, f^x), (depth, heads, d / 2, axes), float32 at least."""
        freqs = self.freqs.to(torch.promote_types(self.freqs.dtype, torch.float32))
        return torch.stack(freqs.unbind()[::-1], -1)

    def rotations(self, grid: Grid) -> list[Rotation]:
        return [PairRotation(table) for table in self(grid)]


@register_encoding("rope_golden_gate")
class GoldenGateRope(FixedRotary):
    r"""Rotates each channel pair by the position along its own direction; the directions cover the circle evenly.

    .. math:: \theta_i = \omega_k (x \cos \varphi_i + y \sin \varphi_i), \quad
              \varphi_i = i\, \pi (\sqrt{5} - 1) / 2, \quad i = h\, d / 2 + k

    for pair k of head h. On other numbers of axes the directions
    cover the sphere evenly. The frequencies :math:`\omega_k` are geometric from the lowest to the
    highest, and the first ones may be zero. Coordinates are in [-1, 1], scaled to keep the aspect ratio. Pairs are (i,
    i + d / 2). Nothing is learned. Prefix tokens are not rotated.

    Reference: On N-dimensional Rotary Positional Embeddings (Xiong, 2025), golden gate RoPE.

    Args:
        head_dim: d, a multiple of 2.
        lowest: the lowest nonzero frequency, in radians per unit of the coordinates.
        highest: the highest frequency.
        zeros: fraction of frequencies that are zero.
        coordinates: the coordinates of patches.
        noise: noise of the coordinates in training.
        scaling: scaling of the frequencies at other grids, for coordinates in patches.
    """

    series = "free"

    def __init__(
        self,
        grid: Grid,
        num_heads: SmallCount,
        head_dim: Bounded,
        lowest: Positive = 0.2,
        highest: Positive = 20.0,
        zeros: ShareBelowOne = 0.0,
        coordinates: Coordinates = Coordinates("area"),  # noqa: B008
        noise: Noise = Noise(),  # noqa: B008
        scaling: Scaling = Scaling(),  # noqa: B008
    ) -> None:
        check_head_dim(head_dim, 2, "pairs of channels")
        if lowest > highest:
            raise ValueError(f"`lowest` must be at most `highest`, got {lowest} and {highest}.")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.lowest, self.highest, self.zeros = lowest, highest, zeros
        super().__init__(grid, coordinates, noise, scaling, "half")

    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors (f^y, f^x), (h, d / 2, axes), float64."""
        pairs = self.head_dim // 2
        still = round(self.zeros * pairs)
        share = torch.linspace(0, 1, pairs - still, device=device, dtype=torch.float64)
        lengths = torch.cat([share.new_zeros(still), self.lowest * (self.highest / self.lowest) ** share])
        index = torch.arange(self.num_heads * pairs, device=device, dtype=torch.float64).unflatten(0, (-1, pairs))
        if (axes := len(self.grid.shape)) == 2:
            angle = index * (math.pi * (math.sqrt(5) - 1) / 2)
            return torch.stack([angle.sin(), angle.cos()], -1) * lengths[:, None]
        return spread_directions(index, axes) * lengths[:, None]
