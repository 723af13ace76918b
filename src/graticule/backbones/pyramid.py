"""Base class of backbones with several stages: one position per stage, and a grid that halves between stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.encodings import PositionBuilder, PyramidPosition, TokenMixing
from graticule.grid import Grid
from graticule.symbolic import ceiling


class Pyramid(Backbone):
    """Stages of blocks, each on a grid with half the sides of the previous one.

    It accepts any image whose sides are multiples of the coarsest patch, whatever `img_size` is. The final norm is
    before the pooling, as in PVT's and Swin's code.
    """

    #: Number of stages, from the first, that get an absolute encoding if one is requested; None for all.
    absolute_stages: ClassVar[int | None] = None
    #: True if odd sides are padded before they are halved; `tokenize` must then pad them.
    pads: ClassVar[bool] = False
    #: True if the table of a later stage is that of the previous stage, merged like the tokens.
    merges: ClassVar[bool] = False

    def build_position(self, position: PositionBuilder, num_heads: int | Sequence[int]) -> None:
        """Build the position of every stage.

        Args:
            position: builds the position of a stage.
            num_heads: h of each stage.
        """
        heads = [num_heads] if isinstance(num_heads, int) else num_heads
        if len(heads) != len(self.depths):
            raise ValueError(
                f"`num_heads` must have a value for each of the {len(self.depths)} stages, got {len(heads)}."
            )
        self.prepare_position(num_heads)
        later = range(1, len(self.depths))
        self.position = PyramidPosition(
            position,
            self.grid,
            dims=self.embed_dims,
            depths=self.depths,
            num_heads=heads,
            prefix=self.num_prefix_tokens,
            absolute_stages=self.absolute_stages,
            merge=[partial(self.merge_table, stage) for stage in later] if self.merges else None,
            pad=self.pads,
        )

    def grid_at(self, image: tuple[int, int]) -> Grid:
        """Return the first stage's grid of an image of `image` = (height, width), in pixels.

        Raises:
            ValueError: if a side is not a multiple of the coarsest patch, or, if odd sides are padded, is empty.
        """
        return padded_grid(image, self.patch_size) if self.pads else super().grid_at(image)

    def position_grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of each stage; `grid` is that of the first."""
        return grid.pyramid(len(self.depths), self.num_prefix_tokens, self.pads)

    def merge_table(self, stage: int, table: Tensor, grid: Grid) -> Tensor:
        """Compute the table of a stage, (N, D), from that of the previous stage, of `grid`, as tokens are computed."""
        return self.tokenize(grid.to_map(table[None]), stage)[0].contiguous()

    def has_softmax(self) -> bool:
        """Return True if a softmax mixes tokens; a gating unit is then better without its norm (PosMLP, 5.3)."""
        return any(isinstance(module, TokenMixing) and module.softmax for module in self.position.modules())

    def keep(self, count: int) -> None:
        """Keep only the first `count` stages, or blocks of a single stage."""
        if not self.stage_lists:
            super().keep(count)
            return
        if not isinstance(self.position, PyramidPosition):
            raise ValueError("`model` must not be folded where stages are removed; call graticule.unfold(model) first.")
        if count == len(self.depths):
            return
        # the final norm and classifier are for the channels of the last stage, and so are tokens that join there
        self.norm = nn.Identity()
        if not self.grid.prefix:
            self.prefix_names, self.num_prefix_tokens = (), 0
        self.depths, self.embed_dims = self.depths[:count], self.embed_dims[:count]
        self.num_features = self.head_hidden_size = self.embed_dims[-1]
        self.position.keep(count)
        for name in self.stage_lists:
            del getattr(self, name)[count:]
        self.reset_classifier(0, "")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group the parameters: the stem, every stage with its position parameters, the rest."""
        if not self.stage_lists:
            return super().group_matcher(coarse)
        lists = "|".join(self.stage_lists)
        return {
            "stem": r"^patch_embeds?\.(?:0\.)?(?:proj|norm)",
            "blocks": [(rf"^(?:{lists}|position\.stages)\.(\d+)", None), (r"^norm|^cls_token", (99999,))],
        }


def padded_grid(image: tuple[int, int], patch: tuple[int, int], prefix: int = 0) -> Grid:
    """Return the grid of an image that is padded to a multiple of `patch` = (height, width), all in pixels.

    Raises:
        ValueError: if the image is empty.
    """
    if min(image) < 1:
        raise ValueError(f"`img_size` must be at least 1 x 1, got {image[0]} x {image[1]}.")
    return Grid(ceiling(image[0], patch[0]), ceiling(image[1], patch[1]), prefix)


torch.fx.wrap("padded_grid")  # it compares sizes, so torch.fx records the call as one node
