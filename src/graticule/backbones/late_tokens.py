"""A ViT whose class token joins the patches after some of the blocks."""

from __future__ import annotations

from torch import Tensor

from graticule.backbones.vision_transformer import VisionTransformer
from graticule.grid import Grid


class LateTokenTransformer(VisionTransformer):
    """A ViT whose first blocks see patches alone: prefix tokens join later and have no position."""

    def grid_at(self, image: tuple[int, int]) -> Grid:
        """Return the grid of the patches of an image of `image` = (height, width), in pixels."""
        return self.patch_embed.grid(image)

    def position_grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of the patches."""
        return [grid]

    def embed(self, x: Tensor, stage: int = 0) -> Tensor:
        """Turn images into the tokens of their patches, (B, H * W, D)."""
        return self.tokenize(x, stage).contiguous()
