"""Survey of a module by one forward pass: its blocks, tokens and patches. `attach` relies on nothing else."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graticule.external.flow import Flow
from graticule.external.images import call, evaluating, image_size
from graticule.external.structure import called_blocks, pattern_of
from graticule.surgery.attached import Queries, Survey, Ways, first_tensor

#: Names of the projections to queries, keys and values in public models.
_PROJECTIONS = (
    *(("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("to_q", "to_k", "to_v")),
    *(("wq", "wk", "wv"), ("query_proj", "key_proj", "value_proj")),
)
#: Names of the number of heads in public models.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


def flow_of(module: nn.Module, example: Tensor | Mapping[str, Any]) -> Flow:
    """Return the flow of a call with any input; where the module refuses it, up to that."""
    flow = Flow(module)
    with suppress(Exception):
        flow.run(example)
    return flow


def names_of_blocks(module: nn.Module, flow: Flow, blocks: str | None) -> tuple[str, str]:
    """Return a pattern of the names of the blocks of any module, and the name in a block of the norm of its input.

    They are 'blocks.*' and 'norm1', as in timm, where they are not found. `blocks` is the pattern if it is known.
    """
    names = called_blocks(flow)
    if blocks is not None:
        names = tuple(name for name in flow.called if _pattern(blocks).fullmatch(name))
    if not names or len({pattern_of(name) for name in names}) > 1:
        return "blocks.*", "norm1"
    weight = flow.norms.get(names[0], (None,))[0]
    inside = module.get_submodule(names[0]).named_modules()
    norm = next((own for own, one in inside if weight is not None and getattr(one, "weight", None) is weight), "norm1")
    parent = names[0].rpartition(".")[0]
    return f"{pattern_of(parent)}.*" if parent else "*", norm


def _pattern(blocks: str) -> re.Pattern[str]:
    return re.compile(re.escape(blocks).replace(r"\*", r"[^.]*"))


def added_tables(module: nn.Module, flow: Flow, found: Survey) -> list[str]:
    """Return the names of the parameters and buffers with rows (..., D) that are added to tokens before the blocks."""
    outside = [one for one in flow.meetings if not set(one.within) & set(found.blocks)]
    added = {name for one in outside if one.kind == "added" for name in one.origins}
    tensors = [*module.named_buffers(), *module.named_parameters()]
    of_tokens = [name for name, one in tensors if one.shape[-1:] == (found.dim,) and one.numel() > found.dim]
    return [name for name in of_tokens if name in added]


def find_blocks(module: nn.Module, blocks: str, norm: str) -> list[str]:
    """Return the names of the modules that `blocks` matches, where * stands for one part of a name."""
    found = [name for name, _ in module.named_modules() if name and _pattern(blocks).fullmatch(name)]
    if not found:
        known = "; ".join(_candidates(module)) or "none: no list of blocks of the same class is in it"
        raise ValueError(
            f"`blocks` must match the blocks of {type(module).__name__}, got {blocks!r}, which matches nothing; "
            f"candidates are {known}."
        )
    for name in found:
        block = module.get_submodule(name)
        if norm not in dict(block.named_modules()):
            known = ", ".join(_norms(block)) or "none"
            raise ValueError(
                f"`norm` must be the norm before the attention of each block, got {norm!r}, which {name} "
                f"({type(block).__name__}) does not have; its norms are {known}."
            )
    return found


def make_example(module: nn.Module, grid: tuple[int, int] | None) -> Tensor:
    """Create two black images of the size that the module expects, with its dtype and on its device.

    Args:
        module: the module that gets the images.
        grid: (H, W) in patches, for a module without a recorded size.
    """
    convolution = next((m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    size = image_size(module)
    if size is None and grid is not None and convolution is not None:
        rows, columns = (int(step) for step in convolution.stride[-2:])
        size = grid[0] * rows, grid[1] * columns
    if size is None or convolution is None:
        what = "the size of its images" if convolution is not None else "the shape of its inputs"
        raise ValueError(
            f"`example` must be given for {type(module).__name__}, which does not say {what}: a batch of images, or a "
            "mapping of its keyword arguments."
        )
    weight = convolution.weight
    return torch.zeros(2, convolution.in_channels, *size, device=weight.device, dtype=weight.dtype)


def survey(module: nn.Module, blocks: Sequence[str], norm: str, example: Tensor | Mapping[str, Any]) -> Survey:
    """Call `module` once with `example`, in evaluation mode, and describe the inputs of its blocks.

    Args:
        module: the module; it is not changed.
        blocks: names of its blocks.
        norm: name of the norm in a block.
        example: a tensor, or a mapping of keyword arguments.
    """
    seen = _Seen()
    with ExitStack() as stack:
        stack.enter_context(evaluating(module))
        for handle in seen.watch(module, blocks, norm):
            stack.callback(handle.remove)
        try:
            call(module, example)
        except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
            what = _described(example)
            raise ValueError(
                f"`example` must be what {type(module).__name__} can be called with, got {what}: "
                f"{type(error).__name__}: {str(error).rstrip('.')}."
            ) from error
    return seen.survey(blocks, norm, example)


@dataclass
class _Seen:
    """Observations of hooks in a forward pass."""

    order: list[str] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    normalized: dict[str, Tensor] = field(default_factory=dict)
    pre_norm: dict[str, bool] = field(default_factory=dict)
    maps: list[tuple[str, torch.Size]] = field(default_factory=list)
    receivers: dict[str, list[str]] = field(default_factory=dict)
    called: dict[str, set[str]] = field(default_factory=dict)

    def watch(self, module: nn.Module, blocks: Sequence[str], norm: str) -> Iterator[Any]:
        """Register the hooks, and yield their handles."""
        inside = tuple(f"{name}." for name in blocks)
        for name, each in module.named_modules():
            if isinstance(each, nn.Conv2d | nn.Conv3d) and not name.startswith(inside):
                yield each.register_forward_hook(lambda m, args, out, name=name: self._map(name, out))
        for name in blocks:
            block = module.get_submodule(name)
            yield block.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: self._enter(name, args, kwargs), with_kwargs=True
            )
            for own, each in block.named_modules():
                if own == norm:
                    yield each.register_forward_hook(lambda m, args, out, name=name: self._norm(name, args, out))
                elif own:
                    yield each.register_forward_pre_hook(
                        lambda m, args, kwargs, name=name, own=own: self._call(name, own, args, kwargs),
                        with_kwargs=True,
                    )

    def _map(self, name: str, output: object) -> None:
        if not self.order and isinstance(output, Tensor) and output.ndim in (4, 5):
            self.maps.append((name, output.shape))

    def _enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.order.append(name)
        if (tokens := first_tensor(args, kwargs)) is not None:
            self.inputs[name] = tokens

    def _norm(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        if name not in self.pre_norm:
            self.pre_norm[name] = bool(args) and args[0] is self.inputs.get(name)
            self.normalized[name] = output

    def _call(self, name: str, own: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.called.setdefault(name, set()).add(own)
        normalized = self.normalized.get(name)
        if normalized is not None and any(value is normalized for value in (*args, *kwargs.values())):
            self.receivers.setdefault(name, []).append(own)

    def survey(self, blocks: Sequence[str], norm: str, example: Tensor | Mapping[str, Any]) -> Survey:
        """Check the observations, and return them as a `Survey`."""
        if self.order != list(blocks):
            missing = [name for name in blocks if name not in self.order]
            what = f"{missing[0]} was not called" if missing else f"they were called as {', '.join(self.order[:6])}"
            raise ValueError(
                f"`blocks` must be called one after another, once each, in the order of their names; {what}."
            )
        shapes = list(dict.fromkeys(tuple(self.inputs[name].shape) if name in self.inputs else () for name in blocks))
        wrong = [shape for shape in shapes if len(shape) != 3]
        if wrong:
            raise ValueError(
                f"`blocks` must be called with tokens (B, N, D), got {wrong[0] or 'no tensor'}; attach supports "
                "models whose blocks get a sequence of tokens, not maps or windows."
            )
        if len(shapes) > 1:
            raise ValueError(
                "`blocks` must be on one grid with the same channels, got tokens of "
                f"{' and '.join(map(str, shapes))}; attach does not support pyramids."
            )
        for name in blocks:
            if name not in self.pre_norm:
                raise ValueError(f"`norm` must be called by its block, got {norm!r}, which {name} does not call.")
            if not self.pre_norm[name]:
                raise ValueError(
                    f"`norm` must be applied to the input of its block (pre-norm), got {norm!r}, which {name} applies "
                    "to something else: it is post-norm, or has another norm before attention."
                )
        shape = shapes[0]
        first = example if isinstance(example, Tensor) else first_tensor((), example)
        batch = shape[0] if first is None else first.shape[0]
        sequence_first = shape[0] != batch and shape[1] == batch
        tokens = shape[0] if sequence_first else shape[1]
        maps = [(name, tuple(found[2:])) for name, found in self.maps if math.prod(found[2:]) <= tokens]
        patches, grid = maps[-1] if maps else (None, None)
        image = None if first is None or first.ndim != 4 else (first.shape[2], first.shape[3])
        return Survey(
            blocks=tuple(blocks),
            norm=norm,
            image=image,
            tokens=tokens,
            dim=shape[2],
            sequence_first=sequence_first,
            patches=patches,
            shape=grid,
            receivers=tuple(self.receivers.get(blocks[0], ())),
            called=frozenset(self.called.get(blocks[0], ())),
        )


def _candidates(module: nn.Module) -> list[str]:
    """Return name patterns of candidates for the blocks of a module, with their norms."""
    found = []
    for name, each in module.named_modules():
        children = list(each.children())
        if len(children) > 1 and len({type(child) for child in children}) == 1 and list(children[0].children()):
            norms = ", ".join(_norms(children[0])) or "no norms"
            found.append(f"{name + '.' if name else ''}* ({len(children)} of {type(children[0]).__name__}: {norms})")
    return found


def _norms(block: nn.Module) -> list[str]:
    """Return the names of the norms of a block."""
    return [name for name, each in block.named_modules() if name and "norm" in type(each).__name__.lower()]


def _described(example: Tensor | Mapping[str, Any]) -> str:
    if isinstance(example, Mapping):
        return f"the arguments {', '.join(map(str, example))}"
    return f"a tensor of {tuple(example.shape)}"


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
