"""A small ViT on the embedded digits, to be evaluated at sizes that it was not trained at.

Reproduces nothing; it follows CPVT (Chu et al., 2023), Tables 2 and 8: trained at one size, tested at others.
Command: graticule compare digits_sizes --sizes 20 28 36 44 56 --seeds 0 1 2 3 4 --choices encoding=learnable ...
Cost: about a minute a run on 2 cores (2026-11-21).
Result: see docs/results.md (six encodings, class token and global average pooling, five seeds).
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
        epochs=15,
        warmup_epochs=1,
        lr=3e-3 * batch_size / 50,
        weight_decay=0.05,
    )
