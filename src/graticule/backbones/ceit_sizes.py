"""The sizes of CeiT by name, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.ceit import CeitTransformer
from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.vit_sizes import SIZES, checkpoint_filter_fn

_MODELS = {
    f"ceit_{size}_patch16_{image}": imagenet_cfg(input_size=(3, image, image), first_conv="patch_embed.conv")
    for size, image in (("tiny", 224), ("small", 224), ("base", 224), ("tiny", 384), ("small", 384))
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> CeitTransformer:
    """Build a CeiT."""
    if pretrained:
        raise ValueError("`pretrained` must be False: timm's hub has not these weights; load a checkpoint of its code.")
    _, size, _, image = name.split("_")
    return build_model_with_cfg(
        CeitTransformer,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        position=take_position(kwargs),
        **{"img_size": int(image), **SIZES[size], **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), CeitTransformer)
