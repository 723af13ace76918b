"""CPVT-Ti on ImageNet-1K with hard distillation from a RegNetY-160: 75.9.

Reproduces: CPVT (Chu et al., 2023), section 4.5 and Table 4; the settings are those of cpvt_tiny_imagenet.
Command: graticule train cpvt_tiny_distilled_imagenet --data-root IMAGENET [--encoding "peg(places=[0, 1, 2, 3, 4])"]
    [--model deit_tiny_distilled_patch16_224 --encoding peg] [--distillation.teacher-checkpoint FILE]
Cost: not reported for this model; the teacher adds its forward pass to every step.
Result: not measured.

The teacher's weights are DeiT's, https://dl.fbaipublicfiles.com/deit/regnety_160-a5fe301d.pth. The paper leaves open
whether the student has a distillation token and how many PEGs. Here it has no token, and its one classifier learns from
labels and teacher, as DeiT's Eq. 3 has it; the second line of the command is with a token. It has one PEG: Table 4
marks rows with five, and this one is not marked.
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe
from graticule.tasks.distillation import Distillation


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
        distillation=Distillation(
            teacher="regnety_160", teacher_checkpoint=Path("data/regnety_160-a5fe301d.pth"), form="hard", alpha=0.5
        ),
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
