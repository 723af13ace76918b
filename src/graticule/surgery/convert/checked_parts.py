"""Checks of parts that must be the same throughout a model of timm: norms and activations."""

from __future__ import annotations

from collections.abc import Collection

from timm.layers.activations import GELU
from torch import nn

from graticule.surgery.convert.conversion import refuse


def layer_norm_text(model: nn.Module, fixed: Collection[str] = ()) -> str:
    """Return the LayerNorm of a model as text, with its eps; in and below the modules `fixed` it must be PyTorch's.

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
        ValueError: naming the first that is not.
    """
    for name, module in model.named_modules():
        exact = type(module) is GELU or (type(module) is nn.GELU and module.approximate == "none")
        if name.endswith(".act") and not exact:
            raise refuse(model, name, module, "must be the exact GELU")
