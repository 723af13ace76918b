"""Types that declare the range of a value, and the checks of dataclasses and JSON files against them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from graticule.registry.checks import format_value, printable
from graticule.system.files import read_json

#: Upper limit of numbers: a larger one is a mistake, and would overflow or never finish.
_MOST = 1_000_000_000

Whole = Annotated[int, Field(strict=True, ge=0, le=_MOST)]
Count = Annotated[int, Field(strict=True, ge=1, le=_MOST)]
Epochs = Annotated[int, Field(strict=True, ge=0, le=100_000)]
#: The side of an image or a kernel.
Side = Annotated[int, Field(strict=True, ge=1, le=65_536)]
#: (height, width) in pixels; a number is the side of a square.
Size = Annotated[tuple[Side, Side], BeforeValidator(lambda side: (side, side) if isinstance(side, int) else side)]
#: Seeds of NumPy have 32 bits.
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Number = Annotated[float, Field(strict=True)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, le=_MOST, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=_MOST, allow_inf_nan=False)]
#: In [0, 1], [0, 1) and (0, 1].
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
ShareBelowOne = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
ShareAboveZero = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
#: Of arguments of models. The upper limits are far beyond any model; they refuse numbers that no machine can handle.
Channels = Annotated[int, Field(ge=1, le=2**20)]
#: Heads, groups, or values of an encoding, some of which are computed for every pair of patches.
SmallCount = Annotated[int, Field(ge=1, le=2**16)]
SmallWhole = Annotated[int, Field(ge=0, le=2**16)]
Depth = Annotated[int, Field(ge=1, le=1000)]
#: Of integers whose minimum each function checks.
LayerIndex = Annotated[int, Field(le=1000)]
Bounded = Annotated[int, Field(le=2**20)]
Classes = Annotated[int, Field(ge=0, le=2**24)]
Ratio = Annotated[float, Field(gt=0, le=1000)]

#: The maximum size of a JSON file, in bytes, and the maximum depth of its nesting.
_LARGEST, _DEEPEST = 4 << 20, 32

_WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "Input should ": "must ",
    "a valid tuple": "a sequence",
}


def check_fields(instance: object, prefix: str = "") -> None:
    """Check every field of a frozen dataclass against its annotation; lists become tuples, and mappings dataclasses.

    Args:
        instance: the dataclass, in its `__post_init__`.
        prefix: precedes the names of fields in messages, such as `peg.`.
    """
    kind: Any = type(instance)
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(kind)}
    try:
        checked = vars(_fields_of(kind).validate_python(values))
    except ValidationError as error:
        raise ValueError(f"{_complaint(error, kind, prefix)}.") from None
    for name, value in checked.items():
        object.__setattr__(instance, name, value)


def check_value(kind: object, value: object, where: str) -> Any:
    """Return `value` as `kind`; `where` begins the error message if it cannot be."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{where}: {_complaint(error, kind)}.") from None


def as_kind(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as `kind`: lists become tuples, and whole numbers become floats; nothing else is converted."""
    try:
        text: str | None = json.dumps(value)
    except (TypeError, ValueError):  # a Python object without a JSON form
        text = None
    try:
        adapter = _adapter(kind)
        return adapter.validate_python(value, strict=True) if text is None else adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = max(error.errors(include_url=False), key=lambda part: len(part["loc"]))  # of the type that fits best
        rule = "must have more values" if first["type"] == "missing" else _plain_words(first["msg"])
        raise ValueError(f"{where} {rule}, got {format_value(value)}.") from None


def read_typed(path: Path, kind: object) -> Any:
    """Read a JSON file as `kind`.

    Raises:
        FileNotFoundError: if it does not exist.
        ValueError: if it is not a regular file, too large, nested too deeply, not JSON, or not a `kind`.
    """
    values = read_json(path, _LARGEST)
    level = [values]
    for _ in range(_DEEPEST):
        inner = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [item for value in inner if isinstance(value, list) for item in value]
    if level:
        raise ValueError(f"{path} is damaged: it must be nested at most {_DEEPEST} levels deep.")
    return check_value(kind, values, f"{path} is damaged")


def keys_with_hints(unknown: set[str], kind: Any) -> str:
    """List keys, each with the most similar field name of the dataclass `kind`."""
    fields = [field.name for field in dataclasses.fields(kind)]
    close = {key: difflib.get_close_matches(key, fields, n=1) for key in sorted(unknown)}
    return ", ".join(
        f"{printable(key)[:60]} (did you mean {names[0]}?)" if names else printable(key)[:60]
        for key, names in close.items()
    )


@cache
def _fields_of(kind: Any) -> TypeAdapter[Any]:
    """Build the validator of the fields of a dataclass; nested dataclasses refuse unknown keys."""
    hints = get_type_hints(kind, include_extras=True)
    form = dataclasses.make_dataclass(
        kind.__name__, [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]
    )
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(form))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _complaint(error: ValidationError, kind: object, prefix: str = "") -> str:
    errors = error.errors(include_url=False)
    first = max((part for part in errors if part["loc"][:1] == errors[0]["loc"][:1]), key=lambda part: len(part["loc"]))
    if first["type"] == "value_error":  # the complete message of a nested dataclass
        return str(first["ctx"]["error"]).rstrip(".")
    name = prefix
    for part in (part for part in first["loc"] if not re.match(r"constrained-|literal\[|tuple\[", str(part))):
        name += f"[{part}]" if isinstance(part, int) else f"{'.' if name and name[-1] != '.' else ''}{part}"
    name = f"`{printable(name)[:80]}`" if name else "it"
    if first["type"] == "missing":
        return f"{name} must be given"
    if first["type"] == "unexpected_keyword_argument":
        options = get_type_hints(kind)[str(first["loc"][0])]
        return f"`{prefix}{first['loc'][0]}` must not have the keys {keys_with_hints({str(first['loc'][-1])}, options)}"
    rule = re.sub(r"a dictionary or an instance of (_\w+|ModelWords)", "a valid dictionary", first["msg"])
    return f"{name} {_plain_words(rule)}, got {format_value(first['input'])}"


def _plain_words(rule: str) -> str:
    """Return a rule of pydantic in the words of `check_numbers`."""
    for words, ours in _WORDS.items():
        rule = rule.replace(words, ours)
    return rule
