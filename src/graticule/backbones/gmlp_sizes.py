"""The sizes of gMLP by name, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.gmlp import GMlp
from graticule.backbones.registry import (
    gray_cfg,
    has_softmax,
    imagenet_cfg,
    register,
    registry_name,
    take_position,
)
from graticule.backbones.vit_sizes import checkpoint_filter_fn

_HALF = (0.5, 0.5, 0.5)
_SIZES: dict[str, dict[str, Any]] = {
    "gmlp_nano_patch4_28": {"embed_dim": 64, "num_blocks": 6, "mlp_ratio": 4.0, "patch_size": 4, "img_size": 28},
    "gmlp_s16_224": {"embed_dim": 256},
    "gmlp_b16_224": {"embed_dim": 512},
}
# Nano is for small images.
_MODELS = {
    "gmlp_nano_patch4_28": gray_cfg(28, first_conv="stem.proj"),
    "gmlp_s16_224": imagenet_cfg(
        first_conv="stem.proj", crop_pct=0.875, mean=_HALF, std=_HALF, hf_hub_id="timm/gmlp_s16_224.ra3_in1k"
    ),
    "gmlp_b16_224": imagenet_cfg(first_conv="stem.proj", crop_pct=0.875, mean=_HALF, std=_HALF),
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> GMlp:
    """Build a gMLP; behind a softmax ('gqpe', 'ggqpe') its gating units have no norm unless `gate_norm` says so."""
    gate_norm = not has_softmax(kwargs.get("encoding", "sgu"))
    return build_model_with_cfg(
        GMlp,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0,)), "feature_cls": "getter"},
        position=take_position(kwargs, encoding="sgu"),
        **{"in_chans": _MODELS[name]["input_size"][0], **_SIZES[name], "gate_norm": gate_norm, **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), GMlp)
