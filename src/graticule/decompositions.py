"""The decompositions of LaPE: modules that can replace the norm of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from graticule.checks import checked

Decomposition = Literal["w", "scalar_w", "channel_w", "affine_w", "norm", "scalar_norm", "channel_norm", "layer_norm"]


class Scale(nn.Module):
    """gamma * w, with one gamma (`channels=1`) or one per channel; `shift` adds beta."""

    @checked
    def __init__(self, channels: int, shift: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        """Scale x: (N, D) to (N, D)."""
        return x * self.weight if self.bias is None else torch.addcmul(self.bias, x, self.weight)


def layer_norm(dim: int) -> nn.Module:
    """gamma * norm(w) + beta: the complete LayerNorm, with eps 1e-6 as in DeiT."""
    return nn.LayerNorm(dim, 1e-6)


def _norm(dim: int) -> nn.Module:
    return nn.LayerNorm(dim, 1e-6, elementwise_affine=False)


#: Modules that can replace LN_l: LaPE (2023), Table 8; the first version (2022), Table 5.
#: Parameters per layer, in this order: 0, 1, D, 2D, 0, 1, D, 2D.
DECOMPOSITIONS: dict[str, Callable[[int], nn.Module]] = {
    "w": lambda dim: nn.Identity(),
    "scalar_w": lambda dim: Scale(1),
    "channel_w": lambda dim: Scale(dim),
    "affine_w": lambda dim: Scale(dim, shift=True),
    "norm": _norm,
    "scalar_norm": lambda dim: nn.Sequential(_norm(dim), Scale(1)),
    "channel_norm": lambda dim: nn.Sequential(_norm(dim), Scale(dim)),
    "layer_norm": layer_norm,
}
