"""Replace the position of a trained model, and recover its features by distillation on images without labels.

Reproduces: nothing; distillation of a model's own features after its position was changed.
Command: graticule adapt MODEL --encoding rope --images FOLDER
Cost: docs/pretrained.md.
Result: docs/pretrained.md.
"""

from __future__ import annotations

import graticule
import graticule.lab.tasks as tasks


@graticule.register_recipe(
    "adapt", "Replace the position of a trained model, and distill its features on unlabeled images."
)
def adapt() -> tasks.AdaptRecipe:
    """Train position, then attention, then all, on crops of images; `graticule adapt` gives model and folder."""
    return tasks.AdaptRecipe(
        epochs=3,
        batch_size=16,
        eval_batch_size=64,
        lr=1e-4,
        min_lr=1e-6,
        warmup_steps=20,
        weight_decay=0.01,
        clip_grad=1.0,
        augmentation=graticule.Augmentation(scale=(0.35, 1.0), hflip=0.5),
    )
