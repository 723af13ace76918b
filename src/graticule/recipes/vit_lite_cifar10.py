"""ViT-Lite-7/4 on CIFAR-10 as LaPE trains it: 93.448 with the default joining, 94.290 with LaPE (2023, Table 2).

Reproduces: LaPE, first version (Yu et al., 2022), Table 7; the mean of seeds 121 to 125. What that table leaves out is
that of the code of Compact Transformers (Hassani et al., 2021), configs/datasets/cifar10.yml.
Command: graticule train vit_lite_cifar10 --data-root FOLDER --seed 121
Cost: not measured.
Result: not measured.

The text of that paper says SGD for CIFAR; the code that it builds on uses AdamW, and so do we
(--optimizer sgd for the other). The 10 warm-up epochs count within the 300; the 10 of cool-down come after.
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """The folder holds CIFAR-10 in its published form."""
    return Recipe(
        model="vit_lite_7_4_32",
        img_size=(32, 32),
        drop_path_rate=0.1,
        dataset="cifar10",
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
        mixing=Mixing(mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5, off_epoch=175),
        label_smoothing=0.1,
        batch_size=128,
        epochs=300,
        warmup_epochs=10,
        cooldown_epochs=10,
        optimizer="adamw",
        lr=55e-5,
        min_lr=1e-5,
        warmup_lr=1e-5,
        weight_decay=0.06,
        precision="16-mixed",
        workers=4,
        seed=121,
    )
