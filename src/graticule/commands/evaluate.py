"""`graticule evaluate`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from graticule.commands.kinds import check_task_options
from graticule.commands.options import (
    choose_device,
    open_runs,
    output_folder,
    parse,
    parse_checkpoint,
    print_table,
    print_written,
    run_labels,
)


@dataclass
class Evaluate:
    """Scores of runs on the held-out data: image classifiers at several sizes, language models at several lengths.

    One table, and a plot of the difference from the size or length of the training.
    """

    runs: tyro.conf.Positional[list[Path]]
    """run folders, all of one task"""
    checkpoint: str = "best"
    """best or last"""
    device: str = "auto"
    """cpu, cuda, ...; auto is a GPU if there is one"""
    output: Path | None = None
    """folder for the table and the plot (default: the first run's)"""


def run(arguments: list[str]) -> int:
    """Score runs on the held-out data, as their task says."""
    options = parse(_with_task_options(), "evaluate", arguments)
    runs = open_runs(options.runs, "evaluate")
    from graticule.files import write_json
    from graticule.training import Evaluated, list_tasks

    checkpoint = parse_checkpoint(options.checkpoint)
    tasks = [run.task() for run in runs]
    name = tasks[0].recipe.task
    if others := [run for run, task in zip(runs, tasks, strict=True) if task.recipe.task != name]:
        raise ValueError(
            f"`runs` must be all of one task, got {runs[0].folder}, which is of {name}, and {others[0].folder}, which "
            f"is of {others[0].recipe().task}: evaluate them separately."
        )
    kind = list_tasks()[name].evaluation
    common = {field.name for field in dataclasses.fields(Evaluate)}
    given = {field.name: field for field in dataclasses.fields(options) if field.name not in common}
    changed = {key: getattr(options, key) for key in given}
    check_task_options(name, **{key: value for key, value in changed.items() if value != _default(given[key])})
    evaluation = kind(**{field.name: changed[field.name] for field in dataclasses.fields(kind)})
    device = choose_device(options.device)
    folder = output_folder(options.output, runs[0].folder)
    loaded = []
    for run, task in zip(runs, tasks, strict=True):  # every mistake is found before the first example is read
        data = run.data()
        model = run.model(data, checkpoint)
        evaluation.check(task, model, data)
        loaded.append((run, task, model, data))
    evaluated = [
        Evaluated(
            label,
            str(run.folder),
            task.recipe,
            evaluation.scores(task, model, data, device=device),
            run.result()[f"{checkpoint}_{task.metric.key}"] if run.finished else None,
        )
        for label, (run, task, model, data) in zip(run_labels(runs), loaded, strict=True)
    ]
    table = evaluation.table(tasks[0].metric, evaluated)
    print_table(table.columns, table.rows)
    for note in table.notes:
        print(note)
    written = [write_json(folder / "evaluation.json", list(table.records))]
    figure = evaluation.figure(evaluated)
    if figure is not None:
        from graticule.analysis import save_figure

        written.append(save_figure(figure, folder / "evaluation.png"))
    print_written(*written)
    return 0


def _with_task_options() -> type:
    """Return the options of the command with those of every task's evaluation."""
    from graticule.training import list_tasks

    tasks = list_tasks()
    kinds: list[type] = list(dict.fromkeys(tasks[name].evaluation for name in tasks))
    found = {field.name: field for field in dataclasses.fields(Evaluate)}
    for kind in kinds:
        for field in dataclasses.fields(kind):
            known = found.setdefault(field.name, field)
            if (known.type, _default(known)) != (field.type, _default(field)):
                raise ValueError(
                    f"`evaluation` {kind.__name__} must not have the option {field.name}, which is another one of "
                    "graticule evaluate."
                )
    merged = type("Evaluate", (*reversed(kinds), Evaluate), {"__doc__": Evaluate.__doc__, "__module__": __name__})
    return dataclass(merged)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
