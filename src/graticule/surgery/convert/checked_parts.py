"""Parts that must be the same in a whole model of timm to be converted: norms, activations, ratios of channels."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from timm.layers.activations import GELU
from torch import nn

from graticule.surgery.convert.conversion import refuse


def layer_norm_text(model: nn.Module, fixed: Collection[str] = ()) -> str:
    """Return the LayerNorm of a model as text, with its eps; in the modules `fixed`, and below them, it is PyTorch's.

    Raises:
        ValueError: if they differ.
    """
    found: float | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.LayerNorm):
            continue
        expected = 1e-5 if any(name == one or name.startswith(f"{one}.") for one in fixed) else found
        if expected is not None and module.eps != expected:
            raise refuse(model, f"{name}.eps", module.eps, f"must be {expected}")
        found = module.eps if expected is None else found
    return f"layernorm(eps={1e-5 if found is None else found!r})"


def check_gelu(model: nn.Module) -> None:
    """Check that all activations of the MLPs are the exact GELU.

    Raises:
        ValueError: naming the first other one.
    """
    for name, module in model.named_modules():
        exact = type(module) is GELU or (type(module) is nn.GELU and module.approximate == "none")
        if name.endswith(".act") and not exact:
            raise refuse(model, name, module, "must be the exact GELU")


def ratio_of(layer: Any, dim: int) -> float:
    """Return the ratio that makes the output channels of a linear layer from `dim`, rounded down."""
    ratio: float = layer.out_features / dim
    return ratio if int(dim * ratio) == layer.out_features else (layer.out_features + 0.5) / dim
