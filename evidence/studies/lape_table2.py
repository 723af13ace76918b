"""LaPE's Table 2 on CIFAR-10 at full length, for a GPU. It has never been run; this was declared before the first run.

Endpoint: top-1 on the 10,000 test images after the last epoch. The paper does not say whether it reports the last or
    the best epoch, so `best_top1` is stored, too, and is not tested.
Pairs: default and LaPE with the same seed, of the paper's seeds 121 to 125, in this order; ViT-Lite first, then CCT
    and CVT. A run that has started is finished and counted; none is left out.
Test: a paired t-test over seeds for each model, two-sided, with p adjusted by Holm's method over the models. There are
    two looks, after three and after five pairs, each at the level 0.025.
Verdict: the paper's direction holds for a model if the mean of LaPE is higher and the adjusted p is below the level. It
    is contradicted if the mean of LaPE is lower and the adjusted p is below the level. Otherwise, and with fewer than
    three pairs, it is undecided. The paper's gain is reproduced if the 95 % interval contains it and excludes zero.
Power: with 10,000 images and accuracies of 93 to 97 %, the standard error of an accuracy is 0.17 to 0.26 points. If the
    difference of a pair has a standard deviation of 0.35, a 95 % interval is +-0.87 points with three pairs and +-0.43
    with five. The paper's gains are 0.842, 0.496 and 0.388, so three pairs can hardly decide.
Command: python -m evidence.studies lape_table2 --data-root CIFAR10 --copies [--minutes 6] [--output FOLDER]
"""

from collections.abc import Iterator

from evidence.studies import Measured, Study
from graticule.lab.recipes.load import load_recipe
from graticule.lab.training.run import Run

#: Top-1 of the default joining and of LaPE (Yu et al., 2023, Table 2).
PAPER = {"ViT-Lite-7/4": (93.448, 94.290), "CCT-7/3x1": (96.034, 96.530), "CVT-7/4": (94.302, 94.690)}


def best(run: Run) -> Iterator[Measured]:
    """Yield the best top-1 of a run, and its epoch."""
    result = run.result()
    yield "best_top1", "trained", result["best_top1"]
    yield "best_epoch", "trained", float(result["best_epoch"])


def study() -> Study:
    """Compare the default joining with LaPE in the three models, whose recipes differ in the model and in erasing."""
    recipe = load_recipe("cct_cifar10")
    return Study(
        question="Does LaPE beat the default joining in Table 2 of its paper, on CIFAR-10 at full length?",
        recipe="vit_lite_cifar10",
        choices={"default": {}, "LaPE": {"joining": "lape"}},
        variants={
            "ViT-Lite-7/4": {},
            "CCT-7/3x1": {"model": recipe.model, "augmentation": recipe.augmentation},
            "CVT-7/4": {"model": "cvt_7_4_32"},
        },
        variant_first=True,
        base={"eval_batch_size": 2_000, "workers": 0, "checkpoint_epochs": 10},  # about every six seconds on a GPU
        seeds=(121, 122, 123, 124, 125),
        measure=best,
        controls="Equal seeds, data and recipes; tables start at 0.2 in both, as in the authors' code.",
        follows="LaPE (Yu et al., 2023), Table 2",
        limits="The images are JPEG copies, whose pixels differ a little from the published ones.",
        folder="CIFAR10",
        expects={
            **{"layers": 7, "images": 50_000 // 128 * 128, "epochs": 310, "std": 0.2},
            **{"ViT-Lite-7/4": {"grid": "8 x 8"}, "CCT-7/3x1": {"grid": "16 x 16"}, "CVT-7/4": {"grid": "8 x 8"}},
            "LaPE": {"joining": "lape(decomposition='layer_norm')"},
        },
        seconds=14 * 3600,
    )
