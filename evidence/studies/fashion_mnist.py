"""Fashion-MNIST: the default joining, LaPE, and the amplitude of the table."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare three choices for 20 epochs, with a smaller model on a twentieth of the images."""
    return Study(
        question="Does LaPE help on Fashion-MNIST, and more than a larger initial amplitude does?",
        recipe="fashion_mnist",
        choices={
            "default": {"encoding": "learnable"},
            "default, std 1": {"encoding": "learnable(std=1)"},
            "LaPE": {"encoding": "learnable", "joining": "lape"},
        },
        base={"epochs": 20},
        variants={
            "3,000 images": {
                "model": "vit_nano_patch4_28",
                "limit_train": 3_000,
                "limit_test": 1_000,
                "batch_size": 50,
                "lr": 3e-3,
                "workers": 0,
            },
        },
        seeds=(0, 1, 2),
        tests=(("LaPE", "default"), ("LaPE", "default, std 1"), ("default, std 1", "default")),
        controls="'default, std 1' controls for the amplitude of the table.",
        follows="LaPE (Yu et al., 2023), Table 1, on other data",
        limits="'3,000 images' is a small model on a twentieth of the images for 20 epochs, tested on 1,000 images, "
        "so it measures the speed of learning as much as the final accuracy. All 60,000 images were planned too, and "
        "not run, and neither were amplitudes other than 0.02 and 1.",
        folder="FASHION_MNIST",
        seconds=130,
    )
