"""A small PosMLP of two stages on the embedded digits, to compare what mixes its tokens.

Reproduces nothing; it follows PosMLP (Wang et al., 2022), Table 1, rows PosMLP, in small.
Command: graticule compare digits_posmlp --seeds 0 1 2 3 4 --choices encoding=sgu encoding=lrpe ...
Cost: about 40 seconds a run on one core (2026-11-21).
Result: see docs/results.md (six gating units, five seeds).
"""

from graticule.data import Augmentation
from graticule.tasks import Recipe


def recipe() -> Recipe:
    """4,000 images, enlarged to 32 x 32: grids of 8 x 8 and 4 x 4."""
    batch_size = 50
    return Recipe(
        model="posmlp_nano_32",
        img_size=(32, 32),
        dataset="digits",
        augmentation=Augmentation(),
        batch_size=batch_size,
        epochs=15,
        warmup_epochs=1,
        lr=3e-3 * batch_size / 50,
        weight_decay=0.05,
    )
