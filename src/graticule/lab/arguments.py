"""The fields of a dataclass as arguments of a command: their description, and their values from a command line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from graticule.registry.checks import Range, check_numbers, known_name, printable, type_words

T = TypeVar("T")
#: Marks of a field: given without its name; listed by --help-all alone; listed by --help, as some values of a recipe.
#: Another text in `Annotated` is the word for its value, such as KEY=VALUE; a `Range` is that of its numbers.
Positional = Annotated[T, "positional"]
Rare = Annotated[T, "rare"]
Usual = Annotated[T, "usual"]

#: The names of the dataclasses that contain a field, and its own: ("recipe", "mixing", "prob").
FieldPath = tuple[str, ...]
#: The longest list of choices that is shown in the place of a value.
_MOST_CHOICES = 40
#: The default of an option, at the end of its text.
_DEFAULT = re.compile(r"\s*\((default: .*)\)\s*$", re.DOTALL)


class BadArguments(ValueError):
    """Arguments that a command does not have, or lacks."""


@dataclass(frozen=True)
class Option:
    """An option or a positional argument of a command.

    path: its field.
    name: its name without dashes.
    word: the word for its value; empty for a flag, whose other form is `reverse`.
    about, default: its text and its default.
    read: converts its texts to its value.
    """

    path: FieldPath
    name: str
    reverse: str
    word: str
    about: str
    default: str
    choices: tuple[str, ...]
    nargs: str | int
    positional: bool
    required: bool
    rare: bool
    read: Callable[[list[str]], Any]

    @property
    def shown(self) -> str:
        """Return the option as typed, with the word for its value."""
        value = f"{self.word} ..." if self.nargs == "*" else " ".join([self.word] * int(self.nargs))
        if not self.positional:
            return f"--{self.name} {value}".rstrip()
        return value if self.required else f"[{value}]"

    def add_to(self, parser: argparse.ArgumentParser) -> argparse.Action:
        """Add the option to a parser, which collects its texts."""
        given: dict[str, Any] = {"help": self.about.replace("%", "%%"), "default": argparse.SUPPRESS}
        if self.positional:
            return parser.add_argument(self.name, nargs="*" if self.nargs == "*" else "?", **given)
        if self.word:
            return parser.add_argument(f"--{self.name}", dest=self.name, nargs=self.nargs, **given)
        parser.add_argument(f"--{self.reverse}", dest=self.name, action="store_const", const=["reverse"], **given)
        return parser.add_argument(f"--{self.name}", dest=self.name, action="store_const", const=[], **given)


def options_of(kind: type, **defaults: Any) -> list[Option]:
    """List the options of a dataclass, its own before those of its bases.

    Those of a field `recipe` are last, and have no prefix.

    Args:
        kind: the dataclass.
        defaults: defaults of its fields, instead of their own.
    """
    own = {field.name: _default_of(field) for field in dataclasses.fields(kind)}
    owners = {name: kind.__mro__.index(_owner(kind, name)) for name in own}  # options of bases are shared, and last
    found = _options(kind, own | defaults, (), "")
    return sorted(found, key=lambda option: (option.path[0] == "recipe", owners[option.path[0]]))


def parse_arguments(options: Sequence[Option], arguments: Sequence[str], command: str) -> dict[FieldPath, Any]:
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
        found, unknown = parser.parse_known_intermixed_args(marked)
    except argparse.ArgumentError as error:
        option = next(one for one in options if error.argument_name in (f"--{one.name}", f"--{one.reverse}"))
        count = f"{option.nargs} value{'s' * (option.nargs != 1)}" if option.word else "no value"
        raise BadArguments(f"`--{option.name}` must have {count}, as in {option.shown}.") from None
    if unknown:
        raise BadArguments(_unknown(unknown[0], options, command))
    texts = {name: [given] if isinstance(given, str) else given for name, given in vars(found).items()}
    if missing := [one for one in options if one.required and one.name not in texts]:
        needed = " and ".join(f"`{one.shown}` ({one.about})" for one in missing)
        taking = [f"--{one.name}" for one in options if one.nargs == "*" and not one.positional and texts.get(one.name)]
        order = f" before {' and '.join(taking)}, which takes every value up to the next option" if taking else ""
        raise BadArguments(f"{needed} must be given{order}; see graticule {command} --help.")
    try:
        return {
            option.path: option.read([text.removeprefix("\0") for text in texts[option.name]])
            for option in options
            if option.name in texts
        }
    except ValueError as error:
        raise BadArguments(str(error)) from None


def change(instance: Any, given: Mapping[FieldPath, Any]) -> Any:
    """Return a dataclass with other values in it and in dataclasses within it."""
    values: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in given):
        inner = {path[1:]: value for path, value in given.items() if path[0] == name}
        values[name] = inner[()] if () in inner else change(getattr(instance, name), inner)
    return dataclasses.replace(instance, **values) if values else instance


def _options(kind: type, values: Mapping[str, Any], path: FieldPath, prefix: str) -> list[Option]:
    """List the options of a dataclass, with `values` as defaults."""
    found = []
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value, place = values[field.name], (*path, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
            group = "" if place == ("recipe",) else f"{prefix}{field.name.replace('_', '-')}."
            found += _options(type(value), inner, place, group)
        else:
            found.append(_option(_owner(kind, field.name), hints[field.name], value, place, prefix))
    return found


def _owner(kind: type, field: str) -> type:
    """Return the class that declares a field."""
    return next(one for one in kind.__mro__ if field in inspect.get_annotations(one))


def _option(owner: type, kind: Any, default: Any, path: FieldPath, prefix: str) -> Option:
    """Describe the field of a dataclass `owner` as an option."""
    field, leaves, marks = path[-1], _leaves(kind), [mark for mark in _marks(kind) if isinstance(mark, str)]
    name = field.strip("_").replace("_", "-")
    text = _texts(owner).get(field, "")
    said, about = _DEFAULT.search(text), _DEFAULT.sub("", text)
    required = default is dataclasses.MISSING
    if default in (None, (), [], ""):
        shown = said[1] if said else ""
    else:
        values = default if isinstance(default, list | tuple) else [default]
        shown = f"default: {' '.join(f'{one:g}' if isinstance(one, float) else str(one) for one in values)}"
    ours = path[0] == "recipe" and owner.__module__.startswith("graticule.")
    common: dict[str, Any] = {
        "path": path,
        "choices": tuple(leaf for leaf in leaves if isinstance(leaf, str)),
        "positional": "positional" in marks,
        "required": required,
        "rare": not required and ("rare" in marks or (ours and "usual" not in marks)),
    }
    if leaves == [bool]:
        names = (f"{prefix}no-{name}", prefix + name) if default else (prefix + name, f"{prefix}no-{name}")
        about = f"do not {about}" if default else about
        return Option(
            **common, name=names[0], reverse=names[1], word="", about=about, default="", nargs=0,
            read=lambda texts: bool(default) == bool(texts),
        )  # fmt: skip
    sequence = next((one for one in _types(kind) if get_origin(one) in (list, tuple)), None)
    nargs: str | int = 1
    if sequence is not None:
        nargs = "*" if get_origin(sequence) is list or ... in get_args(sequence) else len(get_args(sequence))
    return Option(
        **common,
        name=prefix + name,
        reverse="",
        word=_word(field, leaves, marks, about, nargs),
        about=about,
        default="" if required and common["positional"] else "required" if required else shown,
        nargs=nargs,
        read=lambda texts: _read(field, kind, sequence, texts),
    )


def _word(field: str, leaves: Sequence[Any], marks: Sequence[str], about: str, nargs: str | int) -> str:
    """Return the word for a value: the marked one, few choices, FOLDER or FILE, N or X, or from the field's name."""
    if marked := next((mark for mark in marks if mark not in ("positional", "rare", "usual")), None):
        return marked
    choices = ",".join(leaf for leaf in leaves if isinstance(leaf, str))
    if choices and len(choices) < _MOST_CHOICES - 2:
        return f"{{{choices}}}"
    if "positional" not in marks:
        if choices:
            return "NAME"
        if Path in leaves:
            return "FOLDER" if "folder" in re.split("[,;]", about)[0] else "FILE"
        if int in leaves or float in leaves:
            return "N" if int in leaves else "X"
    word = field.strip("_").rpartition("_")[2].upper()
    return word.removesuffix("S") if nargs == "*" else word


def _read(field: str, kind: Any, sequence: Any, texts: Sequence[str]) -> Any:
    """Convert the texts of an option to its type; the word None resets a value that may be None."""
    leaves = _leaves(kind)
    if texts == ["None"] and type(None) in leaves:
        return None
    choices = [leaf for leaf in leaves if isinstance(leaf, str)]
    convert = next((leaf for leaf in leaves if leaf in (int, float, Path)), str)
    try:
        values = [known_name(field, text, choices) if choices else convert(text) for text in texts]
    except ValueError as error:
        shown = printable(" ".join(texts))
        raise error if choices else ValueError(f"`{field}` must be {type_words(kind)}, got {shown!r}.") from None
    for limits in (mark for mark in _marks(kind) if isinstance(mark, Range)):
        check_numbers(field, values, limits)
    return values[0] if sequence is None else get_origin(sequence)(values)


def _unknown(text: str, options: Sequence[Option], command: str) -> str:
    """Say that an argument is unknown, with the nearest options."""
    if not text.startswith("-"):
        return f"{text!r} is one value too many; see graticule {command} --help."
    known = [f"--{one.name}" for one in options if not one.positional]
    near = difflib.get_close_matches(text.partition("=")[0], known, n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown option {text!r}; {hint}graticule {command} --help-all lists all."


def _dashed(text: str) -> str:
    """Return an option with dashes for underscores."""
    name, equals, value = text.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if text.startswith("--") else text


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _marks(kind: Any) -> list[Any]:
    """List the texts and ranges that annotate a type, or a type within it."""
    own = [one for one in getattr(kind, "__metadata__", ()) if isinstance(one, str | Range)]
    return own + [mark for one in get_args(kind) for mark in _marks(one)]


def _types(kind: Any) -> list[Any]:
    """List the types of a union, without annotations; a sequence is one type."""
    inner = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    if not inner or get_origin(kind) in (list, tuple):
        return [kind]
    return [each for one in inner for each in _types(one)]


def _leaves(kind: Any) -> list[Any]:
    """List the types and words in an annotation: [Path] of list[Path], ["a", "b"] of Literal["a", "b"]."""
    found = []
    for one in _types(kind):
        inner = get_args(one)
        found += [leaf for each in inner for leaf in _leaves(each)] if inner else [one]
    return found


@cache
def _texts(kind: type) -> dict[str, str]:
    """Return field -> its description, the text after it in the source of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    found = {}
    for field, text in pairwise(getattr(definition, "body", ())):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found
