"""Short runs of detectors and segmentation models: two epochs of two steps on scenes."""

from typing import Any

from graticule.lab.data.augmentation import DenseAugmentation
from graticule.lab.tasks.options import DetectionRecipe, SegmentationRecipe

COMMON: dict[str, Any] = {
    "model": "vit_nano_patch4_28",
    "model_kwargs": ("depth=1", "embed_dim=24", "num_heads=3"),
    "patch_size": 16,
    "joining": "lape",
    "limit_train": 8,
    "limit_test": 5,
    "batch_size": 4,
    "eval_batch_size": 2,
    "epochs": 2,
    "accelerator": "cpu",
    "lr": 1e-3,
}


def detector(**options: Any) -> DetectionRecipe:
    """Return the recipe of a small RetinaNet."""
    fixed = {"neck": "simple_pyramid(channels=8, extra='none')", "head": "retinanet(convs=0)"}
    return DetectionRecipe(**{**COMMON, **fixed, **options})


def segmenter(**options: Any) -> SegmentationRecipe:
    """Return the recipe of a small Segmenter."""
    return SegmentationRecipe(**{**COMMON, "decoder": "segmenter_linear", **options})


#: Everything that draws random numbers.
RICH: dict[str, Any] = {
    "drop_path_rate": 0.2,
    "augmentation": DenseAugmentation(sizes=("80x80", "96x96"), crop=(64, 80), hflip=0.5, photometric=True),
    "warmup_steps": 1,
    "layer_decay": 0.8,
    "schedule": "step",
    "decay_epochs": (1,),
    "clip_grad": 1.0,
}
