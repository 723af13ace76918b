"""Feature pyramid network, and the coarser levels that detectors add to a pyramid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from graticule.dense.features import Neck, register_neck

Extra = Literal["none", "pool", "convolutions", "outputs"]


class ExtraLevels(nn.Module):
    """Adds coarser maps to a pyramid.

    'pool' adds one, every second cell of the last map (Faster and Mask R-CNN); 'convolutions' adds two by convolutions
    of stride 2, the first from the last input map, without an activation between them (RetinaNet in mmdetection);
    'outputs' the same from the last map of the pyramid, with a ReLU between them (FCOS there: add_extra_convs
    'on_output', relu_before_extra_convs).

    Args:
        extra: 'none', 'pool', 'convolutions' or 'outputs'.
        inputs: channels of the last input map.
        channels: channels of the pyramid.
    """

    def __init__(self, extra: Extra, inputs: int, channels: int) -> None:
        super().__init__()
        self.kind = extra
        self.count = {"none": 0, "pool": 1}.get(extra, 2)
        widths = {"convolutions": (inputs, channels), "outputs": (channels, channels)}.get(extra, ())
        self.convs = nn.ModuleList(nn.Conv2d(width, channels, 3, stride=2, padding=1) for width in widths)
        for parameter in self.parameters():
            nn.init.zeros_(parameter) if parameter.ndim == 1 else nn.init.kaiming_uniform_(parameter, a=1)

    def forward(self, maps: list[Tensor], last: Tensor) -> list[Tensor]:
        """Return the maps of a pyramid and the added ones; `last` is the last input map."""
        if self.kind == "pool":
            return [*maps, F.max_pool2d(maps[-1], 1, 2)]
        outputs = self.kind == "outputs"
        last = maps[-1] if outputs else last
        for step, conv in enumerate(self.convs):
            last = conv(last.relu() if outputs and step else last)
            maps = [*maps, last]
        return maps


@register_neck("fpn")
class FeaturePyramid(Neck):
    """Adds the upsampled coarser maps to each map, all with the same channels: torchvision's, with a choice of levels.

    .. math:: t_l = W_l x_l + \\mathrm{up}(t_{l+1}), \\quad y_l = \\mathrm{conv}_{3 \\times 3}(t_l)

    It computes the same as that of mmdetection and mmsegmentation, whose weights load by their names.

    Reference: Feature Pyramid Networks for Object Detection (Lin et al., 2017).

    Args:
        channels: channels of the pyramid.
        first: index of the first map that is used.
        extra: the added levels, see `ExtraLevels`.
        norm: whether each convolution is followed by a batch norm; it then has no bias.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        channels: int = 256,
        first: int = 0,
        extra: Extra = "none",
        norm: bool = False,
    ) -> None:
        super().__init__()
        check_levels(len(inputs), channels, first)
        self.first = first
        self.fpn = FeaturePyramidNetwork(list(inputs[first:]), channels, norm_layer=nn.BatchNorm2d if norm else None)
        self.more = ExtraLevels(extra, inputs[-1], channels)
        self.extra = self.more.count
        self.strides = with_extra(strides[first:], self.extra)
        self.channels = (channels,) * len(self.strides)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the pyramid of maps (B, C, H, W)."""
        used = OrderedDict((str(level), one) for level, one in enumerate(maps[self.first :]))
        levels: list[Tensor] = self.more(list(self.fpn(used).values()), maps[-1])
        return levels


class ChannelNorm(nn.LayerNorm):
    """Normalizes the channels of each cell of a map (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized map."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@register_neck("simple_pyramid")
class SimplePyramid(Neck):
    """Computes four maps of strides p/4, p/2, p and 2p from the one map of a plain ViT with patches of p pixels.

    Transposed convolutions or a max pooling change the resolution; then a 1 x 1 and a 3 x 3 convolution follow, each
    with a norm of the channels.

    Reference: Exploring Plain Vision Transformer Backbones for Object Detection (ViTDet, Li et al., 2022), Figure 2c.

    Args:
        channels: channels of the pyramid.
        first: index of the first of the four maps that is used.
        extra: the added levels, see `ExtraLevels`.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        channels: int = 256,
        first: int = 0,
        extra: Extra = "none",
    ) -> None:
        super().__init__()
        if len(inputs) > 1 or strides[0] % 4:
            raise ValueError(
                "`neck` must not be 'simple_pyramid' unless the backbone is a plain ViT, whose patches are a multiple "
                f"of 4 pixels, got {len(inputs)} maps, the first of stride {strides[0]}; use 'fpn' for a pyramid."
            )
        check_levels(4, channels, first)
        (dim,), stride = inputs, strides[0]
        double = partial(nn.ConvTranspose2d, kernel_size=2, stride=2)
        scales = [
            nn.Sequential(double(dim, dim // 2), ChannelNorm(dim // 2, 1e-6), nn.GELU(), double(dim // 2, dim // 4)),
            nn.Sequential(double(dim, dim // 2)),
            nn.Sequential(),
            nn.Sequential(nn.MaxPool2d(2)),
        ]
        widths = (dim // 4, dim // 2, dim, dim)
        self.scales = nn.ModuleList(
            nn.Sequential(
                *scale,
                nn.Conv2d(width, channels, 1, bias=False),
                ChannelNorm(channels, 1e-6),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                ChannelNorm(channels, 1e-6),
            )
            for scale, width in list(zip(scales, widths, strict=True))[first:]
        )
        self.more = ExtraLevels(extra, dim, channels)
        self.extra = self.more.count
        self.strides = with_extra([stride // 4, stride // 2, stride, stride * 2][first:], self.extra)
        self.channels = (channels,) * len(self.strides)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the pyramid of the one map (B, D, H, W)."""
        made = [scale(maps[0]) for scale in self.scales]
        levels: list[Tensor] = self.more(made, F.max_pool2d(maps[0], 2))
        return levels


def check_levels(count: int, channels: int, first: int) -> None:
    """Check the options of a pyramid."""
    if channels < 1:
        raise ValueError(f"`channels` must be at least 1, got {channels}.")
    if not 0 <= first < count:
        raise ValueError(f"`first` must be the index of one of {count} maps, got {first}.")


def with_extra(strides: Sequence[int], extra: int) -> tuple[int, ...]:
    """Return the strides of a pyramid with those of the added levels, each twice the previous one."""
    return (*strides, *(strides[-1] << level for level in range(1, extra + 1)))
