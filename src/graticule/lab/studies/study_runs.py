"""Runs of a study: those that its table lacks are trained, measured and added to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graticule.lab.figures.save import save_figure, save_figures
from graticule.lab.figures.scores import score_plot
from graticule.lab.locks import locked
from graticule.lab.studies.execution import Submits, train_runs
from graticule.lab.studies.plan import PlannedRun, check_choices, plan
from graticule.lab.studies.report import StudyReport
from graticule.lab.studies.study import (
    TRAINED,
    Measured,
    Row,
    Study,
    origin,
    place,
    read_table,
    recipe_hash,
    write_table,
)
from graticule.lab.studies.tables import between, marked
from graticule.lab.tasks.parts.image_scores import check_sizes, evaluate
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_model
from graticule.system.files import write_text

#: Seconds that another process may take to add its rows to a table.
_PATIENCE = 60.0


def missing_runs(
    study: Study, rows: Sequence[Row], folder: Path, *, quick: bool = False, data_root: Path | None = None
) -> list[PlannedRun]:
    """List the runs that a table lacks, seed by seed.

    Raises:
        ValueError: if the table has scores of another recipe.
    """
    recipes = study.recipes(quick=quick, data_root=data_root)
    hashes = {study.cells[name]: recipe_hash(recipe) for name, recipe in recipes.items()}
    for row in rows:
        now = hashes.get((row.choice, row.variant))
        if now is not None and now != row.recipe:
            raise ValueError(
                f"`study` must have the recipes of its table, got another one for {row.choice!r}"
                f"{f', {row.variant}' if row.variant else ''}, seed {row.seed}: recipe {now}, not {row.recipe}; move "
                "the table away, or remove these rows."
            )
    kept = {row.cell for row in rows}
    return [
        one for one in plan(recipes, study.seeds, folder) if (*study.cells[one.choice], one.recipe.seed) not in kept
    ]


def run_study(
    study: Study,
    folder: Path,
    table: Path,
    *,
    part: tuple[int, int] | None = None,
    quick: bool = False,
    data_root: Path | None = None,
    executor: Submits | None = None,
    progress: bool = True,
) -> int:
    """Train and measure the runs that `table` lacks, and write it after every seed; returns the number of runs left.

    Finished runs in `folder` are measured and not trained again, so an interrupted study resumes where it stopped.

    Args:
        study: the study.
        folder: of the runs.
        table: the CSV file of the results.
        part: (k, n): train only the k-th of n parts of the runs; the table is written by the process that finds all
            runs finished.
        quick: only a few steps per run.
        data_root: folder of the data set.
        executor: trains the runs, as in `compare`.
        progress: whether progress is printed.

    Raises:
        ValueError: if a choice cannot be built, or the table has scores of another recipe; before any work.
    """
    missing = missing_runs(study, read_table(table), folder, quick=quick, data_root=data_root)
    recipes = {one.choice: one.recipe for one in missing}
    parameters, _ = check_choices(recipes, missing)
    for recipe in recipes.values() if study.sizes else ():
        check_sizes(build_model(recipe, num_classes=10), study.sizes)
    if part is not None and (left := train_runs(missing, executor, part=part, progress=progress)):
        return left
    seeds = list(dict.fromkeys(one.recipe.seed for one in missing))
    for seed in seeds:
        wanted = [one for one in missing if one.recipe.seed == seed]
        # an executor gets all runs at once, so that no worker waits for the last run of a seed
        train_runs(wanted if executor is None else missing, executor, progress=progress)
        _add_rows(table, [row for one in wanted for row in measured_rows(study, one, parameters[one.choice])], folder)
    return 0


def _add_rows(table: Path, rows: Sequence[Row], folder: Path) -> None:
    """Add the rows of runs that `table` lacks; other processes may have added the same since it was read.

    Raises:
        OSError: if another process holds the lock of `folder`.
    """
    with locked(folder, wait=_PATIENCE) as free:
        if not free:
            raise OSError(f"{folder} is in use by another process; end it and start again. The runs are finished.")
        there = read_table(table)
        known = {row.cell for row in there}
        write_table(table, [*there, *(row for row in rows if row.cell not in known)])


def measured_rows(study: Study, planned: PlannedRun, parameters: int) -> list[Row]:
    """Measure a finished run; returns its rows of the table."""
    run = Run(planned.folder)
    choice, variant = study.cells[planned.choice]
    result = run.result()
    common: dict[str, Any] = {
        "choice": choice,
        "variant": variant,
        "seed": planned.recipe.seed,
        "parameters": parameters,
        "seconds": round(result["seconds"], 1),
        **origin(run),
    }
    scores = [(planned.recipe.metric.key, TRAINED, result[f"last_{planned.recipe.metric.key}"])]
    scores += [*_at_sizes(study, run), *(study.measure(run) if study.measure else ())]
    return [Row(metric=metric, at=at, value=value, **common) for metric, at, value in scores]


def report_pages(name: str, docs: Path) -> list[Path]:
    """List the pages of `docs` that have the markers of a study.

    Raises:
        ValueError: if no page has them.
    """
    pages = [page for page in sorted(docs.glob("*.md")) if name in marked(page.read_text(encoding="utf-8"), "study")]
    if not pages:
        raise ValueError(
            f"`docs` must have a page (.md) with the markers <!-- study {name}: begin --> and "
            f"<!-- study {name}: end -->, got {str(docs)!r}."
        )
    return pages


def write_report(name: str, study: Study, table: Path, folder: Path, docs: Path | None = None) -> list[Path]:
    """Write text, LaTeX and figure of a study from its table into `folder`, or into the pages of `docs`.

    Raises:
        ValueError: if no page of `docs` has the markers of the study.
    """
    pages = [] if docs is None else report_pages(name, docs)
    report = StudyReport(name, study, read_table(table))
    written: list[Path] = []
    shown: str | None = None
    if scores := report.figure_scores():
        figure, place = score_plot(scores, report.endpoint, groups=report.figure_groups()), f"study_{name}"
        if docs is None:
            written += save_figures(figure, folder / place)
        else:
            written.append(save_figure(figure, docs / "figures" / f"{place}.png"))
        shown = written[0].relative_to(docs or folder).as_posix()
    text = report.markdown(shown)
    if docs is None:
        written.append(write_text(folder / f"study_{name}.md", text + "\n"))
        return [*written, write_text(folder / f"study_{name}.tex", report.latex())] if report.rows else written
    for page in pages:
        write_text(page, between(page.read_text(encoding="utf-8"), f"study {name}", text))
    return [*written, *pages]


def _at_sizes(study: Study, run: Run) -> Iterator[Measured]:
    """Measure the last weights at the sizes of the study."""
    if not study.sizes:
        return
    data = run.data()
    model = run.model(data, "last")
    for mode in study.modes:
        sizes = [(h, w) for h, w in study.sizes if mode != "crop" or (h <= data.size[0] and w <= data.size[1])]
        for score in evaluate(model, data, sizes, mode=mode, measure_cost=False, progress=False):
            yield "top1", place(mode, score.size), score.top1
            yield "loss", place(mode, score.size), round(score.loss, 5)
