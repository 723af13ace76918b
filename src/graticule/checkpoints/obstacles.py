"""What of a model can be in the way of an operation on it: wrappers, quantized or computed weights, changed code.

Each operation says which of them it cannot carry through, and refuses a model before anything is touched.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn

from graticule.checkpoints.read import check_whole
from graticule.checkpoints.skeleton import CODE, code_of, differences

#: Wrappers of a whole model -> what to do.
_WRAPPERS = {
    "DataParallel": "give its attribute module, and wrap that again after",
    "DistributedDataParallel": "give its attribute module, and wrap that again after",
    "FullyShardedDataParallel": "wrap the model after",
    "OptimizedModule": "give its attribute _orig_mod, and wrap that again after",
}
#: What a subclass of tensors has that does not compute its values from others, as quantized ones do.
_UNCHANGED = Tensor.__torch_dispatch__
Obstacle = Literal["replicated", "wrapped", "compiled", "packed", "quantized", "pruned", "parametrized"]


def check_intact(model: nn.Module, *obstacles: Obstacle, name: str = "model", values: bool = True) -> None:
    """Check that none of some obstacles is in a model, nor sharded tensors, nor, with `values`, some without values.

    A model is 'replicated' by a wrapper of a process group, which keeps the parameters that it was built with, and
    'wrapped' by any wrapper. Weights are 'quantized', or 'packed' if by PyTorch; 'pruned' and 'parametrized' ones are
    computed in each pass.
    """
    check_whole(model, name, values)
    for obstacle, problem in _problems(model):
        if obstacle in obstacles or (obstacle == "packed" and "quantized" in obstacles):
            raise ValueError(f"`{name}` must {problem}.")


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
    subclass = "have weights of PyTorch's own class, got {}; replace it by nn.Parameter(x.detach().as_subclass(Tensor))"
    for place, value in model.named_parameters():
        is_number = value.is_floating_point() or value.is_complex()
        if not type(value).__module__.startswith("torch.") or not is_number:
            problem = subclass if is_number and type(value).__torch_dispatch__ == _UNCHANGED else quantized
            yield "quantized", problem.format(f"{place}, {type(value).__name__} of {value.dtype}")


#: Ends of the names of the rates of dropout and stochastic depth, which have no effect on a model that is opened.
_RATES = (".p", ".drop_prob", ".prob", "attn_drop", "drop_rate", "drop_path_rate")


def check_savable(model: nn.Module, skeleton: nn.Module | None = None) -> None:
    """Check that a file can hold a model, and warn of properties that are not saved with it.

    Not saved are hooks, functions, rates of training, the dtype, and which parameters are frozen.

    Args:
        model: the model.
        skeleton: what the file's arguments build, without weights; None if another library opens the file.
    """
    check_intact(model, "wrapped", "quantized", "pruned", "parametrized")
    if wrapped := [name for name in model.state_dict() if "_orig_mod." in name]:
        raise ValueError(f"`model` must have no compiled parts, whose names are others, got {wrapped[0]}.")
    places = []
    for place, actual, expected in code_of(model) if skeleton is None else differences(model, skeleton):
        if expected not in CODE and not place.endswith(_RATES):
            raise ValueError(
                f"`model` must be a {type(model).__name__} as its arguments build it to be saved, but "
                f"{place or 'the model'} is {actual}, not {expected}; undo this change, or save its `state_dict`."
            )
        places.append(place)
    lost = {"computes what its classes do": places, "is in torch.float32": [], "trains these": []}
    others = dict(skeleton.named_parameters()) if skeleton is not None else {}
    for name, value in model.named_parameters():
        if value.dtype != others.get(name, value).dtype:
            lost["is in torch.float32"].append(f"{name}.dtype")
        if value.requires_grad < others.get(name, value).requires_grad:
            lost["trains these"].append(f"{name}.requires_grad")
    for result, names in lost.items():
        if names:
            subject = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            text = f"{subject} of {type(model).__name__} {'is' if len(names) == 1 else 'are'} not saved"
            warnings.warn(f"{text}: the opened model {result}.", stacklevel=5)
