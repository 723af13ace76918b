"""A small gMLP on the embedded digits, to compare what mixes its tokens.

Reproduces nothing; it follows PosMLP (Wang et al., 2022), Table 1, rows gMLP, in small.
Command: graticule compare digits_gmlp --seeds 0 1 2 3 4 --choices encoding=sgu encoding=lrpe ...
Cost: about a minute and a half a run on one core (2026-11-21).
Result: see docs/results.md (six gating units, five seeds).
"""

from graticule.data import Augmentation
from graticule.tasks import Recipe


def recipe() -> Recipe:
    """4,000 images of 28 x 28 in patches of 4: a grid of 7 x 7."""
    batch_size = 50
    return Recipe(
        model="gmlp_nano_patch4_28",
        dataset="digits",
        augmentation=Augmentation(),
        batch_size=batch_size,
        epochs=15,
        warmup_epochs=1,
        lr=3e-3 * batch_size / 50,
        weight_decay=0.05,
    )
