"""CeiT-T on ImageNet-1K as LaPE trains it: 76.52 with the default joining, 76.87 with LaPE (2023, Table 1).

Reproduces: LaPE, first version (Yu et al., 2022), Table 7, row CeiT; what that table leaves out is DeiT's
(Touvron et al., 2021, Table 9).
Command: graticule train ceit_tiny_imagenet --data-root IMAGENET [--joining lape] [--model ceit_small_patch16_224]
Cost: not measured.
Result: not measured.

The table's learning rate is taken as DeiT's option before it is scaled by batch / 512, as CeiT's code does, which is
DeiT's: hence repeated augmentation, too.
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """A folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    batch_size = 1024
    return Recipe(
        model="ceit_tiny_patch16_224",
        img_size=(224, 224),
        drop_path_rate=0.1,
        dataset="image_folder",
        data_root=Path("data/imagenet"),
        augmentation=Augmentation(
            scale=(0.08, 1.0),
            hflip=0.5,
            color_jitter=0.3,
            rand_augment="rand-m9-mstd0.5-inc1",
            erasing=0.25,
            crop_pct=0.875,
            interpolation="bicubic",
        ),
        aug_repeats=3,
        mixing=Mixing(mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5),
        label_smoothing=0.1,
        batch_size=batch_size,
        eval_batch_size=256,
        workers=8,
        epochs=300,
        warmup_epochs=5,
        optimizer="adamw",
        lr=5e-4 * batch_size / 512,
        min_lr=1e-5,
        warmup_lr=1e-6,
        weight_decay=0.05,
        precision="16-mixed",
    )
