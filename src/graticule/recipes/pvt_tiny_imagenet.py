"""PVT-tiny on ImageNet-1K: 75.0 as published, 77.3 with PEG, 75.9 with GAP, 78.1 with both.

Reproduces: PVT (Wang et al., 2021), and CPVT (Chu et al., 2023), Table 13, which trains it "with the same settings".
Command: graticule train pvt_tiny_imagenet --data-root IMAGENET
    [--model pvt_tiny_peg] [--model pvt_tiny_gap] [--model pvt_tiny_peg_gap]
Cost: not reported.
Result: not measured.

The settings are those of PVT's code, which are DeiT's, but for ten epochs of cool-down that its option names and
CPVT's Table 10 does not. For pvt_small likewise; pvt_medium takes --drop-path-rate 0.3 there.
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """A folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    batch_size = 1024
    return Recipe(
        model="pvt_tiny",
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
