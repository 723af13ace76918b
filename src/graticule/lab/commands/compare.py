"""`graticule compare`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

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
        graticule compare digits_quick --choices lr=1e-3 lr=3e-3 --quick

    A choice is a list of values of the recipe, options of train, separated by commas; an argument of the backbone is
    "model_kwargs=windows=[8,4]". Options of train, such as --epochs 3, change a value in all runs, unless a choice
    changes it again. The tests are against the first choice; p is given unadjusted, and adjusted by Holm's method for
    their number.
    """

    recipe: Positional[Any]
    """name of a recipe, or a Python file"""
    choices: list[str]
    """the choices; the others are tested against the first"""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """seeds, the same for every choice"""
    output: Path | None = None
    """folder of the runs and tables (default: runs/compare-RECIPE, followed by changed values)"""
    sizes: list[str] = field(default_factory=list)
    """for images: also evaluate every run at these sides, in pixels, or HEIGHTxWIDTH: a second table and a plot"""
    mode: Literal["zoom", "canvas"] = "zoom"
    """with --sizes: zoom scales the content; canvas keeps its scale on a larger canvas, or crops it"""
    list_: bool = False
    """list the runs with their states, and train nothing"""
    on: Rare[str] = "here"
    """where the runs are trained: here; local:N, in N processes of one thread each; dask:ADDRESS, in a cluster"""
    quick: bool = False
    """only a few steps, to check that everything works"""
    replace: Rare[bool] = False
    """replace the tables of a comparison with further choices or seeds in the same folder"""

    needs: ClassVar[Mapping[str, str]] = {"mode": "sizes"}
    #: Choice -> recipe, and the default name of the folder.
    recipes: ClassVar[dict[str, Any]]
    folder_name: ClassVar[str]


def read(arguments: list[str]) -> CompareOptions:
    """Read the options, the recipe and the choices, so that PyTorch is not imported for wrong ones."""
    if not arguments or arguments[0].startswith("-"):
        parse(CompareOptions, "compare", arguments)  # prints the help, or says what is missing
    name, recipe = arguments[0], load_recipe(arguments[0])
    options: Any = parse(CompareOptions, f"compare {shlex.quote(name)}", arguments[1:], recipe)
    sizes = parse_sizes(options.sizes)
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"`sizes` must be different sizes, got {' '.join(options.sizes)}.")
    options.recipes = parse_choices(options.recipe, options.choices, f"train {name}")
    changed = sorted(options.recipe.overrides - recipe.overrides)
    if "seed" in changed or any("seed" in choice.overrides for choice in options.recipes.values()):
        raise ValueError("`seed` must be left out of graticule compare, which has --seeds for it, got it.")
    options.folder_name = f"compare-{Path(name).stem}{'-quick' * options.quick}{folder_suffix(options.recipe, changed)}"
    return options


def run(options: CompareOptions) -> int:
    """Train several choices with several seeds, and make one table."""
    run_page = pages.run_page  # imported before the training
    studies.parse_on(options.on)
    choices, task = options.recipes, options.recipe.task
    evaluation = training.list_tasks()[task].evaluation
    if options.sizes and not issubclass(evaluation, tasks.ImageEvaluation):
        raise ValueError(
            f"`sizes` must be left out with the task {task}: compare scores classifiers at other sizes, and "
            f"graticule evaluate a run of any task on images, got {' '.join(options.sizes)}."
        )
    folder = output_folder(options.output, Path("runs") / options.folder_name)
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


def folder_suffix(recipe: Any, names: Sequence[str]) -> str:
    """Return the suffix of the default folder of runs with changed values, such as '-epochs-3'."""
    text = "".join(f"-{name}-{attrgetter(name)(recipe)}" for name in names)
    return re.sub(r"[^\w.]+", "-", text).rstrip("-")


def parse_choices(base: Any, texts: Sequence[str], command: str) -> dict[str, Any]:
    """Return text -> `base` with the overrides of the text, such as encoding=sinusoidal_2d,joining=lape."""
    if len(set(texts)) < len(texts):
        raise ValueError(f"`choices` must differ, got {' '.join(map(repr, texts))}.")
    return {text: overridden(base, words_of(text), command) for text in texts}


def words_of(choice: str) -> list[str]:
    """Return the options of train for a choice KEY=VALUE,...: a truth value is --option or --no-option."""
    words = []
    for text in split_outside(choice, ","):
        key, equals, value = text.strip().partition("=")
        if not (key and equals):
            raise ValueError(f"`choices` must be like encoding=learnable,joining=lape, got {text!r}.")
        group, dot, name = key.replace("_", "-").rpartition(".")
        if value.lower() in ("true", "false"):
            words.append(f"--{group}{dot}{'no-' * (value.lower() == 'false')}{name}")
        else:
            texts = [value] if key in ("encoding", "joining") else split_outside(value, " ")  # one text with spaces
            words += [f"--{group}{dot}{name}", *texts]
    return words
