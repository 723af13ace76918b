"""Why LaPE helps, on CIFAR-10 at its own 32 pixels: the seven choices that tell place, amplitude and norm apart."""

import graticule
from evidence.studies import Study

#: A normal of this standard deviation, truncated at 2, has the standard deviation 1.
EXACT = "learnable(std=1.37)"


def study() -> Study:
    """Compare seven choices on 5,000 images, at the trained size and on 2.25 times as many tokens in two modes."""
    beside = "lape(decomposition='w')"
    choices = {
        "once, std 0.02": {"encoding": "learnable(std=0.02)"},
        "once, std 0.2": {"encoding": "learnable(std=0.2)"},
        "once, std 1": {"encoding": EXACT},
        "beside, std 0.2": {"encoding": "learnable(std=0.2)", "joining": beside},
        "beside, std 1": {"encoding": EXACT, "joining": beside},
        "beside, LN chain": {"encoding": "learnable(std=0.2)", "joining": "lape"},
        "beside, LN chain, std 1": {"encoding": EXACT, "joining": "lape"},
    }
    return Study(
        question="Does LaPE help on CIFAR-10 because of the place of the table, its amplitude, or its norm?",
        recipe="fashion_mnist",
        choices=choices,
        base={
            "dataset": "cifar10",
            "model": "vit_lite_2_4_32",
            "img_size": (32, 32),
            "limit_train": 5_000,
            "limit_test": 2_000,
            "augmentation": graticule.Augmentation(random_crop_padding=4, hflip=0.5),
            "batch_size": 50,
            "lr": 1e-3,
            "epochs": 10,
            "workers": 0,
        },
        seeds=tuple(range(400, 408)),
        sizes=((48, 48),),
        modes=("zoom", "canvas"),
        controls="Tables of ViT-Lite start at 0.2 in the authors' code, and so does the table of 'LN chain' here.",
        follows="LaPE (Yu et al., 2023), Table 2, rows ViT-Lite",
        limits="A tenth of the images (JPEG copies), augmented by crops and flips only, tested on 2,000.",
        folder="CIFAR10",
        expects={
            **{"grid": "8 x 8", "layers": 2, "images": 5000},
            **{name: {"std": float(name.split("std ")[1])} for name in choices if "std" in name},
            "beside, LN chain": {"std": 0.2, "joining": "lape(decomposition='layer_norm')"},
        },
        seconds=70,
    )
