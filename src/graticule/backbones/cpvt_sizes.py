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
    """Build a CPVT with one PEG after the first block; with `encoding="peg(places=[0, 1, 2, 3, 4])"` five.

    With global average pooling the final norm is before it, as in the code of the same authors (Twins); in a ViT or
    DeiT it is after it by default, as in timm. So for CPVT's Table 3, which compares the class token with global
    average pooling in both, give `fc_norm=False` to DeiT (or `fc_norm=True` to CPVT), and only the pooling differs.

    Table 4 prints 88 M parameters for CPVT-B with five PEGs; it has 86.5 M (see `graticule.encodings.Peg`).
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
