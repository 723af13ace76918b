"""A small ViT on 500 of the embedded digits, plain or with a teacher that was trained on all 4,000.

Reproduces nothing; it follows DeiT (Touvron et al., 2021), Table 3, in small.
Command: graticule train digits_posmlp --output runs/digits-teacher; then graticule compare digits_distilled
    --seeds 0 1 2 3 4 --choices distillation.form=hard distillation.teacher=runs/digits-teacher
    distillation.teacher=runs/digits-teacher,distillation.form=soft
Cost: about a minute a run on one core (2026-11-21).
Result: 83.42 without a teacher, 85.54 with hard distillation, five seeds, p < 0.001 (docs/results.md); soft not run.

The first choice has no teacher, and so is the plain training. The teacher is the most accurate of docs/results.md
(97.5); it knows digits at 32 x 32. It has seen these 500 images with their labels: what it has to tell a student is
what mixtures of two of them look like, and in the soft form how alike the classes are.
"""

from graticule.data import Augmentation
from graticule.tasks import Mixing, Recipe


def recipe() -> Recipe:
    """500 images of 28 x 28 in patches of 4: a grid of 7 x 7."""
    batch_size = 50
    return Recipe(
        model="vit_nano_patch4_28",
        joining="lape",
        dataset="digits",
        limit_train=500,
        augmentation=Augmentation(),
        mixing=Mixing(mixup=0.8),
        batch_size=batch_size,
        epochs=40,
        warmup_epochs=4,
        lr=3e-3 * batch_size / 50,
        weight_decay=0.05,
    )
