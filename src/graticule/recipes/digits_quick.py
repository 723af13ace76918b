"""A small ViT on the 5,000 embedded digits: the chain from end to end in a minute.

Reproduces nothing; it is there to try things.
Command: graticule train digits_quick
Cost: under a minute on 2 cores (2026-11-21).
Result: see docs/results.md (five joinings, five seeds).
"""

from graticule.data import Augmentation
from graticule.tasks import Recipe


def recipe() -> Recipe:
    """4,000 images of 28 x 28 in patches of 4: a grid of 7 x 7."""
    batch_size = 50
    return Recipe(
        model="vit_nano_patch4_28",
        dataset="digits",
        augmentation=Augmentation(),
        batch_size=batch_size,
        epochs=10,
        warmup_epochs=1,
        lr=3e-3 * batch_size / 50,
        weight_decay=0.05,
    )
