"""T2T-ViT-7 on ImageNet-1K as LaPE trains it.

Reproduces: LaPE, first version (Yu et al., 2022), Table 7, row T2T-ViT, for Table 1 of LaPE (2023). What that table
    leaves out is from the code of T2T-ViT (Yuan et al., 2021). The encoding is the fixed sinusoidal one; LaPE joins the
    first three layers.
Command: graticule train t2t_vit_7_imagenet --data-root IMAGENET [--joining "lape(layers=3)"]
Cost: not measured.
Result: not measured.

LaPE's table has a batch of 1024; the code's command has 512 with the same rate. The 10 warm-up epochs count within the
300; the 10 of cool-down come after. As in that code, the moving average of the weights is evaluated, at a crop of 0.9.
"""

from __future__ import annotations

from pathlib import Path

import graticule


@graticule.register_recipe(
    "t2t_vit_7_imagenet",
    "T2T-ViT-7 on ImageNet-1K as LaPE trains it: 71.69 with the default joining, 71.92 with LaPE (2023, Table 1).",
)
def imagenet() -> graticule.Recipe:
    """Train on a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    batch_size = 1024
    return graticule.Recipe(
        model="t2t_vit_7",
        img_size=(224, 224),
        drop_path_rate=0.1,
        dataset="image_folder",
        data_root=Path("data/imagenet"),
        augmentation=graticule.Augmentation(
            scale=(0.08, 1.0),
            hflip=0.5,
            color_jitter=0.4,
            rand_augment="rand-m9-mstd0.5-inc1",
            erasing=0.25,
            crop_pct=0.9,
            interpolation="bicubic",
            random_interpolation=True,
        ),
        mixing=graticule.Mixing(mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5),
        label_smoothing=0.1,
        batch_size=batch_size,
        eval_batch_size=256,
        workers=8,
        epochs=300,
        warmup_epochs=10,
        cooldown_epochs=10,
        optimizer="adamw",
        lr=1e-3 * batch_size / 1024,
        min_lr=1e-5,
        warmup_lr=1e-6,
        weight_decay=0.03,
        ema_decay=0.99996,
        precision="16-mixed",
    )
