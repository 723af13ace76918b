"""Sampling of the regions of an image that are learned in a step, independent of the rest of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RegionSampler:
    """Draws `count` regions per image, at most a share of them objects, and the rest background.

    torchvision's sampler uses the global generator, so the draws of an image depend on the previous images of the
    batch. Here each image has its own seed: the same regions are drawn for any split of the batch across processes.

    Args:
        count: regions per image.
        share: largest share of these that are objects.
        stream: separates the draws from those of another sampler with the same seeds.
    """

    #: The seed of each image of the batch; None for the global generator.
    seeds: Sequence[int] | None = None

    def __init__(self, count: int, share: float, stream: int) -> None:
        self.count = count
        self.share = share
        self.stream = stream

    def __call__(self, matched: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the drawn regions of each image as masks (regions,): of objects, and of background.

        Args:
            matched: per image (regions,): at least 1 for an object, 0 for background, -1 for neither.
        """
        drawn = [self._draw(number, one) for number, one in enumerate(matched)]
        return [objects for objects, _ in drawn], [background for _, background in drawn]

    def _draw(self, number: int, matched: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.default_generator
        if self.seeds is not None:
            generator = torch.Generator().manual_seed(2 * self.seeds[number] + self.stream)
        objects, background = torch.where(matched >= 1)[0], torch.where(matched == 0)[0]
        most = min(len(objects), int(self.count * self.share))
        masks = []
        for found, count in ((objects, most), (background, self.count - most)):
            order = torch.randperm(len(found), generator=generator).to(found.device)  # the same on every device
            mask = torch.zeros_like(matched, dtype=torch.uint8)
            mask[found[order[:count]]] = 1
            masks.append(mask)
        return masks[0], masks[1]
