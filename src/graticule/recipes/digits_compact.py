"""Small ViT-Lite, CVT or CCT on the embedded digits, with the default joining or LaPE.

Reproduces nothing; it follows LaPE (Yu et al., 2023), Table 2, in small.
Command: graticule compare digits_compact --seeds 121 122 123 124 125 --choices model=vit_lite_2_4_32
    model=vit_lite_2_4_32,joining=lape ...
Cost: half a minute to two minutes a run on one core (2026-11-21).
Result: default and LaPE, five seeds: ViT-Lite 87.18 and 92.62, CVT 86.94 and 90.74, CCT 96.62 and 97.26; all beyond
    chance (docs/results.md).
"""

from graticule.data import Augmentation
from graticule.tasks import Recipe


def recipe() -> Recipe:
    """4,000 images of 28 x 28 in patches of 4: a grid of 7 x 7."""
    batch_size = 50
    return Recipe(
        model="vit_lite_2_4_32",
        dataset="digits",
        augmentation=Augmentation(),
        batch_size=batch_size,
        epochs=10,
        warmup_epochs=1,
        lr=1e-3 * batch_size / 50,
        weight_decay=0.06,
        drop_path_rate=0.1,
    )
