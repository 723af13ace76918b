"""Training, evaluation and analysis on embedded digits: two joinings, several seeds, other sizes, one page."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from graticule.analysis.correlation import position_correlations
from graticule.analysis.similarity import Correlations
from graticule.lab.figures.layers import locality_plot
from graticule.lab.figures.position_sheets import correlation_sheet
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.scores import convergence_plot
from graticule.lab.pages.explorer import explored, write_explorer
from graticule.lab.pages.report import Report
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.comparison import Comparison, compare
from graticule.lab.studies.runs import curve, read_metrics
from graticule.lab.studies.sizes import Resolutions, resolutions

JOININGS = ("default", "lape")
#: Fewer than in the recipe, so that six runs take about four minutes on 2 cores.
EPOCHS = 8
#: Numbers of training and test digits.
TRAIN, TEST = 4000, 1000
#: Untrained models that the range of locality is compared with.
UNTRAINED = 39
#: The training size and two others, in pixels.
SIZES = ((20, 20), (28, 28), (40, 40))


def demo(folder: str | Path, seeds: Sequence[int] = (0, 1, 2), *, quick: bool = False, progress: bool = True) -> Path:
    """Train, evaluate, analyze and write `report.html` in `folder`; returns its path.

    After an interruption, it resumes where it stopped. With `quick` it takes a few steps on a few images, to see that
    everything works.
    """
    folder = Path(folder)
    start = time.perf_counter()
    recipe = load_recipe("digits_quick")
    recipe = recipe.quick() if quick else dataclasses.replace(recipe, epochs=EPOCHS)
    choices = {joining: dataclasses.replace(recipe, joining=joining) for joining in JOININGS}
    comparison = compare(choices, seeds, folder, progress=progress)
    scores = resolutions(comparison, SIZES, progress=progress)
    scores.write(folder)
    sheets = {}
    for joining, runs in comparison.runs.items():
        sheets[joining] = position_correlations(runs[0].model(checkpoint="last"), untrained=UNTRAINED)
        sheets[joining].save(folder / f"correlations-{joining}.npz")
    _write_explorer(comparison, folder)
    report = _report(comparison, scores, sheets, folder, time.perf_counter() - start)
    return report.write(folder / "report.html")


def _write_explorer(comparison: Comparison, folder: Path) -> None:
    """Write explorer.html with the run of the first seed of both joinings, side by side, at all sizes."""
    data = comparison.runs[JOININGS[0]][0].data()
    images = [data.test_images(size, [0])[0] for size in SIZES]
    models = [
        explored(
            comparison.runs[joining][0].model(data, "last"),
            images,
            data.info.mean,
            data.info.std,
            f"joining {joining}",
            f"seed {comparison.seeds[0]}, last epoch",
        )
        for joining in JOININGS
    ]
    write_explorer(models, folder / "explorer.html")


def _report(
    comparison: Comparison,
    scores: Resolutions,
    sheets: dict[str, Correlations],
    folder: Path,
    seconds: float,
) -> Report:
    recipe = comparison.runs[JOININGS[0]][0].recipe()
    train, test = recipe.limit_train or TRAIN, recipe.limit_test or TEST
    seeds = ", ".join(map(str, comparison.seeds))
    report = Report(
        "Two ways to join a position embedding",
        f"{recipe.model} on {train + test:,} MNIST digits, {recipe.epochs} epochs, seeds {seeds}",
    )
    report.text(
        "A learnable position embedding w is added once, before the first layer (default), or each layer normalizes "
        "it with a norm of its own and passes it on (LaPE, Yu et al., 2023). Everything else is the same: the images, "
        "their order, the initial weights of the backbone, the schedule."
    )
    report.heading("Accuracy at the training size")
    report.table(
        comparison.columns, comparison.rows(), f"{recipe.img_size[0]} pixels per side, {test:,} test digits, last epoch"
    )
    for sentence in comparison.verdict():
        report.note(sentence)
    report.note(
        "The amplitude of the table is not controlled for: it starts with a standard deviation of 0.02, and LaPE's "
        "norm changes it to 1. evidence/studies/amplitude.py compares LaPE with tables that start at other amplitudes."
    )
    history = {joining: [read_metrics(run.metrics_file) for run in runs] for joining, runs in comparison.runs.items()}
    for column, about in (("val_top1", "Top-1 accuracy"), ("train_loss", "Training loss")):
        lines = {joining: [point.on() for point in curve(runs, column)] for joining, runs in history.items()}
        band = "Mean over seeds; the band is one standard deviation."
        report.figure(convergence_plot(lines, column), band, f"{about} against epochs for both joinings")
    report.heading("Accuracy at other sizes, without fine-tuning")
    columns, *rows = scores.rows()
    report.table(
        columns,
        rows,
        "top-1 (%), mean ± standard deviation over seeds; the embedding is resampled bicubically",
    )
    report.figure(
        scores.figure("Accuracy at other sizes"),
        "Bars are one standard deviation over seeds.",
        "Top-1 accuracy against the size of the test images for both joinings",
    )
    report.heading("Position in each layer")
    report.text(
        "Top: the cosine similarity of every pair of positions as a layer's attention sees them (Eq. 12); bottom: that "
        "of the center with every position. Locality is the mean distance between tokens, weighted by the positive "
        "part of the cosine; two-dimensionality is 1 if vertical and horizontal neighbors count alike; the range of "
        "locality over the layers is a share of that of a uniform map, and is compared with untrained models of the "
        f"same shape. Seed {comparison.seeds[0]}, last epoch."
    )
    for joining, found in sheets.items():
        figure = correlation_sheet(found, f"Position correlations, joining {joining}")
        save_figure(figure, folder / f"correlations-{joining}.png")
        report.figure(figure, f"Position correlations, joining {joining}.", f"Correlation sheet of joining {joining}")
        columns, *rows = found.summary()
        report.table(columns, rows, f"joining {joining}")
    report.figure(
        locality_plot(sheets, "Locality by layer"),
        "Low is local, high is global.",
        "Locality against layer for both joinings",
    )
    report.link("Choose a token, a layer and a head, and see both models side by side: the explorer", "explorer.html")
    report.heading("Conclusions and limits")
    report.text(f"{recipe.epochs} epochs are few: this shows the beginning of training as much as its end.")
    report.text(
        "It shows that everything works on real images, and the scores of the two joinings with these seeds. "
        "The paper's gains are for ImageNet and CIFAR, hundreds of epochs and far larger models; "
        f"{train:,} training digits and a model of {comparison.parameters[JOININGS[0]]:,} parameters neither "
        "confirm nor refute them. The test has few seeds: a difference that it does not find may still exist. "
        "The scores are those of the last epoch, so that no epoch was picked by looking at the test digits. "
        "The correlation sheets are of one seed."
    )
    report.text(
        f"Made by graticule demo in {seconds:.0f} s on {torch.get_num_threads()} threads with torch "
        f"{torch.__version__}. Each run folder beside this page contains its recipe, versions, metrics and weights."
    )
    return report
