"""`graticule compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from graticule.lab import pages, studies, tasks, training
from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.options import JsonOutput, output_folder, overridden, parse
from graticule.lab.recipes.load import load_recipe
from graticule.registry.checks import parse_sizes
from graticule.registry.specs import split_outside
from graticule.system.files import read_json


@dataclass
class CompareOptions(JsonOutput):
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
    epochs: int | None = None
    """epochs of every run (default: those of the recipe)"""
    precision: Rare[str | None] = None
    """precision of every run, such as bf16-mixed, which may be faster (default: that of the recipe)"""
    set_: list[Annotated[str, "KEY=VALUE"]] = field(default_factory=list)
    """values of the recipe for every run, such as lr=1e-3; a choice can change them again"""
    list_: bool = False
    """list the runs with their states, and train nothing"""
    on: Rare[str] = "here"
    """where the runs are trained: here; local:N, in N processes of one thread each; dask:ADDRESS, in a cluster"""
    quick: bool = False
    """only a few steps, to check that everything works"""
    replace: Rare[bool] = False
    """replace the tables of a comparison with further choices or seeds in the same folder"""

    needs: ClassVar[Mapping[str, str]] = {"mode": "sizes"}
    #: The recipe with the values of every run, and choice -> recipe.
    base: ClassVar[Any]
    recipes: ClassVar[dict[str, Any]]

    def values(self) -> dict[str, str]:
        """Return the values of the recipe for every run."""
        named = {"epochs": self.epochs, "precision": self.precision}
        texts = [f"{key}={value}" for key, value in named.items() if value is not None] + self.set_
        return values_of(texts, "set", "lr=1e-3")


def read(arguments: list[str]) -> CompareOptions:
    """Read the options, the recipe and the choices, so that PyTorch is not imported for wrong ones."""
    options: Any = parse(CompareOptions, "compare", arguments)
    sizes = parse_sizes(options.sizes)
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"`sizes` must be different sizes, got {' '.join(options.sizes)}.")
    base, command = load_recipe(options.recipe), f"train {options.recipe}"
    base = base.quick() if options.quick else base
    options.base = overridden(base, words_of(options.values()), command) if options.values() else base
    options.recipes = parse_choices(options.base, options.choices, command)
    return options


def run(options: CompareOptions) -> int:
    """Train several choices with several seeds, and make one table."""
    run_page = pages.run_page  # imported before the training
    studies.parse_on(options.on)
    choices, task = options.recipes, options.base.task
    evaluation = training.list_tasks()[task].evaluation
    if options.sizes and not issubclass(evaluation, tasks.ImageEvaluation):
        raise ValueError(
            f"`sizes` must be left out with the task {task}: compare scores classifiers at other sizes, and "
            f"graticule evaluate a run of any task on images, got {' '.join(options.sizes)}."
        )
    default = f"compare-{Path(options.recipe).stem}{'-quick' * options.quick}{folder_suffix(options.values())}"
    folder = output_folder(options.output, Path("runs") / default)
    if options.list_:
        return options.finish(options.print_table(*studies.planned_rows(studies.plan(choices, options.seeds, folder))))
    with studies.executor_of(options.on) as executor:
        results = studies.compare(
            choices,
            options.seeds,
            folder,
            command=options.line,
            replace=options.replace,
            executor=executor,
            sizes=parse_sizes(options.sizes),
            mode=options.mode,
        )
    tables: dict[str, Any] = {}
    for name, (title, table) in results.tables().items():
        options.say("", title)
        tables[name] = options.print_table(*table)
    options.say("", *results.notes())
    page = run_page(results.runs, results).write(folder / "report.html")
    record = {**tables, "comparison": read_json(folder / "comparison.json")}
    return options.finish(record, *sorted(folder.glob("comparison*.*")), page)


def folder_suffix(values: Mapping[str, str]) -> str:
    """Return the suffix of the default folder of changed runs, such as '-epochs-3'; empty if nothing is changed."""
    text = "".join(f"-{key}-{value}" for key, value in values.items())
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in text)


def parse_choices(base: Any, texts: Sequence[str], command: str) -> dict[str, Any]:
    """Return text -> `base` with the overrides of the text, such as encoding=sinusoidal_2d,joining=lape."""
    if len(set(texts)) < len(texts):
        raise ValueError(f"`choices` must differ, got {' '.join(map(repr, texts))}.")
    example = "encoding=learnable,joining=lape"
    choices = {text: words_of(values_of(split_outside(text, ","), "choices", example)) for text in texts}
    return {text: overridden(base, words, command) for text, words in choices.items()}


def values_of(texts: Sequence[str], name: str, example: str) -> dict[str, str]:
    """Return key -> value of different texts KEY=VALUE, which are of the argument `name`."""
    values: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.strip().partition("=")
        if not (key and equals):
            raise ValueError(f"`{name}` must be like {example}, got {text!r}.")
        if (key := key.replace("-", "_")) in values:
            raise ValueError(f"`{name}` must have each value once, got {key} twice.")
        values[key] = value
    return values


def words_of(values: Mapping[str, str]) -> list[str]:
    """Return the options of train that set the values: a truth value is --option or --no-option."""
    words = []
    for key, value in values.items():
        group, dot, name = key.replace("_", "-").rpartition(".")
        if value.lower() in ("true", "false"):
            words.append(f"--{group}{dot}{'no-' * (value.lower() == 'false')}{name}")
        else:
            texts = [value] if key in ("encoding", "joining") else split_outside(value, " ")  # one text with spaces
            words += [f"--{group}{dot}{name}", *texts]
    return words
