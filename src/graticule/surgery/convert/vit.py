"""ViT, DeiT, DeiT III, AugReg, CLIP, SigLIP and DINOv2: what timm builds from its `VisionTransformer`."""

from __future__ import annotations

from typing import Any

from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

from graticule.backbones import DistilledVisionTransformer, VisionTransformer
from graticule.surgery.convert.conversion import Conversion, register_conversion


@register_conversion(TimmVisionTransformer, VisionTransformerDistilled)
def read_vit(model: Any) -> Conversion:
    """Describe timm's ViT, or its distilled form."""
    distilled = isinstance(model, VisionTransformerDistilled)
    arguments = {
        "img_size": model.patch_embed.img_size,
        "patch_size": model.patch_embed.patch_size,
        "in_chans": model.patch_embed.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": model.blocks[0].attn.num_heads,
    }
    return Conversion(DistilledVisionTransformer if distilled else VisionTransformer, arguments, "learnable")
