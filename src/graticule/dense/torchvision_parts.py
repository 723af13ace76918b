"""Replacements for parts of torchvision's detectors: batching of images, and anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from graticule.dense.features import Features


class Batch(GeneralizedRCNNTransform):
    """Normalizes images and pads them to one batch, without resizing them."""

    def __init__(self, features: Features) -> None:
        configuration = getattr(features.backbone, "pretrained_cfg", None) or {}
        mean, std = (list(configuration.get(name, ())) for name in ("mean", "std"))
        if not len(mean) == len(std) == features.backbone.in_chans:
            mean = std = [0.5] * features.backbone.in_chans
        super().__init__(1, 1, mean, std, size_divisible=features.divisor)

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        """Return both unchanged."""
        return image, target


class Anchors(AnchorGenerator):
    """Anchors of exact sizes, centered at multiples of the stride of their level, as in mmdetection.

    torchvision rounds their sides to whole pixels, and computes the stride as the quotient of the sides of image and
    map, which differs from the true stride at coarse levels.

    Args:
        strides: pixels per cell of each level.
        scales: sides of the anchors of ratio 1, in strides.
        ratios: height / width.
    """

    def __init__(self, strides: Sequence[int], scales: Sequence[float], ratios: Sequence[float]) -> None:
        sizes = tuple(tuple(scale * stride for scale in scales) for stride in strides)
        super().__init__(sizes, (tuple(ratios),) * len(sizes))
        self.strides = tuple(strides)

    def generate_anchors(
        self,
        scales: Any,
        aspect_ratios: Any,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return the anchors of a cell at the origin, (ratios * scales, 4)."""
        sides = torch.tensor(scales, dtype=dtype, device="cpu")
        roots = torch.tensor(aspect_ratios, dtype=dtype, device="cpu").sqrt()
        widths, heights = (sides / roots[:, None]).flatten(), (sides * roots[:, None]).flatten()
        return torch.stack([-widths, -heights, widths, heights], 1) / 2

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Return the anchors of each image, all levels together, (n, 4)."""
        like = feature_maps[0]
        found = []
        for one, stride, cell in zip(feature_maps, self.strides, self.cell_anchors, strict=True):
            y, x = (torch.arange(side, dtype=like.dtype, device=like.device) * stride for side in one.shape[-2:])
            y, x = torch.meshgrid(y, x, indexing="ij")
            centers = torch.stack([x, y, x, y], -1).reshape(-1, 1, 4)
            found.append((centers + cell.to(like)).reshape(-1, 4))
        return [torch.cat(found) for _ in image_list.image_sizes]
