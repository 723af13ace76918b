"""ViT-Lite-7/4 on CIFAR-100 as LaPE trains it: 74.984 with the default joining, 75.534 with LaPE (2023, Table 2).

Reproduces: LaPE, first version (Yu et al., 2022), Table 7; the mean of seeds 121 to 125. What that table leaves out is
that of the code of Compact Transformers (Hassani et al., 2021), configs/datasets/cifar100.yml.
Command: graticule train vit_lite_cifar100 --data-root FOLDER --seed 121
    Table 5 of that paper: graticule compare vit_lite_cifar100 --seeds 121 122 123 124 125 --choices joining=default
    "joining=lape(decomposition='w')" "joining=lape(decomposition='scalar_w')" ... (graticule models lists the eight).
    Table 6: the same with --choices joining=default "joining=lape(layers=1)" ... "joining=lape(layers=7)"
Cost: not measured.
Result: not measured.

The text of that paper says SGD for CIFAR; the code that it builds on uses AdamW, and so do we
(--optimizer sgd for the other). The 10 warm-up epochs count within the 300; the 10 of cool-down come after.
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """The folder holds CIFAR-100 in its published form."""
    return Recipe(
        model="vit_lite_7_4_32",
        img_size=(32, 32),
        drop_path_rate=0.1,
        dataset="cifar100",
        data_root=Path("data"),
        augmentation=Augmentation(
            scale=(0.8, 1.0),
            hflip=0.5,
            rand_augment="rand-m9-mstd0.5-inc1",
            color_jitter=0.4,
            erasing=0.25,
            interpolation="bicubic",
            random_interpolation=True,
        ),
        mixing=Mixing(mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5),
        label_smoothing=0.1,
        batch_size=128,
        epochs=300,
        warmup_epochs=10,
        cooldown_epochs=10,
        optimizer="adamw",
        lr=6e-4,
        min_lr=1e-5,
        warmup_lr=1e-6,
        weight_decay=0.06,
        precision="16-mixed",
        workers=4,
        seed=121,
    )
