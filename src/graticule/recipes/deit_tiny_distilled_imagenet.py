"""DeiT-Ti with a distillation token on ImageNet-1K, hard distillation from a RegNetY-160: 74.5.

Reproduces: DeiT (Touvron et al., 2021), Table 3, row class+distillation, which CPVT (Chu et al., 2023) repeats in
Table 4; the settings are those of deit_tiny_imagenet.
Command: graticule train deit_tiny_distilled_imagenet --data-root IMAGENET [--joining lape]
    [--distillation.teacher-checkpoint FILE]
Cost: not reported for this model; the teacher adds its forward pass to every step.
Result: not measured.

The teacher's weights are DeiT's, https://dl.fbaipublicfiles.com/deit/regnety_160-a5fe301d.pth (82.9 as reported there).
LaPE (Yu et al., 2023, Table 1) reports 74.16 with the default joining and 74.97 with LaPE for the distilled model.
Where DeiT disagrees with itself: Table 3 gives 74.6 to the head of the distillation token alone; here and in
its other tables the two heads are averaged.
"""

from pathlib import Path

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe
from graticule.tasks.distillation import Distillation


def recipe() -> Recipe:
    """A folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG."""
    batch_size = 1024
    return Recipe(
        model="deit_tiny_distilled_patch16_224",
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
