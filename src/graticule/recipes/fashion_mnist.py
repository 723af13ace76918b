"""A small ViT on Fashion-MNIST: 60,000 real images, minutes an epoch on 2 cores.

Reproduces nothing; it is the benchmark for machines without ImageNet.
Command: graticule train fashion_mnist
Cost: 150 s an epoch on 2 cores (2026-11-21).
Result: not measured whole; the first 3 epochs are in docs/results.md.
"""

from graticule.data import Augmentation
from graticule.tasks import Recipe


def recipe() -> Recipe:
    """Images of 28 x 28 in patches of 4, cropped with padding and flipped."""
    batch_size = 256
    return Recipe(
        model="vit_micro_patch4_28",
        dataset="fashion_mnist",
        augmentation=Augmentation(random_crop_padding=2, hflip=0.5),
        drop_path_rate=0.05,
        batch_size=batch_size,
        epochs=20,
        warmup_epochs=2,
        lr=1e-3 * batch_size / 256,
        weight_decay=0.05,
        label_smoothing=0.1,
        workers=2,
    )
