"""What decides the result of a gym: the model, how long it is trained, and on which grid."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from graticule.plugins import plugins_of
from graticule.typed import Count, NotNegative, Positive, check_fields

#: The default model: two layers of two heads, 32 channels.
_TINY = ("embed_dim=32", "depth=2", "num_heads=2")


@dataclass(frozen=True)
class GymRecipe:
    """A tiny model, and a training of seconds; every step has new pictures, so nothing can be learned by heart."""

    model: str = "vit_nano_patch4_28"
    """name of the model; its patches are the cells of the pictures"""
    encoding: str | None = None
    """position encoding with its options, such as shaw(clip=4), or several combined by + (default: the model's own)"""
    joining: str = "default"
    """how the encoding reaches each layer, with its options, such as lape(layers=1)"""
    model_kwargs: tuple[str, ...] = _TINY
    """arguments of the model, such as depth=2"""
    surface: Literal["plane", "torus"] = "plane"
    """what the pictures are on: a plane, or a torus, where the first cell of a row is the neighbor of the last"""
    side: Count = 6
    """cells per side of the pictures that are trained on"""
    steps: Count = 400
    """steps of training per task"""
    solved_loss: NotNegative = 0.02
    """training ends early when the mean loss of 20 steps is below this; 0 for never"""
    batch_size: Count = 64
    """pictures per step"""
    lr: Positive = 4e-3
    """highest learning rate, after a tenth of the steps; it falls to 0 by a cosine"""
    weight_decay: NotNegative = 0.01
    """decay of all weights but norms, biases and position parameters"""
    test: Count = 512
    """held-out pictures per size"""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """of the forward pass; the default model is too small to gain by bf16-mixed"""

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values

    @property
    def hash(self) -> str:
        """Return the first digits of the SHA-256 of all values, and of the plugins that define what they name.

        `precision` counts only if it is not the default.
        """
        from graticule.backbones.registry import definitions_of

        values = self.to_dict()
        if plugins := plugins_of(definitions_of(self.model, self.encoding, self.joining)):
            values["plugins"] = plugins
        if self.precision == GymRecipe.precision:  # which scores were kept before there was a choice
            del values["precision"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
