"""Why LaPE helps, on CIFAR-10: the four choices of `lape_place` that decide between place, amplitude and norm."""

import graticule
from graticule.lab.studies.study import Study

#: A normal of this standard deviation, truncated at 2, has the standard deviation 1.
EXACT = "learnable(std=1.37)"


def study() -> Study:
    """Compare four choices on 5,000 images, with the model of the study `cifar10` and a short plain recipe."""
    return Study(
        question="Does LaPE help on CIFAR-10 by where the table is added, by its amplitude, or by its norm?",
        recipe="fashion_mnist",
        choices={
            "once, std 0.2": {"encoding": "learnable"},  # where tables of ViT-Lite start
            "once, std 1": {"encoding": EXACT},
            "beside, std 1": {"encoding": EXACT, "joining": "lape(decomposition='w')"},
            "beside, LN chain": {"encoding": "learnable", "joining": "lape"},
        },
        base={
            "dataset": "cifar10",
            "model": "vit_lite_2_4_32",
            "limit_train": 5_000,
            "limit_test": 2_000,
            "augmentation": graticule.Augmentation(random_crop_padding=4, hflip=0.5),
            "batch_size": 50,
            "lr": 1e-3,
            "epochs": 10,
            "workers": 0,
        },
        seeds=tuple(range(70, 76)),
        tests=(
            ("once, std 1", "once, std 0.2"),
            ("beside, std 1", "once, std 1"),
            ("beside, LN chain", "beside, std 1"),
            ("beside, LN chain", "once, std 1"),
        ),
        controls="'std 1' has the exact standard deviation of a normalized table (1.37 before truncation at 2). "
        "'beside' adds the raw table to the normalized tokens of every layer: LaPE without its norms.",
        limits="A table starts at 0.2 in ViT-Lite; one that starts at 0.02 was not run. Images have 28 pixels a side, "
        "of the recipe, so 7 x 7 patches. Two layers, a tenth of the images, for 10 epochs, with crops and "
        "flips alone, tested on 2,000 images. The recorded runs used JPEG copies of the published images, and patches "
        "at PyTorch's initial values; these now start as in the authors' code.",
        folder="CIFAR10",
        seconds=50,
    )
