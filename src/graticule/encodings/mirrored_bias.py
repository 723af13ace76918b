"""LeViT's attention bias: a learnable table of the absolute offsets of two patches, the same in opposite directions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import PatchBias
from graticule.position.displacement import Displacements
from graticule.position.grid import Grid
from graticule.position.places import ravel
from graticule.position.position import register_encoding
from graticule.position.resampling import build_resampler, resize_rows
from graticule.registry.fields import SmallCount


@register_encoding("mirrored_bias")
class MirroredBias(PatchBias):
    r"""Adds one learned number per head and absolute offset of two patches, of H W of them, to the logits.

    .. math:: b_{h, i, j} = T_h[|y_i - y_j|, |x_i - x_j|]

    So it has a quarter of the numbers of `relative_bias`, and does not tell left from right or up from down. Prefix
    tokens get no bias. At another grid the table of (H, W) offsets is resampled as timm and TinyViT's code resample it:
    by the borders of its entries, so that offset 0 moves slightly. It stays in its place, as the farthest offset does,
    with `resampler="bicubic(antialias=False, align_corners=True)"`.

    Reference: LeViT (Graham et al., 2021), section 4.2; also TinyViT, EfficientViT (MSRA), and EfficientFormer V1 and
    V2. Tables start at 0, as in their code, and are in the same order, by rows of (H, W).

    Args:
        resampler: resampler of the table for another grid.
    """

    resampled = True
    crops = True

    def __init__(self, grid: Grid, num_heads: SmallCount, resampler: str = "bicubic") -> None:
        super().__init__(grid, num_heads)
        self.resampler = build_resampler(resampler)
        self.attention_biases = nn.Parameter(torch.empty(num_heads, grid.patches))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.attention_biases)

    def patch_bias(self, grid: Grid) -> Tensor:
        image = Grid(*grid.image_grid.shape)  # without the spacing: offsets are indices
        table = self.at_grid("attention_biases", image)
        index = ravel(image.unique_offsets(table.device).abs().unbind(-1), image.shape)  # (2H-1, 2W-1)
        maps = table.index_select(1, index.flatten()).unflatten(1, image.table)
        return Displacements(grid.cut_displacements(maps), softmax=False).matrix()

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid or window of a table, (heads, H' W')."""
        fits = value.ndim == 2 and len(value) == self.num_heads
        return self.grid.infer_grid(math.prod(value.shape[1:]), shape) if fits else None

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample a table, (heads, H W)."""
        return resize_rows(value, old.shape, new.shape, self.resampler)
