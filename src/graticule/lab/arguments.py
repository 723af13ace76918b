"""The fields of a dataclass as options of a command: read from a command line, and described on a page of help."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from graticule.lab.terminal import bold
from graticule.registry.checks import Range, check_numbers, known_name, printable, type_words

T = TypeVar("T")
#: Marks of a field: given without its name; listed by --help-all alone; listed by --help, as some values of a recipe.
#: Another text in `Annotated` is the word for its value, such as KEY=VALUE; a `Range` is that of its numbers.
Positional = Annotated[T, "positional"]
Rare = Annotated[T, "rare"]
Usual = Annotated[T, "usual"]

#: The names of the dataclasses that contain a field, and its own: ("recipe", "mixing", "prob").
FieldPath = tuple[str, ...]
#: The longest list of choices that stands for a value.
_MOST_CHOICES = 38
#: The default of an option, at the end of its text.
_DEFAULT = re.compile(r"\s*\((default: .*)\)\s*$", re.DOTALL)
#: The column of the texts on a page of help.
_COLUMN = 24


class BadArguments(ValueError):
    """Arguments that a command does not have, or lacks."""


@dataclass(frozen=True)
class CommandOption:
    """An option or a positional argument of a command.

    path, kind: its field, and the annotated type of that.
    name: its name without dashes.
    word: the word for its value; empty for a flag, which means `on`, and whose other form is `reverse`.
    about, default: its text and its default.
    """

    path: FieldPath
    kind: Any
    name: str
    word: str
    about: str
    default: str
    choices: tuple[str, ...]
    nargs: str | int
    positional: bool
    required: bool
    rare: bool
    on: bool = True
    reverse: str = ""

    @property
    def usage(self) -> str:
        """The option as typed, with the word for its value."""
        value = f"{self.word} ..." if self.nargs == "*" else " ".join([self.word] * int(self.nargs))
        if not self.positional:
            return f"--{self.name} {value}".rstrip()
        return value if self.required else f"[{value}]"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser, which collects its texts."""
        if self.positional:
            parser.add_argument(self.name, nargs="*" if self.nargs == "*" else "?", default=argparse.SUPPRESS)
        elif self.word:
            parser.add_argument(f"--{self.name}", dest=self.name, nargs=self.nargs, default=argparse.SUPPRESS)
        else:
            for name, value in ((self.name, self.on), (self.reverse, not self.on)):
                constant: Any = {"action": "store_const", "const": value, "default": argparse.SUPPRESS}
                parser.add_argument(f"--{name}", dest=self.name, **constant)

    def read(self, value: Any) -> Any:
        """Convert texts to the type of the option; the word None resets a value that may be None."""
        if isinstance(value, bool):
            return value
        texts = [text.removeprefix("\0") for text in ([value] if isinstance(value, str) else value)]
        marks, sequence, leaves = _parts(self.kind)
        if texts == ["None"] and type(None) in leaves:
            return None
        field = self.path[-1]
        convert = next((leaf for leaf in leaves if leaf in (int, float, Path)), str)
        try:
            values = [known_name(field, text, self.choices) if self.choices else convert(text) for text in texts]
        except ValueError:
            if self.choices:
                raise
            words, text = type_words(self.kind), printable(" ".join(texts))
            raise ValueError(f"`{field}` must be {words}, got {text!r}.") from None
        for limits in (mark for mark in marks if isinstance(mark, Range)):
            check_numbers(field, values, limits)
        return values[0] if sequence is None else get_origin(sequence)(values)


def options_of(kind: type, **defaults: Any) -> list[CommandOption]:
    """List the options of a dataclass with other `defaults` of its fields, its own before those of its bases.

    Those of a field `recipe` are last, and have no prefix.
    """
    fields = {field.name: default_of(field) for field in dataclasses.fields(kind)}
    owners = {name: kind.__mro__.index(_owner(kind, name)) for name in fields}  # options of bases are shared, and last
    options = _options(kind, fields | defaults, (), "")
    return sorted(options, key=lambda option: (option.path[0] == "recipe", owners[option.path[0]]))


def parse_arguments(options: Sequence[CommandOption], arguments: Sequence[str], command: str) -> dict[FieldPath, Any]:
    """Return the field of each given option -> its value.

    Raises:
        BadArguments: for an unknown option, a missing or an invalid value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in options:
        option.add_to(parser)
    # a value such as -1x2 is no option
    marked = [f"\0{text}" if re.match(r"-[\d.]", text) else _dashed(text) for text in arguments]
    try:
        namespace, unknown = parser.parse_known_intermixed_args(marked)
    except argparse.ArgumentError as error:
        option = next(item for item in options if error.argument_name in (f"--{item.name}", f"--{item.reverse}"))
        count = f"{option.nargs} value{'s' * (option.nargs != 1)}" if option.word else "no value"
        raise BadArguments(f"`--{option.name}` must have {count}, as in {option.usage}.") from None
    if unknown:
        raise BadArguments(_unknown(unknown[0], options, command))
    values = vars(namespace)
    if missing := [option for option in options if option.required and option.name not in values]:
        needed = " and ".join(f"`{option.usage}` ({option.about})" for option in missing)
        filled = [option for option in options if option.nargs == "*" and values.get(option.name)]
        lists = [f"--{option.name}" for option in filled if not option.positional]
        order = f" before {' and '.join(lists)}, which takes every value up to the next option" if lists else ""
        raise BadArguments(f"{needed} must be given{order}; see graticule {command} --help.")
    try:
        return {option.path: option.read(values[option.name]) for option in options if option.name in values}
    except ValueError as error:
        raise BadArguments(str(error)) from None


def change(instance: Any, changes: Mapping[FieldPath, Any]) -> Any:
    """Return a dataclass with other values in it and in dataclasses within it."""
    values: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        inner = {path[1:]: value for path, value in changes.items() if path[0] == name}
        values[name] = inner[()] if () in inner else change(getattr(instance, name), inner)
    return dataclasses.replace(instance, **values) if values else instance


def help_page(kind: type, name: str, *, every: bool = False, **defaults: Any) -> str:
    """Return the help of the command `name`, whose options are the fields of the dataclass `kind`.

    A page has examples, the arguments and the usual options; with `every`, which is `--help-all`, the rare ones, too.
    """
    width = min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 80
    options = options_of(kind, **defaults)
    positional = [option for option in options if option.positional]
    named = [option for option in options if not option.positional]
    usual = sorted((option for option in named if every or not option.rare), key=lambda option: not option.required)
    lines = [" ".join(["usage: graticule", name, *(option.usage for option in positional), "[options]"]), ""]
    for paragraph in re.split(r"\n\s*\n", (kind.__doc__ or "").strip()):
        texts = [line.strip() for line in paragraph.splitlines()]
        if all(text.startswith("graticule ") for text in texts):  # examples, above the text
            lines[2:2] = [*(f"  {text}" for text in texts), ""]
        else:
            lines += [*textwrap.wrap(" ".join(texts), width), ""]
    for option in [*positional, *usual]:
        choices = f" ({', '.join(option.choices)})" if option.choices and option.word[:1] != "{" else ""
        default = f" ({option.default})" if option.default else ""
        lines += _entry(option.usage, f"{option.about}{choices}{default}", width)
    if hidden := len(named) - len(usual):
        lines += _entry("--help-all", f"list {hidden} more option{'s' * (hidden > 1)}", width)
    lines += _entry("--plugin FILE ...", "your Python files, with encodings, recipes, ...", width)
    return "\n".join(lines).rstrip()


def _entry(usage: str, about: str, width: int) -> Iterator[str]:
    """Yield the lines of an option: its name on the left, its text on the right."""
    text = textwrap.wrap(about, width - _COLUMN, break_on_hyphens=False) or [""]
    first = "" if len(usage) + 4 > _COLUMN else f"{' ' * (_COLUMN - 2 - len(usage))}{text.pop(0)}"
    yield f"  {bold(usage, sys.stdout)}{first}".rstrip()
    yield from (" " * _COLUMN + line for line in text)


def _options(kind: type, values: Mapping[str, Any], path: FieldPath, prefix: str) -> list[CommandOption]:
    """List the options of a dataclass, with `values` as defaults."""
    options = []
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value, place = values[field.name], (*path, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            group = "" if place == ("recipe",) else f"{prefix}{field.name.replace('_', '-')}."
            options += _options(type(value), vars(value), place, group)
        else:
            options.append(_option(_owner(kind, field.name), hints[field.name], value, place, prefix))
    return options


def _owner(kind: type, field: str) -> type:
    return next(base for base in kind.__mro__ if field in inspect.get_annotations(base))


def _option(owner: type, kind: Any, default: Any, path: FieldPath, prefix: str) -> CommandOption:
    """Describe the field of a dataclass `owner` as an option."""
    marks, sequence, leaves = _parts(kind)
    name, text = path[-1].strip("_").replace("_", "-"), _texts(owner).get(path[-1], "")
    match, about = _DEFAULT.search(text), _DEFAULT.sub("", text)
    required, positional = default is dataclasses.MISSING, "positional" in marks
    is_recipe = path[0] == "recipe" and owner.__module__.startswith("graticule.")
    rare = not required and ("rare" in marks or (is_recipe and "usual" not in marks))
    if leaves == [bool]:
        about = f"do not {about}" if default else about
        names = [prefix + name, f"{prefix}no-{name}"][:: -1 if default else 1]
        return CommandOption(path, kind, names[0], "", about, "", (), 0, False, required, rare, not default, names[1])
    if required:
        stated = "" if positional else "required"
    elif default in (None, (), [], ""):
        stated = match[1] if match else ""
    else:
        values = default if isinstance(default, list | tuple) else [default]
        stated = f"default: {' '.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}"
    nargs: str | int = 1
    if sequence is not None:
        nargs = "*" if get_origin(sequence) is list or ... in get_args(sequence) else len(get_args(sequence))
    choices = tuple(leaf for leaf in leaves if isinstance(leaf, str))
    word = _word(path[-1], marks, leaves, about, nargs)
    return CommandOption(path, kind, prefix + name, word, about, stated, choices, nargs, positional, required, rare)


def _word(field: str, marks: Sequence[Any], leaves: Sequence[Any], about: str, nargs: str | int) -> str:
    """Return the word for a value: the marked one, few choices, FOLDER or FILE, N or X, or from the field's name."""
    words = [mark for mark in marks if isinstance(mark, str) and mark not in ("positional", "rare", "usual")]
    choices = ",".join(leaf for leaf in leaves if isinstance(leaf, str))
    if words or (choices and len(choices) < _MOST_CHOICES):
        return words[0] if words else f"{{{choices}}}"
    if "positional" not in marks:
        if choices:
            return "NAME"
        if Path in leaves:
            return "FOLDER" if "folder" in re.split("[,;]", about)[0] else "FILE"
        if int in leaves or float in leaves:
            return "N" if int in leaves else "X"
    word = field.strip("_").rpartition("_")[2].upper()
    return word.removesuffix("S") if nargs == "*" else word


def _unknown(text: str, options: Sequence[CommandOption], command: str) -> str:
    """Return the error for an unknown argument, with the nearest options."""
    if not text.startswith("-"):
        return f"{text!r} is one value too many; see graticule {command} --help."
    names = [f"--{option.name}" for option in options if not option.positional]
    near = difflib.get_close_matches(text.partition("=")[0], names, n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown option {text!r}; {hint}graticule {command} --help-all lists all."


def _dashed(text: str) -> str:
    name, equals, value = text.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if text.startswith("--") else text


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _parts(kind: Any) -> tuple[list[Any], Any, list[Any]]:
    """Return the marks of an annotated type, the list or tuple in it if there is one, and its types and words."""
    marks = [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, str | Range)]
    sequence = kind if get_origin(kind) in (list, tuple) else None
    inner = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    leaves = [] if inner else [kind]
    for part in map(_parts, inner):
        marks += part[0]
        sequence = part[1] if sequence is None else sequence
        leaves += part[2]
    return marks, sequence, leaves


@cache
def _texts(kind: type) -> dict[str, str]:
    """Return field -> its description, the text after it in the source of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    texts = {}
    for field, text in pairwise(getattr(definition, "body", ())):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts
