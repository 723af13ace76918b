"""A tiny language model on the embedded text, for comparisons with many runs.

Reproduces nothing of a paper: it is what LaPE (Yu et al., 2023) asks for in its last sentence, in a small form.
Command: graticule compare pydoc_nano --choices encoding=learnable encoding=learnable,joining=lape ...
    --seeds 1 2 3 4 5 --lengths 64 128 256 512 1024 (all choices: docs/results.md)
Cost: about 75 seconds a run on one core (2026-11-21).
Result: see docs/results.md (seventeen choices, five seeds).
"""

from graticule.tasks import TextRecipe


def recipe() -> TextRecipe:
    """413 kB of text in windows of 128 bytes."""
    return TextRecipe(
        model="lm_nano",
        dataset="pydoc",
        context=128,
        batch_size=16,
        epochs=4,
        warmup_epochs=1,
        lr=4e-3,
        weight_decay=0.1,
        clip_grad=1.0,
    )
