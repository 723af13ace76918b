"""The sizes of Swin by name, as published and with PEG, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.swin import SwinTransformer
from graticule.backbones.vit_sizes import checkpoint_filter_fn

_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
    "small": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
    "base": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
}
#: 'peg' has a PEG after the first block of every stage, beside the bias tables; `encoding="peg"` leaves these out.
_MODELS = {
    **{
        f"swin_{size}_patch4_window7_224": imagenet_cfg(hf_hub_id=f"timm/swin_{size}_patch4_window7_224.ms_in1k")
        for size in _SIZES
    },
    **{f"swin_{size}_peg_patch4_window7_224": imagenet_cfg() for size in _SIZES},
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> SwinTransformer:
    _, size, *peg, _, _, _ = name.split("_")
    if pretrained and peg:
        raise ValueError("`pretrained` must be False: the weights of Swin with PEG were never published.")
    return build_model_with_cfg(
        SwinTransformer,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
        position=take_position(kwargs, encoding="relative_bias+peg" if peg else "relative_bias"),
        **{**_SIZES[size], **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), SwinTransformer)
