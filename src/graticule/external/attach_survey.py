"""Survey of a module by one traced pass: its blocks, tokens and patches. `attach` relies on nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from graticule.external.images import error_line, image_size
from graticule.external.structure import called_blocks, pattern_of
from graticule.external.tracer import ModuleCall, PositionTracer, nested_tensors
from graticule.surgery.attached import AttachedPosition, Hook, Host

#: Names of the projections to queries, keys and values in public models, such as q_proj, query, to_q and wq.
_PROJECTION = re.compile(r"(?:to_|w)?([qkv])(?:(?<=q)uery|(?<=k)ey|(?<=v)alue)?(?:_proj)?")
#: Names of the number of heads in public models, attributes of the attention or of a part of it.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")

Example = Tensor | Mapping[str, Any]


def make_example(module: nn.Module) -> Tensor:
    """Create two black images of the size that a module states, with its dtype and on its device."""
    convolution = next((m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    size = image_size(module)
    if size is None or not isinstance(convolution, nn.Conv2d):
        fact = "the size of its images or videos" if convolution is not None else "the shape of its inputs"
        raise ValueError(
            f"`example` must be given for {type(module).__name__}, which does not say {fact}: a batch of them, or a "
            "mapping of its keyword arguments."
        )
    return convolution.weight.new_zeros(2, convolution.in_channels, *size, requires_grad=False)


def survey(module: nn.Module, example: Example, blocks: str | None = None, norm: str | None = None) -> Host:
    """Call `module` once with `example`, in evaluation mode, and describe it; arguments are as of `attach`."""
    tracer = PositionTracer(module, modules=True)
    try:
        tracer.run(example)
    except Exception as error:  # any error of another library
        shape = getattr(example, "shape", None)
        text = f"the arguments {', '.join(map(str, example))}" if shape is None else f"a tensor of {tuple(shape)}"
        raise ValueError(
            f"`example` must be what {type(module).__name__} can be called with, got {text}: {error_line(error)}"
        ) from error
    names, pattern, norm = _find_blocks(module, tracer, blocks, norm)
    calls = {call.name: call for call in reversed(tracer.calls)}  # the first of each
    shape = _check_calls(tracer, calls, names, norm)
    images = next(nested_tensors(example), None)
    batch = shape[0] if images is None else images.shape[0]
    sequence_first = shape[0] != batch and shape[1] == batch
    tokens, dim = shape[0 if sequence_first else 1], shape[2]
    maps: list[tuple[str | None, Any]] = [(None, None)]
    for call in tracer.calls[: tracer.calls.index(calls[names[0]])]:
        if isinstance(call.module, nn.Conv2d | nn.Conv3d) and isinstance(call.output, Tensor):
            grid = call.output.shape[2:]
            maps += [(call.name, tuple(grid))] if len(grid) > 1 and grid.numel() <= tokens else []
    outside = [use for use in tracer.uses if use.kind == "added" and not set(use.within) & set(names)]
    added = {name for use in outside for name in use.source_parameters}
    tensors = [*module.named_buffers(), *module.named_parameters()]
    return Host(
        blocks=tuple(names),
        pattern=pattern,
        norm=norm,
        image=None if images is None or images.ndim != 4 else (images.shape[2], images.shape[3]),
        tokens=tokens,
        dim=dim,
        sequence_first=sequence_first,
        patches=maps[-1][0],
        shape=maps[-1][1],
        tables=tuple(name for name, x in tensors if name in added and x.shape[-1:] == (dim,) and x.numel() > dim),
        **_find_hooks(tracer, calls, names[0], norm),
    )


def _find_blocks(
    module: nn.Module, tracer: PositionTracer, pattern: str | None, norm: str | None
) -> tuple[list[str], str, str]:
    """Return the names of the blocks, their pattern, and the name in a block of the norm of its input.

    Unless given, they are those that the pass shows, else 'blocks.*' and 'norm1', as in timm.
    """
    if pattern is None:
        patterns = {re.sub(r"[^.]+$", "*", pattern_of(name)) for name in called_blocks(tracer)}
        pattern = patterns.pop() if len(patterns) == 1 else "blocks.*"
    allowed = re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))
    names = [name for name, _ in module.named_modules() if name and allowed.fullmatch(name)]
    if not names:
        lists = {f"{name}.*".lstrip("."): [*part.children()] for name, part in module.named_modules()}
        kinds = {name: [type(block).__name__ for block in blocks] for name, blocks in lists.items()}
        known = [f"{name} ({len(kind)} of {kind[0]})" for name, kind in kinds.items() if len(kind) > len({*kind}) == 1]
        raise ValueError(
            f"`blocks` must match the blocks of {type(module).__name__}, got {pattern!r}, which matches nothing; "
            f"candidates are {', '.join(known) or 'none: no list of blocks of the same class is in it'}."
        )
    if norm is None:
        weight = tracer.norms.get(names[0], (None,))[0]
        parts = module.get_submodule(names[0]).named_modules() if weight is not None else ()
        norm = next((name for name, part in parts if getattr(part, "weight", None) is weight), "norm1")
    for name in names:
        block = module.get_submodule(name)
        if norm not in (parts := dict(block.named_modules())):
            norms = [name for name, part in parts.items() if "norm" in type(part).__name__.lower()]
            raise ValueError(
                f"`norm` must be the norm before the attention of each block, got {norm!r}, which {name} "
                f"({type(block).__name__}) does not have; its norms are {', '.join(norms) or 'none'}."
            )
    return names, pattern, norm


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
    if others or len(shape) != 3:
        raise ValueError(
            "`blocks` must be called with tokens (B, N, D) on one grid, got "
            f"{' and '.join(map(str, (shape, *others)))}; attach supports no maps, windows or pyramids."
        )
    for name in blocks:
        call = calls.get(f"{name}.{norm}")
        if call is None or not call.inputs or call.inputs[0] is not calls[name].inputs[0]:
            fact = "does not call" if call is None else "applies to something else: it is post-norm, or has another"
            raise ValueError(
                f"`norm` must be the norm before attention, and be applied to the input of its block (pre-norm), got "
                f"{norm!r}, which {name} {fact}."
            )
    return shape


def _find_hooks(tracer: PositionTracer, calls: Mapping[str, ModuleCall], block: str, norm: str) -> dict[str, Any]:
    """Return the hooks that pass a position to a block, and its attention, as entries of `Host`."""
    normalized, start = calls[f"{block}.{norm}"].output, f"{block}."
    inside = [call for call in tracer.calls if call.name.startswith(start) and call.name != start + norm]
    called = {call.name.removeprefix(start): call.module for call in inside}
    receivers = [call.name.removeprefix(start) for call in inside if any(value is normalized for value in call.inputs)]
    hooks = [Hook(("added_to_stream", "map_before"), "", AttachedPosition.enter)]
    hooks.append(Hook(("map_after",), "", AttachedPosition.leave, before=False))
    reasons: dict[str, str] = {}
    if mlp := [name for name in receivers if "mlp" in name.lower() or "ffn" in name.lower()]:
        reasons["after_norm"] = f"the normalized tokens go to {mlp[0]}, too"
    else:
        hooks.append(Hook(("after_norm",), norm, AttachedPosition.add_after_norm, before=False))
    if not receivers:
        reason = "no module of the block is called with the normalized tokens"
        return {"hooks": hooks, "reasons": reasons | dict.fromkeys(("queries_keys", "bias", "query_scale"), reason)}
    attention = receivers[0]
    module = called[attention]
    kind, timm = type(module).__name__, type(module).__module__.startswith("timm.")
    is_multihead = isinstance(module, nn.MultiheadAttention)
    leaves = {name.rpartition(".")[2]: name for name in receivers}
    parts = {match[1]: name for leaf, name in leaves.items() if (match := _PROJECTION.fullmatch(leaf))}
    projections: tuple[str, ...] = ()
    names = tuple(inspect.signature(module.forward).parameters)
    if is_multihead:
        hooks.append(Hook(("queries_keys",), attention, AttachedPosition.add_to_arguments, arguments=(names,)))
    elif len(parts) == 3:
        projections = parts["q"], parts["k"]
        hooks += [Hook(("queries_keys",), name, AttachedPosition.add_to_input) for name in projections]
    elif timm and "qkv" in leaves:
        projections = (leaves["qkv"],)
        hooks.append(Hook(("queries_keys",), leaves["qkv"], AttachedPosition.project_again, before=False))
    else:
        projections_text = "q_proj/k_proj/v_proj, query/key/value, q/k/v, or timm's qkv"
        reasons["queries_keys"] = f"{kind} is not called with queries and keys, and has no {projections_text}"
    norms = [name for name in called if name.startswith(f"{attention}.") and "norm" in name.rpartition(".")[2]]
    of_timm = [name for name in norms if timm and name.endswith(".q_norm")]
    if scaled := of_timm if norms else projections[:1]:  # the last that returns queries
        count = 3 if len(projections) == 1 and not norms else 1
        hooks.append(Hook(("query_scale",), scaled[0], AttachedPosition.scale_queries, False, (count,)))
    else:
        reasons["query_scale"] = f"{kind} gives no access to its queries between projection and logits"
    mask, reasons["bias"] = "", f"{kind} has no argument `attn_mask` that is added to its logits"
    if "attn_mask" in names:
        mask = "attn_mask"
    elif "attention_mask" in names and type(module).__module__.startswith("transformers."):
        how = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
        mask = "attention_mask" if how in ("eager", "sdpa") else ""
        why = f"attention {how!r} of {kind} adds nothing to its logits"
        reasons["bias"] = f"{why}; load the model with 'sdpa' or 'eager'"
    values = (getattr(part, name, None) for part in module.modules() for name in _HEADS)
    num_heads = next((heads for heads in values if type(heads) is int), None)
    if mask and not num_heads:
        reasons["bias"] = "the number of heads was not found"
    elif mask:
        arguments = names, mask, num_heads if is_multihead else None
        hooks.append(Hook(("bias",), attention, AttachedPosition.add_bias, arguments=arguments))
    known = {"attention": attention, "projections": projections, "num_heads": num_heads}
    return {"hooks": hooks, "reasons": reasons, **known}
