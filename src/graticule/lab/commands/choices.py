"""Options of commands that train several runs: choices, overrides of a recipe, and where the runs are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from graticule.lab.arguments import Rare
from graticule.lab.commands.options import JsonOutput, overridden
from graticule.lab.studies.results import Results
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


def show_results(results: Results, options: JsonOutput) -> dict[str, Any]:
    """Print the tables of a comparison, and return them as records."""
    tables: dict[str, Any] = {}
    for name, (title, table) in results.tables().items():
        options.say("", title)
        tables[name] = options.print_table(*table)
    options.say("", *results.notes())
    return tables
