"""The options of a command for its user: the help as a page."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from graticule.lab.arguments import Option, options_of
from graticule.lab.terminal import bold

_COLUMN = 24


def help_page(kind: type, name: str, *, every: bool = False, **defaults: Any) -> str:
    """Return the help of the command `name`, whose options are the fields of the dataclass `kind`.

    A page has examples, the arguments and the usual options; with `every`, which is `--help-all`, the rare ones, too.
    """
    width = min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 80
    options = options_of(kind, **defaults)
    examples, text = _described(kind)
    positional = [one for one in options if one.positional]
    lines = [" ".join(["usage: graticule", name, *(one.shown for one in positional), "[options]"]), ""]
    if examples:
        lines += [*(f"  {example}" for example in examples), ""]
    for paragraph in text:
        lines += [*textwrap.wrap(paragraph, width), ""]
    entries = [(one.shown, _text(one)) for one in positional]
    usual = [one for one in options if not one.positional and (every or not one.rare)]
    usual.sort(key=lambda one: not one.required)
    hidden = sum(not one.positional for one in options) - len(usual)
    entries += [(one.shown, _text(one)) for one in usual]
    if hidden:
        entries.append(("--help-all", f"list {hidden} more option{'s' * (hidden > 1)}"))
    entries.append(("--plugin FILE ...", "your Python files, with encodings, recipes, ..."))
    for shown, about in entries:
        lines += _entry(shown, about, width)
    return "\n".join(lines).rstrip()


def _entry(shown: str, about: str, width: int) -> Iterator[str]:
    """Yield the lines of an option: its name on the left, its text on the right."""
    text = textwrap.wrap(about, width - _COLUMN, break_on_hyphens=False) or [""]
    name = bold(shown, sys.stdout)
    if len(shown) + 4 > _COLUMN:
        yield f"  {name}"
    else:
        yield f"  {name}{' ' * (_COLUMN - 2 - len(shown))}{text.pop(0)}".rstrip()
    yield from (" " * _COLUMN + line for line in text)


def _text(option: Option) -> str:
    """Return the text of an option with its choices and default."""
    listed = option.choices and option.word[:1] != "{"
    choices = f" ({', '.join(option.choices)})" if listed else ""
    return f"{option.about}{choices}{f' ({option.default})' if option.default else ''}"


def _described(kind: type) -> tuple[list[str], list[str]]:
    """Return the examples in a docstring, a paragraph of lines that begin with graticule, and its other paragraphs."""
    examples, text = [], []
    for paragraph in re.split(r"\n\s*\n", (kind.__doc__ or "").strip()):
        lines = [line.strip() for line in paragraph.splitlines()]
        if all(line.startswith("graticule ") for line in lines):
            examples += lines
        else:
            text.append(" ".join(lines))
    return examples, text


def command_options(name: str) -> type:
    """Return the dataclass of a command's options."""
    module = import_module(f"graticule.lab.commands.{name}")
    if hasattr(module, "options_class"):
        found: type = module.options_class()
        return found
    own = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
    return next(one for one in own if dataclasses.is_dataclass(one) and isinstance(one, type))
