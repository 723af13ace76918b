"""Recipe of a gym: all values that decide its result, such as the model, its training, and the grid."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from graticule.lab.arguments import Usual
from graticule.registry.fields import Count, NotNegative, Positive, check_fields
from graticule.registry.plugins import plugins_of

#: The default model: two layers of two heads, 32 channels.
_TINY = ("embed_dim=32", "depth=2", "num_heads=2")


@dataclass(frozen=True)
class GymRecipe:
    """A tiny model, trained in seconds; every step has new images, so nothing can be memorized."""

    model: Usual[str] = "vit_nano_patch4_28"
    """name of the model; its patches are the cells of the images"""
    encoding: Usual[str | None] = None
    """position encoding with its options, such as shaw(clip=4), or several combined by + (default: the model's own)"""
    joining: Usual[str] = "default"
    """joining of the encoding to the layers, with its options, such as lape(layers=1)"""
    model_kwargs: tuple[str, ...] = _TINY
    """arguments of the model, such as depth=2"""
    surface: Literal["plane", "torus"] = "plane"
    """surface of the images: a plane, or a torus, where the first cell of a row is next to the last"""
    side: Count = 6
    """cells per side of the training images"""
    steps: Count = 400
    """steps of training per task"""
    solved_loss: NotNegative = 0.02
    """training ends early when the mean loss of 20 steps is below this value; never with 0"""
    batch_size: Usual[Count] = 64
    """images per step"""
    lr: Usual[Positive] = 4e-3
    """highest learning rate, reached after a tenth of the steps; it then falls to 0 as a cosine"""
    weight_decay: Usual[NotNegative] = 0.01
    """weight decay of all parameters except norms, biases and position parameters"""
    test: Count = 512
    """held-out images per size"""

    def __post_init__(self) -> None:
        check_fields(self)

    def quick(self) -> GymRecipe:
        """Return a recipe of a few steps."""
        return dataclasses.replace(self, steps=5, batch_size=8, test=16)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def hash(self) -> str:
        """Return the first digits of the SHA-256 of all values, and of the plugins that define their classes."""
        from graticule.backbones.registry import definitions_of

        values = self.to_dict()
        if plugins := plugins_of(definitions_of(self.model, self.encoding, self.joining)):
            values["plugins"] = plugins
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
