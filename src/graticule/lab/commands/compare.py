"""`graticule compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graticule.lab.commands.choices import Compare, folder_suffix
from graticule.lab.commands.opening import check_task_options
from graticule.lab.commands.options import output_folder
from graticule.lab.pages.report import run_page
from graticule.lab.studies.comparison import compare
from graticule.lab.studies.execution import executor_of, parse_on
from graticule.lab.studies.plan import plan, planned_rows
from graticule.lab.studies.results import Results
from graticule.lab.tasks.parts.image_scores import ImageEvaluation
from graticule.lab.training.task import list_tasks
from graticule.system.files import read_json


def run(options: Compare) -> int:
    """Train several choices with several seeds, and make one table."""
    parse_on(options.on)
    choices, task = options.parsed_choices, options.base.task
    evaluation = list_tasks()[task].evaluation
    if options.sizes and not issubclass(evaluation, ImageEvaluation):
        raise ValueError(
            f"`sizes` must be left out with the task {task}: compare scores classifiers at other sizes, and "
            f"graticule evaluate a run of any task on images, got {' '.join(options.sizes)}."
        )
    check_task_options(task, sizes=options.sizes)
    default = f"compare-{Path(options.recipe).stem}{'-quick' * options.quick}{folder_suffix(options)}"
    folder = output_folder(options.output, Path("runs") / default)
    if options.list_:
        return options.finish(options.print_table(*planned_rows(plan(choices, options.seeds, folder))))
    with executor_of(options.on) as executor:
        results = compare(
            choices,
            options.seeds,
            folder,
            command=options.line,
            replace=options.replace,
            executor=executor,
            sizes=options.parsed_sizes,
            mode=options.mode,
        )
    tables = show_results(results, options)
    page = run_page(results.runs, results).write(folder / "report.html")
    record = {**tables, "comparison": read_json(folder / "comparison.json")}
    return options.finish(record, *sorted(folder.glob("comparison*.*")), page)


def show_results(results: Results, options: Compare) -> dict[str, Any]:
    """Print the tables of a comparison, and return them as records."""
    tables: dict[str, Any] = {}
    for name, (title, table) in results.tables().items():
        options.say("", title)
        tables[name] = options.print_table(*table)
    options.say("", *results.notes())
    return tables
