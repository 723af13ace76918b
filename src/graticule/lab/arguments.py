"""The fields of a dataclass as options of a command: read from a command line, and described on a page of help."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import operator
import re
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from graticule.registry.checks import known_name, printable, type_words

T = TypeVar("T")
#: Marks of a field: positional; shown by --help-all alone; a value of a recipe that --help shows, too. Another text in
#: `Annotated` is the word for its value, such as KEY=VALUE.
Positional = Annotated[T, "positional"]
Rare = Annotated[T, "rare"]
Usual = Annotated[T, "usual"]

#: The names of the dataclasses that contain a field, and its own: ("recipe", "mixing", "prob").
FieldPath = tuple[str, ...]
#: The longest list of choices that stands for a value.
_MOST_CHOICES = 38
#: The default of an option, at the end of its text.
_DEFAULT = re.compile(r"\s*\((default: .*)\)\s*$", re.DOTALL)
#: What begins with a dash and is a value, such as -1x2.
_VALUE = re.compile(r"-([\d.].*)?")
#: The column of the texts on a page of help.
_COLUMN = 24


class BadArguments(ValueError):
    """Arguments that a command does not have, or lacks."""


@dataclass(frozen=True)
class CommandOption:
    """An option or a positional argument of a command.

    path, kind: its field, and the annotated type of that.
    forms: its names without dashes and the values that they mean: both of a flag, of which the help has the first.
    word: the word for its value; empty for a flag.
    about, default: its text and its default.
    most: the largest number of its values; None for a list.
    """

    path: FieldPath
    kind: Any
    forms: Mapping[str, bool]
    word: str
    about: str
    default: str
    choices: tuple[str, ...]
    most: int | None
    positional: bool
    required: bool
    rare: bool

    @property
    def name(self) -> str:
        """The name in the help."""
        return next(iter(self.forms))

    @property
    def usage(self) -> str:
        """The option as typed, with the word for its value."""
        value = f"{self.word} ..." if self.most is None else " ".join([self.word] * self.most)
        if not self.positional:
            return f"--{self.name} {value}".rstrip()
        return value if self.required else f"[{value}]"

    def take(self, words: deque[str]) -> list[str]:
        """Take the values of the option from the next words: all up to an option, or up to what is no number."""
        texts: list[str] = []
        numeric = {int, float} & set(_parts(self.kind)[2])
        while words and not _is_option(words[0]) and (self.most is None or len(texts) < self.most):
            if texts and numeric and not re.match(r"-?\.?\d", words[0]):
                break
            texts.append(words.popleft())
        return texts

    def read(self, texts: Any) -> Any:
        """Convert texts to the type of the option: None resets a value that may be None, and 64x96 is 64 96."""
        if isinstance(texts, bool):
            return texts
        _, sequence, leaves = _parts(self.kind)
        if list(texts) == ["None"] and type(None) in leaves:
            return None
        field = self.path[-1]
        convert = next((leaf for leaf in leaves if leaf in (int, float, Path)), str)
        typed = texts
        if sequence is not None and convert is int:
            texts = [side for text in texts for side in text.lower().split("x")]
        try:
            values = [known_name(field, text, self.choices) if self.choices else convert(text) for text in texts]
        except ValueError:
            if self.choices:
                raise
            words, text = type_words(self.kind), printable(" ".join(typed))
            example = "" if sequence is None else f", as in {self.usage}"
            raise ValueError(f"`{field}` must be {words}{example}, got {text!r}.") from None
        return get_origin(sequence)(values) if self.most is None or len(values) > 1 else values[0]


def options_of(kind: type, **defaults: Any) -> list[CommandOption]:
    """List the options of a dataclass with other `defaults` of its fields, its own before its bases' options.

    The options of a field `recipe` are last, and have no prefix.
    """
    fields = {field.name: default_of(field) for field in dataclasses.fields(kind)}
    owners = {name: kind.__mro__.index(_owner(kind, name)) for name in fields}  # options of bases are shared, and last
    options = _options(kind, fields | defaults, (), "")
    return sorted(options, key=lambda option: (option.path[0] == "recipe", owners[option.path[0]]))


def read_changes(kind: type, command: str, arguments: Sequence[str], **defaults: Any) -> dict[FieldPath, Any]:
    """Return the field of each given option -> its value.

    Raises:
        SystemExit: after the help was printed, if it is asked for.
        BadArguments: for an unknown option, a missing or an invalid value.
    """
    if help_options := {"-h", "--help", "--help-all"} & set(arguments):
        print(help_page(kind, command, every="--help-all" in help_options, **defaults))
        raise SystemExit(0)
    options = options_of(kind, **defaults)
    by_name = {name: option for option in options for name in option.forms if not option.positional}
    texts: dict[FieldPath, Any] = {}
    words, loose = deque(arguments), deque[str]()
    while words:
        if not _is_option(words[0]):
            loose.append(words.popleft())
            continue
        typed, equals, value = words.popleft().partition("=")
        name = typed.removeprefix("--").replace("_", "-")
        if (option := by_name.get(name)) is None or not typed.startswith("--"):
            raise BadArguments(_unknown(typed + equals + value, options, command))
        values = [value] if equals else option.take(words)
        no_reset = option.most is None and option.path[0] != "recipe"  # a list of a recipe can be made empty
        if ((option.most or no_reset) and not values) or (option.most == 0 and equals):
            count = {None: "values", 0: "no value", 1: "1 value"}.get(option.most, f"{option.most} values")
            raise BadArguments(f"`--{name}` must have {count}, as in {option.usage}.")
        if option.path in texts:
            raise BadArguments(f"`--{name}` must be given once, got it twice; see graticule {command} --help.")
        texts[option.path] = values if option.word else option.forms[name]
    for option in (option for option in options if option.positional and loose):
        texts[option.path] = [loose.popleft() for _ in range(len(loose) if option.most is None else 1)]
    if loose:
        raise BadArguments(f"{printable(loose[0])!r} is one value too many; see graticule {command} --help.")
    if missing := [option for option in options if option.required and option.path not in texts]:
        named = by_name.values()
        needed = " and ".join(f"`{option.usage}` ({option.about})" for option in missing)
        lists = [f"--{item.name}" for item in named if item.most is None and texts.get(item.path)]
        order = f" before {' and '.join(lists)}, which takes every value up to the next option" if lists else ""
        raise BadArguments(f"{needed} must be given{order}; see graticule {command} --help.")
    try:
        return {option.path: option.read(texts[option.path]) for option in options if option.path in texts}
    except ValueError as error:
        raise BadArguments(str(error)) from None


def change(instance: Any, changes: Mapping[FieldPath, Any]) -> Any:
    """Return a dataclass with other values in it and in dataclasses within it."""
    values: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        inner = {path[1:]: value for path, value in changes.items() if path[0] == name}
        values[name] = inner[()] if () in inner else change(getattr(instance, name), inner)
    return dataclasses.replace(instance, **values) if values else instance


def check_effects(values: Any, names: Collection[str]) -> None:
    """Check that each value that was given, one of `names`, has an effect with the others, as its class `needs`."""
    for name, needs in values.needs.items():
        terms = [[_is_enabled(values, term) for term in both.split(" or ")] for both in needs.split(" and ")]
        if name in names:
            check_effect(values, name, all(map(any, terms)), needs)


def check_effect(values: Any, name: str, used: bool, needs: str) -> None:
    """Check that a value that was given is used."""
    if not used:
        value = operator.attrgetter(name)(values)
        raise ValueError(f"`{name}` must be left out without {needs}, since it has no effect, got {value}.")


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


def _is_option(word: str) -> bool:
    return word.startswith("-") and _VALUE.fullmatch(word) is None


def _is_enabled(values: Any, term: str) -> bool:
    """Return whether a value, such as mixing.mixup, is on, or has the one in NAME=VALUE."""
    name, equals, expected = term.partition("=")
    value = operator.attrgetter(name)(values)
    return str(value) == expected if equals else bool(value)


def _entry(usage: str, about: str, width: int) -> Iterator[str]:
    """Yield the lines of an option: its name on the left, its text on the right."""
    text = textwrap.wrap(about, width - _COLUMN, break_on_hyphens=False) or [""]
    first = "" if len(usage) + 4 > _COLUMN else f"{' ' * (_COLUMN - 2 - len(usage))}{text.pop(0)}"
    yield f"  {usage}{first}".rstrip()
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
        forms = {f"{prefix}no-{name}": False} if default else {}
        forms |= {prefix + name: True, f"{prefix}no-{name}": False}
        return CommandOption(path, kind, forms, "", about, "", (), 0, False, required, rare)
    if required:
        stated = "" if positional else "required"
    elif default in (None, (), [], ""):
        stated = match[1] if match else ""
    else:
        values = default if isinstance(default, list | tuple) else [default]
        stated = f"default: {' '.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}"
    most: int | None = 1
    if sequence is not None:
        most = None if get_origin(sequence) is list or ... in get_args(sequence) else len(get_args(sequence))
    choices = tuple(leaf for leaf in leaves if isinstance(leaf, str))
    word = _word(path[-1], marks, leaves, about, most)
    forms = {prefix + name: True}
    return CommandOption(path, kind, forms, word, about, stated, choices, most, positional, required, rare)


def _word(field: str, marks: Sequence[Any], leaves: Sequence[Any], about: str, most: int | None) -> str:
    """Return the word for a value: the marked one, few choices, FOLDER or FILE, N or X, or from the field's name."""
    words = [mark for mark in marks if mark not in ("positional", "rare", "usual")]
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
    return word.removesuffix("S") if most is None else word


def _unknown(text: str, options: Sequence[CommandOption], command: str) -> str:
    """Return the error for an unknown option, with the nearest ones."""
    names = [f"--{option.name}" for option in options if not option.positional]
    near = difflib.get_close_matches(text.partition("=")[0].replace("_", "-"), names, n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown option {text!r}; {hint}graticule {command} --help-all lists all."


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _parts(kind: Any) -> tuple[list[str], Any, list[Any]]:
    """Return the marks of an annotated type, the list or tuple in it if there is one, and its types and words."""
    marks = [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, str)]
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
