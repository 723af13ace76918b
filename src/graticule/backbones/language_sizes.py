"""The sizes of the language model by name; they are not in timm's registry, whose models take images."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from graticule.backbones.language import LanguageModel
from graticule.backbones.registry import CHOICES, check_arguments, take_position
from graticule.checks import checked
from graticule.memory import build_within_memory
from graticule.names import known_name

SIZES: dict[str, dict[str, int]] = {
    "lm_nano": {"embed_dim": 64, "depth": 4, "num_heads": 4},
    "lm_tiny": {"embed_dim": 128, "depth": 6, "num_heads": 4},
    "lm_small": {"embed_dim": 384, "depth": 8, "num_heads": 6},
    "lm_base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
}


def list_language_models() -> list[str]:
    """List the names that `create_language_model` takes."""
    return list(SIZES)


def list_language_arguments() -> list[str]:
    """List the arguments of a language model that are numbers, words or truth values, those of position apart."""
    hidden = ("self", "position", "norm_layer", "act_layer", "block_layer")
    return [name for name in inspect.signature(LanguageModel.__init__).parameters if name not in hidden]


@checked
def create_language_model(name: str, vocab_size: int, **kwargs: Any) -> LanguageModel:
    """Create one of `list_language_models()`.

    Args:
        name: the size.
        vocab_size: kinds of token.
        **kwargs: `encoding`, `joining` and what else `build_position` takes, or `position`; `context` and the other
            arguments of `LanguageModel`.

    Raises:
        ValueError: for an unknown name or argument, with the nearest ones, or an encoding that looks ahead.

    Example:
        >>> import torch
        >>> model = create_language_model("lm_nano", vocab_size=65, context=128, encoding="rope_1d")
        >>> model(torch.zeros(2, 7, dtype=torch.long)).shape
        torch.Size([2, 7, 65])
    """
    size = SIZES[known_name("name", name, SIZES)]
    check_arguments(kwargs, [*inspect.signature(LanguageModel).parameters, *CHOICES], name)
    position = take_position(kwargs)
    return build_within_memory(partial(LanguageModel, position, vocab_size, **{**size, **kwargs}))
