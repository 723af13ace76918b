"""Report pages of runs: results, curves, recipes and position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graticule.analysis.position_maps import position_maps
from graticule.analysis.similarity import Correlations
from graticule.lab.figures.layers import reach_plot
from graticule.lab.figures.scores import MOST_LINES, axis_label, convergence_plot, score_plot
from graticule.lab.pages.report import Report, add_position
from graticule.lab.studies.comparison import Comparison
from graticule.lab.studies.plan import format_seconds
from graticule.lab.studies.runs import LONGEST_LABEL, Summary, curve, flat_values, group_seeds, summarise
from graticule.lab.training.results import Metric
from graticule.lab.training.run import Run
from graticule.registry.checks import printable
from graticule.system.files import read_json

#: Maximum number of groups of runs whose position is drawn.
_MOST_MODELS = 6


def run_report(runs: Mapping[str, Run], *, untrained: int = 39, position: bool = True) -> Report:
    """Return the page of runs of one metric, finished or not.

    Runs whose recipes differ only in the seed are a group, and have one line, their mean. Scores are those of the last
    epoch. Groups that are finished with the same seeds are tested against the first.

    Args:
        runs: name -> run.
        untrained: number of untrained models that the reach of a trained one is compared with.
        position: whether to load the first run of each group and draw its maps of position.

    Raises:
        ValueError: if there are no runs, one is damaged or has no epoch yet, or they are judged by different metrics.
    """
    summaries = {name: summarise(run.folder) for name, run in runs.items()}
    _check(summaries)
    first = next(iter(summaries.values()))
    metric = first.metric
    assert metric is not None
    groups = group_seeds({name: one.recipe for name, one in summaries.items()})
    if len(groups) > MOST_LINES:
        raise ValueError(
            f"`runs` must be of at most {MOST_LINES} groups that differ in more than the seed, got {len(groups)}."
        )
    title = ", ".join(groups) if len(groups) > 1 else next(iter(summaries))
    report = Report(
        f"Report: {title if len(title) <= LONGEST_LABEL else f'{len(groups)} choices'}",
        f"{len(runs)} run{'s' * (len(runs) > 1)}, judged by {metric.title}",
    )
    report.heading("Results")
    scores = {label: [summaries[name].last for name in names] for label, names in groups.items()}
    known = {label: [value for value in values if value is not None] for label, values in scores.items()}
    comparison = _comparison(runs, summaries, groups)
    if comparison is not None:
        report.table(comparison.columns, comparison.rows(), "last epoch")
        for sentence in comparison.verdict():
            report.note(sentence)
    if len(groups) > 1 and all(known.values()):
        report.figure(score_plot(known, metric.title), "Scores of the last epoch.", "Scores of all choices and seeds")
    rows = [_row(name, summary) for name, summary in summaries.items()]
    report.table(("run", "state", "seed", "epoch", f"best {metric.title}", "last", "time"), rows, "every run")
    report.heading("Training")
    _curves(report, summaries, groups, metric)
    report.heading("Recipes")
    _recipes(report, summaries, groups)
    if position:
        _position(report, runs, groups, untrained)
    report.heading("Versions and machine")
    report.text(_made(next(iter(runs.values()))))
    return report


def _check(summaries: Mapping[str, Summary]) -> None:
    if not summaries:
        raise ValueError("`runs` must be one run or more, got none.")
    for name, one in summaries.items():
        if one.damage:
            raise ValueError(f"`runs` must not be damaged, got {name}: {one.damage}.")
        if not one.epoch or one.metric is None:
            raise ValueError(f"`runs` must have finished at least one epoch, got {name}, which has not.")
    metrics = {one.metric.title for one in summaries.values() if one.metric is not None}
    if len(metrics) > 1:
        raise ValueError(
            f"`runs` must be judged by one metric, got {' and '.join(sorted(metrics))}; report them separately."
        )


def _comparison(
    runs: Mapping[str, Run], summaries: Mapping[str, Summary], groups: Mapping[str, Sequence[str]]
) -> Comparison | None:
    """Return the comparison of groups that have finished with the same seeds; None for other groups or one run."""
    seeds = [tuple(sorted(int(summaries[name].recipe.get("seed", 0)) for name in names)) for names in groups.values()]
    finished = all(one.state == "finished" and one.last is not None for one in summaries.values())
    if len(runs) == 1 or not finished or len(set(seeds)) > 1 or len(set(seeds[0])) < len(seeds[0]):
        return None
    ordered = {
        label: sorted(names, key=lambda name: int(summaries[name].recipe.get("seed", 0)))
        for label, names in groups.items()
    }
    metric = next(iter(summaries.values())).metric
    assert metric is not None
    return Comparison(
        seeds[0],
        {label: [summaries[name].last or 0.0 for name in names] for label, names in ordered.items()},
        {label: int(read_json(runs[names[0]].recipe_file).get("parameters", 0)) for label, names in ordered.items()},
        {label: [runs[name] for name in names] for label, names in ordered.items()},
        metric,
        {label: [summaries[name].seconds or 0.0 for name in names] for label, names in ordered.items()},
    )


def _row(name: str, one: Summary) -> list[str]:
    assert one.metric is not None
    best = "-" if one.best is None else f"{one.metric.show(one.best[0], unit=False)} ({one.best[1]})"
    last = "-" if one.last is None else one.metric.show(one.last, unit=False)
    time = "-" if one.seconds is None else format_seconds(one.seconds)
    return [name, one.state, str(one.recipe.get("seed", "-")), f"{one.epoch}/{one.epochs}", best, last, time]


def _curves(
    report: Report, summaries: Mapping[str, Summary], groups: Mapping[str, Sequence[str]], score: Metric
) -> None:
    """Add the learning curves of the score and of the losses that all runs have."""
    for metric in (score, "train_loss", "val_loss"):
        column = metric if isinstance(metric, str) else metric.column
        if any(column not in one.metrics for one in summaries.values()):
            continue
        lines = {label: curve([summaries[name].metrics for name in names], column) for label, names in groups.items()}
        if all(lines.values()):
            several = any(len(names) > 1 for names in groups.values())
            said = "Mean over seeds; the band is one standard deviation." if several else "One line per run."
            report.figure(convergence_plot(lines, metric), said, f"{axis_label(metric)} against epochs")


def _recipes(report: Report, summaries: Mapping[str, Summary], groups: Mapping[str, Sequence[str]]) -> None:
    """Add the values of the recipes: those that differ between groups, and those that all share."""
    values = {label: flat_values(summaries[names[0]].recipe) for label, names in groups.items()}
    keys = [key for key in dict.fromkeys(key for one in values.values() for key in one) if key != "seed"]
    differing = [key for key in keys if len({one.get(key) for one in values.values()}) > 1]
    if differing:
        rows = [[key, *(one.get(key, "-") for one in values.values())] for key in differing]
        report.table(["value", *values], rows, "values that differ")
    first = next(iter(values.values()))
    same = [f"{key}={first[key]}" for key in keys if key not in differing and first[key] not in ("None", "")]
    report.text(f"All have {', '.join(same)}.")


def _position(report: Report, runs: Mapping[str, Run], groups: Mapping[str, Sequence[str]], untrained: int) -> None:
    """Add the maps of position of the first run of each group."""
    report.heading("Position in each layer")
    found: dict[str, Correlations] = {}
    for label, names in list(groups.items())[:_MOST_MODELS]:
        run = runs[names[0]]
        if not run.finished:
            report.text(f"{label}: {names[0]} is not finished.")
            continue
        model: Any = run.model(checkpoint="last")
        try:
            stages = position_maps(getattr(model, "backbone", model), untrained=untrained)
        except ValueError as error:
            report.text(f"No maps of {label}: {error}")
            continue
        add_position(report, stages, f"{label}, {names[0]}" if len(groups) > 1 else names[0])
        if stages[0].correlations is not None:
            found[label] = stages[0].correlations
            report.note(f"{label}: {stages[0].correlations.verdict}.")
    if found:
        report.figure(reach_plot(found, "Reach by layer"), "Low is local, high is global.", "Reach by layer")
    if len(groups) > _MOST_MODELS:
        report.text(f"The first {_MOST_MODELS} of {len(groups)} choices are drawn.")
    shown = [runs[names[0]] for names in list(groups.values())[:2]]
    if all(run.task().inputs == "images" for run in shown):  # the explorer takes no others
        folders = " ".join(printable(str(run.folder)) for run in shown)
        report.text(f"To choose a token, a layer and a head: graticule explore {folders}")


def _made(run: Run) -> str:
    """Return a sentence on the versions and the machine of a run."""
    described = read_json(run.recipe_file)
    versions = ", ".join(f"{name} {version}" for name, version in described.get("versions", {}).items())
    machine = ", ".join(f"{key} {value}" for key, value in described.get("machine", {}).items())
    return f"The first run was trained with {versions or 'unknown versions'}, on {machine or 'an unknown machine'}."
