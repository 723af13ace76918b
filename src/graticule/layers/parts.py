"""Norms, activations and MLPs by name, such as `rmsnorm(eps=1e-5)` or `swiglu`, with timm's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.layers import GluMlp, Mlp, SwiGLU, get_act_layer
from torch import nn

from graticule.names import known_name
from graticule.specs import Spec

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


def norm_layer_of(given: str | Norm | None) -> Norm:
    """Return the builder of a norm from its channels, for a callable or a name with options; eps is 1e-6 by default.

    Raises:
        ValueError: if there is no such norm, or it has no such option.
    """
    if callable(given):
        return given
    spec = Spec.parse("layernorm" if given is None else given, "norm_layer")
    kind = NORMS[known_name("norm_layer", spec.name, NORMS)]
    _check_options("norm_layer", spec, ("eps",))
    return partial(kind, **{"eps": 1e-6, **spec.options})


def act_layer_of(given: str | type[nn.Module] | None) -> type[nn.Module] | None:
    """Return the class of an activation: a class or None unchanged, or the class of a name.

    Raises:
        ValueError: if there is no such activation.
    """
    if not isinstance(given, str):
        return given
    found: type[nn.Module] = get_act_layer(known_name("act_layer", given, ACTIVATIONS))
    return nn.GELU if given == "gelu" else found


def build_mlp(
    given: str | Callable[..., nn.Module],
    dim: int,
    hidden: int,
    act_layer: type[nn.Module] | None = None,
    norm_layer: Norm | None = None,
    bias: bool = True,
    drop: float = 0.0,
) -> nn.Module:
    """Build an MLP over D channels.

    Args:
        given: a name of `MLPS`, or a callable with the arguments of timm's MLPs.
        dim: D.
        hidden: hidden channels; in a gated MLP those of the product.
        act_layer: the activation; by default that of the MLP: GELU, or SiLU with a gate.
        norm_layer: builds a norm of the hidden channels; None for no norm.
        bias: whether the linear layers have a bias.
        drop: dropout rate.

    Raises:
        ValueError: if there is no MLP of that name.
    """
    more = {} if act_layer is None else {"act_layer": act_layer}
    if isinstance(given, str):
        packed = known_name("mlp_layer", given, MLPS) == "swiglu_packed"
        given, hidden = MLPS[given], hidden * 2 if packed else hidden
    norm = None if norm_layer is None else for_timm(norm_layer)
    return given(dim, hidden, norm_layer=norm, bias=bias, drop=drop, **more)


def for_timm(norm_layer: Norm) -> Any:
    """Return a builder of a norm for modules of timm, which pass its channels, a device and a dtype."""

    def build(channels: int, **of_timm: Any) -> nn.Module:
        return norm_layer(channels)

    return build


def _check_options(argument: str, spec: Spec, known: tuple[str, ...]) -> None:
    for name in spec.options:
        if name not in known:
            raise ValueError(f"`{argument}` must have no options but {', '.join(known)}, got {spec}.")
