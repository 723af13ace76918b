"""A relative bias that a small MLP computes from the displacement, on a logarithmic scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import PatchBias
from graticule.position.grid import Grid
from graticule.position.position import register_encoding


@register_encoding("continuous_bias")
class ContinuousBias(PatchBias):
    r"""Adds a bias that a small MLP computes from the displacement on a logarithmic scale (log-CPB).

    .. math:: b_{h, i, j} = 16\,\sigma(G_h(s(y_i - y_j, H), s(x_i - x_j, W))), \quad
              s(t, n) = sign(t) \log_8(1 + 8 |t| / (n - 1))

    Prefix tokens get no bias. H and W remain those of the grid that it was built for: at another grid the function is
    evaluated at other displacements, which the logarithm keeps close to those of training.

    Reference: Swin Transformer V2 (Liu et al., 2022), Eq. 3-4 and section 3.3; the sigmoid and the factor 16 are from
    its code. Its attention by cosine is not part of the encoding (`Attention(cosine=True)`). In timm's `vit_relpos`
    models it is the type 'mlp' with 'swin'.

    Args:
        grid: the grid that the encoding is built for.
        num_heads: h.
        hidden: hidden units of the MLP.
    """

    crops = True

    def __init__(self, grid: Grid, num_heads: int, hidden: int = 512) -> None:
        super().__init__()
        self.grid = grid
        self.num_heads = num_heads
        # (H, W) is part of the learned function, so it is saved in checkpoints
        self.register_buffer("reference", torch.tensor(grid.shape))
        self.reference: Tensor
        self.cpb_mlp = nn.Sequential(
            nn.Linear(len(grid.shape), hidden), nn.ReLU(inplace=True), nn.Linear(hidden, num_heads, bias=False)
        )

    def coordinates(self, grid: Grid) -> Tensor:
        """Return s of the displacement on each axis, (2H - 1, 2W - 1, 2) in an image."""
        weight = next(self.cpb_mlp.parameters())
        wide = torch.promote_types(weight.dtype, torch.float32)
        t = grid.lags(weight.device).to(wide) / (self.reference - 1).clamp(min=1)
        return (t.sign() * torch.log2(1 + 8 * t.abs()) / 3).to(weight.dtype)  # log to base 8

    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid`, (num_heads, H * W, H * W)."""
        table = 16 * self.cpb_mlp(self.coordinates(grid).flatten(0, -2)).sigmoid()  # (displacements, heads)
        return grid.of_lags(table.T)

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the names of a parameter in timm's `vit_relpos` models and in Swin V2."""
        layers = {"0": "fc1", "2": "fc2"}
        _, layer, leaf = name.split(".")
        return f"rel_pos.mlp.{layers[layer]}.{leaf}", name

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, num_heads={self.num_heads}"
