"""A skeleton: the model that a class builds from the settings that were read, to compare an existing model with.

What was read is a setting of the skeleton, so every difference is something that was not read.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial, partialmethod
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from graticule.encodings.forms.absolute import FixedEncoding
from graticule.encodings.forms.rotary import FixedRotary
from graticule.position.folded import Folded
from graticule.position.grid import Grid
from graticule.registry.checks import format_value

#: Attributes without an effect on outputs or gradients: of modes, of names, of the initialization, of the choice
#: between two implementations of the same attention, of timm's later `set_input_size`, and of how a model was built.
_FREE = {
    *("grad_checkpointing", "gradient_checkpointing", "name_or_path", "extra_repr", "fused_attn"),
    *("weight_init_mode", "fix_init", "head_init_scale", "feature_info"),
    *("pretrained_cfg", "default_cfg", "pretrained_model_args"),
    *("target_shift_size", "created", "converted_from", "certificate"),
}
#: Sizes that the stems of our pyramids have from timm, and do not read.
_SIZES = {"img_size", "grid_size", "num_patches"}
#: Attributes of every module: the modes, and the dictionaries of its parts and hooks.
_INTERNAL = vars(nn.Module()).keys() | {"_is_hf_initialized", "_compiled_call_impl"}
HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
)
#: Where hooks and functions come from that only record outputs, or read the grids of resized tables.
_HARMLESS = ("transformers.", "graticule.external.table_grids")
_ORDERED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MISSING = "absent"
#: The types of attributes that are compared when a model is resized; an object, such as a configuration, is kept.
COMPARED: Any = (bool, int, float, str, Tensor, tuple, list, type(None))
_SIMPLE = (bool, int, float, str, tuple)
#: What code is expected to be: hooks, attributes that an instance has instead of its class, and other functions.
CODE = EMPTY, OF_CLASS, OF_LIBRARY = "empty", "its class's own", "its library's own"
#: Libraries whose classes and functions are known. Code of others is theirs only if one of their modules imports it.
_LIBRARIES = ("graticule.", "timm.", "torch.", "transformers.")
#: Where what is no function has the function that it calls.
_WITHIN: dict[Any, str] = {MethodType: "__func__", staticmethod: "__func__", classmethod: "__func__", property: "fget"}
_WITHIN |= dict.fromkeys((partial, partialmethod, cached_property), "func")
_CALLING = (FunctionType, type(cache(str)), *_WITHIN)


class Difference(NamedTuple):
    """A part or an attribute of a model that differs from its skeleton, and what both have there, as text."""

    place: str
    actual: str
    expected: str


class _Unfilled(TorchFunctionMode):
    """Leave tensors unchanged whose elements are all one number, as the parameters of a skeleton are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), next(iter((*args, *kwargs.values())), None)
        in_place = (
            name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        ) or name == "__setitem__"
        if in_place and isinstance(first, Tensor) and first.numel() > 1 and not any(first.stride()):
            if name == "copy_":
                args[1].expand(first.shape)  # refuses another shape
            return first
        return func(*args, **kwargs)


def build_skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose buffers have values, and whose parameters need no memory; the random state is kept."""

    def without_memory(module: nn.Module, name: str, value: nn.Parameter) -> nn.Parameter:
        # not on the meta device, on which buffers that are computed on the device of parameters would have no values
        return nn.Parameter(value.detach().new_zeros(()).expand(value.shape), value.requires_grad)

    handle = register_module_parameter_registration_hook(cast("Any", without_memory))
    try:
        with torch.random.fork_rng(devices=[]), _Unfilled():
            torch.manual_seed(0)
            return build()
    finally:
        handle.remove()


def check_as_built(model: nn.Module, skeleton: nn.Module, settings: str, advice: str) -> None:
    """Check that a model differs from its skeleton in the values of its parameters only, and is in one mode.

    The error has the `settings` that the skeleton is built from, and advice.
    """
    kind, library = type(model).__name__, type(model).__module__.partition(".")[0]
    if others := list(differences(model, skeleton)):
        place, actual, expected = _outlier(model, others)
        raise ValueError(
            f"`model` must be a {kind} as {library} builds it from {settings}, but {place or 'the model'} is {actual}, "
            f"not {expected}{_cause(skeleton, place, expected)}; {advice}."
        )
    for place, part in model.named_modules():
        if part.training != model.training and not isinstance(part, nn.Linear | nn.Identity):  # which have no modes
            modes = ("training", "evaluation") if part.training else ("evaluation", "training")
            raise ValueError(
                f"`model` must be in one mode, but {place} is in {modes[0]} mode and the {kind} in {modes[1]} mode; "
                "call model.eval() or model.train() first."
            )


def _outlier(model: nn.Module, others: Sequence[Difference]) -> Difference:
    """Return the first difference; if most parts like it differ in the same way, the part that they were read from."""
    _, actual, expected = others[0]
    same = [place.rpartition(".")[::2] for place, *texts in others if texts == [actual, expected]]
    parts = dict(model.named_modules(remove_duplicate=False))
    # of one class, in one list
    kinds = {(type(parts.get(owner)), owner.partition(".")[0]) for owner, _ in same}
    alike = [(name, part) for name, part in parts.items() if (type(part), name.partition(".")[0]) in kinds]
    leaves = sorted({leaf for _, leaf in same})
    read = [f"{name}.{leaf}" for name, part in alike for leaf in leaves if _text(getattr(part, leaf, None)) == expected]
    return Difference(read[0], expected, f"{actual} as in the others") if 0 < len(read) < len(same) else others[0]


def check_untouched(model: nn.Module, place: str, value: Any, expected: Any) -> None:
    """Check that what an operation is going to replace is what the library of the model gives."""
    if not same_value(value, expected):
        kind, library = type(model).__name__, type(model).__module__.partition(".")[0]
        actual, right = _texts(value, expected)
        raise ValueError(
            f"`model` must be as {library} builds {kind} wherever this replaces something, but {place} is "
            f"{actual}, not {right}; undo this change first."
        )


def differences(model: nn.Module, skeleton: nn.Module) -> Iterator[Difference]:
    """Yield what a model has otherwise than its skeleton, except the values of parameters, and the modes.

    Compared are the classes of all modules, their attributes, functions and hooks, the values of buffers, and the
    shapes and ties of parameters.
    """
    parts, others = (dict(side.named_modules(remove_duplicate=False)) for side in (model, skeleton))
    parts = {name: part.original if isinstance(part, Folded) else part for name, part in parts.items()}
    is_own = _is_own(model)
    free = _FREE | _SIZES if is_own else _FREE
    yield from code_of(model)
    for name, other in reversed(others.items() if is_own else ()):  # what a part computes may depend on its parts
        if (part := parts.get(name)) is not None and type(part) is type(other):
            _load_stored(part, other)
    for name in {**others, **parts}:
        part, other = parts.get(name), others.get(name)
        if part is None or other is None or type(part) is not type(other):
            yield Difference(name, *(_MISSING if side is None else _kind(side, part, other) for side in (part, other)))
            continue
        if not is_own and not type(part).__module__.startswith(_LIBRARIES):  # a table of its library names it
            yield Difference(name, f"{type(part).__name__} of {type(part).__module__}", OF_LIBRARY)
        if isinstance(part, _ORDERED) and list(part._modules) != list(other._modules):
            yield Difference(name, f"in the order {', '.join(part._modules)}", ", ".join(other._modules))
        yield from _attributes_that_differ(f"{name}." if name else "", part, other, free)
    ties, expected = (_ties(side) for side in (model, skeleton))
    for name, first in ties.items():
        if expected.get(name) != first:
            yield Difference(name, f"the parameter {first}", "a parameter of its own")


def code_of(model: nn.Module) -> Iterator[Difference]:
    """Yield hooks, and functions that instances, classes or modules have instead of those that they are defined with.

    Leaves out hooks that only record outputs and, in a model of this library, its own hooks.
    """
    harmless = (*_HARMLESS, "graticule.") if _is_own(model) else _HARMLESS
    for kind in HOOKS:
        for hook in getattr(torch.nn.modules.module, f"_global{kind}", {}).values():
            yield Difference(f"torch.nn.modules.module._global{kind}", _text(hook), EMPTY)
    yield from _replaced_code(model)
    for name, part in model.named_modules():
        start = f"{name}." if name else ""
        entries = [(kind, hook, EMPTY) for kind in HOOKS for hook in vars(part)[kind].values()]
        for key, value in vars(part).items():
            if key not in _FREE and callable(value) and callable(getattr(type(part), key, None)):
                entries.append((key, value, OF_CLASS))
        for key, value, expected in entries:
            if getattr(value, "__self__", None) is part or not _module_of(value).startswith(harmless):
                yield Difference(f"{start}{key}", _text(value), expected)
        for key, parameter in part._parameters.items():
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                for hook in (getattr(parameter, kind, None) or {}).values():
                    yield Difference(f"{start}{key}.{kind}", _text(hook), EMPTY)
            for attribute in sorted(vars(parameter).keys() - _INTERNAL) if parameter is not None else ():
                if not attribute.startswith("_dynamo"):  # notes of a compilation
                    yield Difference(f"{start}{key}.{attribute}", _text(getattr(parameter, attribute)), OF_CLASS)
        for key in (*part._modules, *part._parameters, *part._buffers):
            if key in vars(part) or hasattr(type(part), key):  # which Python finds first
                yield Difference(f"{start}{key}", "hidden by an attribute of this name", "the part of this name")
        attention = getattr(vars(part).get("config"), "_attn_implementation", None)
        function = getattr(sys.modules.get(type(part).__module__), "ALL_ATTENTION_FUNCTIONS", {}).get(attention)
        if function is not None and not _is_known(_module_of(function), "transformers"):
            yield Difference(f"{start}config._attn_implementation", f"{attention!r}, {_text(function)}", OF_LIBRARY)


def _replaced_code(model: nn.Module) -> Iterator[Difference]:
    """Yield functions in the classes of a model, or in the modules that define these, that others put there."""
    kinds = dict.fromkeys(kind for part in model.modules() for kind in type(part).__mro__)
    owners: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
    owners |= {name: sys.modules.get(name) for name in ("torch.nn.functional", *(kind.__module__ for kind in kinds))}
    for place, owner in owners.items():
        home, names = getattr(owner, "__module__", place), {base.__qualname__ for base in getattr(owner, "__mro__", ())}
        for key, value in vars(owner).items() if owner is not None and home.startswith(_LIBRARIES) else ():
            if key == "__init__" or (key.startswith("__") and not names):  # what torch.compile puts into modules
                continue
            for function in _functions(value):
                scope = getattr(getattr(function, "__code__", None), "co_qualname", "").rpartition(".")[0]
                is_other = names and scope and scope not in names and not scope.endswith("<locals>")
                if is_other or not _is_known(_module_of(function), home):
                    yield Difference(f"{place}.{key}", _text(function), OF_CLASS if names else OF_LIBRARY)


def _functions(value: Any) -> Iterator[Any]:
    """Yield the functions that a value calls, from the outermost wrapper inwards, and last another callable object."""
    while isinstance(value, _CALLING):
        if isinstance(value, FunctionType):
            yield value
        value = getattr(value, _WITHIN.get(type(value), "__wrapped__"), None)
    if callable(value) and not isinstance(value, type):
        yield value


@cache
def _is_known(module: str, home: str) -> bool:
    """Return whether a module is of a library, of Python, or of a package that the module `home` imports."""
    root = module.partition(".")[0]
    if f"{root}." in _LIBRARIES or root in sys.stdlib_module_names:
        return True
    return bool(re.search(rf"^\s*(?:from|import) {root}\b", inspect.getsource(sys.modules[home]), re.MULTILINE))


def _cause(skeleton: nn.Module, place: str, expected: str) -> str:
    """Return the settings that classes compute a part or an attribute from, as the end of a sentence."""
    owner, _, leaf = place.rpartition(".")
    parts: dict[str, Any] = dict(skeleton.named_modules())
    if owner not in parts or expected in (*CODE, _MISSING):
        return ""
    config = getattr(parts[owner], "config", getattr(skeleton, "config", None))
    starts = [owner.rsplit(".", count)[0] for count in range(owner.count(".") + 1)]
    inits = [inspect.unwrap(type(parts[start]).__init__) for start in starts]
    reads = [{f"config.{name}": getattr(config, name, None) for name in init.__code__.co_names} for init in inits]
    words = set(re.split(r"[._]", place))
    equal = [
        {
            name: value
            for name, value in read.items()
            if _text(value) == expected and words & set(re.split(r"[._]", name))
        }
        for read in reads
    ]
    values = next(filter(None, equal), reads[0])
    options = inspect.signature(inits[0]).parameters
    for name, option in options.items() if owner and leaf not in options else ():
        value = vars(parts[owner]).get(name)
        if isinstance(value, _SIMPLE) and option.default not in (option.empty, value):
            values[f"{owner}.{name}"] = value
    simple = sorted(f"{name} = {value!r}" for name, value in values.items() if isinstance(value, _SIMPLE))
    return f", which follows from {', '.join(simple)}" if simple else ""


def _is_own(model: nn.Module) -> bool:
    """Return whether a model is of this library, or has an attached position of it."""
    return any(type(part).__module__.startswith("graticule.") for part in model.modules())


def _attributes_that_differ(start: str, part: nn.Module, other: nn.Module, free: set[str]) -> Iterator[Difference]:
    values, expected = attributes(part), attributes(other)
    for key in sorted({*expected, *values} - free):
        value, right = values.get(key, _MISSING), expected.get(key, _MISSING)
        if same_value(value, right) or (key.startswith("_") and not callable(value) and not isinstance(value, Tensor)):
            continue
        if isinstance(value, Grid) and isinstance(right, Grid) and value.shape == right.shape:
            continue  # a resize gives inner modules the grid with prefix tokens
        if key in expected or isinstance(value, Tensor):
            yield Difference(f"{start}{key}", *_texts(value, right))
        elif hasattr(type(part), key) and not callable(value):  # else no code reads it
            yield Difference(f"{start}{key}", _text(value), OF_CLASS)


def _load_stored(part: nn.Module, other: nn.Module) -> None:
    """Load what a file has into a part of a skeleton, which computes the rest from it: buffers, and fixed tables.

    The progress of diffusion belongs to the sampler, and the factor of a table is right if loading the table keeps it.
    """
    if isinstance(part, FixedEncoding) and isinstance(other, FixedEncoding):
        other.factor = part.factor
    if isinstance(part, FixedRotary) and isinstance(other, FixedRotary):
        other.progress = part.progress
        other.init_non_persistent_buffers()
    fixed = {key: value for key, value in other.named_parameters(recurse=False) if not value.requires_grad}
    buffers = {key: value for key, value in other._buffers.items() if key not in other._non_persistent_buffers_set}
    values, expected = attributes(part), {**fixed, **buffers}
    loaded = {
        key: values[key].detach().to(value, copy=True)
        for key, value in expected.items()
        if value is not None and isinstance(values.get(key), Tensor) and not values[key].is_meta
        if values[key].shape == value.shape
    }
    if loaded:
        other.load_state_dict(loaded, strict=False, assign=True)  # assigned, as parameters of a skeleton have no memory


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, the buffers and the attributes of a module."""
    settings = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
    return {**settings, **module._parameters, **module._buffers}


def same_value(value: Any, other: Any) -> bool:
    """Return whether two values of an attribute are equal, also in kind, up to the rounding of tensors.

    Of tensors without values, and of parameters, only the shapes count; of functions the code; of modules
    the class; of other objects that have no equality, their attributes.
    """
    if isinstance(value, bool | int | float) and isinstance(other, bool | int | float):
        close = math.isclose(value, other, rel_tol=torch.finfo(torch.float32).eps)  # rates may come from tensors
        return close and isinstance(value, bool) == isinstance(other, bool)
    if isinstance(value, MethodType) and isinstance(other, MethodType):
        return value.__func__ is other.__func__
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(same_value, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same_value(value[key], other[key]) for key in value)
    if isinstance(value, Tensor):
        return value.shape == other.shape and (isinstance(value, nn.Parameter) or _same_tensor(value, other))
    if isinstance(value, partial):
        return all(same_value(getattr(value, key), getattr(other, key)) for key in ("func", "args", "keywords"))
    if isinstance(value, FunctionType):
        cells, others = ([cell.cell_contents for cell in side.__closure__ or ()] for side in (value, other))
        return value is other or (value.__code__ is other.__code__ and same_value(cells, others))
    if isinstance(value, nn.Module):
        return True  # the class is the same
    equality: Any = type(value).__eq__
    if equality is object.__eq__ and hasattr(value, "__dict__") and not isinstance(value, type):
        return same_value(vars(value), vars(other))
    return bool(value == other)


def _same_tensor(value: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape are equal up to rounding, as far as both have values."""
    if value.is_meta or other.is_meta or not value.numel():
        return True
    if not value.is_floating_point() or not other.is_floating_point():
        return torch.equal(value, other.to(value.device))
    right = other.to(value.device, torch.float64)
    error = 4 * max(torch.finfo(kind).eps for kind in (value.dtype, torch.float32))
    return bool(torch.allclose(value.double(), right, error, error * float(right.abs().max())))


def _ties(model: nn.Module) -> dict[str, str]:
    """Map the name of each parameter that a model has at another place, too, or whose memory, to its name there."""
    firsts: dict[object, str] = {}
    names = []
    for name, value in model.named_parameters(remove_duplicate=False):
        has_memory = type(value) is nn.Parameter and not value.is_meta and value.numel()
        place = (value.data_ptr(), value.shape) if has_memory else id(value)
        names.append((name, firsts.setdefault(place, name)))
    return {name: first for name, first in names if first != name}


def _module_of(value: Any) -> str:
    """Return the name of the module that a function, or the class of a callable object, is from."""
    function = next(_functions(value), value)
    return str(
        function.__globals__.get("__name__") if isinstance(function, FunctionType) else type(function).__module__
    )


def _kind(module: nn.Module, *both: nn.Module | None) -> str:
    """Return the class of a module, with where it is from if both classes have the same name."""
    names = [type(part).__name__ for part in both if part is not None]
    return f"{type(module).__module__}.{names[0]}" if len(names) > len(set(names)) else type(module).__name__


def _texts(value: Any, other: Any) -> tuple[str, str]:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value.shape == other.shape:
            return "a tensor of other values", "what its class computes"
        return f"of shape {tuple(value.shape)}", f"{tuple(other.shape)}"
    return _text(value), _text(other)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, FunctionType):
        return f"the function {value.__code__.co_qualname} of {_module_of(value)}"
    return _MISSING if value is _MISSING else format_value(value)
