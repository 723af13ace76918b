"""ViT-Lite, CVT and CCT on CIFAR-10 and CIFAR-100 as LaPE trains them.

Reproduces: LaPE, first version (Yu et al., 2022), Table 7, for Table 2 of LaPE (2023); the mean of seeds 121 to 125.
    What that table leaves out is from the code of Compact Transformers (Hassani et al., 2021): ViT-Lite and CVT have
    configs/datasets/cifar10.yml and cifar100.yml, CCT has configs/pretrained/cct_7-3x1_cifar10_300epochs.yml and
    cct_7-3x1_cifar100_300epochs.yml.
Command: graticule train cct_cifar10 --data-root FOLDER --seed 121
    Table 5 of LaPE: graticule compare vit_lite_cifar100 --seeds 121 122 123 124 125 --choices joining=default
    "joining=lape(decomposition='w')" "joining=lape(decomposition='scalar_w')" ... (graticule models lists the eight).
    Table 6: the same with --choices joining=default "joining=lape(layers=1)" ... "joining=lape(layers=7)"
Cost: not measured.
Result: not measured.

The text of LaPE's first version says SGD for CIFAR; the code that it builds on uses AdamW, and so do these recipes
(--optimizer sgd for SGD). The 10 warm-up epochs count within the 300; the 10 of cool-down come after them. Its models
exclude nothing but vectors from decay, so tables and class tokens decay. CCT's random erasing differs between the data
sets, 0 and 0.25, since 6bd53cc (September 2021); an earlier state, 3e02036, has 0 in all these files.
"""

from __future__ import annotations

from pathlib import Path

import graticule


@graticule.register_recipe(
    "vit_lite_cifar10",
    "ViT-Lite-7/4 on CIFAR-10 as LaPE trains it: 93.448 with the default joining, 94.290 with LaPE (2023, Table 2).",
    model="vit_lite_7_4_32",
    classes=10,
)
@graticule.register_recipe(
    "vit_lite_cifar100",
    "ViT-Lite-7/4 on CIFAR-100 as LaPE trains it: 74.984 with the default joining, 75.534 with LaPE (2023, Table 2).",
    model="vit_lite_7_4_32",
    classes=100,
)
@graticule.register_recipe(
    "cvt_cifar10",
    "CVT-7/4 on CIFAR-10 as LaPE trains it: 94.302 with the default joining, 94.690 with LaPE (2023, Table 2).",
    model="cvt_7_4_32",
    classes=10,
)
@graticule.register_recipe(
    "cvt_cifar100",
    "CVT-7/4 on CIFAR-100 as LaPE trains it: 77.452 with the default joining, 78.052 with LaPE (2023, Table 2).",
    model="cvt_7_4_32",
    classes=100,
)
@graticule.register_recipe(
    "cct_cifar10",
    "CCT-7/3x1 on CIFAR-10 as LaPE trains it: 96.034 with the default joining, 96.530 with LaPE (2023, Table 2).",
    model="cct_7_3x1_32",
    classes=10,
    erasing=0.0,
)
@graticule.register_recipe(
    "cct_cifar100",
    "CCT-7/3x1 on CIFAR-100 as LaPE trains it: 80.928 with the default joining, 81.986 with LaPE (2023, Table 2).",
    model="cct_7_3x1_32",
    classes=100,
)
def cifar(model: str, classes: int, erasing: float = 0.25) -> graticule.Recipe:
    """Train on CIFAR-10 or CIFAR-100 in its published form."""
    ten = classes == 10
    return graticule.Recipe(
        model=model,
        img_size=(32, 32),
        drop_path_rate=0.1,
        dataset=f"cifar{classes}",
        data_root=Path("data"),
        augmentation=graticule.Augmentation(
            scale=(0.8, 1.0),
            hflip=0.5,
            rand_augment="rand-m9-mstd0.5-inc1",
            color_jitter=0.4,
            erasing=erasing,
            interpolation="bicubic",
            random_interpolation=True,
        ),
        mixing=graticule.Mixing(mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5, off_epoch=175 if ten else 0),
        label_smoothing=0.1,
        batch_size=128,
        epochs=300,
        warmup_epochs=10,
        cooldown_epochs=10,
        optimizer="adamw",
        lr=55e-5 if ten else 6e-4,
        min_lr=1e-5,
        warmup_lr=1e-5 if ten else 1e-6,
        weight_decay=0.06,
        decay_position=True,
        precision="16-mixed",
        workers=4,
        seed=121,
    )
