"""Lists of images of any sizes: one forward pass per size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graticule.grid import Crop

#: Images (C, height, width) of any sizes, and the crop of each image.
Images = list[Tensor] | tuple[Tensor, ...]
Crops = list[Crop | None] | tuple[Crop | None, ...]


def forward_each(model: nn.Module, images: Images, crop: Crop | Crops | None) -> Any:
    """Return the outputs of a model for images (C, height, width), in their order; one forward pass per size and crop.

    Raises:
        ValueError: if the lists cannot be combined, or the outputs of several sizes cannot.
    """
    crops = list(crop) if isinstance(crop, (list, tuple)) else [crop] * len(images)
    if not images or len(crops) != len(images):
        raise ValueError(
            f"`x` must have at least one image, and `crop` one entry per image, got {len(images)} images and "
            f"{len(crops)} crops."
        )
    if wrong := [tuple(image.shape) for image in images if image.ndim != 3]:
        raise ValueError(f"`x` must be a list of images of (channels, height, width), got one of {wrong[0]}.")
    groups: dict[tuple[torch.Size, Crop | None], list[int]] = {}
    for index, (image, part) in enumerate(zip(images, crops, strict=True)):
        groups.setdefault((image.shape, part), []).append(index)
    if not model.global_pool and len({shape for shape, _ in groups}) > 1:
        raise ValueError(
            "`global_pool` must not be '' for images of several sizes, whose numbers of tokens differ; pool the "
            "tokens, or call the model once per size."
        )
    found = [model(torch.stack([images[i] for i in group]), part) for (_, part), group in groups.items()]
    order = [index for group in groups.values() for index in group]
    back = sorted(range(len(order)), key=order.__getitem__)
    if isinstance(found[0], tuple):  # of a model with two classifiers in training
        return tuple(torch.cat(part)[back] for part in zip(*found, strict=True))
    return torch.cat(found)[back]
