"""Small detectors and segmentation models that learn in minutes: composed scenes, CamVid, a few images of COCO.

Reproduces: nothing; for trying position encodings on dense tasks.
Command: graticule train scenes_detection; graticule train scenes_mask_rcnn; graticule train scenes_segmentation;
    graticule train scenes_sides; then graticule evaluate RUN --sizes 72 96 128 and graticule predict RUN. Without
    position: --encoding none.
    graticule train camvid --data-root CAMVID; graticule train camvid_pvt --data-root CAMVID
    graticule train coco_overfit --data-root COCO [--limit-train 100 --limit-test 100]
Cost: docs/dense_scores.md.
Result: docs/dense_scores.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graticule


@graticule.register_recipe(
    "scenes_detection",
    "A small ViT with FCOS finds digits in composed scenes, in minutes.",
    kind="DetectionRecipe",
    neck="simple_pyramid(channels=64, first=2, extra='none')",
    head="fcos",
    epochs=8,
)
@graticule.register_recipe(
    # an eighth of the regions, a tenth of the proposals and an eighth of the channels of Mask R-CNN; the anchors of the
    # four levels have sides of 16, 32, 64 and 128 pixels
    "scenes_mask_rcnn",
    "A small ViT with a small Mask R-CNN finds digits and their pixels in composed scenes, in minutes.",
    kind="DetectionRecipe",
    neck="simple_pyramid(channels=32, first=1)",
    head="mask_rcnn(regions=64, proposals=100, hidden=128, channels=32, convs=2, "
    "scale=4.0, ratios=(1.0, 2.0), most=30)",
    epochs=4,
)
@graticule.register_recipe(
    "scenes_segmentation",
    "A small ViT with a feature pyramid classifies the pixels of composed scenes, in minutes.",
    neck="simple_pyramid(channels=32, first=1)",
    decoder="fpn(channels=32)",
    hardest=0.2,
    epochs=10,
)
@graticule.register_recipe(
    "scenes_sides",  # Segmenter's linear decoder sees one patch at a time, without position from padding
    "A small ViT classifies digits by their half of a scene, which it cannot without position.",
    dataset="scenes_sides",
    decoder="segmenter_linear",
    epochs=4,
)
def scenes(kind: str = "SegmentationRecipe", dataset: str = "scenes", **values: Any) -> Any:
    """Train a ViT on 2,000 scenes of 96 x 96 in patches of 8: a grid of 12 x 12."""
    return getattr(graticule, kind)(
        model="vit_nano_patch4_28",
        dataset=dataset,
        patch_size=8,
        img_size=(96, 96),
        fit=(96, 96),
        batch_size=16,
        eval_batch_size=25,
        lr=2e-3,
        min_lr=2e-5,
        warmup_steps=100,
        weight_decay=0.05,
        clip_grad=1.0,
        **values,
    )


@graticule.register_recipe(
    "camvid",  # patches of 12: a grid of 15 x 20
    "A small ViT with Segmenter's mask transformer on CamVid at 180 x 240.",
    model="vit_micro_patch4_28",
    patch_size=12,
    img_size=(180, 240),
    decoder="segmenter_mask(depth=1)",
)
@graticule.register_recipe(
    # five blocks in four stages and half of PVT-tiny's channels or fewer; images are padded to 192 x 256
    "camvid_pvt",
    "A small PVT with Semantic FPN on CamVid at 180 x 240.",
    model="pvt_tiny",
    model_kwargs=("embed_dims=[32,64,96,128]", "num_heads=[1,2,3,4]", "depths=[1,1,2,1]"),
    img_size=(192, 256),
    neck="fpn(channels=64)",
    decoder="fpn(channels=64)",
)
def camvid(**values: Any) -> graticule.SegmentationRecipe:
    """Train on the 367 training images of CamVid at half their size, 180 x 240."""
    return graticule.SegmentationRecipe(
        dataset="camvid",
        data_root=Path("data/camvid"),
        fit=(180, 240),
        augmentation=graticule.DenseAugmentation(hflip=0.5),
        batch_size=8,
        eval_batch_size=8,
        epochs=30,
        lr=1e-3,
        min_lr=1e-5,
        warmup_steps=100,
        weight_decay=0.05,
        clip_grad=1.0,
        **values,
    )


@graticule.register_recipe("coco_overfit", "A small ViT with FCOS memorizes 20 training images of COCO.")
def coco_overfit() -> graticule.DetectionRecipe:
    """Train and evaluate on the same images, at most 128 x 176, in patches of 8.

    The finest map has a cell every two pixels: FCOS learns an object at cells whose point lies in its box, and at this
    size the boxes of COCO's small objects are a few pixels wide.
    """
    return graticule.DetectionRecipe(
        model="vit_nano_patch4_28",
        patch_size=8,
        neck="simple_pyramid(channels=64, first=0)",
        head="fcos(convs=2)",
        dataset="coco_train",
        data_root=Path("data/coco"),
        limit_train=20,
        limit_test=20,
        img_size=(128, 176),
        fit=(128, 176),
        batch_size=1,
        eval_batch_size=1,
        epochs=100,
        lr=1e-3,
        min_lr=1e-5,
        warmup_steps=100,
        weight_decay=0.0,
        clip_grad=1.0,
    )
