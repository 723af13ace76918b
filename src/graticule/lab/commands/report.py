"""`graticule report`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.options import JsonOutput, Output, parse
from graticule.lab.commands.targets import find_run_folders, open_runs, run_labels
from graticule.registry.checks import Range, printable

if TYPE_CHECKING:
    from graticule.lab.studies.runs import Metrics, Point
    from graticule.lab.training.results import Metric
    from graticule.lab.training.run import Run


@dataclass
class ReportOptions(JsonOutput):
    """Write a page about runs, finished or not: results, tests, learning curves, recipes, and position in their layers.

        graticule report runs/a
        graticule report runs/compare-digits_quick --output comparison.html
        graticule report runs/study --curves --group --output curves.pdf

    Runs whose recipes differ only in the seed are one choice; choices with the same seeds are tested against the first.
    With --curves, the training is drawn in one figure instead, and its numbers are written to a CSV file. For
    predictions of a detector or a segmentation model, graticule predict RUN writes a page.
    """

    runs: Positional[list[Path]]
    """run folders, or folders of runs at any depth"""
    position: bool = True
    """draw the position information in the layers of the first run of each choice"""
    untrained: Rare[Annotated[int, Range(0)]] = 39
    """number of untrained models of the same shape against which the range over layers is tested; 0 for none"""
    curves: bool = False
    """write no page, but the learning curves as a figure and as numbers"""
    metric: str | None = None
    """for curves: a column of metrics.csv, such as val_loss (default: that by which runs are judged, as val_top1)"""
    against: Literal["epoch", "seconds"] = "epoch"
    """for curves: epochs, or seconds of training"""
    group: bool = False
    """for curves: draw runs whose recipes differ only in `seed` as their mean, with a band of one standard deviation"""
    output: Path | None = None
    """page NAME.html, or curves NAME.png, pdf or svg (default: report.html or convergence.png in the first folder)"""


def run(arguments: list[str]) -> int:
    """Write a page about runs, or their learning curves."""
    options = parse(ReportOptions, "report", arguments)
    if options.curves:
        return _curves(options)
    if options.metric is not None or options.against != "epoch" or options.group:
        raise ValueError("`metric`, `against` and `group` must be left out without --curves, got one of them.")
    if options.output is not None and (options.output.suffix != ".html" or options.output.is_dir()):
        raise ValueError(f"`output` must be a file NAME.html, got {str(options.output)!r}.")
    output = Output(options.json)
    runs = open_runs(find_run_folders(options.runs, output))
    from graticule.lab.pages.run_report import run_report

    named = dict(zip(run_labels(runs), runs, strict=True))
    report = run_report(named, untrained=options.untrained, position=options.position)
    page = report.write(options.output or options.runs[0] / "report.html")
    output.give({"report": page})
    output.wrote(page)
    return 0


def _curves(options: ReportOptions) -> int:
    """Draw the training of runs in one figure, and write its numbers to a CSV file."""
    if not options.position:
        raise ValueError("`position` must be left out with --curves, which have no maps of position.")
    output = Output(options.json)
    runs = open_runs(find_run_folders(options.runs, output))
    from graticule.lab.figures.save import save_figure
    from graticule.lab.figures.scores import MOST_LINES, convergence_plot
    from graticule.lab.studies.runs import curve, group_seeds, read_recipe
    from graticule.lab.training.results import TOP1
    from graticule.system.files import followed, write_text

    picture = followed(options.output) or options.runs[0] / "convergence.png"
    suffixes = (".png", ".pdf", ".svg")
    if picture.suffix not in suffixes or picture.stem == "metrics" or picture.is_dir():  # runs have a metrics.csv
        raise ValueError(
            f"`output` must be a file NAME.png, NAME.pdf or NAME.svg, and NAME not metrics, got {str(picture)!r}."
        )
    names = [printable(name) for name in run_labels(runs)]
    if len(set(names)) < len(names):
        raise ValueError(f"`runs` must differ, got {', '.join(map(str, options.runs))}.")
    named = dict(zip(names, runs, strict=True))
    judge = _judged_by(named, options.metric)
    metric = options.metric or (TOP1 if judge is None else judge).column
    metrics = {name: _read(one.metrics_file, metric, options.against) for name, one in named.items()}
    groups = {name: [name] for name in names}
    if options.group:
        recipes = {}
        for name, one in named.items():
            try:
                recipes[name] = read_recipe(one.recipe_file)
            except ValueError as error:
                raise ValueError(f"{one.folder} is damaged: {error}.") from None
        groups = {
            label + (f" ({len(members)} seeds)" if len(members) > 1 else ""): members
            for label, members in group_seeds(recipes).items()
        }
    if len(groups) > MOST_LINES:
        raise ValueError(
            f"`runs` must make 1 to {MOST_LINES} lines, so that no two look the same, got {len(groups)}; "
            "--group combines runs that differ only in the seed."
        )
    lines = {label: curve([metrics[name] for name in members], metric) for label, members in groups.items()}
    if empty := next((label for label, points in lines.items() if not points), None):
        raise ValueError(f"`runs` must have an epoch in common to be grouped, got {', '.join(groups[empty])}.")
    figure = convergence_plot(
        {label: [point.on(options.against) for point in points] for label, points in lines.items()},
        judge or metric,
        options.against,
    )
    ends = _show_ends(output, lines, metric, judge)
    for label, members in groups.items():
        most = max(metrics[name]["epoch"][-1] for name in members)
        if most > lines[label][-1].epoch:
            output.say(f"{label}: drawn to epoch {lines[label][-1].epoch} of {most:.0f}, as far as all of its runs are")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # for a name in a script that the font lacks
        written = save_figure(figure, picture)
    table = write_text(picture.with_suffix(".csv"), _table(lines, groups, metric))
    output.give(ends)
    output.wrote(written, table)
    return 0


def _judged_by(runs: Mapping[str, Run], column: str | None) -> Metric | None:
    """Return the metric of `column` that runs are judged by, or the common one of all; None if they record none."""
    from graticule.lab.studies.runs import summarise

    found: dict[Metric, str] = {}
    for name, one in runs.items():
        metric = summarise(one.folder).metric
        if metric is not None and column in (None, metric.column):
            found.setdefault(metric, name)
    if len(found) > 1:
        judged = " and ".join(f"{metric.column} ({metric.label}) for {name}" for metric, name in found.items())
        raise ValueError(
            "`metric` must be given if runs have different ones, and be one that all have, such as val_loss, "
            f"got {judged}; or draw them separately."
        )
    return next(iter(found), None)


def _read(path: Path, metric: str, against: str) -> Metrics:
    """Read the metrics of a run, which must have an epoch, `metric` and the column of the other axis."""
    from graticule.lab.studies.runs import read_metrics

    try:
        found = read_metrics(path)
    except FileNotFoundError:
        found = {"epoch": []}
    except ValueError as error:
        raise ValueError(f"{path.parent} is damaged: {error}.") from None
    if not found["epoch"]:
        raise ValueError(f"`runs` must have finished an epoch, got {str(path.parent)!r}, which has not yet.")
    if metric not in found:
        raise ValueError(f"`metric` must be one that {path.parent} has, {', '.join(found)}, got {metric!r}.")
    if against == "seconds" and not all(map(math.isfinite, found.get("seconds", [math.nan]))):
        raise ValueError(f"`against` must be epoch, as {path.parent} lacks the seconds of some epochs, got 'seconds'.")
    return found


def _show_ends(
    output: Output, lines: Mapping[str, Sequence[Point]], metric: str, judge: Metric | None
) -> list[dict[str, Any]]:
    """Print the last point of every line, and the best one of a score or a loss; returns them."""
    from graticule.lab.figures.scores import LOSSES

    rows = []
    for label, points in lines.items():
        known = [point for point in points if math.isfinite(point.mean)]
        best = "-"
        if known and (judge or metric in LOSSES):
            top = (max if judge and judge.highest else min)(known, key=lambda point: point.mean)
            best = f"{_shown(top.mean, judge)} ({top.epoch})"
        rows.append((label, str(points[-1].epoch), _shown(points[-1].mean, judge), best))
    return output.table(("run", "epochs", metric, "best (epoch)"), rows)


def _shown(value: float, judge: Metric | None) -> str:
    return f"{value:.4g}" if judge is None else judge.show(value, unit=False)


def _table(lines: Mapping[str, Sequence[Point]], groups: Mapping[str, Sequence[str]], metric: str) -> str:
    """Return the points as CSV, one row each; a cell without a number is empty."""
    from graticule.lab.studies.tables import csv_text

    columns = ("run", "runs", "epoch", "seconds", metric, "deviation")
    rows = []
    for label, points in lines.items():
        for epoch, *values in points:
            cells = ["" if value is None or not math.isfinite(value) else f"{value:.10g}" for value in values]
            rows.append(dict(zip(columns, (label, len(groups[label]), epoch, *cells), strict=True)))
    return csv_text(rows, columns)
