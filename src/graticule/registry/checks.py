"""Checks of arguments against their annotated types, and the limits in these."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import math
import numbers
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

#: The most names that an error lists.
_MANY_NAMES = 30
#: How an image becomes a tensor.
TENSORS = (
    "timm.data.create_transform(**timm.data.resolve_model_data_config(model)), or a processor of transformers, makes a "
    "tensor of an image, and torch.stack a batch of tensors"
)


def known_name(argument: str, name: str, known: Collection[str], hint: str = "") -> str:
    """Return `name` if it is known; else the error says `hint`, or the nearest names.

    Raises:
        ValueError: if it is not, naming the nearest names, and all known ones, or their number if they are many.
    """
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    end = f"; {hint}." if hint else f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    if len(known) > _MANY_NAMES:
        examples = "" if near or hint else f", such as {', '.join(list(known)[:5])}"
        raise ValueError(f"`{argument}` must be one of {len(known)} names{examples}; got {name!r}{end}")
    quoted = repr if any("," in word or not word for word in known) else str  # a comma would make it look like two
    raise ValueError(f"`{argument}` must be one of {', '.join(map(quoted, known))}; got {name!r}{end}")


def search_names(word: str, names: Mapping[str, str]) -> list[str]:
    """Return the names that contain a word in themselves or in their description, in any case.

    >>> search_names("lape", {"lape_sharing": "", "cvt_cifar10": "CVT with LaPE", "adapt": "Replace the position"})
    ['lape_sharing', 'cvt_cifar10']
    """
    return [name for name, about in names.items() if word.lower() in f"{name} {about}".lower()]


def is_path(text: str) -> bool:
    """Return whether a name or a path is a path: it contains a separator, or is . or ..

    >>> [is_path(text) for text in ("digits", "./digits", "runs/digits", "..")]
    [False, True, True, True]
    """
    return text in (".", "..") or any(separator in text for separator in (os.sep, os.altsep) if separator)


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra; graticule itself is on no package index.

    >>> install("lab")
    'pip install -e ".[lab]" in the clone of graticule'
    """
    return f'pip install -e ".[{extra}]" in the clone of graticule'


F = TypeVar("F", bound=Callable[..., Any])


class BrokenContract(TypeError):
    """A method of a user's class returns something else than its documentation says."""


def checked(function: F) -> F:
    """Decorate a function so that its arguments are checked before it does anything.

    An argument must have its annotated type, as far as that consists of numbers, strings, booleans, sequences of them
    and classes. A number must be finite and within the limits of its type, such as `Annotated[int, Field(ge=1)]`.

    Raises:
        TypeError: when it is called with an argument of another type.
        ValueError: when it is called with a number out of range, or a string that is not one of the choices.
    """
    signature = inspect.signature(function)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind not in several]
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not hints:
            hints.update(typing.get_type_hints(function, include_extras=True), **{"return": None})
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # its own error names missing and unexpected arguments
        for name in names:
            if name in values and name in hints:
                check(name, values[name], hints[name])
        if "images" in values and type(None) not in _alternatives(hints.get("images")):  # optional ones are converted
            _check_batch(values.get("model"), values["images"])
        return function(*args, **kwargs)

    return typing.cast("F", call)


class Checked:
    """Base class of classes whose constructors check their arguments, as `checked` does; so do their subclasses'."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", checked(cls.__init__))  # noqa: B010 (mypy)


def check(name: str, value: Any, kind: Any) -> None:
    """Check that the argument `name` has the type `kind`, within its limits."""
    if not _matches(value, kind):
        literals = [part for part in _alternatives(kind) if typing.get_origin(part) is Literal]
        choices = [word for part in literals for word in typing.get_args(part)]
        if choices and isinstance(value, str):
            known_name(name, value, choices)
        got = f"{type(value).__name__}; {TENSORS}" if name == "images" else format_value(value)
        raise TypeError(f"`{name}` must be {type_words(kind)}, got {got}.")
    check_numbers(name, value, kind)
    if hasattr(value, "is_sparse"):
        check_tensor(name, value)
    elif hasattr(value, "original_name") and hasattr(value, "graph"):
        raise TypeError(f"`{name}` must be a Python module, got {type(value).__name__}; give it before `torch.jit`.")


def check_tensor(name: str, value: Any) -> None:
    """Check that a tensor has real values in memory, one for each index."""
    kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "complex": value.is_complex()}
    kinds |= {"sparse": "strided" not in str(value.layout), "without values": value.is_meta}
    kinds |= {str(value.dtype): "float8" in str(value.dtype) or "float4" in str(value.dtype)}
    if wrong := [kind for kind, is_so in kinds.items() if is_so]:
        raise ValueError(f"`{name}` must be a dense tensor with values, got one that is {wrong[0]}.")


def _check_batch(model: Any, images: Any) -> None:
    """Check that images are a batch of the dtype of the model that takes them, unless autocast converts them."""
    if not (hasattr(model, "parameters") and getattr(images, "is_floating_point", lambda: False)()):
        return
    if images.ndim < 4:
        raise ValueError(f"`images` must be (B, C, height, width), got {tuple(images.shape)}; {TENSORS}.")
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if dtypes and images.dtype not in dtypes and not sys.modules["torch"].is_autocast_enabled(images.device.type):
        dtype = min(map(str, dtypes))
        raise ValueError(
            f"`images` must be {dtype}, as the model's weights, got {images.dtype}; call images.to({dtype})."
        )


def check_numbers(name: str, value: Any, kind: Any = None) -> None:
    """Check that `value`, or each value of a sequence, is finite and within the limits of the annotated type `kind`."""
    for number in value if isinstance(value, list | tuple | range) else [value]:
        if isinstance(number, numbers.Real) and not isinstance(number, bool):
            if not is_integer(number) and not math.isfinite(number):  # an integer may be too large for a float
                raise ValueError(f"`{name}` must be finite, got {format_value(value)}.")
            for rule, limit in _limits(kind):
                if not _WITHIN[rule](number, limit):
                    raise ValueError(f"`{name}` must be {_LIMITS[rule]} {limit:,}, got {format_value(number)}.")


@functools.cache
def _limits(kind: Any) -> tuple[tuple[str, float], ...]:
    """Return the limits in an annotated type, by the names of pydantic's `Field`; the limits of any number are last."""
    marks = [part for mark in getattr(kind, "__metadata__", ()) for part in getattr(mark, "metadata", ())]
    limits = [(rule, getattr(mark, rule)) for mark in marks for rule in _LIMITS if hasattr(mark, rule)]
    inner = [limit for part in typing.get_args(kind) for limit in _limits(part) if limit not in _ANY]
    return (*limits, *inner, *_ANY)


def type_words(kind: Any) -> str:
    """Return an annotated type in words, such as 'a whole number or None'."""
    return " or ".join(dict.fromkeys(_rule(part)[0] for part in _alternatives(kind)))


def is_integer(value: Any) -> bool:
    """Return whether `value` is a whole number: integers of NumPy are, booleans are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def format_value(value: Any) -> str:
    """Format a value for a message of one line; one of several lines or thousands of digits is shown as its class."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = type(value).__name__
    text = type(value).__name__ if "\n" in text else printable(text)
    return text if len(text) <= 100 else f"{text[:100]}..."


def printable(text: str) -> str:
    """Escape characters that a terminal or a figure cannot show: line ends, control codes, bytes that are not text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types that an annotated type consists of, without their annotations."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, TypeVar) and kind.__bound__ is not None:
        kind = kind.__bound__
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return tuple(part for inner in typing.get_args(kind) for part in _alternatives(inner)) if union else (kind,)


def _matches(value: Any, kind: Any) -> bool:
    """Return whether a value has an annotated type; True for types that cannot be checked at run time."""
    return any(_rule(part)[1](value) for part in _alternatives(kind))


@functools.cache
def _rule(kind: Any) -> tuple[str, Callable[[Any], bool]]:
    """Return the values that a type without alternatives allows: in words, and as a condition."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        words = f"one of {', '.join(map(str, inner))}"
        return words, lambda value: any(type(value) is type(word) and value == word for word in inner)
    if origin in (tuple, list, collections.abc.Sequence, collections.abc.Collection):
        fixed = origin is tuple and inner[-1:] != (...,)
        plural = _plural(inner[0]) if not fixed or len(set(inner)) == 1 else "values"

        def matches(value: Any) -> bool:
            if fixed:
                return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_matches, value, inner))
            others = (set, frozenset) if origin is collections.abc.Collection else ()
            sequence = isinstance(value, (collections.abc.Sequence, *others)) and not isinstance(value, str | bytes)
            return sequence and all(_matches(part, inner[0]) for part in value)

        return f"{len(inner)} {plural}" if fixed else f"a sequence of {plural}", matches
    if origin in (collections.abc.Callable, type) or getattr(kind, "_is_protocol", False):
        return "a callable", callable
    plain = origin or kind
    name = getattr(plain, "__name__", str(kind))
    return name, lambda value: not isinstance(plain, type) or isinstance(value, plain)


def _plural(kind: Any) -> str:
    first, *others = _alternatives(kind)
    words = "a value" if others else _rule(first)[0]
    article, _, noun = words.partition(" ")
    if article != "a":
        return "booleans" if first is bool else "values"
    head, of, inner = noun.partition(" of ")
    return f"{head}s{of}{inner}"


#: Rule of pydantic's `Field` -> its words, and its condition.
_LIMITS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
_WITHIN: dict[str, Callable[[Any, Any], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}
#: Limits of any number: beyond them, integers and 32-bit floats overflow.
_ANY = (("ge", -1e18), ("le", 1e18))

#: Type -> its values, in words and as a condition; numbers can be NumPy's, and booleans are no numbers.
_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Any: ("a value", lambda value: True),
    int: ("a whole number", is_integer),
    float: ("a number", lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool)),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
    type(None): ("None", lambda value: value is None),
}


def sides(axes: int) -> Sequence[str]:
    """Return the names of the axes of a text, an image, or a video or volume."""
    named = ("length",) if axes == 1 else ("depth", "height", "width")[max(3 - axes, 0) :]
    return [*(f"axis {axis}" for axis in range(axes - len(named))), *named]


def check_sides(image: Sequence[int], patch: Sequence[int]) -> None:
    """Check that every side of an image, in pixels, is a positive multiple of the patch's side."""
    for side, pixels, step in zip(sides(len(image)), image, patch, strict=True):
        if pixels < step or pixels % step:
            above = (pixels // step + 1) * step
            near = f"sizes are {above - step} and {above}" if pixels > step else f"size is {step}"
            raise ValueError(
                f"`img_size` must be a positive multiple of the patch size, got {side} {pixels} with a patch of "
                f"{step}; the nearest {near}. A backbone with `fit` 'floor' drops the rest, one with 'pad' adds zeros."
            )


def parse_sizes(texts: Sequence[str], name: str = "sizes", axes: int = 2) -> list[Any]:
    """Parse sizes of images, SIDE or HEIGHTxWIDTH in pixels, into (height, width), or with a depth of three `axes`."""
    sizes = []
    for text in texts:
        sides = text.lower().split("x")
        if len(sides) not in (1, axes) or not all(side.isdecimal() and len(side) < 6 and int(side) for side in sides):
            raise ValueError(
                f"`{name}` must be sides in pixels, below 100,000, or {'DEPTHx' * (axes - 2)}HEIGHTxWIDTH, such as 224 "
                f"or {'8x' * (axes - 2)}320x224, got {text[:40]!r}."
            )
        sizes.append(tuple(map(int, sides * axes if len(sides) == 1 else sides)))
    return sizes


_FREEZE = "all-but-PART or all-but-PART+PART, with the parts head, position and last-N"
_TRAINED = re.compile(r"head|position|last-[1-9]\d*")


def parse_freeze(text: str) -> list[str]:
    """Return the parts that stay trainable.

    >>> parse_freeze("all-but-last-2+head")
    ['last-2', 'head']
    """
    if text == "all":
        raise ValueError("`freeze` must leave something to train, got 'all'; all-but-head trains the head alone.")
    parts = text.removeprefix("all-but-").split("+")
    if not text.startswith("all-but-") or len(set(parts)) < len(parts) or not all(map(_TRAINED.fullmatch, parts)):
        raise ValueError(f"`freeze` must be {_FREEZE}, got {text!r}.")
    return parts
