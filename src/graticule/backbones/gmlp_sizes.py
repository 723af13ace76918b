"""The sizes of gMLP by name, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.gmlp import GMlp
from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.vit_sizes import checkpoint_filter_fn

_DIMS = {"gmlp_s16_224": 256, "gmlp_b16_224": 512}
_HALF = (0.5, 0.5, 0.5)
_MODELS = {
    name: imagenet_cfg(first_conv="stem.proj", crop_pct=0.875, mean=_HALF, std=_HALF, **hub)
    for name, hub in (("gmlp_s16_224", {"hf_hub_id": "timm/gmlp_s16_224.ra3_in1k"}), ("gmlp_b16_224", {}))
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> GMlp:
    """Build a gMLP; behind a softmax ('gqpe', 'ggqpe') its gating units have no norm unless `gate_norm` says so."""
    softmax = kwargs.get("encoding") in ("gqpe", "ggqpe")
    return build_model_with_cfg(
        GMlp,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0,)), "feature_cls": "getter"},
        position=take_position(kwargs, encoding="sgu"),
        **{"embed_dim": _DIMS[name], "gate_norm": not softmax, **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name))
