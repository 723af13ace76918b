"""Which regions of an image are learned in a step, whatever other images are in its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RegionSampler:
    """Draws so many regions of each image, at most a share of them objects, and the rest background.

    torchvision's draws from the random numbers of the process, so that the draws of an image depend on those before it
    in the batch. Here each image has a seed of its own: the same regions are drawn whether one process has the whole
    batch or several have a part each.

    Args:
        count: regions per image.
        share: of these, so many are objects, if there are as many.
        stream: keeps the draws apart from those of another sampler with the same seeds.
    """

    #: The seed of each image of the batch; None to draw from the random numbers of the process.
    seeds: Sequence[int] | None = None

    def __init__(self, count: int, share: float, stream: int) -> None:
        self.count = count
        self.share = share
        self.stream = stream

    def __call__(self, matched: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return which regions of each image are drawn, as masks (regions,): of objects, and of background.

        Args:
            matched: of each image (regions,): at least 1 for an object, 0 for background, -1 for neither.
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
