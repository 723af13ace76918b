"""The relative bias of timm's `vit_relpos` models: a small MLP of logarithmic displacements."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import PatchBias
from graticule.position.grid import Grid
from graticule.position.position import register_encoding


@register_encoding("mlp_bias")
class MlpBias(PatchBias):
    r"""Adds a bias that a small MLP computes from the logarithm of the displacement, in patches.

    .. math:: b_{h, i, j} = G_h(s(y_i - y_j), s(x_i - x_j)), \quad s(t) = sign(t) \ln(1 + |t|)

    Unlike `continuous_bias` the displacement is not divided by the size of the grid, and the bias is not bounded: at
    another grid small displacements have the same bias, and larger ones are extrapolated. Prefix tokens get no bias.

    Reference: timm's `vit_relpos` models (Wightman, 2022), type 'mlp' with mode 'cr'. Its dropout of 0.125 on the
    hidden units is omitted.

    Args:
        grid: the grid that the encoding is built for; nothing depends on it.
        num_heads: h.
        hidden: hidden units of the MLP.
    """

    crops = True

    def __init__(self, grid: Grid, num_heads: int, hidden: int = 128) -> None:
        super().__init__()
        self.grid = grid
        self.num_heads = num_heads
        self.fc1 = nn.Linear(len(grid.shape), hidden)
        self.fc2 = nn.Linear(hidden, num_heads)

    def coordinates(self, grid: Grid) -> Tensor:
        """Return s of the displacement on each axis, (2H - 1, 2W - 1, 2) in an image."""
        weight = self.fc1.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        t = grid.lags(weight.device)
        return (t.sign() * t.abs().to(wide).log1p()).to(weight.dtype)

    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid`, (num_heads, H * W, H * W)."""
        table = self.fc2(self.fc1(self.coordinates(grid).flatten(0, -2)).relu())  # (displacements, heads)
        return grid.of_lags(table.T)

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the name of a parameter in timm."""
        return (f"rel_pos.mlp.{name}",)

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, num_heads={self.num_heads}"


@register_encoding("shared_mlp_bias")
class SharedMlpBias(MlpBias):
    """Shares the network of `mlp_bias` among all layers, as timm's `vit_srelpos` models."""

    joined = None
    shared = True
