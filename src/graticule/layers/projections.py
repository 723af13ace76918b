"""Projections to queries, keys and values other than one linear layer; each returns them concatenated, (..., 3D)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.names import known_name


class QueryValueBias(nn.Linear):
    """One matrix, with a bias for queries and values and none for keys, as in BEiT and EVA.

    A bias of the keys adds a constant to all logits of a query, which the softmax cancels, unless keys are rotated or
    normalized.

    Reference: BEiT (Bao et al., 2022), its code.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Project x: (..., D) to (..., 3D)."""
        return F.linear(x, self.weight, torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias]))


class SeparateProjections(nn.Module):
    """One linear layer each for queries, keys and values, as in EVA-02; keys may have no bias.

    Args:
        dim: D.
        bias: whether queries and values have a bias.
        key_bias: whether keys have a bias.
    """

    def __init__(self, dim: int, bias: bool, key_bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=own) for own in (bias, key_bias, bias))

    def forward(self, x: Tensor) -> Tensor:
        """Project x: (..., D) to (..., 3D)."""
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


#: Builders of projections by name, from D and whether there are biases.
PROJECTIONS: dict[str, Callable[[int, bool], nn.Module]] = {
    "fused": lambda dim, bias: nn.Linear(dim, 3 * dim, bias=bias),
    "no_key_bias": lambda dim, bias: QueryValueBias(dim) if bias else nn.Linear(dim, 3 * dim, bias=False),
    "separate": lambda dim, bias: SeparateProjections(dim, bias, bias),
    "separate_no_key_bias": lambda dim, bias: SeparateProjections(dim, bias, False),
}


def build_projection(name: str, dim: int, bias: bool) -> nn.Module:
    """Build the projection to queries, keys and values of that name.

    Raises:
        ValueError: if there is no such projection.
    """
    return PROJECTIONS[known_name("qkv_layer", name, PROJECTIONS)](dim, bias)
