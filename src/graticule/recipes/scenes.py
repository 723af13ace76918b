"""Detection and segmentation of digits in composed scenes: small models that learn in minutes, without a download.

Reproduces: nothing; it is where any position encoding can be tried on dense tasks.
Command: graticule train scenes_detection; graticule train scenes_segmentation; then graticule evaluate RUN --sizes 72
    96 128 and graticule predict RUN. Without position: --encoding none.
Cost, result: docs/dense.md.
"""

from __future__ import annotations

import graticule


@graticule.register_recipe("scenes_detection", "A small ViT with FCOS finds digits in composed scenes, in minutes.")
def detection() -> graticule.DetectionRecipe:
    """Train on 2,000 scenes of 96 x 96 in patches of 8: a grid of 12 x 12."""
    return graticule.DetectionRecipe(
        model="vit_nano_patch4_28",
        patch_size=8,
        neck="simple_pyramid(channels=64, first=2, extra='none')",
        head="fcos",
        dataset="scenes",
        img_size=(96, 96),
        fit=(96, 96),
        batch_size=16,
        eval_batch_size=25,
        epochs=8,
        lr=2e-3,
        min_lr=2e-5,
        warmup_steps=100,
        weight_decay=0.05,
        clip_grad=1.0,
    )


@graticule.register_recipe(
    "scenes_segmentation", "A small ViT with Segmenter's linear decoder classifies the pixels of composed scenes."
)
def segmentation() -> graticule.SegmentationRecipe:
    """Train on 2,000 scenes of 96 x 96 in patches of 6: a grid of 16 x 16."""
    return graticule.SegmentationRecipe(
        model="vit_nano_patch4_28",
        patch_size=6,
        decoder="segmenter_linear",
        dataset="scenes",
        img_size=(96, 96),
        fit=(96, 96),
        batch_size=16,
        eval_batch_size=25,
        epochs=8,
        lr=2e-3,
        min_lr=2e-5,
        warmup_steps=100,
        weight_decay=0.05,
        clip_grad=1.0,
    )
