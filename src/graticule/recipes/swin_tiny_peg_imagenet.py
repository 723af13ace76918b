"""Swin-T with PEG and global average pooling on ImageNet-1K: 82.3, against 81.3 (81.1 in a rerun) without PEG.

Reproduces: CPVT (Chu et al., 2023), Table 15 and appendix B.5 (82.25), "with the same training settings" as Swin's
code (Liu et al., 2021): a batch of 1024, with which all three learning rates are scaled.
Command: graticule train swin_tiny_peg_imagenet --data-root IMAGENET [--encoding peg]
    [--model swin_tiny_patch4_window7_224]
Cost: not reported.
Result: not measured.

Section 4.6 removes "its learnable PE" and does not say whether that includes Swin's bias tables. By default they stay
beside the PEG; with --encoding peg there are none; with the second model there is no PEG.
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """A folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    batch_size = 1024
    return Recipe(
        model="swin_tiny_peg_patch4_window7_224",
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
        min_lr=5e-6 * batch_size / 512,
        warmup_lr=5e-7 * batch_size / 512,
        weight_decay=0.05,
        clip_grad=5.0,
        precision="16-mixed",
    )
