"""The interface and the registry of decoders, which compute logits from feature maps, and their common parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from graticule.registry.registry import Option, Registry, options_of


class Decoder(nn.Module, ABC):
    """Computes the logits of each class from feature maps.

    A subclass takes `inputs`, the channels of the maps, their `strides`, and `num_classes`; its further arguments are
    options.
    """

    #: The default necks after a pyramid and after a plain ViT.
    neck: ClassVar[str | None] = None
    plain_neck: ClassVar[str | None] = "simple_pyramid"
    #: True if it decodes the tokens of a plain ViT after its final norm; its prefix tokens are then kept.
    tokens: ClassVar[bool] = False

    @abstractmethod
    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) at the resolution of the finest map, from maps (B, C, H, W)."""


def _options(kind: Any) -> dict[str, Option]:
    return options_of(kind.__init__, frozenset({"self", "inputs", "strides", "num_classes"}))


#: Decoders by name: the values of the argument `decoder`.
DECODERS: Registry[type[Decoder]] = Registry("decoder", Decoder, _options, "graticule.dense")
register_decoder = DECODERS.register


def resize_to(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize maps (B, C, H, W) bilinearly to `size` = (H', W'), with `align_corners=False`."""
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


class ConvNorm(nn.Module):
    """A convolution without bias, a batch norm and a ReLU; its names are those of mmcv's ConvModule."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the map (B, outputs, H, W) of (B, inputs, H, W)."""
        out: Tensor = self.bn(self.conv(x)).relu()
        return out


def classifier(channels: int, num_classes: int) -> nn.Conv2d:
    """Return the 1 x 1 convolution that computes logits, with small random weights."""
    layer = nn.Conv2d(channels, num_classes, 1)
    nn.init.normal_(layer.weight, std=0.01)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
