"""Groups of parameters of a dense model for the optimizer, from those of its backbone."""

from __future__ import annotations

import re

from torch import nn

from graticule.backbones import Backbone
from graticule.dense.features import Levels


def backbone_prefix(model: nn.Module, backbone: Backbone) -> str:
    """Return the prefix of the backbone's parameters in the names of the model."""
    return next(f"{name}." for name, module in model.named_modules() if module is backbone)


def not_decayed(model: nn.Module, backbone: Backbone) -> set[str]:
    """Return the names of the model's parameters that the backbone or a neck excludes from weight decay."""
    prefix = backbone_prefix(model, backbone)
    own = dict(model.named_parameters())
    kept = {name for each in backbone.no_weight_decay() if (name := prefix + each) in own}
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, Levels)]
    return kept | {f"{name}.{each}" for name, part in parts for each in part.not_decayed}


def dense_groups(model: nn.Module, backbone: Backbone, coarse: bool = False) -> dict[str, object]:
    """Return the backbone's patterns for timm's groups by layer, for the model's names; other parameters come last."""
    prefix = "^" + re.escape(backbone_prefix(model, backbone))
    matcher = backbone.group_matcher(coarse)
    blocks = matcher["blocks"]
    patterns = blocks if isinstance(blocks, list) else [(blocks, None)]
    return {
        "stem": _within(matcher["stem"], prefix),
        "blocks": [(_within(pattern, prefix), order) for pattern, order in patterns],
    }


def _within(pattern: str, prefix: str) -> str:
    """Return a pattern for names with `prefix`, from one for names without it."""
    whole = re.sub(r"(^|[|])[\^]", r"\1", pattern)
    return f"{prefix}(?:{whole})"
