"""The sizes of PVT by name, as published and as CPVT has them, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.pvt import PyramidVisionTransformer
from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.vit_sizes import checkpoint_filter_fn

_DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3)}
#: 'peg' has a PEG behind the first block of every stage in the place of the embeddings; 'gap' no class token.
_MODELS = {
    f"pvt_{size}{form}": imagenet_cfg(first_conv="patch_embeds.0.proj")
    for size in _DEPTHS
    for form in ("", "_peg", "_gap", "_peg_gap")
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    if pretrained:
        raise ValueError("`pretrained` must be False: no hub has these weights; load a file with load_checkpoint.")
    _, size, *forms = name.split("_")
    return build_model_with_cfg(
        PyramidVisionTransformer,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
        position=take_position(kwargs, encoding="peg" if "peg" in forms else "learnable", interpolation="bilinear"),
        **{"depths": _DEPTHS[size], "global_pool": "avg" if "gap" in forms else "token", **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), PyramidVisionTransformer)
