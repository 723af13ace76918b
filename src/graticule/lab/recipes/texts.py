"""Language models on the embedded text, Python's own help.

Reproduces: nothing; pydoc_nano is the experiment that LaPE (Yu et al., 2023) suggests in its last sentence, on a small
    scale.
Command: graticule train pydoc_quick
    graticule compare pydoc_nano --choices encoding=learnable encoding=learnable,joining=lape ...
    --seeds 1 2 3 4 5 --lengths 64 128 256 512 1024 (all choices: docs/results.md)
Cost: pydoc_quick about four minutes on 2 cores, pydoc_nano about 75 seconds per run on one core (2026-11-21).
Result: pydoc_quick 2.198 bits per byte on held-out topics; pydoc_nano: seventeen choices, five seeds (docs/results.md).
"""

from __future__ import annotations

import graticule


@graticule.register_recipe(
    "pydoc_quick",
    "A small language model on the embedded text, Python's own help: train, evaluate and generate in minutes.",
    model="lm_tiny",
    encoding="alibi",
    epochs=7,
    lr=2e-3,
)
@graticule.register_recipe(
    "pydoc_nano",
    "A tiny language model on the embedded text, for comparisons with many runs.",
    model="lm_nano",
    epochs=4,
    lr=4e-3,
)
def pydoc(model: str, epochs: int, lr: float, encoding: str | None = None) -> graticule.TextRecipe:
    """Train on 413 kB of text in windows of 128 bytes."""
    return graticule.TextRecipe(
        model=model,
        encoding=encoding,
        dataset="pydoc",
        context=128,
        batch_size=16,
        epochs=epochs,
        warmup_epochs=1,
        lr=lr,
        weight_decay=0.1,
        clip_grad=1.0,
    )
