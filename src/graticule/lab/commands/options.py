"""Common functions of commands: parsing options, opening runs, printing tables."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TextIO, TypeVar, cast

from graticule.lab.arguments import BadArguments, Rare, change, check_effects, read_changes
from graticule.registry.checks import printable
from graticule.registry.fields import Side, check_fields
from graticule.registry.plugins import named_plugins
from graticule.system.tables import format_table, plain

T = TypeVar("T")


class Options:
    """Base class of the options of a command.

    line: the command line that repeats it.
    needs: option -> the options that use it, as of `TrainingRecipe.needs`.
    """

    line = ""
    needs: ClassVar[Mapping[str, str]] = {}


@dataclass(kw_only=True)
class JsonOutput(Options):
    """The option of commands that print results: text for people, or with --json only one value for programs."""

    json: bool = False
    """print the results as JSON, and nothing else, on stdout"""

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        if lines and not self.json:
            print(*lines, sep="\n")

    def print_table(self, columns: Sequence[str], *rows: Sequence[str]) -> list[dict[str, Any]]:
        """Print a table for people; returns its rows as records, with numeric cells as numbers."""
        self.say(format_table([[printable(cell) for cell in row] for row in (columns, *rows)]))
        return [dict(zip(columns, map(_number_of, row), strict=True)) for row in rows]

    def finish(self, results: object, *written: Path) -> int:
        """Print the results for programs, NaN and infinity as null, and the names of written files; returns 0."""
        if self.json:
            print(json.dumps(plain(results), indent=2, allow_nan=False, default=str))
        if written:
            print_written(*written, file=sys.stderr if self.json else None)
        return 0


@dataclass(kw_only=True)
class OnDevice:
    """The device of commands that run a model."""

    device: Rare[str] = "auto"
    """cpu, cuda, ...; auto is a GPU if there is one"""


@dataclass(kw_only=True)
class OfSize:
    """The image size of commands that run a model."""

    img_size: tuple[Annotated[Side, "PIXELS"], ...] = ()
    """one side, or height and width, such as 224 320 (default: the model's)"""


@dataclass(kw_only=True)
class OfCheckpoint(Options):
    """The checkpoint of commands that open a run."""

    checkpoint: Rare[Literal["best", "last"]] = "best"
    """checkpoint of a run"""


@dataclass(kw_only=True)
class NamedModels(OfCheckpoint):
    """The options of models that are given by name."""

    weights: str | None = None
    """for a model given by name: checkpoint file, or random (default: its published weights, if any)"""
    encoding: str | None = None
    """for a model of graticule given by name: encoding (default: its own)"""
    joining: str | None = None
    """for a model of graticule given by name: joining (default: its own)"""


@dataclass(kw_only=True)
class NamedData(NamedModels):
    """The options of models that are given by name, and of the images for them."""

    images: str | None = None
    """for models that are not runs: folder of images at any depth, or name of a data set; runs have their own"""
    data_root: Rare[Path | None] = None
    """folder of the data set, if `images` is a name"""

    needs: ClassVar[Mapping[str, str]] = {"data_root": "images"}


@dataclass(kw_only=True)
class Figures:
    """The format of the figures of a command."""

    format: Literal["png", "pdf", "svg"] = "png"
    """format of the figures: png, or pdf or svg, which scale to any size"""


def parse(kind: type[T], command: str, arguments: Sequence[str], recipe: Any = None) -> T:
    """Parse the arguments of a command into a dataclass, whose field `recipe` has the values of `recipe` as defaults.

    Overrides of a recipe must have an effect, and take precedence over --quick; its own warm-up and decays fit
    `--epochs`.

    Raises:
        SystemExit: after the help was printed.
        BadArguments: for an unknown option, a missing or an invalid value, or one without effect.
    """
    recipe = recipe.quick() if recipe is not None and "--quick" in arguments else recipe
    defaults = {} if recipe is None else {"recipe": recipe}
    changes = read_changes(kind, command, arguments, **defaults)
    names = {".".join(path[1:]) for path in changes if path[1:]}
    values = {path[0]: value for path, value in changes.items() if not path[1:]}
    build: Any = kind
    try:
        if epochs := changes.get(("recipe", "epochs")):
            defaults = {"recipe": _shorten_schedule(recipe, epochs, names)}
        options: Any = change(build(**defaults, **values), {path: changes[path] for path in changes if path[1:]})
        check_fields(options)
        check_effects(options, values)
        if recipe is not None:
            _check_overrides(options.recipe, recipe.overrides | names)
    except ValueError as error:
        raise BadArguments(str(error)).with_traceback(error.__traceback__) from None
    options.line = command_line(command, arguments)
    return cast("T", options)


def _check_overrides(recipe: Any, names: Collection[str]) -> None:
    """Record the values that a user gave, and check that they have an effect and that their data exist."""
    if (root := recipe.data_root) is not None and not root.exists():
        raise FileNotFoundError(f"`data_root` must be where the data are, got {str(root)!r}, which does not exist.")
    recipe.record_overrides(names)
    reads = reads_files(getattr(recipe, "dataset", ""))
    recipe.check_effect("data_root", reads, "dataset image_folder, or another that reads files")


@dataclass
class _Overrides(Options):
    recipe: Any


def overridden(recipe: Any, arguments: Sequence[str], command: str) -> Any:
    """Parse overrides of a recipe."""
    return parse(_Overrides, command, arguments, recipe).recipe


def reads_files(dataset: str) -> bool:
    """Return whether a data set reads files; the others are in packages or are generated."""
    return dataset not in ("digits", "scenes", "pydoc") and not dataset.startswith("gym_")


def _shorten_schedule(recipe: Any, epochs: int, names: Collection[str]) -> Any:
    """Return the recipe with a warm-up and decays that fit into `epochs`, but for those in `names`."""
    warmup, decays = recipe.warmup_epochs, recipe.decay_epochs
    if "warmup_epochs" not in names and 0 < epochs <= warmup:
        shorter = warmup * epochs // recipe.epochs
        text = f"the warm-up of the recipe, {warmup} of {recipe.epochs} epochs, is shortened to {shorter} of {epochs}"
        print(text, file=sys.stderr)
        recipe = dataclasses.replace(recipe, warmup_epochs=shorter)
    if "decay_epochs" not in names and 0 < epochs <= max(decays, default=0):
        earlier = tuple(sorted({at * epochs // recipe.epochs for at in decays} - {0}))
        before, after = (", ".join(map(str, at)) or "none" for at in (decays, earlier))
        text = f"the decays of the recipe, at {before} of {recipe.epochs} epochs, are moved to {after} of {epochs}"
        print(text, file=sys.stderr)
        recipe = dataclasses.replace(recipe, epochs=epochs, decay_epochs=earlier)
    return recipe


def command_line(command: str, arguments: Sequence[str]) -> str:
    """Return the line that repeats a command, including plugins, for the record of its results."""
    plugins = [word for name in named_plugins() for word in ("--plugin", name)]
    return f"graticule {command} {shlex.join([*arguments, *plugins])}".rstrip()


def square(sides: tuple[int, ...], axes: int = 2, name: str = "img_size") -> Any:
    """Return the sides of images, or of videos of three `axes`, of which one may stand for all; None without any."""
    if len(sides) not in (0, 1, axes):
        raise ValueError(f"`{name}` must be one side in pixels or {axes}, got {' '.join(map(str, sides))}.")
    return (sides * axes if len(sides) == 1 else sides) or None


def output_folder(output: Path | None, default: Path = Path()) -> Path:
    """Return the output folder of a command."""
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(f"`output` must be a folder, got {str(output)!r}, which is not.")
    return output or default


def print_written(*paths: Path, file: TextIO | None = None) -> None:
    """Print the names of written files."""
    names = [printable(str(path)) for path in paths]
    print(f"wrote {' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}", file=file)


def _number_of(cell: str) -> float | str | None:
    """Return a cell of a table as a number if it is one, or None if it is a dash."""
    if cell == "-":
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return cell
