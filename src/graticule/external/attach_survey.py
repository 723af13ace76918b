"""Survey of a module by one forward pass: its blocks, tokens and patches. `attach` relies on nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graticule.external.images import image_size
from graticule.external.structure import called_blocks, pattern_of
from graticule.external.tracer import PositionTracer
from graticule.surgery.attached import Queries, Survey, Ways

#: Names of the projections to queries, keys and values in public models, such as q_proj, query, to_q and wq.
_PROJECTION = re.compile(r"(?:to_|w)?([qkv])(?:(?<=q)uery|(?<=k)ey|(?<=v)alue)?(?:_proj)?")
#: Names of the number of heads in public models.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")

Example = Tensor | Mapping[str, Any]


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
    if isinstance(convolution, nn.Conv3d):
        size = None  # of a film
    if size is None or convolution is None:
        what = "the size of its images or films" if convolution is not None else "the shape of its inputs"
        raise ValueError(
            f"`example` must be given for {type(module).__name__}, which does not say {what}: a batch of them, or a "
            "mapping of its keyword arguments."
        )
    weight = convolution.weight
    return torch.zeros(2, convolution.in_channels, *size, device=weight.device, dtype=weight.dtype)


def survey(
    module: nn.Module, example: Example, blocks: str | None = None, norm: str | None = None
) -> tuple[Survey, str, list[str]]:
    """Call `module` once with `example`, in evaluation mode, and describe the inputs of its blocks.

    Args:
        module: the module; it is not changed.
        example: a tensor, or a mapping of keyword arguments.
        blocks: pattern of the names of its blocks; found by default.
        norm: name of the norm in a block; found by default.

    Returns:
        The survey, the pattern of the names of the blocks, and the names of the parameters and buffers with rows
        (..., D) that are added to tokens before the blocks.
    """
    flow, problem = PositionTracer(module, modules=True), None
    try:
        flow.run(example)
    except Exception as error:  # any error of another library
        problem = error
    blocks, norm = _names_of_blocks(module, flow, blocks, norm)
    names = _find_blocks(module, blocks, norm)
    if problem is not None:
        what = f"the arguments {', '.join(map(str, example))}"
        if isinstance(example, Tensor):
            what = f"a tensor of {tuple(example.shape)}"
        raise ValueError(
            f"`example` must be what {type(module).__name__} can be called with, got {what}: "
            f"{type(problem).__name__}: {str(problem).rstrip('.')}."
        ) from problem
    found = _survey(flow, names, norm, example)
    outside = [meeting for meeting in flow.meetings if not set(meeting.within) & set(names)]
    added = {name for meeting in outside if meeting.kind == "added" for name in meeting.origins}
    tensors = [*module.named_buffers(), *module.named_parameters()]
    rows = [name for name, value in tensors if value.shape[-1:] == (found.dim,) and value.numel() > found.dim]
    return found, blocks, [name for name in rows if name in added]


def _names_of_blocks(module: nn.Module, flow: PositionTracer, blocks: str | None, norm: str | None) -> tuple[str, str]:
    """Return a pattern of the names of the blocks, and the name in a block of the norm of its input, unless given.

    They are 'blocks.*' and 'norm1', as in timm, where they are not found.
    """
    names = called_blocks(flow)
    if blocks is not None:
        names = tuple(name for name in flow.called if _pattern(blocks).fullmatch(name))
    if not names or len({pattern_of(name) for name in names}) > 1:
        return blocks or "blocks.*", norm or "norm1"
    weight = flow.norms.get(names[0], (None,))[0]
    parts = module.get_submodule(names[0]).named_modules()
    first = (name for name, part in parts if weight is not None and getattr(part, "weight", None) is weight)
    parent = names[0].rpartition(".")[0]
    return blocks or (f"{pattern_of(parent)}.*" if parent else "*"), norm or next(first, "norm1")


def _pattern(blocks: str) -> re.Pattern[str]:
    return re.compile(re.escape(blocks).replace(r"\*", r"[^.]*"))


def _find_blocks(module: nn.Module, blocks: str, norm: str) -> list[str]:
    """Return the names of the modules that `blocks` matches, where * stands for one part of a name."""
    names = [name for name, _ in module.named_modules() if name and _pattern(blocks).fullmatch(name)]
    if not names:
        known = "; ".join(_candidates(module)) or "none: no list of blocks of the same class is in it"
        raise ValueError(
            f"`blocks` must match the blocks of {type(module).__name__}, got {blocks!r}, which matches nothing; "
            f"candidates are {known}."
        )
    for name in names:
        block = module.get_submodule(name)
        if norm not in dict(block.named_modules()):
            known = ", ".join(_norms(block)) or "none"
            raise ValueError(
                f"`norm` must be the norm before the attention of each block, got {norm!r}, which {name} "
                f"({type(block).__name__}) does not have; its norms are {known}."
            )
    return names


def _survey(flow: PositionTracer, blocks: Sequence[str], norm: str, example: Example) -> Survey:
    """Check the calls of the blocks and of their norms, and describe them."""
    order = [call.name for call in flow.calls if call.name in blocks]
    if order != list(blocks):
        missing = [name for name in blocks if name not in order]
        what = f"{missing[0]} was not called" if missing else f"they were called as {', '.join(order[:6])}"
        raise ValueError(f"`blocks` must be called one after another, once each, in the order of their names; {what}.")
    first = {call.name: call for call in reversed(flow.calls)}
    shapes = list(dict.fromkeys(tuple(first[name].inputs[0].shape) if first[name].inputs else () for name in blocks))
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
        call = first.get(f"{name}.{norm}")
        if call is None:
            raise ValueError(f"`norm` must be called by its block, got {norm!r}, which {name} does not call.")
        if not call.inputs or call.inputs[0] is not first[name].inputs[0]:
            raise ValueError(
                f"`norm` must be applied to the input of its block (pre-norm), got {norm!r}, which {name} applies "
                "to something else: it is post-norm, or has another norm before attention."
            )
    (shape,) = shapes
    values = [example] if isinstance(example, Tensor) else list(example.values())
    images = next((value for value in values if isinstance(value, Tensor)), None)
    batch = shape[0] if images is None else images.shape[0]
    sequence_first = shape[0] != batch and shape[1] == batch
    tokens = shape[0] if sequence_first else shape[1]
    before = flow.calls[: next(index for index, call in enumerate(flow.calls) if call.name == blocks[0])]
    maps = [
        (call.name, tuple(call.output.shape[2:]))
        for call in before
        if isinstance(call.module, nn.Conv2d | nn.Conv3d)
        and isinstance(call.output, Tensor)
        and call.output.ndim > 3
        and call.output.shape[2:].numel() <= tokens
    ]
    patches, grid = maps[-1] if maps else (None, None)
    start = f"{blocks[0]}."
    inside = [call for call in flow.calls if call.name.startswith(start) and call.name != start + norm]
    normalized = first[start + norm].output
    return Survey(
        blocks=tuple(blocks),
        norm=norm,
        image=None if images is None or images.ndim != 4 else (images.shape[2], images.shape[3]),
        tokens=tokens,
        dim=shape[2],
        sequence_first=sequence_first,
        patches=patches,
        shape=grid,
        receivers=tuple(
            call.name.removeprefix(start) for call in inside if any(value is normalized for value in call.inputs)
        ),
        called=frozenset(call.name.removeprefix(start) for call in inside),
    )


def _candidates(module: nn.Module) -> list[str]:
    """Return name patterns of candidates for the blocks of a module, with their norms."""
    candidates = []
    for name, part in module.named_modules():
        children = list(part.children())
        if len(children) > 1 and len({type(child) for child in children}) == 1 and list(children[0].children()):
            norms = ", ".join(_norms(children[0])) or "no norms"
            pattern = f"{name + '.' if name else ''}*"
            candidates.append(f"{pattern} ({len(children)} of {type(children[0]).__name__}: {norms})")
    return candidates


def _norms(block: nn.Module) -> list[str]:
    """Return the names of the norms of a block."""
    return [name for name, part in block.named_modules() if name and "norm" in type(part).__name__.lower()]


def find_ways(block: nn.Module, found: Survey) -> Ways:
    """Find the access of position to the attention of `block`, the first block of a surveyed module."""
    if not found.receivers:
        reason = "no module of the block is called with the normalized tokens"
        return Ways(None, why=dict.fromkeys(("queries_keys", "bias", "query_scale"), reason))
    attention = found.receivers[0]
    module = block.get_submodule(attention)
    timm = type(module).__module__.startswith("timm.")
    multihead = isinstance(module, nn.MultiheadAttention)
    leaves = {name.rpartition(".")[2]: name for name in found.receivers}
    parts = {match[1]: name for leaf, name in leaves.items() if (match := _PROJECTION.fullmatch(leaf))}
    pair = (parts["q"], parts["k"]) if len(parts) == 3 else None
    fused = leaves.get("qkv") if timm else None
    norms = [name for name in found.called if name.startswith(f"{attention}.") and "norm" in name.rpartition(".")[2]]
    scale: tuple[str, Queries] | None = None  # the last module before the logits whose output has the queries
    if timm and f"{attention}.q_norm" in norms:
        scale = f"{attention}.q_norm", "heads"
    elif not norms and not multihead and (pair or fused):
        scale = (pair[0], "channels") if pair else (fused or "", "fused")
    kind, why = type(module).__name__, {}
    if not (multihead or pair or fused):
        why["queries_keys"] = (
            f"{kind} is not called with queries and keys, and calls no separate projections to them (such as "
            "q_proj/k_proj/v_proj, query/key/value, q/k/v, or timm's qkv)"
        )
    mask, reason = _mask(module, multihead)
    if mask is None:
        why["bias"] = reason
    if scale is None:
        why["query_scale"] = f"{kind} gives no access to its queries between projection and logits"
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


def _num_heads(module: nn.Module) -> int | None:
    """Return the number of heads, an attribute of the attention or of a part of it with one of the usual names."""
    values = (getattr(part, name, None) for part in module.modules() for name in _HEADS)
    return next((heads for heads in values if isinstance(heads, int) and not isinstance(heads, bool)), None)
