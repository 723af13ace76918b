"""The sizes of T2T-ViT by name, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.t2t import T2tVisionTransformer
from graticule.backbones.vit_sizes import checkpoint_filter_fn

#: Layers -> D, h and ratio of the MLP.
_SIZES = {
    7: (256, 4, 2.0),
    10: (256, 4, 2.0),
    12: (256, 4, 2.0),
    14: (384, 6, 3.0),
    19: (448, 7, 3.0),
    24: (512, 8, 3.0),
}
_STEM: dict[str, Any] = {"first_conv": None}  # its soft splits are no convolutions
# 't' has transformers between the splits, the others performers.
_MODELS = {
    **{f"t2t_vit_{layers}": imagenet_cfg(**_STEM) for layers in _SIZES},
    **{f"t2t_vit_t_{layers}": imagenet_cfg(**_STEM) for layers in (14, 19, 24)},
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> T2tVisionTransformer:
    """Build a T2T-ViT with its fixed sinusoidal embedding unless another is asked for."""
    if pretrained:
        raise ValueError("`pretrained` must be False: timm's hub has not these weights; load a checkpoint of its code.")
    *kind, layers = name.split("_")
    dim, heads, ratio = _SIZES[int(layers)]
    return build_model_with_cfg(
        T2tVisionTransformer,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        position=take_position(kwargs, encoding="sinusoidal_1d"),
        **{
            "embed_dim": dim,
            "depth": int(layers),
            "num_heads": heads,
            "mlp_ratio": ratio,
            "tokens_type": "transformer" if kind[-1] == "t" else "performer",
            **kwargs,
        },
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), T2tVisionTransformer)
