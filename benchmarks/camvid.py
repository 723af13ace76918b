"""Position encodings in segmentation: CamVid at the size of training and two others.

    python benchmarks/camvid.py --data CAMVID --seeds 0 1 2 --folder runs/camvid
    python benchmarks/camvid.py --report

A small ViT (6 blocks, patches of 8 x 8) with Segmenter's mask transformer, which sees no padding, and a small PVT
(5 blocks in four stages) with Semantic FPN, whose convolutions do. They are trained from scratch on the 367 training
images of CamVid at 96 x 128, in batches of 8 for 5 epochs with flips, a minute of one core each, and the last weights
are scored on all 101 validation images at 96 x 128, 144 x 192 and 192 x 256 against the truth of the originals (PVT's
images of 144 rows are padded to 160). So early in training this compares how fast position helps, not where it ends.

Seed by seed, so that an interruption leaves a whole table; the same command resumes. The scores are kept in
docs/data/camvid.csv, one row for each, and --report writes docs/camvid.md and its picture from them. PVT takes no
relative bias and no rotation: it has fewer keys than queries.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import platform
from collections import defaultdict
from datetime import date
from pathlib import Path
from statistics import fmean, stdev

import torch
from matplotlib.figure import Figure

import graticule
from graticule.analysis import save_figure
from graticule.files import write_text
from graticule.recipes import load_recipe
from graticule.studies.significance import format_p, holm, paired_p
from graticule.studies.tables import markdown
from graticule.tasks.segmentation_scores import evaluate_segmentation
from graticule.training import train
from graticule.training.task import task_of

DOCS = Path(__file__).parent.parent / "docs"
DATA = DOCS / "data" / "camvid.csv"
TRAINED = (96, 128)
SIZES = [TRAINED, (144, 192), (192, 256)]
FIELDS = ("model", "choice", "seed", "height", "width", "miou", "accuracy", "date", "torch", "machine")

#: The models, as changes of the recipes of CamVid.
MODELS = {
    "ViT, Segmenter": ("camvid", {"model": "vit_nano_patch4_28", "patch_size": 8}),
    "PVT, Semantic FPN": ("camvid_pvt", {}),
}
CHOICES = {
    "none": {"encoding": "none"},
    "learnable": {"encoding": "learnable"},
    "learnable, lape": {"encoding": "learnable", "joining": "lape"},
    "sinusoidal_2d": {"encoding": "sinusoidal_2d"},
    "peg": {"encoding": "peg"},
    "relative_bias": {"encoding": "relative_bias"},
    "rope": {"encoding": "rope"},
}
#: What a model cannot take.
REFUSED = {"PVT, Semantic FPN": ("relative_bias", "rope")}
RUNS = [(model, choice) for model in MODELS for choice in CHOICES if choice not in REFUSED.get(model, ())]
#: What is tested: each encoding against none, and LaPE against the default joining.
TESTS = [(choice, "none") for choice in CHOICES if choice != "none"] + [("learnable, lape", "learnable")]


def recipe(model: str, choice: str, seed: int, data: Path) -> graticule.SegmentationRecipe:
    """Return the recipe of a run; while it trains, only 16 images are scored."""
    name, changes = MODELS[model]
    size = {"fit": TRAINED, "img_size": TRAINED, "epochs": 5, "warmup_steps": 40, "limit_test": 16}
    fixed = {"data_root": data, "seed": seed, "accelerator": "cpu"}
    return dataclasses.replace(load_recipe(name), **changes, **size, **fixed, **CHOICES[choice])


def measure(model: str, choice: str, seed: int, data: Path, folder: Path) -> list[dict[str, object]]:
    """Train a run, or find it trained, and score it; returns a record for each size."""
    planned = recipe(model, choice, seed, data)
    run = train(planned, place(model, choice, seed, folder), resume=True, progress=False)
    images = task_of(dataclasses.replace(planned, limit_test=None)).build_data()
    surroundings = {"date": date.today().isoformat(), "torch": torch.__version__, "machine": platform.machine()}
    records = []
    for height, width in SIZES:
        network = run.model(checkpoint="last").eval()
        score = evaluate_segmentation(network, images, (height, width), planned, progress=False)
        records.append(
            {"model": model, "choice": choice, "seed": seed, "height": height, "width": width}
            | {"miou": round(score.miou, 4), "accuracy": round(score.accuracy, 4)}
            | surroundings
        )
    return records


def place(model: str, choice: str, seed: int, folder: Path) -> Path:
    """Return the folder of a run."""
    return folder / f"{model} {choice}".replace(", ", "-").replace(" ", "-") / str(seed)


def read() -> list[dict[str, str]]:
    """Read the kept scores."""
    if not DATA.exists():
        return []
    with DATA.open(newline="") as file:
        return list(csv.DictReader(file))


def keep(records: list[dict[str, object]]) -> None:
    """Append scores to those that are kept."""
    DATA.parent.mkdir(exist_ok=True)
    new = not DATA.exists()
    with DATA.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(records)


Scores = dict[tuple[str, str], dict[tuple[int, int], list[float]]]


def scores_of(records: list[dict[str, str]]) -> tuple[Scores, list[int]]:
    """Return (model, choice) -> size -> mIoU over the seeds that all runs have, and these seeds."""
    seeds_of = defaultdict(set)
    for r in records:
        seeds_of[r["model"], r["choice"]].add(int(r["seed"]))
    seeds = sorted(set.intersection(*(seeds_of[run] for run in RUNS)))
    found: Scores = defaultdict(lambda: defaultdict(list))
    for seed in seeds:
        for r in records:
            if int(r["seed"]) == seed:
                found[r["model"], r["choice"]][int(r["height"]), int(r["width"])].append(float(r["miou"]))
    return found, seeds


def spread(values: list[float]) -> str:
    """Write mean and standard deviation."""
    return f"{fmean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{fmean(values):.1f}"


def report() -> None:
    """Write the tables and the picture from the kept scores.

    Raises:
        ValueError: if no seed is complete.
    """
    records = read()
    found, seeds = scores_of(records)
    if not seeds:
        raise ValueError(f"`--report` needs every choice of one seed at least, and {DATA} has {len(records)} scores.")
    days = " to ".join(sorted({min(r["date"] for r in records), max(r["date"] for r in records)}))
    text = [
        "# Position in segmentation: CamVid",
        __doc__.split("\n\n")[2].replace("\n", " "),
        f"`python benchmarks/camvid.py --data CAMVID --seeds {' '.join(map(str, seeds))}`, {days}, "
        f"{len(seeds)} seeds, one thread on a shared machine with 2 cores, torch {records[-1]['torch']}; written by "
        "`python benchmarks/camvid.py --report`. mIoU (%) over 11 classes, mean and standard deviation over seeds. All "
        "have the same recipe, tuned for none.",
        "![mIoU at three sizes](figures/camvid.png)",
    ]
    columns = [f"{height} x {width}" + " (trained)" * ((height, width) == TRAINED) for height, width in SIZES]
    for model in MODELS:
        choices = [choice for one, choice in RUNS if one == model]
        rows = [(model, *columns)]
        rows += [(f"`{c}`", *(spread(found[model, c][size]) for size in SIZES)) for c in choices]
        text.append(markdown(rows))
    if len(seeds) > 1:
        text += tests(found, columns)
    print(write_text(DOCS / "camvid.md", "\n\n".join(text) + "\n"))
    print(save_figure(picture(found), DOCS / "figures" / "camvid.png"))


def tests(found: Scores, columns: list[str]) -> list[str]:
    """Return the paragraph and the table of the differences."""
    compared = [(m, a, b) for m in MODELS for a, b in TESTS if (m, a) in RUNS]
    cells = []
    for model, one, other in compared:
        for size in SIZES:
            mine, theirs = found[model, one][size], found[model, other][size]
            cells.append((fmean(mine) - fmean(theirs), paired_p(mine, theirs)))
    adjusted = holm([p for _, p in cells])
    written = [f"{d:+.1f} (p {format_p(p)}; {format_p(q)})" for (d, p), q in zip(cells, adjusted, strict=True)]
    rows = [("model", "encoding", "against", *columns)]
    each = len(SIZES)
    rows += [(m, f"`{a}`", f"`{b}`", *written[each * i : each * (i + 1)]) for i, (m, a, b) in enumerate(compared)]
    few = "With three seeds a test has little power: a difference that is not significant is not shown to be none."
    return [
        "Differences of the means in points, p of a paired t-test over seeds, and p adjusted by Holm's method over all "
        f"tests of the table. {few}",
        markdown(rows),
    ]


def picture(found: Scores) -> Figure:
    """Draw mIoU against the size of the images, a line per encoding with bars of one standard deviation."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for ax, model in zip(panels, MODELS, strict=True):
        for number, choice in enumerate(CHOICES):
            if (model, choice) not in RUNS:
                continue
            values = [found[model, choice][size] for size in SIZES]
            errors = [stdev(one) if len(one) > 1 else 0.0 for one in values]
            at = [height + 2 * (number - 3) for height, _ in SIZES]  # side by side, so that bars can be told apart
            style = "--" if choice == "none" else "-"
            means = [fmean(one) for one in values]
            ax.errorbar(at, means, errors, label=choice, marker="o", markersize=4, capsize=2, linestyle=style)
        ax.set_xticks([height for height, _ in SIZES], [f"{h} x {w}" for h, w in SIZES])
        ax.set(title=model, xlabel="size of the images (trained at the first)")
    panels[0].set_ylabel("mIoU (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(CHOICES), fontsize=8)
    return figure


def main() -> None:
    """Run what is missing, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of CamVid, with images/ and annotations/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/camvid"))
    parser.add_argument("--report", action="store_true", help="write the tables and the picture from the kept scores")
    options = parser.parse_args()
    if not options.report and options.data is None:
        parser.error("--data, the folder of CamVid, is needed to train")
    if not options.report:
        torch.set_num_threads(1)
        kept = {(r["model"], r["choice"], int(r["seed"])) for r in read()}
        todo = [(*run, seed) for seed in options.seeds for run in RUNS if (*run, seed) not in kept]
        for number, (model, choice, seed) in enumerate(todo, 1):
            print(f"{number} of {len(todo)}: {model}, {choice}, seed {seed}", flush=True)
            keep(measure(model, choice, seed, options.data, options.folder))
    report()


if __name__ == "__main__":
    main()
