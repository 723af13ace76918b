"""The common base of classifiers on ImageNet-1K: the settings of DeiT (Touvron et al., 2021), Table 9.

Recipes of other papers replace the values that differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graticule


def imagenet(model: str, distilled: bool = False, augmentation: Any = None, **values: Any) -> graticule.Recipe:
    """Return DeiT's recipe for a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG, with other values.

    Args:
        model: name of the model.
        distilled: whether it learns from the decisions of a RegNetY-160, with the weights of DeiT.
        augmentation: the values of the augmentation that differ.
        values: the other fields that differ.
    """
    distillation = graticule.Distillation()
    if distilled:
        weights = Path("data/regnety_160-a5fe301d.pth")
        distillation = graticule.Distillation(teacher="regnety_160", teacher_checkpoint=weights, form="hard", alpha=0.5)
    batch_size = 1024
    crops = {
        "scale": (0.08, 1.0),
        "hflip": 0.5,
        "color_jitter": 0.3,
        "rand_augment": "rand-m9-mstd0.5-inc1",
        "erasing": 0.25,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
    }
    base = {
        "img_size": (224, 224),
        "drop_path_rate": 0.1,
        "dataset": "image_folder",
        "data_root": Path("data/imagenet"),
        "aug_repeats": 3,
        "mixing": graticule.ImageMixing(mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5),
        "label_smoothing": 0.1,
        "batch_size": batch_size,
        "eval_batch_size": 256,
        "workers": 8,
        "epochs": 300,
        "warmup_epochs": 5,
        "optimizer": "adamw",
        "lr": 5e-4 * batch_size / 512,
        "min_lr": 1e-5,
        "warmup_lr": 1e-6,
        "weight_decay": 0.05,
        "precision": "16-mixed",
    }
    return graticule.Recipe(
        model=model,
        distillation=distillation,
        augmentation=graticule.Augmentation(**{**crops, **(augmentation or {})}),
        **{**base, **values},
    )
