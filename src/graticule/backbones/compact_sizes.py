"""The sizes of ViT-Lite, CVT and CCT by name, in timm's registry."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.compact import CompactTransformer
from graticule.backbones.registry import imagenet_cfg, register, registry_name, take_position
from graticule.backbones.vit_sizes import checkpoint_filter_fn

#: Layers -> D, h and ratio of the MLP.
_SIZES = {2: (128, 2, 1.0), 4: (128, 2, 1.0), 6: (256, 4, 2.0), 7: (256, 4, 2.0), 8: (256, 4, 2.0), 14: (384, 6, 3.0)}
#: Means and deviations of CIFAR-10, which the published configurations of its code have.
_CIFAR10: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "num_classes": 10,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2470, 0.2435, 0.2616),
    "crop_pct": 1.0,
}
#: The same of CIFAR-100, for a model of 32 pixels and 100 classes.
_CIFAR100: dict[str, Any] = {
    "num_classes": 100,
    "mean": (0.5071, 0.4867, 0.4408),
    "std": (0.2675, 0.2565, 0.2761),
}


def _cfg(name: str) -> dict[str, Any]:
    side = int(name.rsplit("_", 1)[1])
    stem = "patch_embed.conv_layers.0.0" if name.startswith("cct") else "patch_embed.proj"
    given = _CIFAR10 if side == 32 else {"input_size": (3, side, side)}
    return imagenet_cfg(first_conv=stem, **given)


# The names are those of its code: layers, then side of a patch, or kernel x number of convolutions, then image.
_MODELS = {
    name: _cfg(name)
    for name in (
        *(f"vit_lite_{layers}_{patch}_32" for layers, patch in ((2, 4), (4, 4), (6, 4), (7, 4), (7, 8), (7, 16))),
        *(f"cvt_{layers}_4_32" for layers in (2, 4, 6, 7, 8)),
        *(f"cct_{layers}_3x2_32" for layers in (2, 4, 6)),
        *(f"cct_{layers}_3x1_32" for layers in (6, 7)),
        "cct_7_7x2_224",
        "cct_14_7x2_224",
        "cct_14_7x2_384",
    )
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> CompactTransformer:
    """Build a compact transformer; a learnable embedding starts with a deviation of 0.2, as in its code."""
    if pretrained:
        raise ValueError("`pretrained` must be False: timm's hub has not these weights; load a checkpoint of its code.")
    found = re.fullmatch(r"(vit_lite|cvt|cct)_(\d+)_(\d+)(?:x(\d+))?_(\d+)", name)
    assert found is not None
    family, layers, kernel, convolutions, image = found.groups()
    dim, heads, ratio = _SIZES[int(layers)]
    given: dict[str, Any] = {
        "img_size": int(image),
        "patch_size": int(kernel),
        "num_classes": _MODELS[name]["num_classes"],
        "global_pool": "token" if family == "vit_lite" else "seq",
        "embed_dim": dim,
        "depth": int(layers),
        "num_heads": heads,
        "mlp_ratio": ratio,
    }
    if convolutions:
        given |= {"tokenizer": "convolutions", "conv_layers": int(convolutions)}
    if int(image) == 32 and kwargs.get("num_classes") == 100:
        kwargs["pretrained_cfg_overlay"] = {**_CIFAR100, **(kwargs.get("pretrained_cfg_overlay") or {})}
    return build_model_with_cfg(
        CompactTransformer,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        position=take_position(kwargs, defaults={"learnable": {"std": 0.2}}),
        **{**given, **kwargs},
    )


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), CompactTransformer)
