"""Semantic segmentation: decoders (Segmenter's and mmsegmentation's), and the model, whole or in windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.backbones.token_model import check_image, init_linear
from graticule.dense.features import DenseModel, Features
from graticule.layers.block import Block
from graticule.layers.tokenizers import fit_images
from graticule.position.grid import Crop
from graticule.registry.checks import Checked, checked
from graticule.registry.fields import Channels, Classes, Depth, Ratio, ShareBelowOne, SmallCount
from graticule.registry.registry import Registry, options_of


class Decoder(Checked, nn.Module, ABC):
    """Computes the logits of each class from feature maps.

    A subclass takes `inputs`, the channels of the maps, their `strides`, and `num_classes`; its further arguments are
    options; `drop` is the dropout of whole channels before the classifier.
    """

    #: The default necks after a pyramid and after a plain ViT.
    neck: ClassVar[str | None] = None
    plain_neck: ClassVar[str | None] = "simple_pyramid"
    #: True if it decodes the tokens of a plain ViT after its final norm; its prefix tokens are then kept.
    tokens: ClassVar[bool] = False

    @abstractmethod
    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) at the resolution of the finest map, from maps (B, C, H, W)."""


#: The arguments of a class that are not options.
_CONTEXT = frozenset({"inputs", "strides", "num_classes"})
#: Decoders by name: the values of the argument `decoder`.
DECODERS: Registry[type[Decoder]] = Registry(
    "decoder", Decoder, lambda kind: options_of(kind, _CONTEXT), "graticule.dense"
)
register_decoder = DECODERS.register


def resize_to(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize maps (B, C, H, W) bilinearly to `size` = (H', W'), with `align_corners=False`."""
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


class ConvNorm(nn.Module):
    """A convolution without bias, a batch norm and a ReLU, with the names of mmcv's ConvModule."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the map (B, outputs, H, W) of (B, inputs, H, W)."""
        return self.bn(self.conv(x)).relu()


def classifier(channels: int, num_classes: int) -> nn.Conv2d:
    """Return the 1 x 1 convolution that computes logits, with small random weights."""
    layer = nn.Conv2d(channels, num_classes, 1)
    nn.init.normal_(layer.weight, std=0.01)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


@register_decoder("segmenter_linear")
class LinearDecoder(Decoder):
    """Classifies each patch by a linear layer.

    Reference: Segmenter (Strudel et al., 2021), section 3.2.
    """

    plain_neck = None
    tokens = True

    def __init__(self, inputs: Sequence[int], strides: Sequence[int], num_classes: Classes) -> None:
        super().__init__()
        self.head = nn.Linear(inputs[-1], num_classes)
        init_linear(self.head)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) of the last map."""
        logits: Tensor = self.head(maps[-1].movedim(1, -1))
        return logits.movedim(-1, 1)


@register_decoder("segmenter_mask")
class MaskTransformer(Decoder):
    r"""Appends one learned token per class to the patches, applies blocks to all, and compares patches with classes.

    .. math:: logits = LN(\hat{z} W_p \cdot \hat{c} W_c), \quad \hat{z}, \hat{c}: \text{after the blocks, of length 1}

    The blocks add no position information. All norms have an epsilon of 1e-5, as in Segmenter's code.

    Reference: Segmenter (Strudel et al., 2021), section 3.2.

    Args:
        depth: number of blocks.
        dim: channels of the blocks; the map's channels by default.
        num_heads: h; one per 64 channels by default.
        mlp_ratio: hidden channels of the MLPs, as a multiple of `dim`.
        drop: dropout on the outputs of attention and MLP and on attention weights.
        drop_path: stochastic depth of the last block; it grows linearly from 0 at the first.
    """

    plain_neck = None
    tokens = True

    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        num_classes: Classes,
        depth: Depth = 2,
        dim: Channels | None = None,
        num_heads: SmallCount | None = None,
        mlp_ratio: Ratio = 4.0,
        drop: ShareBelowOne = 0.1,
        drop_path: ShareBelowOne = 0.0,
    ) -> None:
        super().__init__()
        dim = inputs[-1] if dim is None else dim
        num_heads = max(1, dim // 64) if num_heads is None else num_heads
        norm = partial(nn.LayerNorm, eps=1e-5)
        rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()
        self.num_classes = num_classes
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, mlp_ratio, proj_drop=drop, attn_drop=drop, drop_path=rate, norm_layer=norm)
            for rate in rates
        )
        self.cls_emb = nn.Parameter(torch.empty(1, num_classes, dim))
        self.proj_dec = nn.Linear(inputs[-1], dim)
        self.proj_patch = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.proj_classes = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.decoder_norm = norm(dim)
        self.mask_norm = norm(num_classes)
        self.apply(init_linear)
        trunc_normal_(self.cls_emb, std=0.02)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) of the last map."""
        last = maps[-1]
        x = self.proj_dec(last.flatten(2).transpose(1, 2))
        x = torch.cat([x, self.cls_emb.expand(x.shape[0], -1, -1)], 1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_norm(x)
        patches = x[:, : -self.num_classes] @ self.proj_patch
        classes = x[:, -self.num_classes :] @ self.proj_classes
        patches, classes = (y / y.norm(dim=-1, keepdim=True) for y in (patches, classes))
        logits: Tensor = self.mask_norm(patches @ classes.mT)
        return logits.transpose(1, 2).unflatten(-1, last.shape[-2:])


@register_decoder("uperhead")
class UperHead(Decoder):
    """UperNet: the coarsest map is pooled to several sizes, and added to the finer ones from top to bottom.

    It computes the same as mmsegmentation's UPerHead, with the same names. segmentation_models_pytorch's has no
    convolutions after its sums and other widths, so it is not used.

    Reference: Unified Perceptual Parsing for Scene Understanding (Xiao et al., 2018).

    Args:
        channels: channels of all inner maps.
        pools: sides to which the coarsest map is pooled.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        num_classes: Classes,
        channels: SmallCount = 512,
        pools: tuple[int, ...] = (1, 2, 3, 6),
        drop: ShareBelowOne = 0.1,
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
        return self.bottleneck(torch.cat([x, *pooled], 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) at the resolution of the finest map."""
        *finer, coarsest = maps
        sums = [self.pool(coarsest)]
        for lateral, x in zip(reversed(self.lateral_convs), reversed(finer), strict=True):
            sums.insert(0, lateral(x) + resize_to(sums[0], x.shape[-2:]))
        out = [*(conv(x) for conv, x in zip(self.fpn_convs, sums[:-1], strict=True)), sums[-1]]
        same = [resize_to(x, maps[0].shape[-2:]) for x in out]
        return self.conv_seg(self.dropout(self.fpn_bottleneck(torch.cat(same, 1))))


@register_decoder("fpn")
class SemanticFpn(Decoder):
    """Semantic FPN: each level is doubled by convolutions until it has the finest resolution, and all are summed.

    It computes the same as mmsegmentation's FPNHead, with the same names. segmentation_models_pytorch's has group
    norms, aligned corners and no 3 x 3 convolutions in its pyramid, so it is not used.

    Reference: Panoptic Feature Pyramid Networks (Kirillov et al., 2019), section 3.1.

    Args:
        channels: channels of all inner maps.
    """

    neck = "fpn"

    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        num_classes: Classes,
        channels: SmallCount = 128,
        drop: ShareBelowOne = 0.1,
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
        return self.conv_seg(self.dropout(first))


@register_decoder("fcn")
class FcnHead(Decoder):
    """Classifies each cell of one map after a 3 x 3 convolution: the auxiliary head of UperNet in mmsegmentation.

    It computes the same as mmsegmentation's FCNHead, with the same names.

    Reference: Fully Convolutional Networks for Semantic Segmentation (Long et al., 2015).

    Args:
        channels: channels of the convolution.
        level: index of the map.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        num_classes: Classes,
        channels: SmallCount = 256,
        level: int = 2,
        drop: ShareBelowOne = 0.1,
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
        return self.conv_seg(self.dropout(self.convs(maps[self.level])))


class SegmentationModel(DenseModel):
    """Feature maps and a decoder.

    Images can have any size: they are padded with zeros at the bottom and on the right to a multiple of
    `features.divisor`, and the logits are resized bilinearly to the padded size and cropped, as in Segmenter's code.
    Inputs are normalized as for the backbone alone.

    Args:
        features: images to feature maps.
        decoder: feature maps to logits.
        num_classes: number of classes.
        auxiliary: another decoder, for a second loss in training (`all_logits`).
    """

    kind = "segmenter"

    def __init__(
        self, features: Features, decoder: Decoder, num_classes: Classes, auxiliary: Decoder | None = None
    ) -> None:
        super().__init__()
        self.features = features
        self.decoder = decoder
        self.auxiliary = auxiliary
        self.num_classes = num_classes

    @property
    def divisor(self) -> int:
        """Sides of images are padded to multiples of this."""
        return self.features.divisor

    def forward(self, images: Tensor, crop: Crop | None = None) -> Tensor:
        """Return logits (B, num_classes, height, width) of images (B, C, height, width).

        Args:
            images: normalized as for the backbone.
            crop: their part of larger images (see `Backbone.forward`); their sides then are multiples of
                `features.divisor`.
        """
        return self._logits(images, [self.decoder], crop)[0]

    def all_logits(self, images: Tensor) -> list[Tensor]:
        """Return the logits of `forward` and, if there is an auxiliary decoder, its logits.

        mmsegmentation's UperNet is trained with the loss of the first plus 0.4 times the loss of the second.
        """
        return self._logits(images, [self.decoder, *([] if self.auxiliary is None else [self.auxiliary])])

    def _logits(self, images: Tensor, decoders: list[Decoder], crop: Crop | None = None) -> list[Tensor]:
        check_image(images, "images")
        height, width = images.shape[-2:]
        padded = fit_images(images, (self.features.divisor,) * 2, "pad")
        if crop is not None and padded.shape != images.shape:
            raise ValueError(
                f"`images` must have sides that are multiples of {self.features.divisor} if `crop` is given, got "
                f"{height} x {width}."
            )
        maps = list(self.features(padded, crop).values())
        return [resize_to(decoder(maps), padded.shape[-2:])[..., :height, :width] for decoder in decoders]


@torch.no_grad()
@checked
def segment_in_windows(
    model: SegmentationModel,
    images: Tensor,
    window: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    located: bool = False,
) -> Tensor:
    """Return logits (B, num_classes, height, width), the mean over all windows that contain a pixel.

    Windows are `stride` pixels apart; the last of a row or column ends at the border of the image, as in the code of
    Segmenter and mmsegmentation. An image smaller than a window is padded with zeros (Segmenter enlarges it,
    mmsegmentation makes the window smaller).

    Args:
        model: the model.
        images: (B, C, height, width).
        window: pixels, a side or (height, width), multiples of the model's divisor.
        stride: pixels; two thirds of a window by default.
        located: whether each window is encoded with its position in the image, for encodings with `crops`; otherwise
            as a separate image.
    """
    tall, wide = (window, window) if isinstance(window, int) else window
    stride = (max(1, tall * 2 // 3), max(1, wide * 2 // 3)) if stride is None else stride
    down, right = (stride, stride) if isinstance(stride, int) else stride
    divisor = model.features.divisor
    if tall < divisor or wide < divisor or tall % divisor or wide % divisor:
        raise ValueError(f"`window` must have sides that are multiples of {divisor} pixels, got {tall} x {wide}.")
    if not (0 < down <= tall and 0 < right <= wide):
        raise ValueError(f"`stride` must be from 1 to the side of the window, {tall} x {wide}, got {down} x {right}.")
    height, width = images.shape[-2:]
    padded = F.pad(images, (0, max(0, wide - width), 0, max(0, tall - height)))
    size = (padded.shape[-2] + -padded.shape[-2] % divisor, padded.shape[-1] + -padded.shape[-1] % divisor)
    total, count = None, torch.zeros_like(padded[:1, :1])
    for top in window_starts(padded.shape[-2], tall, down):
        for left in window_starts(padded.shape[-1], wide, right):
            rows, columns = slice(top, top + tall), slice(left, left + wide)
            crop = Crop.of_pixels(size, (top, left, tall, wide), model.backbone.patch_size) if located else None
            logits = model(padded[..., rows, columns], crop)
            if total is None:
                total = logits.new_zeros(len(images), logits.shape[1], *padded.shape[-2:])
            total[..., rows, columns] += logits
            count[..., rows, columns] += 1
    assert total is not None
    mean: Tensor = total / count
    return mean[..., :height, :width]


def window_starts(side: int, window: int, stride: int) -> list[int]:
    """Return the starts of windows on an axis of `side` pixels; they cover the axis, and none extends beyond it."""
    return [*range(0, side - window, stride), side - window]
