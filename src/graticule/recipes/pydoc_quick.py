"""A small language model on the embedded text, Python's own help: the chain from end to end in minutes.

Reproduces nothing; it is there to try things.
Command: graticule train pydoc_quick
Cost: about four minutes on 2 cores (2026-11-21).
Result: 2.198 bits per byte on held-out topics (docs/results.md).
"""

from graticule.tasks import TextRecipe


def recipe() -> TextRecipe:
    """413 kB of text in windows of 128 bytes."""
    return TextRecipe(
        model="lm_tiny",
        encoding="alibi",
        dataset="pydoc",
        context=128,
        batch_size=16,
        epochs=7,
        warmup_epochs=1,
        lr=2e-3,
        weight_decay=0.1,
        clip_grad=1.0,
    )
