"""Swin-T on ImageNet-1K as LaPE trains it: 81.12 with its bias, 80.92 learnable, 81.25 LaPE, 81.49 with both.

Reproduces: LaPE (Yu et al., 2023), Table 1, with the settings of the first version's (2022) Table 7, row Swin; what
that table leaves out is that of Swin's code (Liu et al., 2021).
Command: graticule train swin_tiny_imagenet --data-root IMAGENET [--encoding learnable] [--encoding learnable
    --joining lape] [--encoding learnable+relative_bias --joining lape] [--model swin_small_patch4_window7_224
    --drop-path-rate 0.3]
Cost: not measured.
Result: not measured.

The paper trains Swin with LaPE and does not say how w reaches the later stages: here the chain of norms goes on through
the patch merging (`graticule.joining.Lape`).
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """A folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    batch_size = 512
    return Recipe(
        model="swin_tiny_patch4_window7_224",
        img_size=(224, 224),
        drop_path_rate=0.2,
        dataset="image_folder",
        data_root=Path("data/imagenet"),
        augmentation=Augmentation(
            scale=(0.08, 1.0),
            hflip=0.5,
            color_jitter=0.4,
            rand_augment="rand-m9-mstd0.5-inc1",
            erasing=0.25,
            crop_pct=0.875,
            interpolation="bicubic",
        ),
        mixing=Mixing(mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5),
        label_smoothing=0.1,
        batch_size=batch_size,
        eval_batch_size=256,
        workers=8,
        epochs=300,
        warmup_epochs=20,
        optimizer="adamw",
        lr=5e-4 * batch_size / 512,
        min_lr=5e-6,
        warmup_lr=5e-7,
        weight_decay=0.05,
        clip_grad=5.0,
        precision="16-mixed",
    )
