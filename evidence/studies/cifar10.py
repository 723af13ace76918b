"""LaPE's Table 2 at small scale: CIFAR-10, three kinds of compact transformers, with a control for the amplitude."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare the joinings in small ViT-Lite, CVT and CCT on a fifth of the data."""
    models = {"ViT-Lite-2/4": "vit_lite_2_4_32", "CVT-2/4": "cvt_2_4_32", "CCT-2/3x2": "cct_2_3x2_32"}
    small = {"model": "vit_lite_2_4_32", "limit_train": 5_000, "limit_test": 2_000, "epochs": 20}
    return Study(
        question="Does LaPE help compact transformers on CIFAR-10, and more than a larger initial amplitude does?",
        recipe="vit_lite_cifar10",
        choices={
            "default": {"encoding": "learnable"},
            "default, std 1": {"encoding": "learnable(std=1)"},
            "LaPE": {"encoding": "learnable", "joining": "lape"},
        },
        variants={**{name: {"model": model} for name, model in models.items()}, "5,000 images": small},
        base={"limit_train": 10_000, "epochs": 30, "warmup_epochs": 2, "cooldown_epochs": 0},
        seeds=(121, 122, 123),
        tests=(("LaPE", "default"), ("LaPE", "default, std 1"), ("default, std 1", "default")),
        controls="'default, std 1' controls for the amplitude of the table.",
        follows="LaPE (Yu et al., 2023), Table 2",
        limits="The models are trained on a fifth of the data for a tenth of the paper's epochs; '5,000 images' is "
        "ViT-Lite-2/4 on a tenth of the data for 20 epochs, tested on 2,000 images. On a CPU the recipe's 16-mixed is "
        "replaced by bf16-mixed. The recorded runs used JPEG copies of the published images.",
        folder="CIFAR10",
        seconds={**dict.fromkeys(models, 900.0), "5,000 images": 450.0},
    )
