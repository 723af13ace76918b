"""Parsing of the values of options: None resets an optional one, and errors name the option."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, get_args

from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructTypeInfo,
)

from graticule.checks import printable, type_words
from graticule.names import known_name


class BadOption(Exception):
    """An invalid option or value; not a ValueError, which tyro would report in its own format."""


def value_registry() -> ConstructorRegistry:
    """Build tyro's registry with our two rules, which fall back to those of tyro."""
    registry = ConstructorRegistry()
    within: list[StructTypeInfo] = []

    @registry.primitive_rule
    def optional(info: PrimitiveTypeInfo) -> Any:
        """Parse `T | None` as T or None, which resets a value of the recipe."""
        kinds = get_args(info.type)
        if len(kinds) != 2 or kinds[1] is not type(None):
            return None
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], set(info.markers)))
        return _or_none(spec) if isinstance(spec, PrimitiveConstructorSpec) else spec

    @registry.struct_rule
    def named(info: StructTypeInfo) -> Any:
        """Make errors of values name their option."""
        if any(info is one for one in within):  # call tyro's own rule
            return None
        within.append(info)
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            within.pop()
        if not isinstance(spec, StructConstructorSpec):
            return spec
        return dataclasses.replace(spec, fields=tuple(map(_named, spec.fields)))

    return registry


def _or_none(spec: PrimitiveConstructorSpec[Any]) -> PrimitiveConstructorSpec[Any]:
    """Make an option accept the word None, too."""
    return dataclasses.replace(
        spec,
        instance_from_str=lambda texts: None if texts == ["None"] else spec.instance_from_str(texts),
        is_instance=lambda value: True if value is None else spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
    )


def _named(field: Any) -> Any:
    """Make an invalid value an error with the name of its option, its type and the given text."""
    info = PrimitiveTypeInfo.make(field.type, set())
    spec = ConstructorRegistry.get_primitive_spec(info)
    if info.type is bool or not isinstance(spec, PrimitiveConstructorSpec):  # a flag has no value
        return field
    read, choices = spec.instance_from_str, spec.choices

    def checked(texts: list[str]) -> object:
        try:
            for text in texts if choices else ():
                known_name(field.name, text, choices or ())
            return read(texts)
        except ValueError as error:
            if choices:
                raise BadOption(str(error)) from None
            came = printable(" ".join(texts))
            raise BadOption(f"`{field.name}` must be {type_words(field.type)}, got {came!r}.") from None

    spec = dataclasses.replace(spec, instance_from_str=checked, choices=None)
    return dataclasses.replace(field, type=Annotated[field.type, spec])
