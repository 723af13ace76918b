"""`graticule compare`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.choices import RunOptions, folder_suffix, parse_choices
from graticule.lab.commands.options import check_task_options, choose_device, command_line, output_folder, parse
from graticule.registry.checks import parse_sizes
from graticule.system.files import read_json

if TYPE_CHECKING:
    from graticule.lab.studies.sizes import Lengths, Resolutions


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
    lengths: list[int] = dataclasses.field(default_factory=list)
    """for text: also evaluate every run in windows of these numbers of tokens: a second table and a plot"""
    quick: bool = False
    """only a few steps, to check that everything works"""
    replace: Rare[bool] = False
    """replace the tables of a comparison with further choices or seeds in the same folder"""


def run(arguments: list[str]) -> int:
    """Train several choices with several seeds, and make one table."""
    options = parse(Compare, "compare", arguments)
    output, part = options.parsed()
    from graticule.lab.recipes.load import load_recipe

    sizes = parse_sizes(options.sizes)
    base = load_recipe(options.recipe)
    base = options.changed(base.quick() if options.quick else base, f"train {options.recipe}")
    choices = parse_choices(base, options.choices, f"train {options.recipe}")

    from graticule.lab.pages.run_report import run_page
    from graticule.lab.studies.comparison import compare
    from graticule.lab.studies.execution import executor_of
    from graticule.lab.studies.plan import plan, planned_rows
    from graticule.lab.studies.sizes import lengths, resolutions
    from graticule.lab.tasks.language import check_lengths
    from graticule.lab.tasks.parts.image_scores import ImageEvaluation
    from graticule.lab.training.task import list_tasks, task_of

    evaluation = list_tasks()[base.task].evaluation
    if options.sizes and not issubclass(evaluation, ImageEvaluation):
        raise ValueError(
            f"`sizes` must be left out with the task {base.task}: compare scores classifiers at other sizes, and "
            f"graticule evaluate a run of any task on images, got {' '.join(options.sizes)}."
        )
    check_task_options(base.task, lengths=options.lengths, sizes=options.sizes)
    for recipe in choices.values() if options.lengths else ():
        task = task_of(recipe)
        data = task.build_data()
        check_lengths(task.build_model(task.describe(data)), options.lengths, data)
    default = f"compare-{Path(options.recipe).stem}{'-quick' * options.quick}{folder_suffix(options)}"
    folder = output_folder(options.output, Path("runs") / default)
    if options.list_:
        columns, *rows = planned_rows(plan(choices, options.seeds, folder))
        output.give(output.table(columns, rows))
        return 0
    with executor_of(options.on) as executor:
        how: Any = {
            "replace": options.replace,
            "executor": executor,
            "part": part,
            "sizes": sizes,
            "mode": options.mode,
        }
        comparison = compare(choices, options.seeds, folder, command=command_line("compare", arguments), **how)
    if comparison is None:
        options.report_part(sum(not one.run.finished for one in plan(choices, options.seeds, folder)), output)
        return 0
    output.table(comparison.columns, comparison.rows())
    output.say(*comparison.verdict())
    given = {"comparison": read_json(folder / "comparison.json")}
    page = run_page(comparison.runs, comparison).write(folder / "report.html")
    output.wrote(*(folder / f"comparison.{kind}" for kind in ("md", "csv", "png", "pdf", "svg", "json")), page)
    found: Resolutions | Lengths | None = None
    if sizes:
        found = resolutions(comparison, sizes, device=choose_device("auto"), mode=options.mode)
    elif options.lengths:
        found = lengths(comparison, options.lengths, device=choose_device("auto"))
    if found is not None:
        columns, *rows = found.rows()
        output.say(f"\n{found.title}")
        given["sizes" if sizes else "lengths"] = output.table(columns, rows)
        if legend := found.legend():
            output.say(legend)
        if len(found.scores) > 1:
            columns, *rows = found.differences()
            output.table(columns, rows)
            output.say(found.note())
        if remark := found.remark():
            output.say(remark)
        output.wrote(*found.write(folder))
    output.give(given)
    return 0
