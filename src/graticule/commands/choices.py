"""Choices on the command line: overrides of a recipe, separated by commas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graticule.commands.options import overridden
from graticule.specs import split_outside


def parse_choices(base: Any, given: Sequence[str], command: str) -> dict[str, Any]:
    """Return text -> `base` with its overrides, for each text, such as encoding=sinusoidal_2d,joining=lape.

    Args:
        base: a recipe, a dataclass.
        given: the texts.
        command: the command whose options are the fields.

    Raises:
        ValueError: for a text that is not a list of overrides or is repeated, an unknown field or a refused value.
    """
    choices: dict[str, Any] = {}
    for choice in given:
        pairs = [pair.strip().partition("=") for pair in split_outside(choice, ",")]
        if not all(key and equals for key, equals, _ in pairs):
            raise ValueError(f"`choices` must be like encoding=learnable,joining=lape, got {choice!r}.")
        flags = [text for key, _, value in pairs for text in flags_of(key, value)]
        if choice in choices:
            raise ValueError(f"`choices` must differ, got {choice!r} twice.")
        choices[choice] = overridden(base, flags, command)
    return choices


def flags_of(key: str, value: str) -> list[str]:
    """Convert one override to options of tyro: a truth value is --option or --no-option."""
    *group, name = key.replace("_", "-").split(".")
    truth = value.lower()
    if truth in ("true", "false"):
        return ["--" + ".".join([*group, name if truth == "true" else f"no-{name}"])]
    values = [value] if key in ("encoding", "joining") else split_outside(value, " ")  # one text with spaces
    return [f"--{'.'.join([*group, name])}", *values]
