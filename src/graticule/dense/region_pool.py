"""Pooling of regions for two-stage detectors: samples of the feature map that fits the size of a region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign, roi_align

#: Largest side of a region that is read from the finest map, in its cells.
_CELLS = 14


class RegionPool(MultiScaleRoIAlign):
    r"""Reads each region as side x side bins, means of bilinear samples whose number grows with the bin.

    A region of width w and height h pixels is read from map

    .. math:: l = \lfloor \log_2 (\sqrt{w h} / 14 s_0) \rfloor, \quad s_0: \text{stride of the finest map},

    or from the nearest existing one; for a stride of 4 this is 224 pixels at stride 16, as in the paper. Cell j of a
    map is at (j + 1/2) s pixels. Both are as in mmdetection and Detectron2; torchvision's parent class, which its
    detectors require, reads half a cell further to the bottom right, with four samples per bin, and assumes strides
    that are powers of two.

    Reference: Mask R-CNN (He et al., 2017); Feature Pyramid Networks (Lin et al., 2017), Eq. 1.

    Args:
        strides: pixels per cell of the maps, which are named '0', '1', ... from the finest.
        side: bins per side of a region.
    """

    def __init__(self, strides: Sequence[int], side: int) -> None:
        super().__init__([str(level) for level in range(len(strides))], side, sampling_ratio=0)
        self.strides = tuple(strides)

    def forward(self, x: Mapping[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """Return (regions, C, side, side), the concatenated regions of all images.

        Args:
            x: maps (B, C, H, W) by name.
            boxes: per image (n, 4), left, top, right and bottom in pixels.
            image_shapes: unused, since the strides are known.
        """
        maps = [x[name] for name in self.featmap_names]
        levels = self.levels(torch.cat(boxes))
        numbers = torch.cat([torch.full_like(one[:, :1], number) for number, one in enumerate(boxes)])
        regions = torch.cat([numbers, torch.cat(boxes)], 1)
        out = maps[0].new_zeros(len(regions), maps[0].shape[1], *self.output_size)
        for level, (one, stride) in enumerate(zip(maps, self.strides, strict=True)):
            here = torch.where(levels == level)[0]
            read = roi_align(one, regions[here], self.output_size, 1 / stride, sampling_ratio=0, aligned=True)
            out[here] = read.to(out.dtype)
        return out

    def levels(self, boxes: Tensor) -> Tensor:
        """Return the index of the map that each of boxes (n, 4) is read from, (n,)."""
        side = (boxes[:, 2:] - boxes[:, :2]).prod(1).sqrt()
        fitting = torch.log2(side / (_CELLS * self.strides[0]) + 1e-6).floor()
        return fitting.clamp(0, len(self.strides) - 1)
