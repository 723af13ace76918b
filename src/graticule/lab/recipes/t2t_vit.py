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

import graticule
from graticule.lab.recipes.imagenet import imagenet


@graticule.register_recipe(
    "t2t_vit_7_imagenet",
    "T2T-ViT-7 on ImageNet-1K as LaPE trains it: 71.69 with the default joining, 71.92 with LaPE (2023, Table 1).",
)
def train() -> graticule.Recipe:
    """Train with the settings of T2T-ViT's code."""
    batch_size = 1024
    return imagenet(
        "t2t_vit_7",
        augmentation={"color_jitter": 0.4, "crop_pct": 0.9, "random_interpolation": True},
        aug_repeats=1,
        batch_size=batch_size,
        warmup_epochs=10,
        cooldown_epochs=10,
        lr=1e-3 * batch_size / 1024,
        weight_decay=0.03,
        ema_decay=0.99996,
    )
