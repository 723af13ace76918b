"""KERPLE: a bias that decreases with the distance by a learned logarithm or power per head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import PatchBias
from graticule.position.grid import Grid
from graticule.position.position import register_encoding


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
        grid: the grid that the encoding is built for; nothing depends on it.
        num_heads: h.
        kernel: 'log' or 'power'.
    """

    crops = True

    def __init__(self, grid: Grid, num_heads: int, kernel: Literal["log", "power"] = "log") -> None:
        super().__init__()
        self.grid = grid
        self.num_heads, self.kernel = num_heads, kernel
        self.raw_r1 = nn.Parameter(torch.empty(num_heads))
        self.raw_r2 = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize r_1 and r_2."""
        one, two = (torch.rand_like(self.raw_r1) for _ in range(2))
        if self.kernel == "log":
            self.raw_r1.copy_((2 * one).clamp(min=0.01).log())
            self.raw_r2.copy_(two.clamp(min=0.01).log())
        else:
            self.raw_r1.copy_(one.clamp(min=0.01).log())
            self.raw_r2.copy_(two.clamp(0.005, 0.995).logit())

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

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, num_heads={self.num_heads}, kernel={self.kernel!r}"
