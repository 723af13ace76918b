"""The sizes of PosMLP by name, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.posmlp import PosMlp
from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.vit_sizes import checkpoint_filter_fn

_DIMS = {"tiny": 96, "small": 128, "base": 192}
_MODELS = {
    **{f"posmlp_{size}_224": imagenet_cfg(first_conv="downsamples.0.proj.0") for size in _DIMS},
    "posmlp_tiny_384": imagenet_cfg(first_conv="downsamples.0.proj.0", input_size=(3, 384, 384), crop_pct=1.0),
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> PosMlp:
    """Build a PosMLP; at 384 pixels with windows of 12, 12, 24 and 12, which give the 17.7 G of the paper's Table 2."""
    if pretrained:
        raise ValueError("`pretrained` must be False: no hub has these weights.")
    _, size, image = name.split("_")
    given: dict[str, Any] = {"img_size": int(image), "embed_dim": _DIMS[size]}
    if image == "384":
        given["windows"] = (12, 12, 24, 12)
    return build_model_with_cfg(
        PosMlp,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
        position=take_position(kwargs, encoding="ggqpe"),
        **{**given, **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name))
