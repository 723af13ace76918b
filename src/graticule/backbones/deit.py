"""DeiT: ViT trained on ImageNet alone; and its distilled form, with a second prefix token and a second head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.token_model import init_linear
from graticule.backbones.vision_transformer import SMALL, TINY, VisionTransformer
from graticule.position.position import PositionBuilder


class DistilledVisionTransformer(VisionTransformer):
    """DeiT with a distillation token, which has its own head.

    In evaluation the logits are the mean of the two heads; in training, too, unless
    `set_distilled_training()` requests both, as in timm.

    Reference: Training data-efficient image transformers & distillation through attention (Touvron et al., 2021).
    """

    prefix_names = ("cls_token", "dist_token", "reg_token")
    needs_class_token = True
    classifiers = ("head", "head_dist")

    def __init__(self, position: PositionBuilder, **kwargs: Any) -> None:
        if kwargs.get("global_pool", "token") != "token" or kwargs.get("class_token") is False:
            got = kwargs.get("global_pool", "no class token")
            raise ValueError(
                f"`global_pool` must be 'token' in a distilled model, whose heads read prefix tokens, got {got!r}."
            )
        super().__init__(position, **kwargs)
        self.distilled_training = False
        self.head_dist = self._classifier()
        init_linear(self.head_dist)

    def _add_prefix_tokens(self) -> None:
        self.dist_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))

    def set_distilled_training(self, enable: bool = True) -> None:
        """Return the logits of both heads, as a pair, in training."""
        self.distilled_training = enable

    def get_classifier(self) -> Any:
        """Return both classifiers."""
        return self.head, self.head_dist

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifiers by new ones of `num_classes` outputs; 0 for none."""
        if global_pool not in (None, "", "token"):
            raise ValueError(f"`global_pool` must be 'token' in a distilled model, got {global_pool!r}.")
        super().reset_classifier(num_classes)
        self.head_dist = self._like_weights(self._classifier())

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """Classify tokens (B, N, D) by class and distillation token."""
        cls, dist = self.head_drop(x[:, 0]), self.head_drop(x[:, 1])
        if pre_logits:
            return (cls + dist) / 2
        cls, dist = self.head(cls), self.head_dist(dist)
        if self.training and self.distilled_training:
            return cls, dist
        return (cls + dist) / 2


_AT_384 = {"crop_pct": 1.0}

register_sizes(
    VisionTransformer,
    {
        "deit_tiny_patch16_224": Size(5_717_416, TINY, hub="timm/deit_tiny_patch16_224.fb_in1k"),
        "deit_tiny_distilled_patch16_224": Size(
            5_910_800, TINY, hub="timm/deit_tiny_distilled_patch16_224.fb_in1k", backbone=DistilledVisionTransformer
        ),
        "deit_small_patch16_224": Size(22_050_664, SMALL, hub="timm/deit_small_patch16_224.fb_in1k"),
        "deit_small_distilled_patch16_224": Size(
            22_436_432, SMALL, hub="timm/deit_small_distilled_patch16_224.fb_in1k", backbone=DistilledVisionTransformer
        ),
        "deit_base_patch16_224": Size(86_567_656, hub="timm/deit_base_patch16_224.fb_in1k"),
        "deit_base_distilled_patch16_224": Size(
            87_338_192, hub="timm/deit_base_distilled_patch16_224.fb_in1k", backbone=DistilledVisionTransformer
        ),
        "deit_base_patch16_384": Size(
            86_859_496, {"img_size": 384}, hub="timm/deit_base_patch16_384.fb_in1k", cfg=_AT_384
        ),
        "deit_base_distilled_patch16_384": Size(
            87_630_032,
            {"img_size": 384},
            hub="timm/deit_base_distilled_patch16_384.fb_in1k",
            cfg=_AT_384,
            backbone=DistilledVisionTransformer,
        ),
    },
)
register_small("DeiT, distilled", "deit_tiny_distilled_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3)
