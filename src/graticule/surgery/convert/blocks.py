"""Convert the blocks of timm's transformers to arguments of our ViT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from graticule.surgery.convert.conversion import check_kind, refuse
from graticule.surgery.convert.parts import drop_path, layer_scale, read_attention, read_mlp, same_norm

#: Function that describes a block of timm as arguments of our ViT, with 'drop_path' for its rate of stochastic depth.
Describe = Callable[[Any], dict[str, Any]]


def read_blocks(model: Any, kinds: Mapping[type[nn.Module], Describe]) -> dict[str, Any]:
    """Return the blocks of a model as arguments of our ViT.

    Args:
        model: the model.
        kinds: the function that describes a block, by the class of the block in timm.

    Raises:
        ValueError: if blocks differ, or have features that ours lack.
    """
    described: list[dict[str, Any]] = []
    for index, block in enumerate(model.blocks):
        check_kind(model, f"blocks.{index}", *kinds)
        described.append(kinds[type(block)](block))
    rates = [found.pop("drop_path") for found in described]
    for index, other in enumerate(described):
        for name, value in other.items():
            if value != described[0].get(name):
                raise refuse(model, f"blocks.{index}", f"{name}={value!r}", f"must have {name}={described[0][name]!r}")
    return {**described[0], "depth": len(described), "drop_path_rate": read_rates(model, rates)}


def pre_norm(*attentions: type[nn.Module]) -> Describe:
    """Return the function that describes a pre-norm block whose attention is of one of these classes."""
    return lambda block: _describe(block, "pre_norm", attentions)


def post_norm(*attentions: type[nn.Module]) -> Describe:
    """Return the function that describes a block with norms after its branches and attention of these classes."""
    return lambda block: _describe(block, "post_norm", attentions)


def _describe(block: Any, kind: str, attentions: tuple[type[nn.Module], ...]) -> dict[str, Any]:
    check_kind(block, "attn", *attentions)
    scales = layer_scale(block)
    return {
        "block_layer": kind,
        "init_values": scales if any(scales) else None,
        "drop_path": drop_path(block.drop_path1),
        **join_parts(block, same_norm(block, ["norm1", "norm2"]), read_attention(block), read_mlp(block)),
    }


def join_parts(block: nn.Module, norm: str | None, attn: dict[str, Any], mlp: dict[str, Any]) -> dict[str, Any]:
    """Combine attention and MLP, whose biases, dropout and norms must be the same.

    Raises:
        ValueError: if they are not.
    """
    for name in ("proj_bias", "proj_drop_rate"):
        if attn[name] != mlp[name]:
            raise refuse(block, f"mlp ({name})", mlp[name], f"must be {attn[name]!r} as that of attention")
    inner = {"qk_norm": attn.pop("qk"), "scale_attn_norm": attn.pop("inner"), "scale_mlp_norm": mlp.pop("norm")}
    for name, own in inner.items():
        if own not in (None, norm):
            raise refuse(block, name, own, f"must be {norm} as the other norms")
    return {**attn, **mlp, "norm_layer": norm, **{name: own is not None for name, own in inner.items()}}


def read_rates(model: nn.Module, rates: list[float]) -> float:
    """Return the rate of stochastic depth of the last block, to which it grows linearly from 0.

    Raises:
        ValueError: if it does not.
    """
    expected = torch.linspace(0, rates[-1], len(rates), device="cpu").tolist()
    if any(abs(own - rule) > 1e-6 for own, rule in zip(rates, expected, strict=True)):
        raise refuse(model, "drop_path", rates, "must grow linearly from 0")
    return rates[-1]


def vit_arguments(model: nn.Module, trunk: dict[str, Any], blocks: dict[str, Any]) -> dict[str, Any]:
    """Combine the trunk and the blocks, whose norms and activations must be the same.

    Raises:
        ValueError: if they are not.
    """
    if trunk["norm_layer"] not in (None, blocks["norm_layer"]):
        raise refuse(model, "norm", trunk["norm_layer"], f"must be {blocks['norm_layer']} as those of the blocks")
    act = trunk.pop("pool_act", blocks["act_layer"])
    if act != blocks["act_layer"]:
        raise refuse(model, "attn_pool.mlp.act", act, f"must be {blocks['act_layer']} as that of the blocks")
    return {**trunk, **blocks}


def prefixed(layers: Iterable[int], names: Mapping[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
    """Extend names of the tensors of a block to the same tensors of all blocks."""
    found: dict[str, str | tuple[str, ...]] = {}
    for layer in layers:
        for theirs, own in names.items():
            at = f"blocks.{layer}."
            found[at + theirs] = at + own if isinstance(own, str) else tuple(at + one for one in own)
    return found
