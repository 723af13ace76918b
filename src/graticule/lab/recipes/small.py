"""Small models that learn in minutes: digits, Fashion-MNIST, the gym, text, composed scenes, CamVid.

Reproduces: nothing; most follow a table of a paper on a small scale, as noted beside each.
Command: graticule train digits_quick
    python -m evidence.studies lape_place (digits_small; `python -m evidence.studies` lists the others)
    graticule compare digits_sizes --sizes 20 28 36 44 56 --seeds 0 1 2 3 4 --choices encoding=learnable ...
    graticule compare digits_gmlp --seeds 0 1 2 3 4 --choices encoding=sgu encoding=lrpe ... (digits_posmlp too)
    graticule train digits_cpvt --augmentation.scale 0.25 1; then graticule evaluate RUN --sizes 20 28 36 44
    graticule compare digits_compact --seeds 121 122 123 124 125 --choices model=vit_lite_2_4_32
    model=vit_lite_2_4_32,joining=lape ...
    graticule train digits_posmlp --output runs/digits-teacher; then graticule compare digits_distilled
    --seeds 0 1 2 3 4 --choices distillation.form=hard distillation.teacher=runs/digits-teacher
    distillation.teacher=runs/digits-teacher,distillation.form=soft
    graticule train fashion_mnist
    graticule train gym --encoding rope; graticule train gym --dataset gym_neighbors (docs/compare.md has the ten tasks)
    graticule train pydoc_quick
    graticule train scenes_detection; graticule train scenes_mask_rcnn; graticule train scenes_segmentation;
    then graticule evaluate RUN --sizes 72 96 128 and graticule predict RUN. Without position: --encoding none.
    graticule train camvid --data-root CAMVID; graticule train camvid_pvt --data-root CAMVID
Cost: on one core, digits_quick and digits_posmlp two minutes, digits_cpvt three, pydoc_quick nine (2026-11-28),
    digits_small half a minute, gym 20 seconds, digits_gmlp 90, digits_compact 30 to 120, digits_distilled 60;
    on 2 cores, digits_sizes about a minute, fashion_mnist 150 s per epoch (2026-11-21). Dense models:
    docs/dense.md.
Result: docs/results.md has the studies of digits_small, digits_posmlp and digits_gmlp, and of Fashion-MNIST. gym with
    seed 0 (2026-11-29): none 12.5 % (chance), learnable 17.8 %, learnable with LaPE 100 %, rope 100 %. For the others
    no score per seed is on record. Dense models: docs/dense.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graticule


@graticule.register_recipe(
    "digits_quick",
    "A small ViT on the 5,000 embedded digits: train and evaluate in two minutes on one core.",
    epochs=10,
)
@graticule.register_recipe(
    "digits_sizes",  # CPVT (Chu et al., 2023), Tables 2 and 8: trained at one size, tested at others
    "A small ViT on the embedded digits, for evaluation at other sizes.",
)
@graticule.register_recipe(
    "digits_small",
    "A small ViT of 4 layers on the embedded digits at 20 x 20, for studies of many runs.",
    epochs=10,
    img_size=(20, 20),
    model_kwargs=("depth=4",),
)
@graticule.register_recipe(
    "digits_cpvt",  # CPVT-Ti-GAP (Chu et al., 2023, Table 3)
    "A small CPVT on the embedded digits: five PEGs and global average pooling, with the norm before the pooling.",
    encoding="peg(places=[0, 1, 2, 3, 4])",
    global_pool="avg",
    model_kwargs=("fc_norm=False",),
)
@graticule.register_recipe(
    "digits_gmlp",  # PosMLP (Wang et al., 2022), Table 1, rows gMLP
    "A small gMLP on the embedded digits, to compare its token mixing.",
    model="gmlp_nano_patch4_28",
)
@graticule.register_recipe(
    "digits_posmlp",  # PosMLP (Wang et al., 2022), Table 1, rows PosMLP
    "A small PosMLP of two stages on the embedded digits, to compare its token mixing.",
    model="posmlp_nano_32",
    img_size=(32, 32),  # the digits enlarged: grids of 8 x 8 and 4 x 4
)
@graticule.register_recipe(
    "digits_compact",  # LaPE (Yu et al., 2023), Table 2
    "Small ViT-Lite, CVT or CCT on the embedded digits, with the default joining or LaPE.",
    model="vit_lite_2_4_32",
    epochs=10,
    lr=1e-3,
    weight_decay=0.06,
    drop_path_rate=0.1,
)
def digits(
    model: str = "vit_nano_patch4_28",
    epochs: int = 15,
    warmup_epochs: int = 1,
    lr: float = 3e-3,
    weight_decay: float = 0.05,
    **others: Any,
) -> graticule.Recipe:
    """Train on 4,000 images of 28 x 28 in patches of 4: a grid of 7 x 7."""
    batch_size = 50
    return graticule.Recipe(
        model=model,
        dataset="digits",
        batch_size=batch_size,
        epochs=epochs,
        warmup_epochs=warmup_epochs,
        lr=lr * batch_size / 50,
        weight_decay=weight_decay,
        **others,
    )


@graticule.register_recipe(
    "digits_distilled",  # DeiT (Touvron et al., 2021), Table 3
    "A small ViT on 500 of the embedded digits, plain or with a teacher that was trained on all 4,000.",
)
def distilled() -> graticule.Recipe:
    """Train on 500 images of 28 x 28 in patches of 4, without a teacher unless `distillation.teacher` names a run.

    The teacher of the command takes digits of 32 x 32. It was trained on these 500 images, too, so all that it adds for
    a student is the labels of mixtures of two of them, and in the soft form the similarity of the classes.
    """
    mixing = graticule.ImageMixing(mixup=0.8)
    return digits(joining="lape", limit_train=500, mixing=mixing, epochs=40, warmup_epochs=4)


@graticule.register_recipe(
    "fashion_mnist", "A small ViT on Fashion-MNIST: 60,000 real images, minutes per epoch on 2 cores."
)
def fashion_mnist() -> graticule.Recipe:
    """Train on images of 28 x 28 in patches of 4, cropped with padding and flipped."""
    batch_size = 256
    return graticule.Recipe(
        model="vit_micro_patch4_28",
        dataset="fashion_mnist",
        augmentation=graticule.Augmentation(random_crop_padding=2, hflip=0.5),
        drop_path_rate=0.05,
        batch_size=batch_size,
        epochs=20,
        warmup_epochs=2,
        lr=1e-3 * batch_size / 256,
        weight_decay=0.05,
        label_smoothing=0.1,
        workers=2,
    )


@graticule.register_recipe("gym", "A tiny ViT on generated images whose class needs one kind of position information.")
def gym() -> graticule.Recipe:
    """Train on images of 24 x 24 in patches of 4, which are the cells of the gym: a grid of 6 x 6."""
    batch_size = 64
    return graticule.Recipe(
        model="vit_nano_patch4_28",
        model_kwargs=("embed_dim=48", "depth=2", "num_heads=2"),
        dataset="gym_displacement",
        img_size=(24, 24),
        global_pool="avg",
        batch_size=batch_size,
        epochs=5,
        warmup_epochs=1,
        lr=4e-3 * batch_size / 64,
        weight_decay=0.01,
        clip_grad=1.0,
    )


@graticule.register_recipe(
    "pydoc_quick", "A small language model on the embedded text, Python's own help: train and evaluate in minutes."
)
def pydoc() -> graticule.TextRecipe:
    """Train on 413 kB of text, Python's own help, in windows of 128 bytes."""
    return graticule.TextRecipe(
        model="lm_tiny",
        encoding="alibi",
        dataset="pydoc",
        context=128,
        batch_size=16,
        epochs=7,
        warmup_epochs=1,
        lr=2e-3,
        weight_decay=0.1,
        clip_grad=1.0,
    )


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
def scenes(kind: str = "SegmentationRecipe", **values: Any) -> Any:
    """Train a ViT on 2,000 scenes of 96 x 96 in patches of 8: a grid of 12 x 12."""
    return getattr(graticule, kind)(
        model="vit_nano_patch4_28",
        dataset="scenes",
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
