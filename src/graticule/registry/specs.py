"""The grammar of `encoding`, `joining` and `model`: a name, or a name with options, such as `shaw(clip=4)`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

#: Maximum length, because Python's parser cannot handle text of any length.
_LONGEST = 4096


@dataclass(frozen=True)
class Spec:
    """A name and its options, as written: `str(spec)` is the text that `parse` reads.

    Options that are not given keep their defaults.

    Example:
        >>> spec = Spec.parse("peg(places=[0, 1], kernel=3)")
        >>> spec.name, dict(spec.options)
        ('peg', {'places': [0, 1], 'kernel': 3})
        >>> print(spec)
        peg(places=[0, 1], kernel=3)
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> Any:
        return Spec, (self.name, dict(self.options))

    @classmethod
    def parse(cls, text: str, argument: str = "spec") -> Spec:
        """Read one name with options.

        Raises:
            ValueError: naming `argument`, if `text` is not exactly one spec.
        """
        specs = parse_sum(text, argument)
        if len(specs) > 1:
            raise ValueError(f"`{argument}` must be one name, such as {specs[0]}, got {len(specs)}: {text!r}.")
        return specs[0]


def parse_sum(text: str, argument: str = "spec") -> tuple[Spec, ...]:
    """Read names with options, combined by '+'.

    Values are Python literals; nothing is evaluated.

    Raises:
        ValueError: naming `argument` and the error in `text`.

    Example:
        >>> [str(spec) for spec in parse_sum("peg(kernel=5)+learnable( std = 1.0 )")]
        ['peg(kernel=5)', 'learnable(std=1.0)']
    """
    if not isinstance(text, str):
        raise TypeError(f"`{argument}` must be text, such as 'shaw(clip=4)', got {text!r}.")
    if len(text) > _LONGEST:
        raise ValueError(f"`{argument}` must have at most {_LONGEST:,} characters, got {len(text):,}.")
    if not text.strip():
        raise _complaint(argument, text, "it is empty")
    if not text.isprintable():
        raise ValueError(f"`{argument}` must be one line of printable text, got {text!r}.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return tuple(_spec(node, text, argument) for node in _terms(tree))
    except SyntaxError as error:
        at = f" at character {error.offset}" if error.offset else ""
        raise _complaint(argument, text, f"{error.msg}{at}") from None
    except (RecursionError, MemoryError):
        raise _complaint(argument, text[:80], "it is nested too deeply") from None


def _terms(node: ast.expr) -> list[ast.expr]:
    """Return the terms of a sum, from left to right."""
    terms = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms.append(node.right)
        node = node.left
    return [node, *reversed(terms)]


def _spec(node: ast.expr, text: str, argument: str) -> Spec:
    if isinstance(node, ast.Name):
        return Spec(node.id)
    if isinstance(node, ast.Constant) and node.value is None:  # we have no name 'None'
        raise _complaint(argument, text, "None is not a name; 'none' is")
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise _complaint(argument, text, f"{ast.unparse(node)} is not a name")
    if node.args:
        raise _complaint(
            argument, text, f"{ast.unparse(node.args[0])} must be written NAME={ast.unparse(node.args[0])}"
        )
    options: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _complaint(argument, text, "** must be left out")
        if keyword.arg in options:  # not every version of Python's parser refuses it
            raise _complaint(argument, text, f"{keyword.arg} is given twice")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            value = ast.unparse(keyword.value)
            raise _complaint(
                argument, text, f"{keyword.arg}={value} must be a literal, such as 4, 0.5, 'text', True, None or [1, 2]"
            ) from None
    return Spec(node.func.id, options)


def _complaint(argument: str, text: str, why: str) -> ValueError:
    return ValueError(
        f"`{argument}` must be a name, or a name with options such as shaw(clip=4), several combined by +; got "
        f"{text!r}: {why}."
    )


def split_outside(text: str, separator: str) -> list[str]:
    """Split text at a character, but not within brackets or quotes; empty parts are left out.

    >>> split_outside("encoding=peg(places=[0, 1]), joining=lape", ",")
    ['encoding=peg(places=[0, 1])', ' joining=lape']
    """
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
            if character == separator and depth <= 0:
                parts.append("")
                continue
        parts[-1] += character
    return [part for part in parts if part.strip()]
