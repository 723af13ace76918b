"""Common functions of commands: parsing options, opening runs, printing tables."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, TypeVar

import tyro

from graticule.lab.commands.help import BadOption, help_page, options_of, value_registry
from graticule.lab.terminal import red
from graticule.lab.training.run_folder import RunFolder
from graticule.registry.checks import parse_sizes, printable
from graticule.registry.plugins import named_plugins

if TYPE_CHECKING:
    from graticule.lab.training.run import Run

T = TypeVar("T")


def parse(kind: type[T], name: str, arguments: list[str]) -> T:
    """Parse typed options; the error for an unknown one names the nearest.

    Raises:
        SystemExit: after the help was printed, or with code 2 if an option or a value is invalid.
    """
    if asked := {"-h", "--help", "--help-all"} & set(arguments):
        print(help_page(kind, name, every="--help-all" in asked))
        raise SystemExit(0)
    if arguments[:1] and arguments[0].startswith("--"):  # otherwise positional arguments come first
        _check_order(kind, name, arguments)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed, unknown = tyro.cli(
                kind, prog=f"graticule {name}", args=arguments, return_unknown_args=True, registry=value_registry()
            )
    except BadOption as error:
        _refuse(str(error))
    except SystemExit:
        _refuse(_one_line(said.getvalue(), kind, name))
    if unknown:
        known = [f"--{one.name}" for one in options_of(kind) if not one.positional]
        _check_known(unknown[0], known, name)
    return parsed


def _refuse(reason: str) -> NoReturn:
    """Report a bad option."""
    print(red("graticule: error:", sys.stderr), reason, file=sys.stderr)
    raise SystemExit(2)


def _one_line(text: str, kind: type, name: str) -> str:
    """Return the text of a box of tyro as one line."""
    said = " ".join(re.sub("[│|╭╮╰╯─]|-{3,}", " ", text).split())  # boxes differ in a terminal without UTF-8
    if found := re.search(r"Missing value for argument '([^']+)'", said):
        option = next((one for one in options_of(kind) if one.name == found[1].removeprefix("--")), None)
        if option is not None and option.positional:
            return f"`{option.shown}` ({option.about}) must be given; see graticule {name} --help."
        shown = option.shown if option is not None else found[1]
        return f"`{found[1]}` must have a value, as in {shown}, got none or too few; see graticule {name} --help-all."
    if "Missing from" in said:
        missing = [one for one in options_of(kind) if one.required and one.about[:20] in said]
        needed = " and ".join(f"`{one.shown}` ({one.about})" for one in missing)
        return f"{needed or said} must be given; see graticule {name} --help."
    return said


def _check_known(option: str, known: Sequence[str], name: str) -> None:
    """Check that a command has an option.

    Raises:
        ValueError: with the nearest options, and all of them if they are few.
    """
    if not option.startswith("-"):
        raise ValueError(f"{option!r} is one value too many; see graticule {name} --help.")
    close = difflib.get_close_matches(option.replace("_", "-").partition("=")[0], known, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    every = f"The options are: {' '.join(known)}" if len(known) <= 20 else f"See graticule {name} --help-all."
    raise ValueError(f"unknown option {option!r}; {hint}{every}")


def _check_order(kind: type, name: str, arguments: Sequence[str]) -> None:
    """Check that an option of several values did not consume the positional arguments.

    Raises:
        ValueError: with the order that works.
    """
    if not any("Positional" in str(field.type) for field in dataclasses.fields(kind)):
        return
    options = options_of(kind)
    many = {one.name for one in options if one.many and not one.positional}
    single = {one.name for one in options if one.metavar and not one.many}
    wanted = [one.name for one in options if one.positional and one.required]
    taken: dict[str, list[str]] = {}
    option, free = "", True  # `free`: the next value does not belong to an option
    for text in arguments:
        if text.startswith("--"):
            option, equals, value = text[2:].replace("_", "-").partition("=")
            free = option not in many | single or bool(equals and option in single)
            if option in many:
                taken[option] = [value] if equals else []
        elif option in taken:
            taken[option].append(text)
        elif free:
            return
        else:
            free = True
    if wanted and any(taken.values()):
        option, values = next((option, values) for option, values in reversed(taken.items()) if values)
        *before, last = values
        raise ValueError(
            f"`{wanted[0]}` must come before --{option}, which takes every value up to the next option, got "
            f"--{option} {' '.join(values)}; write graticule {name} {last} --{option} {' '.join(before) or '...'}"
        )


def overridden(recipe: Any, arguments: list[str], command: str) -> Any:
    """Parse overrides of a recipe; a refused value is an error of the recipe, not of the parser."""

    def options(recipe: Any) -> type:
        @dataclasses.dataclass
        class Overrides:
            recipe: Any = dataclasses.field(default_factory=lambda: recipe)

        Overrides.__annotations__["recipe"] = Annotated[type(recipe), tyro.conf.arg(name="")]
        return Overrides

    return parse_recipe(options, recipe, arguments, command).recipe


def parse_recipe(kind: Callable[[Any], type], recipe: Any, arguments: list[str], command: str) -> Any:
    """Parse options with overrides of a recipe, which must have an effect; its own warm-up and decays fit `--epochs`.

    Args:
        kind: returns the options with the values of a recipe as the defaults of their field `recipe`.
        recipe: the recipe.
        arguments: the options as given.
        command: the command, for messages.
    """
    known = set(_value_names(recipe))
    given: dict[str, str] = {}
    for text, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = text.partition("=")
        *groups, name = option.removeprefix("--").replace("-", "_").split(".")
        named = (".".join([*groups, each]) for each in (name, name.removeprefix("no_")))
        given |= {each: value if equals else following for each in named if option.startswith("--") and each in known}
    if given.get("epochs", "").isdecimal():
        recipe = _shortened(recipe, int(given["epochs"]), given)
    options: Any = parse(kind(recipe), command, arguments)
    if hasattr(recipe, "give"):
        options.recipe.give(recipe.given | given.keys())
    return options


def _shortened(recipe: Any, epochs: int, given: Collection[str]) -> Any:
    """Return the recipe with a warm-up and decays that fit into `epochs`, unless given, and print what changed."""
    warmup, decays = getattr(recipe, "warmup_epochs", 0), getattr(recipe, "decay_epochs", ())
    if "warmup_epochs" not in given and 0 < epochs <= warmup:
        shorter = warmup * epochs // recipe.epochs
        said = f"the warm-up of the recipe, {warmup} of {recipe.epochs} epochs, is shortened to {shorter} of {epochs}"
        print(said, file=sys.stderr)
        recipe = dataclasses.replace(recipe, warmup_epochs=shorter, warmup_prefix=recipe.warmup_prefix and shorter > 0)
    if "decay_epochs" not in given and 0 < epochs <= max(decays, default=0):
        earlier = tuple(sorted({at * epochs // recipe.epochs for at in decays} - {0}))
        said = f"the decays of the recipe, at {_listed(decays)} of {recipe.epochs} epochs, are moved to"
        print(f"{said} {_listed(earlier)} of {epochs}", file=sys.stderr)
        recipe = dataclasses.replace(recipe, epochs=epochs, decay_epochs=earlier)
    return recipe


def _listed(epochs: Sequence[int]) -> str:
    """Return the epochs as a text."""
    return ", ".join(map(str, epochs)) or "none"


def _value_names(recipe: Any) -> Iterator[str]:
    """Yield the names of the values of a recipe, such as mixing.prob."""
    for one in dataclasses.fields(recipe):
        inner = getattr(recipe, one.name)
        yield one.name
        if dataclasses.is_dataclass(inner):
            yield from (f"{one.name}.{name}" for name in _value_names(inner))


def command_line(command: str, arguments: Sequence[str]) -> str:
    """Return the line that repeats a command, including plugins, for the record of its results."""
    plugins = [word for name in named_plugins() for word in ("--plugin", name)]
    return shlex.join(["graticule", command, *arguments, *plugins])


def parse_checkpoint(given: str) -> Any:
    """Check that it is best or last."""
    if given not in ("best", "last"):
        raise ValueError(f"`checkpoint` must be best or last, got {given!r}.")
    return given


def parse_part(given: str | None) -> tuple[int, int] | None:
    """Parse K/N, a part of the runs of a comparison or study."""
    if given is None:
        return None
    number, _, parts = given.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts) < 10**6):
        raise ValueError(f"`part` must be K/N with K from 1 to N, such as 2/4, got {given!r}.")
    return int(number), int(parts)


def parse_size(given: str | None) -> tuple[int, int] | None:
    """Parse the size of images; None if it is not given."""
    return parse_sizes([given], "img_size")[0] if given else None


def parse_query(text: str) -> tuple[int, int]:
    """Parse ROWxCOLUMN, the position of a token.

    Raises:
        ValueError: for another format.
    """
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"`query` must be ROWxCOLUMN, such as 0x3, got {text!r}.")
    return int(sides[0]), int(sides[1])


def read_picture(path: Path, read: Any) -> Any:
    """Read an image; one that cannot be read is a ValueError."""
    from PIL import Image

    try:
        return read(path)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"`images` must be images, got {path}, which cannot be read as one ({reason}).") from None


def choose_device(given: str) -> str:
    """Resolve auto to cuda if there is a GPU, otherwise to cpu.

    Raises:
        ValueError: for a device that does not exist.
    """
    import torch

    if given == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.Generator(given)
    except (RuntimeError, AssertionError) as error:  # the latter if PyTorch was built without it
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"`device` must be one that PyTorch has here, such as cpu, got {given!r} ({reason})."
        ) from None
    return given


def open_runs(folders: Sequence[Path], command: str) -> list[Run]:
    """Open runs, at least one and all different; a folder without a run is an error before PyTorch is imported."""
    if not folders:
        raise ValueError(f"`runs` must be one run folder or more, got none; see graticule {command} --help.")
    if len(set(folders)) < len(folders):
        raise ValueError(f"`runs` must differ, got {', '.join(map(str, folders))}.")
    found = [RunFolder.open(folder) for folder in folders]
    from graticule.lab.training.run import Run

    return [Run(one.folder) for one in found]


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return distinct labels of runs from their folders."""
    folders = [run.folder.resolve() for run in runs]
    if len(folders) == 1:
        return [printable(folders[0].name)]
    common = Path(os.path.commonpath(folders))
    names = [folder.relative_to(common).parts for folder in folders]
    while len({parts[-1:] for parts in names}) == 1 and all(len(parts) > 1 for parts in names):
        names = [parts[:-1] for parts in names]
    return [printable("/".join(parts) or common.name) for parts in names]


def output_folder(given: Path | None, default: Path) -> Path:
    """Return the output folder of a command.

    Raises:
        ValueError: if `output` exists and is not a folder.
    """
    if given is not None and given.exists() and not given.is_dir():
        raise ValueError(f"`output` must be a folder, got {str(given)!r}, which is not.")
    return given or default


def print_written(*paths: Path, file: TextIO | None = None) -> None:
    """Print the names of written files."""
    names = [printable(str(path)) for path in paths]
    print(f"wrote {' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}", file=file)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with the first column left-aligned and the others right-aligned."""
    columns, *rows = ([printable(cell) for cell in row] for row in (columns, *rows))
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


@dataclasses.dataclass(frozen=True)
class Output:
    """Output of a command: text for people, or with --json only one value for programs on stdout."""

    json: bool

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        if not self.json:
            print(*lines, sep="\n")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Print a table for people; returns its rows as records, with numeric cells as numbers."""
        if not self.json:
            print_table(columns, rows)
        return [dict(zip(columns, map(_value, row), strict=True)) for row in rows]

    def wrote(self, *paths: Path) -> None:
        """Print the names of written files, with --json on stderr."""
        print_written(*paths, file=sys.stderr if self.json else None)

    def give(self, values: object) -> None:
        """Print the results of a command for programs; NaN and infinity are null."""
        if self.json:
            print(json.dumps(_finite(values), indent=2, allow_nan=False, default=str))


def _value(cell: str) -> float | str | None:
    """Return a cell of a table as a number if it is one, or None if it is a dash."""
    if cell == "-":
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return cell


def _finite(values: object) -> object:
    """Return values for JSON, with None for numbers that are not finite."""
    if isinstance(values, dict):
        return {str(key): _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
