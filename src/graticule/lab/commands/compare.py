"""`graticule compare`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.choices import RunOptions, folder_suffix, parse_choices, show_results
from graticule.lab.commands.opening import check_task_options
from graticule.lab.commands.options import command_line, output_folder, parse
from graticule.lab.pages.report import run_page
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.comparison import compare
from graticule.lab.studies.execution import executor_of, parse_on
from graticule.lab.studies.plan import plan, planned_rows
from graticule.lab.tasks.parts.image_scores import ImageEvaluation
from graticule.lab.training.task import list_tasks
from graticule.registry.checks import parse_sizes
from graticule.system.files import read_json


@dataclass
class Compare(RunOptions):
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
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    """seeds, the same for every choice"""
    output: Path | None = None
    """folder of the runs and tables (default: runs/compare-RECIPE, followed by changed values)"""
    sizes: list[str] = dataclasses.field(default_factory=list)
    """for images: also evaluate every run at these sides, in pixels, or HEIGHTxWIDTH: a second table and a plot"""
    mode: Literal["zoom", "canvas", "crop"] = "zoom"
    """with --sizes: zoom scales the content; canvas keeps its scale on a larger canvas, crop that of the middle"""
    quick: bool = False
    """only a few steps, to check that everything works"""
    replace: Rare[bool] = False
    """replace the tables of a comparison with further choices or seeds in the same folder"""


def run(arguments: list[str]) -> int:
    """Train several choices with several seeds, and make one table."""
    options = parse(Compare, "compare", arguments)
    parse_on(options.on)
    sizes = parse_sizes(options.sizes)
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"`sizes` must be different sizes, got {' '.join(options.sizes)}.")
    base = load_recipe(options.recipe)
    base = options.changed(base.quick() if options.quick else base, f"train {options.recipe}")
    choices = parse_choices(base, options.choices, f"train {options.recipe}")
    evaluation = list_tasks()[base.task].evaluation
    if options.sizes and not issubclass(evaluation, ImageEvaluation):
        raise ValueError(
            f"`sizes` must be left out with the task {base.task}: compare scores classifiers at other sizes, and "
            f"graticule evaluate a run of any task on images, got {' '.join(options.sizes)}."
        )
    check_task_options(base.task, sizes=options.sizes)
    default = f"compare-{Path(options.recipe).stem}{'-quick' * options.quick}{folder_suffix(options)}"
    folder = output_folder(options.output, Path("runs") / default)
    if options.list_:
        return options.finish(options.print_table(*planned_rows(plan(choices, options.seeds, folder))))
    with executor_of(options.on) as executor:
        results = compare(
            choices,
            options.seeds,
            folder,
            command=command_line("compare", arguments),
            replace=options.replace,
            executor=executor,
            sizes=sizes,
            mode=options.mode,
        )
    tables = show_results(results, options)
    page = run_page(results.runs, results).write(folder / "report.html")
    record = {**tables, "comparison": read_json(folder / "comparison.json")}
    return options.finish(record, *sorted(folder.glob("comparison*.*")), page)
