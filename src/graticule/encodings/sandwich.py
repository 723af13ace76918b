"""Sandwich: the inner product of two sinusoidal encodings as a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.bias import LowRank
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.registry.fields import Positive, SmallCount
from graticule.system.memory import check_memory


@register_encoding("sandwich")
class Sandwich(BiasEncoding):
    r"""Adds the inner product of two sinusoidal encodings to the attention logits, scaled per head (Sandwich).

    .. math:: b_{h, i, j} = \frac{n}{8 h} \sum_{k=1}^{c / 2} (\cos \omega_k (y_i - y_j) - 1) +
              (\cos \omega_k (x_i - x_j) - 1), \quad \omega_k = T^{-2k / c}, \quad h = 1 \dots n

    for n heads; c is `channels` and T `temperature`. Nothing is learned. The paper defines it in one dimension, and in
    a text it is the paper's. In two dimensions it is the sum of one bias for rows and one for columns, as is the inner
    product of two 2-D sinusoidal encodings; further axes are added likewise. Subtracting 1 changes nothing in a text;
    here it makes the bias zero at distance 0 and negative elsewhere, so that prefix tokens, which get no bias, are not
    at a disadvantage. It is computed for any grid.

    Each wave of an axis is a product of two channels, so up to 6 `channels` need 2 `channels` + 1 more channels per
    head instead of a table on large grids (`LowRank`).

    Reference: Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis (Sandwich, Chi et
    al., 2023), section 5; the scale per head and the subtraction as in NVIDIA's NeMo.

    Args:
        channels: number of channels c of an axis, a multiple of 2.
        temperature: T.
    """

    shared = True

    crops = True

    def __init__(
        self, grid: Grid, num_heads: SmallCount, channels: SmallCount = 128, temperature: Positive = 10_000.0
    ) -> None:
        super().__init__(grid, num_heads)
        if channels % 2:
            raise ValueError(f"`channels` must be a multiple of 2 (sin and cos), got {channels}.")
        self.channels, self.temperature = channels, temperature
        self.omega: Tensor
        self.scales: Tensor
        self.init_non_persistent_buffers()

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        wave = torch.arange(1, self.channels // 2 + 1, dtype=torch.float64, device=device)
        head = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device=device)
        omega, scales = self.temperature ** (-2 * wave / self.channels), self.num_heads / (8 * head)
        return {"omega": omega.to(dtype), "scales": scales.to(dtype)}

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), nowhere positive."""
        waves, _ = self._waves(grid)
        # the inner product of all waves at two patches, (H * W, H * W)
        bias = waves @ waves.T - waves.shape[1] / 2
        return grid.with_prefix_bias((self.scales[:, None, None] * bias).to(self.scales.dtype))

    def low_rank(self, grid: Grid) -> LowRank:
        """Return the same in two factors of 2 `channels` + 1 channels."""
        waves, scales = self._waves(grid)
        ones = torch.ones_like(waves[:, :1])
        queries = scales[:, None, None] * torch.cat([waves, -waves.shape[1] / 2 * ones], -1)
        return LowRank(grid.with_prefix_rows(queries), grid.with_prefix_rows(torch.cat([waves, ones], -1)[None]))

    def _waves(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return cos and sin of all angles of each patch, (H * W, 2 channels), and the scales, in float32 at least."""
        wide = torch.promote_types(self.omega.dtype, torch.float32)
        place = grid.coordinates(self.omega.device).to(wide)
        size = 4 * wide.itemsize * grid.patches * self.omega.numel()  # angles, their cos and sin, and those joined
        check_memory("grid", f"the waves of its {grid.patches} patches", size, self.omega.device)
        angle = (place[..., None] * self.omega.to(wide)).flatten(1)  # (H * W, channels)
        return torch.cat([angle.cos(), angle.sin()], -1), self.scales.to(wide)
