"""Training, evaluation and analysis on embedded digits: four choices, several seeds, a larger size, one page."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from graticule.analysis.correlation import position_correlations
from graticule.lab.figures.position_sheets import center_sheet, correlation_sheet
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.scores import convergence_plot
from graticule.lab.pages.explorer import explored, write_explorer
from graticule.lab.pages.report import Report
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.comparison import Comparison, compare
from graticule.lab.studies.runs import curve, read_metrics
from graticule.lab.studies.significance import PairedTest, paired_test
from graticule.lab.studies.sizes import Resolutions, resolutions

#: Name -> values of the recipe. A normal of 1.37, truncated at 2, has the standard deviation 1 of a normalized table.
CHOICES: dict[str, dict[str, Any]] = {
    "default": {"encoding": "learnable"},
    "std 1": {"encoding": "learnable(std=1.37)"},
    "lape": {"encoding": "learnable", "joining": "lape"},
    "peg": {"encoding": "peg"},
}
#: Those with a table, whose maps are drawn.
TABLES = ("default", "std 1", "lape")
#: Those that the explorer shows side by side.
EXPLORED = ("std 1", "lape")
#: Fewer than in the recipe, so that 16 runs take less than five minutes.
EPOCHS = 6
#: Numbers of training and test digits.
TRAIN, TEST = 4000, 1000
#: The training size and two larger ones, in pixels.
SIZES = ((20, 20), (28, 28), (40, 40))


def demo(
    folder: str | Path, seeds: Sequence[int] = (0, 1, 2, 3), *, quick: bool = False, progress: bool = True
) -> Path:
    """Train, evaluate, analyze and write `report.html` in `folder`; returns its path.

    After an interruption, it resumes where it stopped. With `quick` it takes a few steps on a few images, to see that
    everything works.
    """
    folder = Path(folder)
    start = time.perf_counter()
    recipe = load_recipe("digits_small")
    recipe = recipe.quick() if quick else dataclasses.replace(recipe, epochs=EPOCHS)
    choices = {name: dataclasses.replace(recipe, **values) for name, values in CHOICES.items()}
    comparison = compare(choices, seeds, folder, progress=progress)
    assert comparison is not None  # no part of the runs is left to others
    scores = resolutions(comparison, SIZES, progress=progress)
    scores.write(folder)
    _write_explorer(comparison, folder)
    report = _report(comparison, scores, folder)
    report.text(
        f"Made by graticule demo in {time.perf_counter() - start:.0f} s on {torch.get_num_threads()} threads with "
        f"torch {torch.__version__}. Each run folder beside this page "
        "contains its recipe, versions, metrics and weights."
    )
    return report.write(folder / "report.html")


def _write_explorer(comparison: Comparison, folder: Path) -> None:
    """Write explorer.html with the run of the first seed of two choices, side by side, at all sizes."""
    data = comparison.runs[EXPLORED[0]][0].data()
    images = [data.test_images(size, [0])[0] for size in SIZES]
    models = [
        explored(
            comparison.runs[name][0].model(data, "last"),
            images,
            data.info.mean,
            data.info.std,
            name,
            f"seed {comparison.seeds[0]}, last epoch",
        )
        for name in EXPLORED
    ]
    write_explorer(models, folder / "explorer.html")


def headline(scores: Resolutions) -> list[str]:
    """Return the findings: LaPE less the default table and less the table of its amplitude, per size."""
    trained, large, n = SIZES[0], SIZES[-1], len(scores.seeds)

    def less(reference: str, size: tuple[int, int]) -> tuple[str, PairedTest | None]:
        ours, theirs = scores.scores["lape"][size], scores.scores[reference][size]
        found = paired_test(ours, theirs)
        said = f"{fmean(ours) - fmean(theirs):+.1f} points"
        return said + (f" (95 % interval {found.low:+.1f} to {found.high:+.1f})" if found else " (no interval)"), found

    gain, whole = less("default", trained)
    rest, control = less("std 1", trained)
    if control is None:
        conclusion = "These seeds have no interval, and decide nothing."
    elif control.low > 0:
        conclusion = "So amplitude alone does not explain the gain."
    elif whole is None or whole.low <= 0:
        conclusion = f"No gain of LaPE at this size is seen with {n} seeds."
    elif control.high >= whole.difference:
        conclusion = f"With {n} seeds it is undecided whether LaPE's gain at this size is amplitude."
    else:
        conclusion = f"So LaPE's gain at this size is amplitude, as far as {n} seeds show."
    beyond, place = less("std 1", large)
    if place is None:
        said = "These seeds have no interval, and decide nothing."
    elif place.low > 0:
        said = "There amplitude does not explain it: LaPE adds its table to every layer, the control once."
    else:
        said = f"Beyond amplitude, no gain of LaPE is seen there with {n} seeds."
    return [
        f"At the trained size, {trained[0]} pixels, LaPE less the default table: {gain}; less a table that is added "
        f"once, but starts at LaPE's amplitude: {rest}. {conclusion}",
        f"On the same digits enlarged to {large[0]} pixels, LaPE less the table of its amplitude: {beyond}. {said}",
    ]


def _report(comparison: Comparison, scores: Resolutions, folder: Path) -> Report:
    recipe = comparison.runs["default"][0].recipe()
    train, test = recipe.limit_train or TRAIN, recipe.limit_test or TEST
    seeds = ", ".join(map(str, comparison.seeds))
    report = Report(
        "What does LaPE gain, and is it more than amplitude?",
        f"{recipe.model} with 4 layers on {train + test:,} MNIST digits, {recipe.epochs} epochs, seeds {seeds}",
    )
    for sentence in headline(scores):
        report.note(sentence)
    report.text(
        "default: a learnable table, which starts at a standard deviation of 0.02, is added once to the embedded "
        "patches. std 1: the same, but it starts at 1; it is the control of amplitude. lape: each layer normalizes the "
        "table with a norm of its own, which makes its standard deviation 1, and adds it (LaPE, Yu et al., 2023). peg: "
        "no table, a convolution after the first layer (CPVT, Chu et al., 2023). Everything else is the same: the "
        "images, their order, the initial weights of the backbone, the schedule."
    )
    report.heading("Accuracy at the trained size and at larger ones")
    columns, *rows = scores.rows()
    report.table(
        columns,
        rows,
        f"top-1 (%) by size in pixels, mean ± standard deviation over {len(comparison.seeds)} seeds; {test:,} test "
        "digits, last epoch; larger images are the same digits enlarged, without fine-tuning",
    )
    report.figure(
        scores.figure("Accuracy at other sizes"),
        f"Mean over {len(comparison.seeds)} seeds, with bars of one standard deviation. At the trained size std 1 and "
        "lape should be compared; the distance of their lines at larger sizes is what LaPE adds to amplitude.",
        "Top-1 accuracy against the size of the test images for all choices",
    )
    report.heading("Position in each layer")
    models = {name: comparison.runs[name][0].model(checkpoint="last") for name in TABLES}
    sheets = {name: position_correlations(model) for name, model in models.items()}
    for name, found in sheets.items():
        found.save(folder / f"correlations-{name.replace(' ', '-')}.npz")
        figure = correlation_sheet(found, f"Position correlations, {name}")
        save_figure(figure, folder / f"correlations-{name.replace(' ', '-')}.png")
    sheet = center_sheet(sheets, "Similarity of the center to all positions")
    save_figure(sheet, folder / "position.png")
    report.figure(
        sheet,
        "Each map: cosine similarity of the position of the marked patch to that of every patch, as the attention of a "
        "layer receives it (LaPE, Eq. 12). Below it the reach, the mean distance in patches over which positions are "
        "similar: small if only near ones are. "
        f"Seed {comparison.seeds[0]}, last epoch; peg has no table to draw.",
        "Position similarity of the center patch, one row per choice, one column per layer",
    )
    report.link(
        "Choose a token, a layer and a head, and see std 1 and lape side by side: the explorer", "explorer.html"
    )
    report.heading("Training and tests")
    report.table(comparison.columns, comparison.rows(), f"{recipe.img_size[0]} pixels per side, last epoch")
    for sentence in comparison.verdict():
        report.note(sentence)
    history = {name: [read_metrics(run.metrics_file) for run in runs] for name, runs in comparison.runs.items()}
    lines = {name: curve(runs, "val_top1") for name, runs in history.items()}
    report.figure(
        convergence_plot(lines, "val_top1"),
        "Mean over seeds; the band is one standard deviation. The default table starts slowly; it needs time to grow.",
        "Top-1 accuracy against epochs for all choices",
    )
    report.heading("Conclusions and limits")
    report.text(
        f"{recipe.epochs} epochs are few: this shows the beginning of training as much as its end. The intervals of "
        "the first lines are not adjusted for the other tests of this page. docs/why_lape.md has the same "
        "question with 12 seeds, more controls and other data. The paper's gains are for ImageNet and CIFAR, hundreds "
        f"of epochs and far larger models; {train:,} training digits and a model of "
        f"{comparison.parameters['default']:,} parameters neither confirm nor refute them. The scores are those of the "
        "last epoch, so that no epoch was picked by looking at the test digits. The maps are of one seed."
    )
    return report
