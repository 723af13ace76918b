"""How --help describes options: one default each, and the type of an optional one without its None."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, get_args

import tyro
from tyro.constructors import (
    MISSING,
    MISSING_NONPROP,
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructTypeInfo,
)

#: The default of an optional option, at the end of its text.
_OPEN = re.compile(r"\s*(\(default: .*\))\s*$", re.DOTALL)


def help_registry() -> ConstructorRegistry:
    """Build tyro's registry with our two rules, which fall back to tyro's own."""
    registry = ConstructorRegistry()
    within: list[StructTypeInfo] = []

    @registry.primitive_rule
    def optional(info: PrimitiveTypeInfo) -> Any:
        """Show `T | None` as T; None is still accepted, for it resets what a recipe sets."""
        kinds = get_args(info.type)
        if len(kinds) != 2 or kinds[1] is not type(None):
            return None
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], set(info.markers)))
        return _or_none(spec) if isinstance(spec, PrimitiveConstructorSpec) else spec

    @registry.struct_rule
    def documented(info: StructTypeInfo) -> Any:
        """Give every option one default."""
        if any(info is one for one in within):  # tyro's own rule is called
            return None
        within.append(info)
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            within.pop()
        if not isinstance(spec, StructConstructorSpec):
            return spec
        return dataclasses.replace(spec, fields=tuple(_documented(field) for field in spec.fields))

    return registry


def _or_none(spec: PrimitiveConstructorSpec[Any]) -> PrimitiveConstructorSpec[Any]:
    """Let an option accept the word None too."""
    return dataclasses.replace(
        spec,
        instance_from_str=lambda texts: None if texts == ["None"] else spec.instance_from_str(texts),
        is_instance=lambda value: True if value is None else spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
        choices=None if spec.choices is None else (*spec.choices, "None"),
    )


def _documented(field: Any) -> Any:
    """Describe the default of an optional option by its own text, and any other default by its value."""
    if dataclasses.is_dataclass(field.default):
        return field
    text = (field.helptext() if callable(field.helptext) else field.helptext) or ""
    found = _OPEN.search(text)
    text = text[: found.start()] if found else text
    if field.default is MISSING or field.default is MISSING_NONPROP:
        hint = "(required)"
    elif field.default in (None, (), []):
        hint = found[1] if found else "(optional)"
    else:
        return dataclasses.replace(field, helptext=text)
    kind = Annotated[field.type, tyro.conf.arg(help_behavior_hint=hint)]
    return dataclasses.replace(field, helptext=text, type=kind)
