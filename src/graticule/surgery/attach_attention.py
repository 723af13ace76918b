"""Access of position to the attention of a block of another library, or the reason for which there is none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Survey:
    """Tokens and blocks of a module, found by one forward pass.

    blocks: names of the blocks, in order.
    norm: name, in a block, of the norm before attention.
    image: (height, width) of the input images, in pixels; None for other inputs.
    tokens: N.
    dim: D.
    sequence_first: whether tokens are (N, B, D) instead of (B, N, D).
    patches: name of the convolution that cuts images into patches; None if there is none.
    shape: (H, W) of its output.
    receivers: names, in the first block, of the modules called with the normalized tokens, in order of their calls.
    called: names, in the first block, of all modules that are called.
    """

    blocks: tuple[str, ...]
    norm: str
    image: tuple[int, int] | None
    tokens: int
    dim: int
    sequence_first: bool
    patches: str | None
    shape: tuple[int, int] | None
    receivers: tuple[str, ...]
    called: frozenset[str]


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of a call."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


@dataclass
class Removed:
    """A parameter or buffer that zeros replace, with the information for restoring it.

    name: its name in the module.
    value: the parameter or buffer.
    order: the names of the parameters, or buffers, of its owner, in order.
    persistent: whether a buffer was in the state dict; None for a parameter.
    """

    name: str
    value: Tensor
    order: tuple[str, ...]
    persistent: bool | None


def take_out(module: nn.Module, name: str) -> Removed:
    """Replace a parameter or buffer by zeros that are not in the state dict."""
    owner, leaf = _owner(module, name)
    parameter = leaf in owner._parameters
    holder: Any = owner._parameters if parameter else owner._buffers
    persistent = None if parameter else leaf not in owner._non_persistent_buffers_set
    removed = Removed(name, holder[leaf], tuple(holder), persistent)
    if parameter:
        del owner._parameters[leaf]
    owner.register_buffer(leaf, torch.zeros_like(removed.value, requires_grad=False), persistent=False)
    return removed


def put_back(module: nn.Module, removed: Removed) -> None:
    """Restore a parameter or buffer, on the device and with the dtype of the zeros."""
    owner, leaf = _owner(module, removed.name)
    zeros = owner.get_buffer(leaf)
    del owner._buffers[leaf]
    owner._non_persistent_buffers_set.discard(leaf)
    removed.value.data = removed.value.data.to(zeros.device, zeros.dtype)
    holder: Any = owner._parameters if removed.persistent is None else owner._buffers
    values = {**holder, leaf: removed.value}
    order = [name for name in removed.order if name in values]
    order += [name for name in values if name not in order]
    holder.clear()
    holder.update((name, values[name]) for name in order)
    if removed.persistent is False:
        owner._non_persistent_buffers_set.add(leaf)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


#: Names of the projections to queries, keys and values in public models.
_PROJECTIONS = (
    *(("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("to_q", "to_k", "to_v")),
    *(("wq", "wk", "wv"), ("query_proj", "key_proj", "value_proj")),
)
#: Names of the number of heads in public models.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")

#: Layout of queries in the output of a module: (B, N, h * d); (B, N, 3 * h * d), before keys and values; (B, h, N, d).
Queries = Literal["channels", "fused", "heads"]


class Ways(NamedTuple):
    """Access of position to the attention of a block. Names are relative to the block.

    attention: the module that receives the normalized tokens; None if there is none.
    multihead: whether it is PyTorch's, which takes queries, keys and values as arguments.
    queries_keys: the two projections to queries and to keys.
    fused: the single projection to queries, keys and values, in this order.
    mask: name of the argument of `attention` that is added to the logits, (B, h, N, N) or broadcast to it.
    scale: the last module before the logits whose output has the queries, and their layout in it.
    num_heads: h; None if it was not found.
    why: for `queries_keys`, `bias` and `query_scale`, the reason if there is no access.
    """

    attention: str | None
    multihead: bool = False
    queries_keys: tuple[str, str] | None = None
    fused: str | None = None
    mask: str | None = None
    scale: tuple[str, Queries] | None = None
    num_heads: int | None = None
    why: dict[str, str] = {}  # noqa: RUF012 (never changed)


def find_ways(block: nn.Module, found: Survey) -> Ways:
    """Find the access of position to the attention of `block`, the first block of a surveyed module."""
    if not found.receivers:
        reason = "no module of the block is called with the normalized tokens"
        return Ways(None, why=dict.fromkeys(("queries_keys", "bias", "query_scale"), reason))
    attention = found.receivers[0]
    module = block.get_submodule(attention)
    timm = type(module).__module__.startswith("timm.")
    why: dict[str, str] = {}
    multihead = isinstance(module, nn.MultiheadAttention)
    by_leaf = {name.rpartition(".")[2]: name for name in found.receivers}
    names = next((names for names in _PROJECTIONS if all(name in by_leaf for name in names)), None)
    pair = None if names is None else (by_leaf[names[0]], by_leaf[names[1]])
    fused = by_leaf.get("qkv") if timm else None
    if not (multihead or pair or fused):
        why["queries_keys"] = (
            f"{type(module).__name__} is not called with queries and keys, and calls no separate projections to them "
            f"(such as {', '.join('/'.join(each) for each in _PROJECTIONS[:3])}, or timm's qkv)"
        )
    mask, why_mask = _mask(module, multihead)
    if why_mask:
        why["bias"] = why_mask
    scale = None if multihead else _scale(found, attention, pair, fused, timm)
    if scale is None:
        why["query_scale"] = f"{type(module).__name__} gives no access to its queries between projection and logits"
    return Ways(attention, multihead, pair, fused, mask, scale, _num_heads(module), why)


def _mask(module: nn.Module, multihead: bool) -> tuple[str | None, str]:
    """Return the name of the argument that is added to the logits, or the reason for which there is none."""
    arguments = inspect.signature(module.forward).parameters
    kind = type(module).__name__
    if multihead or "attn_mask" in arguments:
        return "attn_mask", ""
    if "attention_mask" in arguments and type(module).__module__.startswith("transformers."):
        how = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
        if how in ("eager", "sdpa"):
            return "attention_mask", ""
        return None, f"attention {how!r} of {kind} adds nothing to its logits; load the model with 'sdpa' or 'eager'"
    return None, f"{kind} has no argument `attn_mask` that is added to its logits"


def _scale(
    found: Survey, attention: str, pair: tuple[str, str] | None, fused: str | None, timm: bool
) -> tuple[str, Queries] | None:
    """Return the last module before the logits whose output has the queries; None if it is unknown."""
    norms = [name for name in found.called if name.startswith(f"{attention}.") and "norm" in name.rpartition(".")[2]]
    if timm and (of_queries := f"{attention}.q_norm") in norms:
        return of_queries, "heads"
    if norms:
        return None
    if pair is not None:
        return pair[0], "channels"
    return None if fused is None else (fused, "fused")


def _num_heads(module: nn.Module) -> int | None:
    """Return the number of heads, an attribute of the attention or of a part of it with one of the usual names."""
    for part in module.modules():
        for name in _HEADS:
            heads = getattr(part, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool):
                return heads
    return None
