"""Train every encoding at one size and test it on more tokens: zoomed, and on a larger canvas.

    python benchmarks/extrapolation.py --seeds 0 1 2 3 4 --folder runs/extrapolation
    python benchmarks/extrapolation.py --report

A small ViT (4 layers, class token; the recipe `digits_small`) is trained with every encoding that attention can use, on
the 4,000 training digits at 20 x 20 pixels, 5 x 5 tokens, for 10 epochs without augmentation. It is tested on 1,000
digits at 1, 1.4, 2 and 4 times as many tokens: on zoomed images, where the digit is scaled with the image, and on a
larger canvas, where it keeps its scale, at a random position, and the rest is empty. The same weights are tested with
the log N temperature (`+ log_n`, a factor of 1 at the training size), and those of some rotary encodings with position
interpolation, NTK and YaRN scaling (which change nothing at the training size), alone and with log N. YaRN has a ramp
of 0.25 to 1 turns instead of 1 to 32, since a frequency of one radian per patch makes 0.8 turns on a grid of 5 x 5. NTK
and YaRN need ordered frequencies; learned ones (`rope_mixed`) are not ordered.

All choices of a seed are trained before the next seed, so an interruption leaves complete seeds; the same command
resumes. The scores are stored in docs/data/extrapolation.csv, one per row, and --report writes docs/extrapolation.md
and its figures from them.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import platform
import tempfile
from collections import defaultdict
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

import graticule
from graticule.encodings.forms.mixing import TokenMixing
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.style import decorate, line_style
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.significance import LEVEL, holm, paired_test
from graticule.lab.studies.tables import markdown
from graticule.lab.tasks.parts.image_scores import evaluate
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.position.position import ENCODINGS
from graticule.system.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
TRAINED = (20, 20)
LARGEST = (40, 40)
SIZES = [TRAINED, (24, 24), (28, 28), LARGEST]
MODES = ("canvas", "zoom")
FIELDS = ("choice", "variant", "mode", "height", "width", "seed", "top1", "loss", "date", "torch", "machine")

#: Encodings that are not trained: they are tested with the weights of the others, or are forms of trained ones.
LEFT_OUT = ("log_n", "shared_mlp_bias", "shared_relative_bias")
#: Every encoding that attention can use, other forms of some, and LaPE of a learnable and a sinusoidal table.
CHOICES = {
    **{
        name: {"encoding": name}
        for name, kind in ENCODINGS.items()
        if not issubclass(kind, TokenMixing) and name not in LEFT_OUT
    },
    "learnable(std=1)": {"encoding": "learnable(std=1)"},
    "learnable, lape": {"encoding": "learnable", "joining": "lape"},
    "sinusoidal_2d, lape": {"encoding": "sinusoidal_2d", "joining": "lape"},
    "rope(preset='rope_vit')": {"encoding": "rope(preset='rope_vit')"},
    "rope(preset='dinov3')": {"encoding": "rope(preset='dinov3')"},
}
#: What --quick changes: the choices, and values of the recipe.
QUICK_CHOICES = ("none", "rope")
QUICK = {"epochs": 1, "warmup_epochs": 0, "limit_train": 40, "limit_test": 20, "batch_size": 20}
#: The choices of the figure of lines.
DRAWN = ("learnable", "learnable, lape", "rope(preset='dinov3')", "rope", "peg", "none", "learnable(std=1)")
#: Scalings of rotary frequencies; NTK and YaRN need ordered frequencies, which learned ones are not.
SCALED = {
    **dict.fromkeys(("rope", "rope_1d", "mrope", "pope", "rope(preset='rope_vit')"), ("interpolation", "ntk", "yarn")),
    "rope_mixed": ("interpolation",),
}


def recipe(choice: str, seed: int, changes: dict[str, Any]) -> graticule.Recipe:
    """Return the recipe of a run, with further changes."""
    base = load_recipe("digits_sizes")
    values = {"img_size": TRAINED, "epochs": 10, "model_kwargs": ("depth=4",), "accelerator": "cpu"}
    return dataclasses.replace(base, seed=seed, **values | changes, **CHOICES[choice])


def variants(choice: str) -> dict[str, str]:
    """Return the encodings with which a run is tested: name -> spec."""
    plain = CHOICES[choice]["encoding"]
    models = {"plain": plain}
    for scaling in SCALED.get(choice, ()):
        inside = plain[:-1] + ", " if plain.endswith(")") else plain + "("
        ramp = ", ramp=(0.25, 1)" if scaling == "yarn" else ""  # a grid of 5 has no frequency of more turns
        models[scaling] = f"{inside}scaling='{scaling}'{ramp})"
    return models | {
        f"{name} + log_n": "log_n" if spec == "none" else f"{spec} + log_n" for name, spec in models.items()
    }


def tested_with(run: Run, encoding: str) -> nn.Module:
    """Return the model of a run with its last weights and another encoding of the same parameters."""
    data = run.data()
    trained = run.model(data, "last")
    kwargs = {"img_size": TRAINED, "num_classes": 10, "in_chans": 1, "depth": 4, "joining": run.recipe().joining}
    model = graticule.create_model("vit_nano_patch4_28", encoding=encoding, **kwargs)
    here, there = (dict(network.named_parameters()) for network in (trained, model))
    if len(here) != len(there):
        raise ValueError(f"`encoding` must have the parameters of the run, got {encoding!r} for {run.folder}.")
    with torch.no_grad():
        for (name, mine), (other, value) in zip(there.items(), here.items(), strict=True):
            if name != other and not (name.startswith("position.") and name.endswith(other.rpartition(".")[2])):
                raise ValueError(f"`encoding` must have the parameters of the run, got {name} for {other}.")
            mine.copy_(value)
    return model.eval()


def measure(choice: str, seed: int, folder: Path, changes: dict[str, Any]) -> list[dict[str, object]]:
    """Train a run unless it is trained already, and score it; returns one record per score."""
    place = folder / choice.translate(str.maketrans("(),'= ", "------")) / str(seed)
    run = train(recipe(choice, seed, changes), place, resume=True)
    data = run.data()
    surroundings = {"date": date.today().isoformat(), "torch": torch.__version__, "machine": platform.machine()}
    records = []
    for variant, encoding in variants(choice).items():
        model = tested_with(run, encoding)
        for mode in MODES:
            sizes = [size for size in SIZES if size != TRAINED or variant == "plain"]  # where all variants are equal
            for score in evaluate(model, data, sizes, mode=mode, measure_cost=False, progress=False):
                height, width = score.size
                record = {"choice": choice, "variant": variant, "mode": mode, "height": height, "width": width}
                records.append(record | {"seed": seed, "top1": score.top1, "loss": round(score.loss, 4)} | surroundings)
    return records


def data_file(docs: Path) -> Path:
    """Return the file of the scores."""
    return docs / "data" / "extrapolation.csv"


def read(docs: Path = DOCS) -> list[dict[str, str]]:
    """Read the stored scores."""
    if not data_file(docs).exists():
        return []
    with data_file(docs).open(newline="") as file:
        return list(csv.DictReader(file))


def store(docs: Path, records: list[dict[str, object]]) -> None:
    """Append scores to the stored ones."""
    data_file(docs).parent.mkdir(exist_ok=True)
    new = not data_file(docs).exists()
    with data_file(docs).open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(records)


def tokens(size: tuple[int, int]) -> str:
    """Format a size as its number of tokens relative to training."""
    return f"{size[0] * size[1] / (TRAINED[0] * TRAINED[1]):.1f}x ({size[0] // 4} x {size[1] // 4})"


Scores = dict[tuple[str, str, str], dict[tuple[int, int], list[float]]]


def scores_of(records: list[dict[str, str]]) -> tuple[Scores, list[int]]:
    """Return (choice, variant, mode) -> size -> top-1 of the seeds that all choices have, and these seeds."""
    by_choice = defaultdict(set)
    for record in records:
        by_choice[record["choice"]].add(int(record["seed"]))
    seeds = sorted(set.intersection(*by_choice.values()))
    scores: Scores = defaultdict(lambda: defaultdict(list))
    for seed in seeds:
        for r in records:
            if int(r["seed"]) == seed:
                size = (int(r["height"]), int(r["width"]))
                scores[r["choice"], r["variant"], r["mode"]][size].append(float(r["top1"]))
    for (choice, variant, mode), by_size in scores.items():
        if variant != "plain":
            by_size[TRAINED] = scores[choice, "plain", mode][TRAINED]
    return scores, seeds


def spread(values: list[float]) -> str:
    """Format mean and standard deviation."""
    return f"{fmean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{fmean(values):.1f}"


def below(adjusted: float | None) -> bool:
    """Return whether an adjusted p is significant."""
    return adjusted is not None and adjusted < LEVEL


def in_order(scores: Scores) -> list[str]:
    """Return the choices, sorted by their score on the largest canvas, best first."""
    return sorted({choice for choice, _, _ in scores}, key=lambda c: -fmean(scores[c, "plain", "canvas"][LARGEST]))


def report(docs: Path) -> None:
    """Write the tables and the figures from the stored scores."""
    records = read(docs)
    scores, _ = scores_of(records)
    print(write_text(docs / "extrapolation.md", page(records)))
    print(save_figure(picture(scores, in_order(scores)), docs / "figures" / "extrapolation.png"))
    print(save_figure(lines(scores), docs / "figures" / "extrapolation_lines.png"))


def page(records: list[dict[str, str]]) -> str:
    """Return the page docs/extrapolation.md."""
    scores, seeds = scores_of(records)
    choices = in_order(scores)
    dates = sorted({r["date"] for r in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    best = {mode: max(choices, key=lambda c: fmean(scores[c, "plain", mode][SIZES[-1]])) for mode in MODES}
    text = [
        "# More tokens than in training",
        __doc__.split("\n\n")[2].replace("\n", " "),
        f"`python benchmarks/extrapolation.py --seeds {' '.join(map(str, seeds))}`, {when}, "
        f"{len(seeds)} seeds, one thread on a shared machine with 2 cores, torch {records[-1]['torch']}; written by "
        "`python benchmarks/extrapolation.py --report`. The table shows top-1 (%), mean and standard deviation over "
        "seeds; the figure has all sizes. The recipe is not tuned for any encoding. Differences between rows were not "
        "tested here.",
        "![top-1 at more tokens than in training](figures/extrapolation.png)",
        f"Means over {len(seeds)} seeds. At the most tokens, `{best['canvas']}` is highest on a canvas, and "
        f"`{best['zoom']}` on zoomed images.",
    ]
    rows = [("encoding", "trained", f"canvas {tokens(LARGEST)}", f"zoom {tokens(LARGEST)}")]
    for c in choices:
        cells = [scores[c, "plain", "canvas"][TRAINED], *(scores[c, "plain", mode][LARGEST] for mode in MODES)]
        rows.append((f"`{c}`", *map(spread, cells)))
    text.append(markdown(rows))
    about = len(text)
    text.append(
        "The log N temperature and scaled frequencies were also tested at 4 times as many tokens, against the same "
        "weights without them, by paired t-tests over seeds adjusted by Holm's method."
    )
    tested = [(c, v) for c, v, mode in scores if mode == MODES[0] and v != "plain"]
    compared = sorted(tested, key=lambda pair: choices.index(pair[0]))
    cells = []
    for choice, variant in compared:
        for mode in MODES:
            mine, plain = (scores[choice, v, mode][LARGEST] for v in (variant, "plain"))
            test = paired_test(mine, plain)
            cells.append((fmean(mine) - fmean(plain), test and test.p))
    adjusted = holm([p for _, p in cells])
    tests = sum(p is not None for p in adjusted)
    names = [f"`{c}` with {v.removeprefix('plain + ')}, {mode}" for c, v in compared for mode in MODES]
    decided = [f"{name} ({d:+.1f})" for name, (d, _), q in zip(names, cells, adjusted, strict=True) if below(q)]
    text[about] += (
        f" Of {tests} tests, {len(decided)} have an adjusted p below {LEVEL:g}: {'; '.join(decided)}. The others are "
        "inconclusive with so few seeds; docs/data/extrapolation.csv has all scores."
    )
    return "\n\n".join(text) + "\n"


def picture(scores: Scores, choices: list[str]) -> Figure:
    """Plot the mean top-1 as a heatmap: one row per encoding, one column per size, on a canvas and zoomed."""
    figure = Figure(figsize=(7.6, 0.27 * len(choices) + 1.3), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for ax, mode in zip(panels, MODES, strict=True):
        values = [[fmean(scores[c, "plain", mode][size]) for size in SIZES] for c in choices]
        image = ax.imshow(values, vmin=10, vmax=100, cmap="viridis", aspect="auto")
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                ax.text(
                    column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color="w" if value < 70 else "k"
                )
        ax.set_xticks(range(len(SIZES)), [tokens(size).replace(" (", "\n(") for size in SIZES], fontsize=8)
        ax.set_xlabel("tokens relative to training (grid of patches)", fontsize=8)
        ax.set_yticks(range(len(choices)), choices, fontsize=8)
        ax.set_title(
            {"canvas": "larger canvas, content at its scale", "zoom": "content scaled with the image"}[mode], fontsize=9
        )
    figure.colorbar(image, ax=panels, label="top-1 (%)", shrink=0.6)
    return figure


def lines(results: Scores) -> Figure:
    """Plot the top-1 of some choices against the number of tokens, each line with its name beside its end."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    shares = [height * width / (TRAINED[0] * TRAINED[1]) for height, width in SIZES]
    for ax, mode in zip(figure.subplots(1, 2, sharey=True), MODES, strict=True):
        decorate(ax)
        ends = {}
        for index, choice in enumerate(choice for choice in DRAWN if (choice, "plain", mode) in results):
            scores = [results[choice, "plain", mode][size] for size in SIZES]
            means, deviations = [fmean(values) for values in scores], [stdev(values) for values in scores]
            ax.errorbar(shares, means, deviations, capsize=2, **line_style(index))
            ends[choice] = means[-1]
        order = sorted(ends, key=lambda choice: ends[choice])
        up, down = 0.0, {}
        for choice in reversed(order):  # names 5.8 points apart, from above and from below; the mean of both is drawn
            down[choice] = min([ends[choice], *(height - 5.8 for height in down.values())])
        for choice in order:
            up = max(ends[choice], up + 5.8)
            color = line_style(DRAWN.index(choice))["color"]
            at = (shares[-1] * 1.07, (up + down[choice]) / 2)
            ax.annotate(choice, (shares[-1], ends[choice]), at, va="center", fontsize=9, color=color)
        ax.set_xscale("log")
        ax.set_xlim(0.94, 10.5)
        ax.set_ylim(0, 100)
        ax.set_xticks(shares, [f"{share:.3g}x" for share in shares])
        ax.set_xticks([], minor=True)
        ax.set_xlabel("tokens, relative to training")
        ax.set_title(
            {"canvas": "more content: the digit keeps its size", "zoom": "the digit grows with the image"}[mode]
        )
    figure.axes[0].set_ylabel("top-1 (%)")
    return figure


def main() -> None:
    """Run the missing choices and seeds, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/extrapolation"))
    parser.add_argument("--choices", nargs="+", default=list(CHOICES))
    parser.add_argument("--report", action="store_true", help="write the tables and the figure from the stored scores")
    parser.add_argument("--quick", action="store_true", help="two choices on a few digits, in a temporary folder")
    options = parser.parse_args()
    if not options.quick:
        complete(options, DOCS, {})
        return
    with tempfile.TemporaryDirectory() as folder:
        options.report = False
        options.seeds, options.choices, options.folder = [0, 1], list(QUICK_CHOICES), Path(folder) / "runs"
        complete(options, Path(folder), QUICK)


def complete(options: argparse.Namespace, docs: Path, changes: dict[str, Any]) -> None:
    """Train and score the missing runs, and write the page and its figures."""
    if not options.report:
        torch.set_num_threads(1)
        stored = {(r["choice"], int(r["seed"])) for r in read(docs)}
        missing = [(c, s) for s in options.seeds for c in options.choices if (c, s) not in stored]
        for number, (choice, seed) in enumerate(missing, 1):
            print(f"{number} of {len(missing)}: {choice}, seed {seed}", flush=True)
            store(docs, measure(choice, seed, options.folder, changes))
    report(docs)


if __name__ == "__main__":
    main()
