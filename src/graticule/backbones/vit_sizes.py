"""The sizes of ViT and DeiT by name, in timm's registry as `graticule_...`."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs

from graticule.backbones.distilled import DistilledVisionTransformer
from graticule.backbones.registry import gray_cfg, imagenet_cfg, register, registry_name, take_position
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.checkpoints import own_state, unwrap_checkpoint

_INCEPTION = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
SIZES: dict[str, dict[str, Any]] = {
    "nano": {"embed_dim": 64, "depth": 6, "num_heads": 4, "mlp_ratio": 2.0},
    "micro": {"embed_dim": 128, "depth": 6, "num_heads": 4, "mlp_ratio": 2.0},
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
}


def _deit(name: str, **kwargs: Any) -> dict[str, Any]:
    heads = {"classifier": ("head", "head_dist")} if "distilled" in name else {}
    return imagenet_cfg(hf_hub_id=f"timm/{name}.fb_in1k", **heads, **kwargs)


# Names say kind, size, patch and image; a distilled model has two heads. Nano and micro are for small images.
_MODELS: dict[str, dict[str, Any]] = {
    "vit_nano_patch4_28": gray_cfg(28),
    "vit_micro_patch4_28": gray_cfg(28),
    "vit_tiny_patch16_224": imagenet_cfg(hf_hub_id="timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", **_INCEPTION),
    "vit_small_patch16_224": imagenet_cfg(hf_hub_id="timm/vit_small_patch16_224.augreg_in21k_ft_in1k", **_INCEPTION),
    "vit_small_patch32_224": imagenet_cfg(hf_hub_id="timm/vit_small_patch32_224.augreg_in21k_ft_in1k", **_INCEPTION),
    "vit_base_patch8_224": imagenet_cfg(hf_hub_id="timm/vit_base_patch8_224.augreg_in21k_ft_in1k", **_INCEPTION),
    "vit_base_patch16_224": imagenet_cfg(hf_hub_id="timm/vit_base_patch16_224.augreg_in21k_ft_in1k", **_INCEPTION),
    "vit_base_patch32_224": imagenet_cfg(hf_hub_id="timm/vit_base_patch32_224.augreg_in21k_ft_in1k", **_INCEPTION),
    **{
        name: _deit(name)
        for size in ("tiny", "small", "base")
        for name in (f"deit_{size}_patch16_224", f"deit_{size}_distilled_patch16_224")
    },
    **{
        name: _deit(name, input_size=(3, 384, 384), crop_pct=1.0)
        for name in ("deit_base_patch16_384", "deit_base_distilled_patch16_384")
    },
}


def _build(name: str, pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    size = name.split("_")[1]
    patch, image = (int(part.removeprefix("patch")) for part in name.split("_")[-2:])
    given = {
        "img_size": image,
        "patch_size": patch,
        "in_chans": _MODELS[name]["input_size"][0],
        **SIZES[size],
    }
    return build_model_with_cfg(
        DistilledVisionTransformer if "distilled" in name else VisionTransformer,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        position=take_position(kwargs),
        **{**given, **kwargs},
    )


def checkpoint_filter_fn(checkpoint: dict[str, Any], model: VisionTransformer) -> dict[str, Any]:
    """Turn a published checkpoint of DeiT, timm or LaPE's code into a state dict of `model`, timm's convention."""
    return own_state(model, unwrap_checkpoint(checkpoint))


default_cfgs = generate_default_cfgs({registry_name(name): cfg for name, cfg in _MODELS.items()})
for _name in _MODELS:
    register(__name__, _name, partial(_build, _name), VisionTransformer)
