"""CPVT-Ti on ImageNet-1K: 72.4 with one PEG, 73.4 with five, 74.9 with five and global average pooling.

Reproduces: CPVT (Chu et al., 2023), Tables 2 and 3, with the settings of Table 10.
Command: graticule train cpvt_tiny_imagenet --data-root IMAGENET [--encoding "peg(places=[0, 1, 2, 3, 4])"]
    [--model cpvt_tiny_gap_patch16_224]; then graticule evaluate RUN --sizes 160 224 384 448 512
Cost: the paper reports 1.3 days on eight V100s.
Result: not measured.

Table 3's DeiT-Ti with global average pooling is graticule train deit_tiny_imagenet --global-pool avg --model-kwargs
fc_norm=False: with the norm before the pooling, as CPVT has it, the pooling alone differs from the class token's model.

Where the paper disagrees with itself: Table 10 names LAMB and a batch of 1024, section 4.1 AdamW (for all but base)
and a batch of 2048, and appendix B.2 says "exactly the same hyperparameters as DeiT except for the base model".
AdamW and DeiT's batch are taken; the learning rate is 5e-4 a batch of 512 by all three.
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """A folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    batch_size = 1024
    return Recipe(
        model="cpvt_tiny_patch16_224",
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
