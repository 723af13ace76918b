"""A small CPVT on the embedded digits: five PEGs and global average pooling, with the norm before the pooling.

Reproduces nothing; it is the form of CPVT-Ti-GAP (Chu et al., 2023, Table 3) in small.
Command: graticule train digits_cpvt; then graticule evaluate RUN --sizes 20 28 36 44 and graticule translation RUN
Cost: about a minute on 2 cores (2026-11-21).
Result: not measured over seeds. With the norm after the pooling, DeiT's form (--model-kwargs fc_norm=True), it is the
    row PEG at 0 to 4 with global average pooling of docs/results.md: 96.62 (s.d. 0.48, five seeds).
"""

from graticule.data import Augmentation
from graticule.tasks import Recipe


def recipe() -> Recipe:
    """4,000 images of 28 x 28 in patches of 4: a grid of 7 x 7."""
    batch_size = 50
    return Recipe(
        model="vit_nano_patch4_28",
        encoding="peg(places=[0, 1, 2, 3, 4])",
        global_pool="avg",
        model_kwargs=("fc_norm=False",),
        dataset="digits",
        augmentation=Augmentation(),
        batch_size=batch_size,
        epochs=15,
        warmup_epochs=1,
        lr=3e-3 * batch_size / 50,
        weight_decay=0.05,
    )
