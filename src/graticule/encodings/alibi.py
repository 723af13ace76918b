"""Penalties on the attention logits that grow with the distance: ALiBi's, and KERPLE's learned ones."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import BiasEncoding, PatchBias, squared_distance_factors
from graticule.position.bias import LowRank
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.registry.fields import NotNegative, SmallCount

Distance = Literal["euclidean", "manhattan", "squared"]
Slopes = tuple[NotNegative, ...] | Literal["learned"] | None


@register_encoding("alibi")
class Alibi(BiasEncoding):
    r"""Subtracts one slope per head times the distance from the attention logits; by default nothing is learned.

    .. math:: b_{h, i, j} = -m_h |p_i - p_j|, \quad m_h = 2^{-8h / n}, \quad h = 1 \dots n

    for n heads, n a power of two. For another number of heads the slopes are the slopes of the largest power of two
    below, then every second slope, from the first, of the power of two above, as in its code. Two heads have 1/16 and
    1/256, which a small grid hardly shows; `slopes` gives others. The paper defines it in one
    dimension, for causal attention; in a text all distances but the squared one are |i - j|. Prefix tokens
    get no bias. It is computed for any grid.

    Distances in two dimensions, and likewise in any other number, in patches:

    - 'euclidean': of CROMA (Fuller et al., 2023), whose 2D-ALiBi has the same slopes.
    - 'manhattan': |dy| + |dx|, so that the bias is the sum of one for rows and one for columns.
    - 'squared': dy^2 + dx^2, as in an ablation of LookHere (Fuller et al., 2024), here with the slopes of ALiBi. On
      large grids it needs four more channels per head instead of a table (`LowRank`).

    Reference: Train Short, Test Long (ALiBi, Press et al., 2022), section 3.

    Args:
        distance: 'euclidean', 'manhattan' or 'squared'.
        slopes: m_h of every head, or 'learned' as logarithms that start at the formula's slopes (default: the
            formula's). In the paper, trained slopes did not extrapolate as well.
    """

    shared = True
    crops = True
    initial: Tensor

    def __init__(
        self, grid: Grid, num_heads: SmallCount, distance: Distance = "euclidean", slopes: Slopes = None
    ) -> None:
        super().__init__(grid, num_heads)
        self.distance = distance
        if slopes is None or slopes == "learned":
            self.initial_slopes = default_slopes(num_heads)
        elif len(slopes) != num_heads:
            raise ValueError(f"`slopes` must be one per head, {num_heads}, got {len(slopes)}.")
        else:
            self.initial_slopes = [float(m) for m in slopes]
        self.init_non_persistent_buffers()
        self.log_slopes = nn.Parameter(torch.empty(num_heads)) if slopes == "learned" else None
        self.reset_parameters()

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"initial": torch.tensor(self.initial_slopes, device=device, dtype=dtype)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.log_slopes is not None:
            self.log_slopes.copy_(self.initial.log())

    @property
    def slopes(self) -> Tensor:
        """Return m_h of every head, (num_heads,)."""
        return self.initial if self.log_slopes is None else self.log_slopes.exp()

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), nowhere positive."""
        wide = torch.promote_types(self.slopes.dtype, torch.float32)
        offsets = grid.offsets(self.slopes.device).to(wide)
        slope = -self.slopes[:, None, None]
        if self.distance == "euclidean":
            bias = slope * offsets.square().sum(-1).sqrt()  # `norm` of one axis on `meta` is wrong in torch 2.11
        elif self.distance == "squared":
            bias = slope * offsets.square().sum(-1)
        else:
            bias = slope * offsets.abs().sum(-1)
        return grid.with_prefix_bias(bias.to(self.slopes.dtype))

    def low_rank(self, grid: Grid) -> LowRank | None:
        """Return the bias of squared distances in two factors of four channels."""
        return squared_distance_factors(grid, -self.slopes) if self.distance == "squared" else None


def default_slopes(num_heads: int) -> list[float]:
    """Return m_h of every head, the steepest first for a power of two."""
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    return slopes + [2 ** (-4 * h / below) for h in range(1, 2 * (num_heads - below), 2)]


@register_encoding("kerple")
class Kerple(PatchBias):
    r"""Subtracts a learned logarithm or power of the distance from the attention logits, two numbers per head (KERPLE).

    .. math:: b_{h, i, j} = -r_{h, 1} \ln(1 + r_{h, 2} |p_i - p_j|) \quad \text{or} \quad
              -r_{h, 1} |p_i - p_j|^{r_{h, 2}}

    with r > 0, and the power at most 2. The paper defines it in one dimension; in a text the distance is
    |i - j|. In several dimensions it is the Euclidean distance, in patches: with it both kernels remain conditionally
    positive definite, on which the paper builds, in any number of dimensions (Schoenberg, 1938).

    As in its code, r_1 of the logarithm and the power start uniform in (0, 2), the others in (0, 1), and none below
    0.01. The code clamps them in every step; here they are learned as logarithms, and the power as 2 times a sigmoid,
    so that they always get a gradient. Prefix tokens get no bias. Nothing is resampled at another grid.

    Reference: KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation (Chi et al., 2022), Eq. 7.

    Args:
        kernel: 'log' or 'power'.
    """

    crops = True

    def __init__(self, grid: Grid, num_heads: SmallCount, kernel: Literal["log", "power"] = "log") -> None:
        super().__init__(grid, num_heads)
        self.kernel = kernel
        self.raw_r1 = nn.Parameter(torch.empty(num_heads))
        self.raw_r2 = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        first, second = (torch.rand_like(self.raw_r1) for _ in range(2))
        if self.kernel == "log":
            self.raw_r1.copy_((2 * first).clamp(min=0.01).log())
            self.raw_r2.copy_(second.clamp(min=0.01).log())
        else:
            self.raw_r1.copy_(first.clamp(min=0.01).log())
            self.raw_r2.copy_(second.clamp(0.005, 0.995).logit())

    def rates(self) -> tuple[Tensor, Tensor]:
        """Return r_1 and r_2, (num_heads,) each, in float32 at least."""
        wide = torch.promote_types(self.raw_r1.dtype, torch.float32)
        first, second = self.raw_r1.to(wide), self.raw_r2.to(wide)
        return first.exp(), second.exp() if self.kernel == "log" else 2 * second.sigmoid()

    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid`, (num_heads, H * W, H * W), nowhere positive."""
        first, second = (rate[:, None, None] for rate in self.rates())
        distance = grid.offsets(first.device).to(first.dtype).norm(dim=-1)
        kernel = torch.log1p(second * distance) if self.kernel == "log" else distance**second
        return (-first * kernel).to(self.raw_r1.dtype)
