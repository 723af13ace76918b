"""The sizes of PVT by name, as published and as CPVT has them, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.pvt import PyramidVisionTransformer
from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.vit_sizes import checkpoint_filter_fn

_DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3)}
#: PVT + PEG + GAP is PCPVT of Twins (Chu et al., 2021), whose published weights have 81.2 and 82.7 % top-1: the rows
#: of CPVT's Table 13. Its 'base' is PVT-Medium.
_PUBLISHED = {"pvt_small_peg_gap": "twins_pcpvt_small", "pvt_medium_peg_gap": "twins_pcpvt_base"}
#: 'peg' has a PEG after the first block of every stage instead of the embeddings; 'gap' no class token.
_MODELS = {
    name: imagenet_cfg(
        first_conv="patch_embeds.0.proj",
        **({"hf_hub_id": f"timm/{_PUBLISHED[name]}.in1k"} if name in _PUBLISHED else {}),
    )
    for size in _DEPTHS
    for name in (f"pvt_{size}", f"pvt_{size}_peg", f"pvt_{size}_gap", f"pvt_{size}_peg_gap")
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    if pretrained and name not in _PUBLISHED:
        raise ValueError(
            f"`pretrained` must be False for {name}: of PVT timm's hub has {' and '.join(_PUBLISHED)} alone; load a "
            "checkpoint file of PVT's code with load_checkpoint."
        )
    _, size, *forms = name.split("_")
    return build_model_with_cfg(
        PyramidVisionTransformer,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
        position=take_position(
            kwargs, "peg" if "peg" in forms else "learnable", {"learnable": {"interpolation": "bilinear"}}
        ),
        **{"depths": _DEPTHS[size], "global_pool": "avg" if "gap" in forms else "token", **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), PyramidVisionTransformer)
