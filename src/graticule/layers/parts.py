"""Norms, activations and MLPs by name, such as `rmsnorm(eps=1e-5)` or `swiglu`, with timm's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import GluMlp, Mlp, SwiGLU, get_act_layer
from torch import Tensor, nn

from graticule.registry.checks import known_name
from graticule.registry.specs import Spec

Norm = Callable[[int], nn.Module]

NORMS: dict[str, type[nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
#: Activations of MLPs, by timm's names.
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu")
#: MLPs over channels: two linear layers; with a gate, which is a separate layer or packed with the first.
MLPS: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp,
    "swiglu": SwiGLU,
    "swiglu_packed": partial(GluMlp, act_layer=nn.SiLU, gate_last=False),
}


def norm_layer_of(norm_layer: str | Norm | None) -> Norm:
    """Return the builder of a norm from its channels, for a callable or a name with options; eps is 1e-6 by default."""
    if callable(norm_layer):
        return norm_layer
    spec = Spec.parse("layernorm" if norm_layer is None else norm_layer, "norm_layer")
    kind = NORMS[known_name("norm_layer", spec.name, NORMS)]
    _check_options("norm_layer", spec, ("eps",))
    return partial(kind, **{"eps": 1e-6, **spec.options})


def act_layer_of(act_layer: str | type[nn.Module] | None) -> type[nn.Module] | None:
    """Return the class of an activation: a class or None unchanged, or the class of a name."""
    if not isinstance(act_layer, str):
        return act_layer
    activation: type[nn.Module] = get_act_layer(known_name("act_layer", act_layer, ACTIVATIONS))
    return nn.GELU if act_layer == "gelu" else activation


def build_mlp(
    mlp_layer: str | Callable[..., nn.Module],
    dim: int,
    hidden: int,
    act_layer: type[nn.Module] | None = None,
    norm_layer: Norm | None = None,
    bias: bool = True,
    drop: float = 0.0,
) -> nn.Module:
    """Build an MLP over D channels.

    Args:
        mlp_layer: a name of `MLPS`, or a callable with the arguments of timm's MLPs.
        dim: D.
        hidden: hidden channels; in a gated MLP, channels of the product.
        act_layer: the activation; by default the MLP's: GELU, or SiLU with a gate.
        norm_layer: builds a norm of the hidden channels; None for no norm.
        bias: whether the linear layers have a bias.
        drop: dropout rate.
    """
    more = {} if act_layer is None else {"act_layer": act_layer}
    if isinstance(mlp_layer, str):
        packed = known_name("mlp_layer", mlp_layer, MLPS) == "swiglu_packed"
        mlp_layer, hidden = MLPS[mlp_layer], hidden * 2 if packed else hidden
    norm = None if norm_layer is None else for_timm(norm_layer)
    return mlp_layer(dim, hidden, norm_layer=norm, bias=bias, drop=drop, **more)


def for_timm(norm_layer: Norm) -> Any:
    """Return a builder of a norm for modules of timm, which pass its channels, a device and a dtype."""

    def build(channels: int, **of_timm: Any) -> nn.Module:
        return norm_layer(channels)

    return build


def _check_options(argument: str, spec: Spec, known: tuple[str, ...]) -> None:
    for name in spec.options:
        if name not in known:
            raise ValueError(f"`{argument}` must have no options but {', '.join(known)}, got {spec}.")


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
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(dim, dim, bias=has_bias) for has_bias in (bias, key_bias, bias)
        )

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
    """Build the projection to queries, keys and values of that name."""
    return PROJECTIONS[known_name("qkv_layer", name, PROJECTIONS)](dim, bias)


class TanhLinear(nn.Linear):
    """A linear layer and tanh, the pooler of BERT and of transformers' ViT."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (..., D) to (..., outputs), in [-1, 1]."""
        return super().forward(x).tanh()


#: Builders of classifiers by name, from D and the number of outputs.
HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "linear_no_bias": partial(nn.Linear, bias=False),
    "tanh": TanhLinear,
}


class SequencePool(nn.Linear):
    """Averages the patches with the softmax of a learned score as weights, as in Compact Transformers.

    Reference: Escaping the Big Data Paradigm with Compact Transformers (Hassani et al., 2021), section 3.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Pool tokens x: (B, N, D) to (B, D)."""
        return (super().forward(x).softmax(1).transpose(1, 2) @ x).squeeze(1)
