"""The options of `graticule compare`: choices, overrides of a recipe, and where the runs are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.options import JsonOutput, Repeatable, overridden
from graticule.lab.recipes.load import load_recipe
from graticule.registry.checks import parse_sizes
from graticule.registry.specs import split_outside


def parse_choices(base: Any, texts: Sequence[str], command: str) -> dict[str, Any]:
    """Return text -> `base` with the overrides of the text, such as encoding=sinusoidal_2d,joining=lape."""
    flags: dict[str, list[str]] = {}
    for choice in texts:
        pairs = [pair.strip().partition("=") for pair in split_outside(choice, ",")]
        if not all(key and equals for key, equals, _ in pairs):
            raise ValueError(f"`choices` must be like encoding=learnable,joining=lape, got {choice!r}.")
        if choice in flags:
            raise ValueError(f"`choices` must differ, got {choice!r} twice.")
        flags[choice] = [text for key, _, value in pairs for text in flags_of(key, value)]
    return {choice: overridden(base, words, command) for choice, words in flags.items()}


def flags_of(key: str, value: str) -> list[str]:
    """Convert one override to options of train: a truth value is --option or --no-option."""
    *group, name = key.replace("_", "-").split(".")
    truth = value.lower()
    if truth in ("true", "false"):
        return ["--" + ".".join([*group, name if truth == "true" else f"no-{name}"])]
    values = [value] if key in ("encoding", "joining") else split_outside(value, " ")  # one text with spaces
    return [f"--{'.'.join([*group, name])}", *values]


@dataclass(kw_only=True)
class RunOptions(JsonOutput):
    """The options of a comparison: values of all runs, and how the runs are trained."""

    epochs: int | None = None
    """epochs of every run (default: those of the recipe)"""
    precision: Rare[str | None] = None
    """precision of every run, such as bf16-mixed, which may be faster (default: that of the recipe)"""
    set_: list[Annotated[str, "KEY=VALUE"]] = field(default_factory=list)
    """values of the recipe for every run, such as lr=1e-3; a choice can change them again"""
    list_: bool = False
    """list the runs with their states and an estimate of the remaining time, and train nothing"""
    on: Rare[str] = "here"
    """where the runs are trained: here; local:N, in N processes of one thread each; dask:ADDRESS, in a cluster"""

    def flags(self) -> dict[str, list[str]]:
        """Return key of each changed value -> options of train that change it."""
        named = [("epochs", self.epochs), ("precision", self.precision)]
        pairs = [(key, str(value)) for key, value in named if value is not None]
        for text in self.set_:
            key, equals, value = text.partition("=")
            if not (key and equals):
                raise ValueError(f"`set` must be like lr=1e-3, got {text!r}.")
            pairs.append((key.strip().replace("-", "_"), value))
        flags: dict[str, list[str]] = {}
        for key, value in pairs:
            if key in flags:
                raise ValueError(f"`set` must have each value once, got {key} twice.")
            flags[key] = flags_of(key, value)
        return flags

    def changed(self, recipe: Any, command: str) -> Any:
        """Return a recipe with the values, which are options of `command`."""
        flags = [text for values in self.flags().values() for text in values]
        return overridden(recipe, flags, command) if flags else recipe


def folder_suffix(values: RunOptions) -> str:
    """Return the suffix of the default folder of changed runs, such as '-epochs-3'; empty if nothing is changed."""
    values_of = {key: flags[-1].removeprefix("--") for key, flags in values.flags().items()}
    text = "".join(f"-{key}-{value}" for key, value in values_of.items())
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in text)


@dataclass
class Compare(Repeatable, RunOptions):
    """Train several choices with several seeds: one table with mean, standard deviation and paired tests.

        graticule compare digits_quick --choices joining=default joining=lape
        graticule compare digits_quick --choices encoding=peg "encoding=shaw(clip=4)"
        graticule compare digits_quick --choices lr=1e-3 lr=3e-3 --epochs 3

    A choice is a list of values of the recipe, options of train, separated by commas; an argument of the backbone is
    "model_kwargs=windows=[8,4]". The tests are against the first choice; p is given unadjusted, and adjusted by Holm's
    method for their number.
    """

    recipe: Positional[str]
    """name of a recipe, or a Python file"""
    choices: list[str]
    """the choices; the others are tested against the first"""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """seeds, the same for every choice"""
    output: Path | None = None
    """folder of the runs and tables (default: runs/compare-RECIPE, followed by changed values)"""
    sizes: list[str] = field(default_factory=list)
    """for images: also evaluate every run at these sides, in pixels, or HEIGHTxWIDTH: a second table and a plot"""
    mode: Literal["zoom", "canvas", "crop"] = "zoom"
    """with --sizes: zoom scales the content; canvas keeps its scale on a larger canvas, crop that of the middle"""
    quick: bool = False
    """only a few steps, to check that everything works"""
    replace: Rare[bool] = False
    """replace the tables of a comparison with further choices or seeds in the same folder"""

    def __post_init__(self) -> None:
        """Read the sizes, the recipe and the choices, so that PyTorch is not imported for wrong ones."""
        self.parsed_sizes = parse_sizes(self.sizes)
        if len(set(self.parsed_sizes)) < len(self.sizes):
            raise ValueError(f"`sizes` must be different sizes, got {' '.join(self.sizes)}.")
        base, command = load_recipe(self.recipe), f"train {self.recipe}"
        self.base = self.changed(base.quick() if self.quick else base, command)
        self.parsed_choices = parse_choices(self.base, self.choices, command)
