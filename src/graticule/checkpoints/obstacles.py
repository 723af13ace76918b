"""What of a model can be in the way of an operation on it: wrappers, quantized or computed weights, changed code.

Each operation says which of them it cannot carry through, and refuses a model before anything is touched.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from graticule.checkpoints.read import check_whole
from graticule.registry.checks import format_value
from graticule.registry.plugins import plugins_of

#: Wrappers of a whole model -> what to do.
_WRAPPERS = {
    "DataParallel": "give its attribute module, and wrap that again after",
    "DistributedDataParallel": "give its attribute module, and wrap that again after",
    "FullyShardedDataParallel": "wrap the model after",
    "OptimizedModule": "give its attribute _orig_mod, and wrap that again after",
}
#: Where the classes and hooks come from that an operation knows, or that have no effect on outputs.
_KNOWN = ("torch.", "timm.", "transformers.")
#: Where what reads the grids of resized tables of transformers is from.
_GRIDS = "graticule.external.table_grids"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Obstacle = Literal["replicated", "wrapped", "compiled", "packed", "quantized", "pruned", "parametrized", "changed"]


def check_intact(model: nn.Module, *obstacles: Obstacle, name: str = "model", values: bool = True) -> None:
    """Check that none of some obstacles is in a model, nor sharded tensors, nor, with `values`, some without values.

    A model is 'replicated' by a wrapper of a process group, which keeps the parameters that it was built with, and
    'wrapped' by any wrapper. Weights are 'quantized', or 'packed' if by PyTorch; 'pruned' and 'parametrized' ones are
    computed in each pass. Code is 'changed' if hooks, functions or classes are not those of the library of the model.
    """
    check_whole(model, name, values)
    for obstacle, problem in _problems(model):
        if obstacle in obstacles or (obstacle == "packed" and "quantized" in obstacles):
            raise ValueError(f"`{name}` must {problem}.")
    if "changed" in obstacles:
        known = (*_KNOWN, "graticule.") if hasattr(model, "each_layer") else _KNOWN
        for place, value, rule in _changes(model, known):
            value_text = type(value).__name__ if isinstance(value, nn.Module) else format_value(value)
            raise ValueError(f"`{place}` of {type(model).__name__} {rule} to be converted, got {value_text}.")


def _problems(model: nn.Module) -> Iterator[tuple[Obstacle, str]]:
    """Yield the obstacles in a model, with the end of a sentence."""
    quantized = "have weights in floating point, got a quantized one ({}); change or train it first, and export as int8"
    computed = "have its weights as tensors, got {}, which is computed; call torch.nn.utils.{} first"
    for place, part in model.named_modules():
        kind, start = type(part).__name__, f"{place}." if place else ""
        if kind in _WRAPPERS:
            rule = f"not be wrapped, got {kind}; {_WRAPPERS[kind]} this"
            if not place:
                yield "wrapped", rule
            if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
                yield "replicated", rule
        if kind == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None:
            yield "compiled", f"not be compiled, got {place or kind}, which is; compile it after this"
        if "quantized" in type(part).__module__:
            yield "packed", quantized.format(f"{kind} at {place}")
        for hook in part._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils"):
                remove = f"remove_{'spectral' if 'Spectral' in type(hook).__name__ else 'weight'}_norm"
                remove, leaf = (
                    ("prune.remove", pruned) if (pruned := getattr(hook, "_tensor_name", "")) else (remove, hook.name)
                )
                yield "pruned", computed.format(start + leaf, remove)
        if isinstance(parametrized := part._modules.get("parametrizations"), nn.ModuleDict):
            leaf = next(iter(parametrized))
            yield "parametrized", computed.format(start + leaf, "parametrize.remove_parametrizations")
        if hasattr(part, "base_layer"):
            adapter = f"{place}, where {kind} adds to base_layer; merge both"
            yield "parametrized", f"have its weights as tensors, got {adapter}"
    for place, value in model.named_parameters():
        if not type(value).__module__.startswith("torch.") or not (value.is_floating_point() or value.is_complex()):
            yield "quantized", quantized.format(f"{place}, {type(value).__name__} of {value.dtype}")


def _changes(model: nn.Module, known: tuple[str, ...]) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value and the violated rule of code that is not of `known` modules."""
    for kind in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        for hook in getattr(torch.nn.modules.module, kind).values():
            yield f"torch.nn.modules.module.{kind}", hook, "must be empty"
    for name, part in model.named_modules():
        start = f"{name}." if name else ""
        if not type(part).__module__.startswith(known):
            yield name, part, f"must be of a class of its library, not of {type(part).__module__},"
        for method, value in vars(part).items():
            shadows = method != "extra_repr" and callable(value) and callable(getattr(type(part), method, None))
            if shadows and not _module_of(value).startswith((*known[len(_KNOWN) :], _GRIDS)):
                yield f"{start}{method}", value, "must be that of its class"
        for kind in _HOOKS:
            for hook in vars(part)[kind].values():
                if not _module_of(hook).startswith((*known, _GRIDS)):
                    yield f"{start}{kind}", hook, "must be removed"


def _module_of(function: Any) -> str:
    """Return the name of the module that a function, or the class of a callable object, is from."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def check_savable(model: nn.Module) -> None:
    """Check that a file can hold the weights of a model; warn of hooks and functions, which are not saved with them."""
    check_intact(model, "wrapped", "quantized", "pruned", "parametrized")
    if wrapped := [name for name in model.state_dict() if "_orig_mod." in name]:
        raise ValueError(f"`model` must have no compiled parts, whose names are others, got {wrapped[0]}.")
    changes = [*_changes(model, (*_KNOWN, "graticule."))]
    for place, value, rule in changes:
        if isinstance(value, nn.Linear) and not plugins_of([type(value)]):  # as with LoRA in a class of its own
            raise ValueError(f"`{place}` of {type(model).__name__} {rule} to be saved, got {type(value).__name__}.")
    if places := [place for place, value, _ in changes if not isinstance(value, nn.Module)]:
        subject = f"{', '.join(places[:3])} of {type(model).__name__} {'is' if len(places) == 1 else 'are'}"
        warnings.warn(f"{subject} not saved: the opened model computes what its classes do.", stacklevel=4)
