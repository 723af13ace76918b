"""Relative biases that a small MLP computes from the displacement, on a logarithmic scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.encodings.forms.bias import PatchBias
from graticule.position.grid import Grid
from graticule.position.position import init_table, register_encoding
from graticule.registry.fields import ShareBelowOne, SmallCount


@register_encoding("mlp_bias")
class MlpBias(PatchBias):
    r"""Adds a bias that a small MLP computes from the logarithm of the displacement, in patches.

    .. math:: b_{h, i, j} = G_h(s(y_i - y_j), s(x_i - x_j)), \quad s(t) = sign(t) \ln(1 + |t|)

    Unlike `continuous_bias` the displacement is not divided by the size of the grid, and the bias is not bounded: at
    another grid small displacements have the same bias, and larger ones are extrapolated. Prefix tokens get no bias.

    Reference: timm's `vit_relpos` models (Wightman, 2022), type 'mlp' with mode 'cr'.

    Args:
        hidden: hidden units of the MLP.
        drop_rate: dropout on the hidden units; 0.125 in timm.
    """

    crops = True

    def __init__(
        self, grid: Grid, num_heads: SmallCount, hidden: SmallCount = 128, drop_rate: ShareBelowOne = 0.0
    ) -> None:
        super().__init__(grid, num_heads)
        self.drop_rate = drop_rate
        self.fc1 = nn.Linear(len(grid.shape), hidden)
        self.fc2 = nn.Linear(hidden, num_heads)

    def coordinates(self, grid: Grid) -> Tensor:
        """Return s of the displacement on each axis, (2H - 1, 2W - 1, 2) in an image."""
        weight = self.fc1.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        t = grid.unique_offsets(weight.device)
        return (t.sign() * t.abs().to(wide).log1p()).to(weight.dtype)

    def patch_bias(self, grid: Grid) -> Tensor:
        units = self.fc1(self.coordinates(grid).flatten(0, -2)).relu()  # (displacements, hidden)
        table = self.fc2(F.dropout(units, self.drop_rate, self.training))  # (displacements, heads)
        return grid.expand_offsets(table.T)

    def published_names(self, name: str) -> tuple[str, ...]:
        return (f"rel_pos.mlp.{name}",)


@register_encoding("shared_mlp_bias")
class SharedMlpBias(MlpBias):
    """Shares the network of `mlp_bias` among all layers, as timm's `vit_srelpos` models."""

    joinable_as = None
    shared = True


@register_encoding("continuous_bias")
class ContinuousBias(PatchBias):
    r"""Adds a bias that a small MLP computes from the displacement on a logarithmic scale (log-CPB).

    .. math:: b_{h, i, j} = 16\,\sigma(G_h(s(y_i - y_j, H), s(x_i - x_j, W))), \quad
              s(t, n) = sign(t) \log_8(1 + 8 |t| / (n - 1))

    Prefix tokens get no bias. H and W remain the sides of the grid that it was built for: at another grid the function
    is evaluated at other displacements, which the logarithm keeps close to the displacements of training.

    Reference: Swin Transformer V2 (Liu et al., 2022), Eq. 3-4 and section 3.3; the sigmoid and the factor 16 are from
    its code. Its attention by cosine is not part of the encoding (`Attention(cosine=True)`). In timm's `vit_relpos`
    models it is the type 'mlp' with 'swin'.

    Args:
        hidden: hidden units of the MLP.
        drop_rate: dropout on the hidden units; 0.125 in timm's `vit_relpos`.
    """

    crops = True

    def __init__(
        self, grid: Grid, num_heads: SmallCount, hidden: SmallCount = 512, drop_rate: ShareBelowOne = 0.0
    ) -> None:
        super().__init__(grid, num_heads)
        self.drop_rate = drop_rate
        # (H, W) is part of the learned function, so it is saved in checkpoints
        self.register_buffer("reference", torch.tensor(grid.shape))
        self.reference: Tensor
        self.cpb_mlp = nn.Sequential(
            nn.Linear(len(grid.shape), hidden), nn.ReLU(inplace=True), nn.Linear(hidden, num_heads, bias=False)
        )
        for layer in self.cpb_mlp:
            if isinstance(layer, nn.Linear):  # as all of Swin V2's code
                init_table(layer.weight, 0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def coordinates(self, grid: Grid) -> Tensor:
        """Return s of the displacement on each axis, (2H - 1, 2W - 1, 2) in an image."""
        weight = next(self.cpb_mlp.parameters())
        wide = torch.promote_types(weight.dtype, torch.float32)
        t = grid.unique_offsets(weight.device).to(wide) / (self.reference - 1).clamp(min=1)
        return (t.sign() * torch.log2(1 + 8 * t.abs()) / 3).to(weight.dtype)  # log to base 8

    def patch_bias(self, grid: Grid) -> Tensor:
        units = self.cpb_mlp[:2](self.coordinates(grid).flatten(0, -2))  # (displacements, hidden)
        table = (
            16 * self.cpb_mlp[2](F.dropout(units, self.drop_rate, self.training)).sigmoid()
        )  # (displacements, heads)
        return grid.expand_offsets(table.T)

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the names of a parameter in timm's `vit_relpos` models and in Swin V2."""
        layers = {"0": "fc1", "2": "fc2"}
        _, layer, leaf = name.split(".")
        return f"rel_pos.mlp.{layers[layer]}.{leaf}", name
