"""The decoders of mmsegmentation: UperNet, Semantic FPN and a fully convolutional head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graticule.dense.decoders import ConvNorm, Decoder, classifier, register_decoder, resize_to
from graticule.registry.checks import checked


@register_decoder("uperhead")
class UperHead(Decoder):
    """UperNet: the coarsest map is pooled to several sizes, and added to the finer ones from top to bottom.

    It computes the same as mmsegmentation's UPerHead, with the same names. segmentation_models_pytorch's has no
    convolutions after its sums and other widths, so it is not used.

    Reference: Unified Perceptual Parsing for Scene Understanding (Xiao et al., 2018).

    Args:
        inputs: channels of the maps.
        strides: their pixels per cell.
        num_classes: number of classes.
        channels: channels of all inner maps.
        pools: sides to which the coarsest map is pooled.
        drop: dropout of whole channels before the classifier.
    """

    @checked
    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        num_classes: int,
        channels: int = 512,
        pools: tuple[int, ...] = (1, 2, 3, 6),
        drop: float = 0.1,
    ) -> None:
        super().__init__()
        *finer, coarsest = inputs
        self.psp_modules = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(side), ConvNorm(coarsest, channels, 1)) for side in pools
        )
        self.bottleneck = ConvNorm(coarsest + len(pools) * channels, channels, 3)
        self.lateral_convs = nn.ModuleList(ConvNorm(width, channels, 1) for width in finer)
        self.fpn_convs = nn.ModuleList(ConvNorm(channels, channels, 3) for _ in finer)
        self.fpn_bottleneck = ConvNorm(len(inputs) * channels, channels, 3)
        self.dropout = nn.Dropout2d(drop)
        self.conv_seg = classifier(channels, num_classes)

    def pool(self, x: Tensor) -> Tensor:
        """Return the coarsest map with its pooled versions mixed in, (B, channels, H, W)."""
        pooled = [resize_to(module(x), x.shape[-2:]) for module in self.psp_modules]
        out: Tensor = self.bottleneck(torch.cat([x, *pooled], 1))
        return out

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) at the resolution of the finest map."""
        *finer, coarsest = maps
        sums = [self.pool(coarsest)]
        for lateral, x in zip(reversed(self.lateral_convs), reversed(finer), strict=True):
            sums.insert(0, lateral(x) + resize_to(sums[0], x.shape[-2:]))
        out = [*(conv(x) for conv, x in zip(self.fpn_convs, sums[:-1], strict=True)), sums[-1]]
        same = [resize_to(x, maps[0].shape[-2:]) for x in out]
        logits: Tensor = self.conv_seg(self.dropout(self.fpn_bottleneck(torch.cat(same, 1))))
        return logits


@register_decoder("fpn")
class SemanticFpn(Decoder):
    """Semantic FPN: each level is doubled by convolutions until it has the finest resolution, and all are summed.

    It computes the same as mmsegmentation's FPNHead, with the same names. segmentation_models_pytorch's has group
    norms, aligned corners and no 3 x 3 convolutions in its pyramid, so it is not used.

    Reference: Panoptic Feature Pyramid Networks (Kirillov et al., 2019), section 3.1.

    Args:
        inputs: channels of the maps.
        strides: their pixels per cell.
        num_classes: number of classes.
        channels: channels of all inner maps.
        drop: dropout of whole channels before the classifier.
    """

    neck = "fpn"

    @checked
    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        num_classes: int,
        channels: int = 128,
        drop: float = 0.1,
    ) -> None:
        super().__init__()
        heads = []
        for level, width in enumerate(inputs):
            head: list[nn.Module] = []
            for step in range(max(1, level)):
                head.append(ConvNorm(channels if step else width, channels, 3))
                if level:
                    head.append(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False))
            heads.append(nn.Sequential(*head))
        self.scale_heads = nn.ModuleList(heads)
        self.dropout = nn.Dropout2d(drop)
        self.conv_seg = classifier(channels, num_classes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) at the resolution of the finest map."""
        first, *others = (head(x) for head, x in zip(self.scale_heads, maps, strict=True))
        for x in others:
            first = first + resize_to(x, first.shape[-2:])
        logits: Tensor = self.conv_seg(self.dropout(first))
        return logits


@register_decoder("fcn")
class FcnHead(Decoder):
    """Classifies each cell of one map after a 3 x 3 convolution: the auxiliary head of UperNet in mmsegmentation.

    It computes the same as mmsegmentation's FCNHead, with the same names.

    Reference: Fully Convolutional Networks for Semantic Segmentation (Long et al., 2015).

    Args:
        inputs: channels of the maps.
        strides: their pixels per cell.
        num_classes: number of classes.
        channels: channels of the convolution.
        level: index of the map.
        drop: dropout of whole channels before the classifier.
    """

    @checked
    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        num_classes: int,
        channels: int = 256,
        level: int = 2,
        drop: float = 0.1,
    ) -> None:
        super().__init__()
        if not 0 <= level < len(inputs):
            raise ValueError(f"`level` must be the index of one of {len(inputs)} maps, got {level}.")
        self.level = level
        self.convs = nn.Sequential(ConvNorm(inputs[level], channels, 3))
        self.dropout = nn.Dropout2d(drop)
        self.conv_seg = classifier(channels, num_classes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) at the resolution of the map."""
        logits: Tensor = self.conv_seg(self.dropout(self.convs(maps[self.level])))
        return logits
