"""CPVT: a ViT whose position embedding is made from its tokens; the sizes by name, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.pvt import check_class_token
from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.backbones.vit_sizes import SIZES, checkpoint_filter_fn

#: Table 9: each has the channels, heads and layers of the DeiT of its size. 'gap' has no class token.
_MODELS = {
    f"cpvt_{size}{pool}_patch16_224": imagenet_cfg(crop_pct=0.875)
    for size in ("tiny", "small", "base")
    for pool in ("", "_gap")
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Build a CPVT with one PEG behind the first block; `peg={"places": range(5)}` puts one behind the first five.

    With global average pooling the norm stands before it, as in the code of the same authors (Twins).
    """
    if pretrained:
        raise ValueError("`pretrained` must be False: the weights of CPVT were never published.")
    _, size, *gap, _, _ = name.split("_")
    pool = kwargs.pop("global_pool", "avg" if gap else "token")
    return build_model_with_cfg(
        VisionTransformer,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        position=take_position(kwargs, encoding="peg"),
        global_pool=pool,
        class_token=check_class_token(pool, kwargs.pop("class_token", None)),
        **{"img_size": 224, "patch_size": 16, "fc_norm": False, **SIZES[size], **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), VisionTransformer)
