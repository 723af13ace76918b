"""`graticule demo`: three choices, several seeds, two larger sizes, one page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from graticule import analysis
from graticule.lab import figures, pages, studies
from graticule.lab.commands.options import Options, output_folder
from graticule.lab.recipes.load import load_recipe
from graticule.registry.checks import printable


@dataclass
class DemoOptions(Options):
    """Train a small ViT on digits with a small table, one as large as LaPE's, and LaPE; write report.html.

    graticule demo
    graticule demo --quick --seeds 0
    """

    output: Path = Path("runs/demo")
    """folder of the runs and the report"""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    """seeds, the same for all choices"""
    quick: bool = False
    """train a few steps on a few images, to check that everything works"""


#: Name -> values of the recipe. A normal of 1.37, truncated at 2, has the standard deviation 1 of a normalized table.
CHOICES: dict[str, dict[str, Any]] = {
    "default": {"encoding": "learnable"},
    "std 1": {"encoding": "learnable(std=1.37)"},
    "lape": {"encoding": "learnable", "joining": "lape"},
}
#: Those that the explorer shows side by side.
EXPLORED = ("std 1", "lape")
#: Fewer than in the recipe, so that 12 runs take less than three minutes on two idle cores.
EPOCHS = 6
#: The training size and two larger ones, in pixels.
SIZES = ((20, 20), (28, 28), (40, 40))


def run(options: DemoOptions) -> int:
    """Train, evaluate and analyze on embedded digits."""
    report = demo(output_folder(options.output, DemoOptions.output), options.seeds, quick=options.quick)
    print(printable(f"wrote {report}; open it in a browser. The runs are beside it, in {options.output}"))
    return 0


def demo(folder: Path, seeds: Sequence[int] = (0, 1, 2, 3), *, quick: bool = False, progress: bool = True) -> Path:
    """Train, evaluate, analyze and write `report.html` in `folder`; returns its path. It resumes where it stopped."""
    run_page = pages.run_page  # imported before the training
    recipe = load_recipe("digits_small")
    recipe = recipe.quick() if quick else dataclasses.replace(recipe, epochs=EPOCHS)
    choices = {name: dataclasses.replace(recipe, **values) for name, values in CHOICES.items()}
    workers = 1 if quick else min(os.cpu_count() or 1, len(choices) * len(seeds))
    with studies.executor_of(f"local:{workers}" if workers > 1 else "here") as executor:  # small models use one core
        results = studies.compare(choices, seeds, folder, progress=progress, sizes=SIZES, executor=executor)
    runs = results.runs
    data = runs["default"][0].data()
    images = [data.test_images(size, [0])[0] for size in SIZES]
    models = {name: members[0].model(data, "last") for name, members in runs.items()}
    about = f"seed {seeds[0]}, last epoch"
    maps = [pages.compute_maps(models[name], images, data.info.mean, data.info.std, name, about) for name in EXPLORED]
    pages.write_explorer(maps, folder / "explorer.html")
    report = run_page(runs, results, headline(results))
    report.title = "What does LaPE gain, and is it more than a larger initialization?"
    report.text(
        "default: a learnable table, which starts at a standard deviation of 0.02, is added once to the embedded "
        "patches. std 1: the same, but it starts at 1; it is the control for the larger initialization. lape: each "
        "layer normalizes the table with a norm of its own, which makes its standard deviation 1, and adds it (LaPE, "
        "Yu et al., 2023). "
        f"Larger images are the same digits enlarged. {recipe.epochs} epochs of a small model on digits neither "
        "confirm nor refute the paper, whose models are larger and train for hundreds of epochs; docs/why_lape.md has "
        "the same question with more seeds, controls and data."
    )
    report.heading("Position in each layer")
    correlations = {name: analysis.position_correlations(models[name]) for name in CHOICES}
    sheet = figures.center_sheet(correlations, "Similarity of the center")
    caption = "Cosine of the position of the marked patch with every other, as attention receives it (LaPE, Eq. 12)."
    report.figure(sheet, caption, "Position similarity of the center patch, one row per choice, one column per layer")
    report.link("Choose a token, a layer and a head, and see std 1 and lape side by side", "explorer.html")
    return report.write(folder / "report.html")


def headline(results: studies.Results) -> list[str]:
    """Return the findings: LaPE less the default table and less the larger one, at two sizes."""
    sentences = []
    enlarged = studies.place("zoom", SIZES[-1])
    for at, where in ((studies.TRAINED, "At the trained size"), (enlarged, "On digits enlarged to 40 pixels")):
        scores, parts, is_more = results.scores(at), [], False
        for reference in ("default", "std 1"):
            test = studies.paired_test(scores["lape"], scores[reference])
            is_more = test is not None and test.low > 0  # of the last one, std 1
            interval = f" (95 % interval {test.low:+.1f} to {test.high:+.1f})" if test else " (no interval)"
            difference = fmean(scores["lape"]) - fmean(scores[reference])
            parts.append(f"{difference:+.1f} points over {reference}{interval}")
        more, no_more = "which is more than a larger initialization gives", "so a larger initialization may explain it"
        answer = more if is_more else no_more
        sentences.append(f"{where}, LaPE gains {' and '.join(parts)}, {answer}.")
    return sentences
