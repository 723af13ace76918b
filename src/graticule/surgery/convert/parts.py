"""Convert parts of timm's transformers (norms, activations, MLPs, attention, LayerScale) to arguments of our ViT."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from timm.layers import GluMlp, LayerNorm, LayerScale, Mlp, RmsNorm, SwiGLU
from torch import nn

from graticule.layers.parts import ACTIVATIONS, act_layer_of
from graticule.surgery.convert.conversion import refuse

_LAYER_NORMS, _RMS_NORMS = (nn.LayerNorm, LayerNorm), (nn.RMSNorm, RmsNorm)


def norm_text(owner: nn.Module, attribute: str) -> str | None:
    """Return the name, in this library, of a norm that is an attribute of a module; None for an identity.

    Raises:
        ValueError: if it is another module.
    """
    norm = owner.get_submodule(attribute)
    if isinstance(norm, nn.Identity):
        return None
    if type(norm) not in (*_LAYER_NORMS, *_RMS_NORMS) or norm.weight is None:
        raise refuse(owner, attribute, norm, "must be a LayerNorm or RMSNorm with weights")
    return f"{'layernorm' if type(norm) in _LAYER_NORMS else 'rmsnorm'}(eps={norm.eps})"


def same_norm(owner: nn.Module, attributes: Iterable[str]) -> str | None:
    """Return the name of the norm that is common to those attributes of a module that are norms; None if none is.

    Raises:
        ValueError: if they differ.
    """
    found: str | None = None
    for attribute in attributes:
        text = norm_text(owner, attribute)
        if found is not None and text not in (None, found):
            raise refuse(owner, attribute, text, f"must be {found} as the other norms")
        found = found or text
    return found


def act_text(owner: nn.Module, attribute: str) -> str:
    """Return timm's name of an activation that is an attribute of a module.

    Raises:
        ValueError: if it is another module.
    """
    act = owner.get_submodule(attribute)
    exact = getattr(act, "approximate", "none") == "none"
    for name in ACTIVATIONS:
        kind = act_layer_of(name)
        if type(act) is kind and (name == "gelu") <= exact:
            return name
    if isinstance(act, nn.GELU) and not exact:
        return "gelu_tanh"
    raise refuse(owner, attribute, act, f"must be one of {', '.join(ACTIVATIONS)}")


def trunk_arguments(model: nn.Module, patches: Any) -> dict[str, Any]:
    """Read the arguments for images, classes and channels from a model and its patch embedding, timm's `PatchEmbed`."""
    return {
        "img_size": tuple(patches.img_size),
        "patch_size": tuple(patches.patch_size),
        "in_chans": patches.proj.in_channels,
        "num_classes": model.num_classes,
        "embed_dim": model.embed_dim,
    }


def ratio_of(hidden: int, dim: int) -> float:
    """Return a ratio whose product with `dim`, rounded down, is `hidden`."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else (hidden + 0.5) / dim


def read_mlp(block: nn.Module) -> dict[str, Any]:
    """Return an MLP of timm as arguments of our ViT, with 'norm' for the norm of its hidden channels.

    Raises:
        ValueError: if our ViT has no such MLP.
    """
    mlp: Any = block.get_submodule("mlp")
    kinds: dict[type[nn.Module], str] = {Mlp: "mlp", SwiGLU: "swiglu", GluMlp: "swiglu_packed"}
    if type(mlp) not in kinds:
        raise refuse(block, "mlp", mlp, "must be Mlp, SwiGLU or GluMlp")
    if isinstance(mlp, GluMlp) and mlp.gate_last:
        raise refuse(mlp, "gate_last", True, "must be False")
    first = mlp.fc1_g if isinstance(mlp, SwiGLU) else mlp.fc1
    if not isinstance(first, nn.Linear):
        raise refuse(mlp, "fc1", first, "must be Linear")
    if mlp.fc2.out_features != first.in_features:
        raise refuse(mlp, "fc2.out_features", mlp.fc2.out_features, f"must be {first.in_features}")
    biases = [layer.bias is not None for layer in mlp.modules() if isinstance(layer, nn.Linear)]
    if len(set(biases)) > 1:
        raise refuse(mlp, "fc2.bias", mlp.fc2.bias, "must exist if that of the first layer does")
    if mlp.drop1.p != mlp.drop2.p:
        raise refuse(mlp, "drop1.p", mlp.drop1.p, "must be that of drop2")
    return {
        "mlp_layer": kinds[type(mlp)],
        "mlp_ratio": ratio_of(mlp.fc2.in_features, first.in_features),
        "act_layer": act_text(mlp, "act"),
        "proj_bias": biases[0],
        "proj_drop_rate": mlp.drop1.p,
        "norm": norm_text(mlp, "norm"),
    }


def read_attention(block: nn.Module) -> dict[str, Any]:
    """Return an attention of timm as arguments of our ViT, with 'qk' and 'inner' for its norms.

    Raises:
        ValueError: if our attention lacks a feature of it.
    """
    attn: Any = block.get_submodule("attn")
    if getattr(attn, "gate", None) is not None:
        raise refuse(attn, "gate", attn.gate, "must be None")
    if getattr(attn, "num_kv_groups", 1) != 1:
        raise refuse(attn, "num_kv_groups", attn.num_kv_groups, "must be 1 (as many heads of keys as of queries)")
    if getattr(attn, "k_bias", None) is not None and torch.any(attn.k_bias != 0):
        raise refuse(attn, "k_bias", "a bias", "must be zero")
    width = attn.proj.in_features
    if width != attn.proj.out_features:
        raise refuse(attn, "proj.in_features", width, f"must be {attn.proj.out_features}")
    return {
        **_read_projection(attn),
        "num_heads": attn.num_heads,
        "attn_drop_rate": attn.attn_drop.p,
        "proj_drop_rate": attn.proj_drop.p,
        "proj_bias": attn.proj.bias is not None,
        "qk_scale": None if attn.scale == (width // attn.num_heads) ** -0.5 else attn.scale,
        "qk": same_norm(attn, [name for name in ("q_norm", "k_norm") if hasattr(attn, name)]),
        "inner": norm_text(attn, "norm") if hasattr(attn, "norm") else None,
    }


def _read_projection(attn: Any) -> dict[str, Any]:
    """Return the arguments for the projections to queries, keys and values."""
    if attn.qkv is not None:
        if getattr(attn, "q_bias", None) is not None:
            return {"qkv_layer": "no_key_bias", "qkv_bias": True}
        return {"qkv_layer": "fused", "qkv_bias": attn.qkv.bias is not None}
    bias, key_bias = attn.q_proj.bias is not None, attn.k_proj.bias is not None
    if key_bias and not bias:
        raise refuse(attn, "k_proj.bias", "a bias", "must be None as that of the queries")
    return {"qkv_layer": "separate" if bias == key_bias else "separate_no_key_bias", "qkv_bias": bias}


def layer_scale(block: Any) -> tuple[float, float]:
    """Return the initial values of LayerScale for attention and MLP; 0 if there is none."""
    values = []
    for scale, gamma in (("ls1", "gamma_1"), ("ls2", "gamma_2")):
        module = getattr(block, scale, None)
        if getattr(block, gamma, None) is not None:
            values.append(float(block.init_values) or 1.0)
        else:
            values.append(float(module.init_values) or 1.0 if isinstance(module, LayerScale) else 0.0)
    return values[0], values[1]


def drop_path(module: nn.Module) -> float:
    """Return the rate of stochastic depth of a module; 0 for an identity."""
    return float(getattr(module, "drop_prob", 0.0) or 0.0)
