"""A small ViT on Fashion-MNIST: 60,000 real images, for machines without ImageNet.

Reproduces: nothing.
Command: graticule train fashion_mnist
Cost: 150 s per epoch on 2 cores (2026-11-21).
Result: not measured over all epochs; the first 3 are in docs/results.md.
"""

from __future__ import annotations

import graticule


@graticule.register_recipe(
    "fashion_mnist", "A small ViT on Fashion-MNIST: 60,000 real images, minutes per epoch on 2 cores."
)
def fashion_mnist() -> graticule.Recipe:
    """Train on images of 28 x 28 in patches of 4, cropped with padding and flipped."""
    batch_size = 256
    return graticule.Recipe(
        model="vit_micro_patch4_28",
        dataset="fashion_mnist",
        augmentation=graticule.Augmentation(random_crop_padding=2, hflip=0.5),
        drop_path_rate=0.05,
        batch_size=batch_size,
        epochs=20,
        warmup_epochs=2,
        lr=1e-3 * batch_size / 256,
        weight_decay=0.05,
        label_smoothing=0.1,
        workers=2,
    )
