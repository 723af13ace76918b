"""The sizes of PosMLP by name, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.posmlp import PosMlp
from graticule.backbones.registry import (
    gray_cfg,
    has_softmax,
    imagenet_cfg,
    register,
    registry_name,
    take_position,
)
from graticule.backbones.vit_sizes import checkpoint_filter_fn

_SIZES: dict[str, dict[str, Any]] = {
    "nano": {
        "embed_dim": 32,
        "depths": (2, 4),
        "windows": (8, 4),
        "groups": (4, 8),
        "mlp_ratios": (4, 2),
        "out_indices": (0, 1),
    },
    "tiny": {"embed_dim": 96},
    "small": {"embed_dim": 128},
    "base": {"embed_dim": 192},
}
# Nano is for small images.
_MODELS = {
    "posmlp_nano_32": gray_cfg(32, first_conv="downsamples.0.projs.0"),
    **{f"posmlp_{size}_224": imagenet_cfg(first_conv="downsamples.0.projs.0") for size in ("tiny", "small", "base")},
    "posmlp_tiny_384": imagenet_cfg(first_conv="downsamples.0.projs.0", input_size=(3, 384, 384), crop_pct=1.0),
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> PosMlp:
    """Build a PosMLP; at 384 pixels with windows of 12, 12, 24 and 12, which the paper does not give.

    They are those of 224 pixels, where the last two stages are one window each, and in the first two the nearest to 14
    that tile the grids. The authors' code has 14, 14, 14 and 7 at 384 pixels too, which do not, and so it cannot run.
    These cost 18.6 G multiply-adds counted as the paper's other rows are, with the 5 s N^2 of the logits of every
    block, and 17.6 G without them, where its Table 2 prints 17.7 G. Counted with them no windows give 17.7 G that tile
    the grids and are alike in the first two stages.

    The gating units have a norm with 'sgu' and the tables (Eq. 1, 10, 11) and none behind a softmax (Eq. 12), unless
    `gate_norm` says so.
    """
    if pretrained:
        raise ValueError("`pretrained` must be False: no hub has these weights.")
    _, size, image = name.split("_")
    channels = _MODELS[name]["input_size"][0]
    given: dict[str, Any] = {"img_size": int(image), "in_chans": channels, "out_indices": (0, 1, 2, 3), **_SIZES[size]}
    if image == "384":
        given["windows"] = (12, 12, 24, 12)
    given |= {"gate_norm": not has_softmax(kwargs.get("encoding", "ggqpe"))} | kwargs
    return build_model_with_cfg(
        PosMlp,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": given.pop("out_indices"), "feature_cls": "getter"},
        position=take_position(given, "ggqpe", {"sgu": {"std": 0.02, "bias_start": 0.0}}),
        **given,
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), PosMlp)
