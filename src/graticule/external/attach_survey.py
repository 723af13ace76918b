"""Survey of a module by one forward pass: its blocks, tokens and patches. `attach` relies on nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graticule.external.images import image_size
from graticule.external.structure import called_blocks, pattern_of
from graticule.external.tracer import ModuleCall, PositionTracer
from graticule.surgery.attached import AttachedPosition, Hook

#: Names of the projections to queries, keys and values in public models, such as q_proj, query, to_q and wq.
_PROJECTION = re.compile(r"(?:to_|w)?([qkv])(?:(?<=q)uery|(?<=k)ey|(?<=v)alue)?(?:_proj)?")
#: Names of the number of heads in public models, attributes of the attention or of a part of it.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")

Example = Tensor | Mapping[str, Any]


@dataclass(frozen=True)
class Access:
    """Access of a position to a block. Names are relative to the block.

    hooks: those that apply a field of the position of a layer, in the order in which they are registered.
    reasons: for a field without hooks, the reason.
    attention: the module that gets the normalized tokens; None if there is none.
    projections: its projections, to queries and to keys, or the single one to queries, keys and values.
    num_heads: h; None if it was not found.
    """

    hooks: Mapping[str, tuple[Hook, ...]]
    reasons: Mapping[str, str]
    attention: str | None = None
    projections: tuple[str, ...] = ()
    num_heads: int | None = None


@dataclass(frozen=True)
class Survey:
    """Tokens and blocks of a module, found by one forward pass.

    blocks: names of the blocks, in order.
    pattern: of these names, with * for one part of a name.
    norm: name, in a block, of the norm before attention.
    image: (height, width) of the input images, in pixels; None for other inputs.
    tokens: N.
    dim: D.
    sequence_first: whether tokens are (N, B, D) instead of (B, N, D).
    patches: name of the convolution that cuts images or videos into patches; None if there is none.
    shape: of its output, (H, W) or (T, H, W).
    tables: names of the parameters and buffers with rows (..., D) that are added to tokens before the blocks.
    access: to the first block.
    """

    blocks: tuple[str, ...]
    pattern: str
    norm: str
    image: tuple[int, int] | None
    tokens: int
    dim: int
    sequence_first: bool
    patches: str | None
    shape: tuple[int, ...] | None
    tables: tuple[str, ...]
    access: Access


def make_example(module: nn.Module, grid: tuple[int, int] | None) -> Tensor:
    """Create two black images of the size that a module states, or of the grid, with its dtype and on its device."""
    convolution = next((m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    size = image_size(module)
    if size is None and grid is not None and convolution is not None:
        rows, columns = (int(step) for step in convolution.stride[-2:])
        size = grid[0] * rows, grid[1] * columns
    if size is None or convolution is None or isinstance(convolution, nn.Conv3d):
        fact = "the size of its images or videos" if convolution is not None else "the shape of its inputs"
        raise ValueError(
            f"`example` must be given for {type(module).__name__}, which does not say {fact}: a batch of them, or a "
            "mapping of its keyword arguments."
        )
    return convolution.weight.new_zeros(2, convolution.in_channels, *size, requires_grad=False)


def survey_module(module: nn.Module, example: Example, blocks: str | None = None, norm: str | None = None) -> Survey:
    """Call `module` once with `example`, in evaluation mode, and describe its blocks; arguments are as of `attach`."""
    tracer, problem = PositionTracer(module, modules=True), None
    try:
        tracer.run(example)
    except Exception as error:  # any error of another library
        problem = error
    pattern, norm = _names_of_blocks(module, tracer, blocks, norm)
    names = _find_blocks(module, pattern, norm)
    if problem is not None:
        example_text = f"the arguments {', '.join(map(str, example))}"
        if isinstance(example, Tensor):
            example_text = f"a tensor of {tuple(example.shape)}"
        raise ValueError(
            f"`example` must be what {type(module).__name__} can be called with, got {example_text}: "
            f"{type(problem).__name__}: {str(problem).rstrip('.')}."
        ) from problem
    calls = {call.name: call for call in reversed(tracer.calls)}  # the first of each
    shape = _check_calls(tracer, calls, names, norm)
    values = [example] if isinstance(example, Tensor) else list(example.values())
    images = next((value for value in values if isinstance(value, Tensor)), None)
    batch = shape[0] if images is None else images.shape[0]
    sequence_first = shape[0] != batch and shape[1] == batch
    tokens, dim = shape[0 if sequence_first else 1], shape[2]
    before = tracer.calls[: tracer.calls.index(calls[names[0]])]
    convolutions = [call for call in before if isinstance(call.module, nn.Conv2d | nn.Conv3d)]
    maps = [
        (call.name, tuple(call.output.shape[2:]))
        for call in convolutions
        if isinstance(call.output, Tensor) and call.output.ndim > 3 and call.output.shape[2:].numel() <= tokens
    ]
    patches, grid = maps[-1] if maps else (None, None)
    outside = [use for use in tracer.uses if not set(use.within) & set(names)]
    added = {name for use in outside if use.kind == "added" for name in use.source_parameters}
    return Survey(
        blocks=tuple(names),
        pattern=pattern,
        norm=norm,
        image=None if images is None or images.ndim != 4 else (images.shape[2], images.shape[3]),
        tokens=tokens,
        dim=dim,
        sequence_first=sequence_first,
        patches=patches,
        shape=grid,
        tables=tuple(
            name
            for name, value in [*module.named_buffers(), *module.named_parameters()]
            if name in added and value.shape[-1:] == (dim,) and value.numel() > dim
        ),
        access=_find_access(tracer, calls, names[0], norm),
    )


def _names_of_blocks(
    module: nn.Module, tracer: PositionTracer, blocks: str | None, norm: str | None
) -> tuple[str, str]:
    """Return a pattern of the names of the blocks, and the name in a block of the norm of its input, unless given.

    They are 'blocks.*' and 'norm1', as in timm, where they are not found.
    """
    names = called_blocks(tracer)
    if blocks is not None:
        names = tuple(name for name in tracer.called if _matches(blocks, name))
    if not names or len({pattern_of(name) for name in names}) > 1:
        return blocks or "blocks.*", norm or "norm1"
    weight = tracer.norms.get(names[0], (None,))[0]
    parts = module.get_submodule(names[0]).named_modules()
    first = (name for name, part in parts if weight is not None and getattr(part, "weight", None) is weight)
    parent = names[0].rpartition(".")[0]
    return blocks or (f"{pattern_of(parent)}.*" if parent else "*"), norm or next(first, "norm1")


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]*"), name) is not None


def _find_blocks(module: nn.Module, pattern: str, norm: str) -> list[str]:
    """Return the names of the blocks, and check that they have the norm."""
    names = [name for name, _ in module.named_modules() if name and _matches(pattern, name)]
    if not names:
        candidates = []
        for name, part in module.named_modules():
            children = list(part.children())
            if len(children) > 1 and len({type(child) for child in children}) == 1 and list(children[0].children()):
                list_name, kind = f"{name}.*" if name else "*", type(children[0]).__name__
                candidates.append(f"{list_name} ({len(children)} of {kind}: {_norms(children[0]) or 'no norms'})")
        known = "; ".join(candidates) or "none: no list of blocks of the same class is in it"
        raise ValueError(
            f"`blocks` must match the blocks of {type(module).__name__}, got {pattern!r}, which matches nothing; "
            f"candidates are {known}."
        )
    for name in names:
        block = module.get_submodule(name)
        if norm not in dict(block.named_modules()):
            raise ValueError(
                f"`norm` must be the norm before the attention of each block, got {norm!r}, which {name} "
                f"({type(block).__name__}) does not have; its norms are {_norms(block) or 'none'}."
            )
    return names


def _norms(block: nn.Module) -> str:
    return ", ".join(name for name, part in block.named_modules() if name and "norm" in type(part).__name__.lower())


def _check_calls(
    tracer: PositionTracer, calls: Mapping[str, ModuleCall], blocks: Sequence[str], norm: str
) -> tuple[int, ...]:
    """Check the calls of the blocks and of their norms, and return the shape of the tokens, with three axes."""
    order = [call.name for call in tracer.calls if call.name in blocks]
    if order != list(blocks):
        missing = [name for name in blocks if name not in order]
        why = f"{missing[0]} was not called" if missing else f"they were called as {', '.join(order[:6])}"
        raise ValueError(f"`blocks` must be called one after another, once each, in the order of their names; {why}.")
    inputs = [calls[name].inputs for name in blocks]
    shape, *others = dict.fromkeys(tuple(tensors[0].shape) if tensors else () for tensors in inputs)
    if wrong := [shape for shape in (shape, *others) if len(shape) != 3]:
        raise ValueError(
            f"`blocks` must be called with tokens (B, N, D), got {wrong[0] or 'no tensor'}; attach supports "
            "models whose blocks get a sequence of tokens, not maps or windows."
        )
    if others:
        raise ValueError(
            "`blocks` must be on one grid with the same channels, got tokens of "
            f"{' and '.join(map(str, (shape, *others)))}; attach does not support pyramids."
        )
    for name in blocks:
        call = calls.get(f"{name}.{norm}")
        if call is None:
            raise ValueError(f"`norm` must be called by its block, got {norm!r}, which {name} does not call.")
        if not call.inputs or call.inputs[0] is not calls[name].inputs[0]:
            raise ValueError(
                f"`norm` must be applied to the input of its block (pre-norm), got {norm!r}, which {name} applies "
                "to something else: it is post-norm, or has another norm before attention."
            )
    return shape


def _find_access(tracer: PositionTracer, calls: Mapping[str, ModuleCall], block: str, norm: str) -> Access:
    """Find the access of a position to a block."""
    normalized, start = calls[f"{block}.{norm}"].output, f"{block}."
    inside = [call for call in tracer.calls if call.name.startswith(start) and call.name != start + norm]
    called = {call.name.removeprefix(start): call.module for call in inside}
    receivers = [call.name.removeprefix(start) for call in inside if any(value is normalized for value in call.inputs)]
    enter = (Hook("", AttachedPosition.enter, before=True),)
    leave = (Hook("", AttachedPosition.leave, before=False),)
    hooks: dict[str, tuple[Hook, ...]] = {"added_to_stream": enter, "map_before": enter, "map_after": leave}
    reasons = {}
    if mlp := [name for name in receivers if "mlp" in name.lower() or "ffn" in name.lower()]:
        reasons["after_norm"] = f"the normalized tokens go to {mlp[0]}, too"
    else:
        hooks["after_norm"] = (Hook(norm, AttachedPosition.add_after_norm, before=False),)
    if not receivers:
        reason = "no module of the block is called with the normalized tokens"
        return Access(hooks, reasons | dict.fromkeys(("queries_keys", "bias", "query_scale"), reason))
    attention = receivers[0]
    module = called[attention]
    kind, timm = type(module).__name__, type(module).__module__.startswith("timm.")
    multihead = isinstance(module, nn.MultiheadAttention)
    leaves = {name.rpartition(".")[2]: name for name in receivers}
    parts = {match[1]: name for leaf, name in leaves.items() if (match := _PROJECTION.fullmatch(leaf))}
    projections: tuple[str, ...] = ()
    scaled, fused = "", False  # the last module before the logits whose output has the queries
    if multihead:
        hooks["queries_keys"] = (Hook(attention, AttachedPosition.add_to_arguments, before=True),)
    elif len(parts) == 3:
        scaled, _ = projections = (parts["q"], parts["k"])
        hooks["queries_keys"] = tuple(Hook(name, AttachedPosition.add_to_input, before=True) for name in projections)
    elif timm and "qkv" in leaves:
        (scaled,) = projections = (leaves["qkv"],)
        fused = True
        hooks["queries_keys"] = (Hook(scaled, AttachedPosition.project_again, before=False),)
    else:
        reasons["queries_keys"] = (
            f"{kind} is not called with queries and keys, and calls no separate projections to them (such as "
            "q_proj/k_proj/v_proj, query/key/value, q/k/v, or timm's qkv)"
        )
    norms = [name for name in called if name.startswith(f"{attention}.") and "norm" in name.rpartition(".")[2]]
    if norms:
        scaled, fused = f"{attention}.q_norm" if timm and f"{attention}.q_norm" in norms else "", False
    if scaled:
        hooks["query_scale"] = (Hook(scaled, AttachedPosition.scale_queries, False, (3 if fused else 1,)),)
    else:
        reasons["query_scale"] = f"{kind} gives no access to its queries between projection and logits"
    values = (getattr(part, name, None) for part in module.modules() for name in _HEADS)
    num_heads = next((heads for heads in values if isinstance(heads, int) and not isinstance(heads, bool)), None)
    mask, reasons["bias"] = _mask(module, multihead)
    if mask and num_heads:
        index = list(inspect.signature(module.forward).parameters).index(mask)
        arguments = (mask, index, num_heads if multihead else None)
        hooks["bias"] = (Hook(attention, AttachedPosition.add_bias, before=True, arguments=arguments),)
    return Access(hooks, reasons, attention, projections, num_heads)


def _mask(module: nn.Module, multihead: bool) -> tuple[str | None, str]:
    """Return the name of the argument that is added to the logits, and the reason for which there is no access."""
    arguments = inspect.signature(module.forward).parameters
    kind = type(module).__name__
    if multihead or "attn_mask" in arguments:
        return "attn_mask", "the number of heads was not found"
    if "attention_mask" in arguments and type(module).__module__.startswith("transformers."):
        how = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
        if how in ("eager", "sdpa"):
            return "attention_mask", "the number of heads was not found"
        return None, f"attention {how!r} of {kind} adds nothing to its logits; load the model with 'sdpa' or 'eager'"
    return None, f"{kind} has no argument `attn_mask` that is added to its logits"
