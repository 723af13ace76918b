"""CPVT-B on ImageNet-1K, with LAMB: 81.9 with one PEG, 82.3 with five, 82.7 with five and global average pooling.

Reproduces: CPVT (Chu et al., 2023), Tables 2 and 4, with the settings of Table 10.
Command: graticule train cpvt_base_imagenet --data-root IMAGENET [--encoding "peg(places=[0, 1, 2, 3, 4])"]
    [--model cpvt_base_gap_patch16_224]; then graticule evaluate RUN --sizes 160 224 384 448 512
Cost: the paper reports 2.5 days on eight V100s.
Result: not measured.

LAMB, for the base model "is not always stably trained using AdamW" (appendix B.2).
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """A folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    batch_size = 1024
    return Recipe(
        model="cpvt_base_patch16_224",
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
        optimizer="lamb",
        lr=5e-4 * batch_size / 512,
        min_lr=1e-5,
        warmup_lr=1e-6,
        weight_decay=0.05,
        precision="16-mixed",
    )
