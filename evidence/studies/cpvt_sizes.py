"""CPVT's Table 2 at a fixed scale of the content: more tokens, after training with crops of many scales."""

import graticule
from evidence.studies import Study


def study() -> Study:
    """Compare seven choices, trained at 28 pixels and tested at seven sizes."""
    return Study(
        question="Does PEG gain accuracy at larger image sizes than in training, where learnable tables lose it?",
        recipe="digits_sizes",
        choices={
            "learnable": {"encoding": "learnable"},
            "none": {"encoding": "none"},
            "sinusoidal 2-D": {"encoding": "sinusoidal_2d"},
            "learnable, LaPE": {"encoding": "learnable", "joining": "lape"},
            "PEG at 0": {"encoding": "peg"},
            "PEG at 0 to 4": {"encoding": "peg(places=[0, 1, 2, 3, 4])"},
            "learnable, std 1": {"encoding": "learnable(std=1.37)"},
        },
        base={
            "global_pool": "avg",
            "epochs": 60,
            "warmup_epochs": 4,
            "augmentation": graticule.Augmentation(scale=(0.25, 1.0)),
        },
        seeds=(0, 1, 2, 3),
        sizes=((20, 20), (24, 24), (28, 28), (32, 32), (36, 36), (40, 40), (44, 44)),
        modes=("canvas", "zoom"),
        controls="'learnable, std 1' has the standard deviation of a normalized table. It was added when the other "
        "scores were known.",
        follows="CPVT (Chu et al., 2023), Table 2",
        limits="Training crops enlarge a digit up to four times in area. A fifth seed was planned but not run.",
        expects={
            **{"grid": "7 x 7", "model": "vit_nano_patch4_28", "global_pool": "avg"},
            "learnable": {"std": 0.02},
            "learnable, LaPE": {"std": 0.02, "joining": "lape(decomposition='layer_norm')"},
            "learnable, std 1": {"std": 1.0},
            "PEG at 0": {"encoding": "peg(places=[0])"},
        },
        seconds=450,
    )
