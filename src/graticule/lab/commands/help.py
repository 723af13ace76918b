"""The help of a command as a page: examples, arguments and the usual options; `--help-all` adds the rare ones."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from tyro.constructors import (
    MISSING,
    MISSING_NONPROP,
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from graticule.lab.terminal import bold
from graticule.registry.checks import known_name, printable, type_words


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


#: Option -> metavar, the same for every command; a path is FOLDER or FILE, depending on the text of its option.
METAVARS = {
    **dict.fromkeys(("sizes", "img_size", "train_sizes", "patch_size"), "SIZE"),
    **dict.fromkeys(("lengths", "context", "tokens"), "TOKENS"),
    **dict.fromkeys(("epochs", "warmup_epochs", "cooldown_epochs", "decay_epochs"), "EPOCHS"),
    **dict.fromkeys(("seed", "seeds", "share_seed"), "SEED"),
    **dict.fromkeys(("layers", "features"), "LAYER"),
    **dict.fromkeys(("model", "models"), "MODEL"),
    "choices": "CHOICE",
    "data": "DATA",
    "dataset": "DATA",
    "device": "DEVICE",
    "docs": "FOLDER",
    "encoding": "ENCODING",
    "folder": "FOLDER",
    "folders": "FOLDER",
    "format": "FORMAT",
    "groups": "GROUP",
    "heads": "HEAD",
    "joining": "JOINING",
    "kind": "KIND",
    "metric": "METRIC",
    "on": "WHERE",
    "part": "K/N",
    "prompt": "TEXT",
    "push": "OWNER/NAME",
    "query": "ROWxCOLUMN",
    "recipe": "RECIPE",
    "run": "RUN",
    "runs": "RUN",
    "values": "KEY=VALUE",
    "shifts": "DOWNxRIGHT",
    "skip": "CHECK",
    "start_from": "FILE",
    "weights": "FILE",
}
#: Options that are rarely needed: `--help-all` lists them.
RARE = {
    *("batch_size", "checkpoint", "context", "data_root", "device", "border", "labels", "private", "workers"),
    *("precision", "real", "revision"),
    *(
        "located",
        "per_class",
        "stride",
        "window",
        "windows",
        "patch_size",
        "untrained",
        "dry_run",
        "part",
        "replace",
        "on",
    ),
}
#: Options of recipes that are often needed.
USUAL = {
    *("output", "quick", "auto_resume", "model", "encoding", "joining", "dataset", "data_root", "img_size"),
    *("epochs", "batch_size", "lr", "weight_decay", "seed", "start_from", "precision", "devices"),
    *("text", "tokenizer", "context", "backbone", "head", "detector"),
}
_COLUMN = 24
_MOST_CHOICES = 40  # most characters of choices beside an option's name
#: The default of an option, at the end of its text.
_DEFAULT = re.compile(r"\s*\((default: .*|optional)\)\s*$", re.DOTALL)


@dataclass(frozen=True)
class Option:
    """An option or a positional argument of a command.

    name: the name without dashes.
    metavar: the word for its value; empty for a flag.
    about, default: its text and its default.
    """

    name: str
    metavar: str
    about: str
    default: str
    choices: tuple[str, ...]
    positional: bool
    required: bool
    many: bool
    rare: bool

    @property
    def shown(self) -> str:
        """Return the option as typed, with its metavar."""
        value = f"{self.metavar} ..." if self.many else self.metavar
        if not self.positional:
            return f"--{self.name} {value}".rstrip()
        return value if self.required else f"[{value}]"


def options_of(kind: type, prefix: str = "", default: Any = MISSING_NONPROP, recipe: bool = False) -> list[Option]:
    """List the options of a dataclass, in its order, with those of a nested recipe last."""
    with value_registry():
        spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(kind, default, False))
        assert isinstance(spec, StructConstructorSpec)
        found, last = [], []
        for field in spec.fields:
            if dataclasses.is_dataclass(field.default):
                inner = type(field.default)
                if field.name == "recipe":
                    last += options_of(inner, prefix, field.default, recipe=True)
                else:
                    last += options_of(inner, f"{prefix}{field.name.replace('_', '-')}.", field.default, recipe)
            else:
                rare = _rare_in_recipe(kind, field.name, prefix) if recipe else field.name in RARE
                found.append(_option(field, prefix, rare))
    return found + last


def help_page(kind: type, name: str, *, every: bool = False) -> str:
    """Return the help of the command `name`, whose options are the fields of the dataclass `kind`."""
    width = min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 80
    options = options_of(kind)
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
    listed = option.choices and option.metavar[:1] != "{"
    choices = f" ({', '.join(option.choices)})" if listed else ""
    return f"{option.about}{choices}{f' ({option.default})' if option.default else ''}"


def _option(field: StructFieldSpec, prefix: str, rare: bool) -> Option:
    """Describe a field of a dataclass as an option."""
    name = prefix + (_renamed(field) or field.name).replace("_", "-")
    about = " ".join(((field.helptext() if callable(field.helptext) else field.helptext) or "").split())
    said = _DEFAULT.search(about)
    about = about[: said.start()] if said else about
    positional = any(str(one) == "Positional" for one in getattr(field.type, "__metadata__", ()))
    required = field.default is MISSING or field.default is MISSING_NONPROP
    if _leaves(field.type) == [bool]:
        name = f"{prefix}no-{name.removeprefix(prefix)}" if field.default else name
        return Option(name, "", f"do not {about}" if field.default else about, "", (), False, False, False, rare)
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(field.type, set()))
    assert isinstance(spec, PrimitiveConstructorSpec)
    choices = tuple(one for one in _leaves(field.type) if isinstance(one, str))
    default = ""
    if required:
        default = "" if positional else "required"
    elif field.default in (None, (), [], ""):
        default = said[1] if said and said[1] != "optional" else ""
    else:
        values = field.default if isinstance(field.default, list | tuple) else [field.default]
        default = f"default: {' '.join(f'{one:g}' if isinstance(one, float) else str(one) for one in values)}"
    many = spec.nargs == "*"
    metavar = _metavar(field, spec, about, choices, positional, many)
    return Option(name, metavar, about, default, choices, positional, required, many, rare and not required)


def _metavar(field: Any, spec: Any, about: str, choices: Sequence[str], positional: bool, many: bool) -> str:
    """Return the metavar of an option."""
    joined = f"{{{','.join(choices)}}}"
    if choices and len(joined) <= _MOST_CHOICES:
        return joined
    kinds = _leaves(field.type)
    named = None if float in kinds else METAVARS.get(field.name)  # the part of an augmentation is a probability
    if named and named != "FILE":
        word = named
    elif Path in kinds or named:
        word = "FOLDER" if "folder" in about.partition(",")[0].partition(";")[0] else "FILE"
    elif positional:
        word = field.name.upper().removesuffix("S" if many else "")
    else:
        word = next((word for kind, word in ((int, "N"), (float, "X")) if kind in kinds), "NAME")
    count = spec.nargs if isinstance(spec.nargs, int) else 1
    return " ".join([word] * count)


def _leaves(kind: Any) -> list[Any]:
    """List the types and words in an annotation: [Path] of list[Path], ["a", "b"] of Literal["a", "b"]."""
    inner = get_args(kind)
    inner = inner[:1] if get_origin(kind) is Annotated else inner
    return [leaf for one in inner for leaf in _leaves(one)] if inner else [kind]


def _renamed(field: StructFieldSpec) -> str | None:
    """Return the name of a field on the command line, if it differs."""
    for one in getattr(field.type, "__metadata__", ()):
        if (name := getattr(one, "name", None)) is not None:
            return str(name)
    return None


def _rare_in_recipe(kind: type, name: str, prefix: str) -> bool:
    """Return whether an option of a recipe is rare, as all except a few of the library's are."""
    owner = next(one for one in kind.__mro__ if name in inspect.get_annotations(one))
    return owner.__module__.startswith("graticule.") and (bool(prefix) or name not in USUAL)


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
