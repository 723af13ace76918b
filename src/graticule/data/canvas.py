"""Pictures at constant scale on a larger canvas: more room around the content, which does not grow."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

#: How images get a size other than that of training: scaled (zoom), or at the same scale on a larger canvas (canvas).
Mode = Literal["zoom", "canvas"]
#: Seed of the positions of the pictures, so that all models are tested on the same ones.
_PLACE_SEED = 28


class CanvasImages(Dataset[tuple[Tensor, int]]):
    """Images (C, h, w) of another data set, each at a random position on a canvas (C, H, W), or cropped to it.

    The position depends on the index alone. The canvas has the median color of the border of its image, per channel.
    At the size of the images nothing changes.

    Args:
        images: pairs of a tensor and a label, by index; a negative index is padding (`TransformedImages`).
        size: (H, W) of the canvas, in pixels.
    """

    def __init__(self, images: Any, size: tuple[int, int]) -> None:
        self.images = images
        self.size = size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        random = torch.Generator().manual_seed(_PLACE_SEED + abs(index))
        return place(image, self.size, random), label


def place(image: Tensor, size: tuple[int, int], random: torch.Generator | None = None) -> Tensor:
    """Put `image`, (C, h, w), at a random position on a canvas (C, H, W) of the median color of its border.

    Along an axis on which the canvas is smaller, the image is cropped at a random position.
    """
    canvas = border_color(image)[:, None, None].expand(-1, *size).clone()
    here, there = [slice(None)], [slice(None)]
    for length, room in zip(image.shape[1:], size, strict=True):
        start = int(torch.randint(abs(room - length) + 1, (), generator=random))
        inside = slice(start, start + min(length, room))
        whole = slice(0, min(length, room))
        there.append(inside if room >= length else whole)
        here.append(whole if room >= length else inside)
    canvas[tuple(there)] = image[tuple(here)]
    return canvas


def border_color(image: Tensor) -> Tensor:
    """Return the median over the outermost pixels of `image`, (C, h, w), per channel: (C,)."""
    height, width = image.shape[1:]
    border = torch.ones(height, width, dtype=torch.bool, device=image.device)
    border[1:-1, 1:-1] = False
    return image[:, border].median(dim=1).values
