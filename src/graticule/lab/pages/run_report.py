"""Page of runs, which train and compare write: scores with tests, learning curves, recipes, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graticule.lab.figures.scores import MOST_LINES, axis_label, convergence_plot
from graticule.lab.pages.report import Report
from graticule.lab.studies.results import Results
from graticule.lab.studies.runs import curve, flat_values, read_metrics
from graticule.lab.training.run import Run
from graticule.system.files import read_json


def run_page(runs: Mapping[str, Sequence[Run]], results: Results | None = None) -> Report:
    """Return the page of finished runs of one metric.

    Args:
        runs: choice -> its runs, which differ only in the seed.
        results: their scores and tests; None for a single run.
    """
    first = next(iter(runs.values()))[0]
    metric = first.recipe().metric
    report = Report(", ".join(runs) if len(runs) < 4 else f"{len(runs)} choices", f"judged by {metric.title}")
    if results is not None:
        for title, (header, *rows) in results.tables().values():
            report.table(header, rows, title)
        report.text(" ".join([results.provenance(), *results.notes()]))
        for figure in results.figures().values():
            report.figure(figure, results.endpoint, f"{results.endpoint} of all choices and seeds")
    histories = {name: [read_metrics(run.metrics_file) for run in members] for name, members in runs.items()}
    report.heading("Training")
    for key in (metric, "train_loss", "val_loss") if len(runs) <= MOST_LINES else ():
        column = key if isinstance(key, str) else key.column
        if all(column in history for members in histories.values() for history in members):
            lines = {name: curve(members, column) for name, members in histories.items()}
            several = any(len(members) > 1 for members in runs.values())
            caption = "Mean over seeds; the band is one standard deviation." if several else "One line per run."
            report.figure(convergence_plot(lines, key), caption, f"{axis_label(key)} against epochs")
    report.heading("Recipes")
    values = {name: flat_values(members[0].recipe().to_dict()) for name, members in runs.items()}
    keys = [key for key in dict.fromkeys(key for recipe in values.values() for key in recipe) if key != "seed"]
    differing = [key for key in keys if len({recipe.get(key) for recipe in values.values()}) > 1]
    if differing:
        changed = [[key, *(recipe.get(key, "-") for recipe in values.values())] for key in differing]
        report.table(["value", *values], changed, "values that differ")
    same = next(iter(values.values()))
    shared = [f"{key}={same[key]}" for key in keys if key not in differing and same[key] not in ("None", "")]
    report.text(f"All have {', '.join(shared)}.")
    described = read_json(first.recipe_file)
    versions = ", ".join(f"{name} {version}" for name, version in described.get("versions", {}).items())
    machine = ", ".join(f"{key} {value}" for key, value in described.get("machine", {}).items())
    report.text(f"The first run was trained with {versions or 'unknown versions'}, on {machine or 'unknown'}.")
    return report
