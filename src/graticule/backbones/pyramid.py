"""Base class of backbones with several stages: one position per stage, and a grid that halves between stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from timm.models.swin_transformer import PatchMerging, checkpoint_filter_fn
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.staged import Stage
from graticule.checkpoints.layouts import rename_by_timm, rename_library
from graticule.encodings.forms.mixing import TokenMixing
from graticule.encodings.forms.pyramid import PyramidPosition
from graticule.layers.tokenizers import Patches, fit_images, patch_grid
from graticule.position.grid import Grid
from graticule.position.position import PositionBuilder
from graticule.position.windows import Windows


class Pyramid(Backbone):
    """Stages of blocks, each on a grid with half the sides of the previous one.

    It accepts any image whose sides are multiples of the coarsest patch, whatever `img_size` is. The final norm is
    before the pooling, as in PVT's and Swin's code.
    """

    #: Number of stages, from the first, that get an absolute encoding if one is requested; None for all.
    absolute_stages: ClassVar[int | None] = None
    #: True if a later stage has the previous stage's table, merged like the tokens.
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

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the first stage's grid of an image of `image` = (height, width), in pixels."""
        return patch_grid(image, self.patch_size, fit="pad") if self.pads else super().grid_at(image)

    def position_grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of each stage; `grid` is the first stage's."""
        return grid.pyramid(len(self.depths), self.num_prefix_tokens, self.pads)

    def merge_table(self, stage: int, table: Tensor, grid: Grid) -> Tensor:
        """Compute the table of a stage, (N, D), from the one of the previous stage, of `grid`, as for tokens."""
        return self.tokenize(grid.to_map(table[None]), stage)[0].contiguous()

    def alternating_windows(self, stage: int, grid: Grid, together: bool = False) -> list[tuple[Windows]]:
        """Return the windows of the blocks of a stage: every second one shifts them by half a window.

        An axis that one window covers is not shifted, and with `together` neither is the other one.
        """
        kinds = Windows(grid, grid.within), _shifted_windows(grid, together)
        return [(kinds[index % 2],) for index in range(self.depths[stage])]

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
        self.grid = self.grid_at(self.img_size)  # with the windows of the remaining stages
        self.reset_classifier(0, "")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group the parameters: the stem, every block with its position parameters, the rest.

        What a stage has before its blocks is in the group of its first block, as in timm. With `coarse` the groups are
        stages.
        """
        if not self.stage_lists:
            return super().group_matcher(coarse)
        layers = "|".join({re.escape(name.split(".", 2)[2]) for name in self.position.layer_lists()}) or "(?!)"
        stages = rf"^(?:{'|'.join(self.stage_lists)}|position\.stages)\.(\d+)"
        of_blocks = rf"^(?:{self.stage_lists[-1]}|position\.stages)\.(\d+)\.(?:(?:blocks|{layers})\.)?(\d+)\b"
        return {
            "stem": r"^patch_embeds?\.(?:0\.)?(?:proj|norm)",
            "blocks": [
                *([(stages, None)] if coarse else [(of_blocks, None), (stages, (0,))]),
                (r"^norm|^cls_token", (99999,)),
            ],
        }


def _shifted_windows(grid: Grid, together: bool) -> Windows:
    window = grid.within.shape
    several = [side > step for side, step in zip(grid.shape, window, strict=True)]
    if together:
        several = [all(several)] * 2
    return Windows(
        grid, grid.within, tuple(step // 2 if more else 0 for step, more in zip(window, several, strict=True))
    )


for _name in ("_shifted_windows", "patch_grid", "fit_images"):
    torch.fx.wrap(_name)  # they compare sizes, so torch.fx records each call as one node


class MergingPyramid(Pyramid):
    """A pyramid that merges 2 x 2 patches between stages, whose channels double; the names are from Swin's code.

    An absolute encoding is added before the first stage; for the later stages it is merged like the tokens.
    """

    stage_lists = ("layers",)
    absolute_stages = 1
    merges = True
    pads = True
    timm_filter = staticmethod(checkpoint_filter_fn)

    def build_stages(
        self,
        block: Callable[[int, int, float], nn.Module],
        norm_layer: Callable[[int], nn.Module],
        merging_layer: Callable[..., nn.Module] = PatchMerging,
        patch_norm: bool = True,
    ) -> None:
        """Build the patch embedding and the stages.

        Args:
            block: builds a block from its stage, its index in the stage and its rate of stochastic depth.
            norm_layer: builds a norm from its channels.
            merging_layer: builds the merging before a stage from the channels before and after it, and `norm_layer`.
            patch_norm: whether the patch embedding ends with a norm.
        """
        dims, patch = self.embed_dims, self.patch_size
        padded = tuple(side * step for side, step in zip(self.grid.shape, patch, strict=True))
        norm = norm_layer if patch_norm else None
        self.patch_embed = Patches(padded, patch, self.in_chans, dims[0], norm_layer=norm)
        self.patch_embed.img_size = None  # sizes are not checked, as images are padded
        rates = iter(self.drop_path_rates())
        self.layers = nn.ModuleList()
        for stage, dim in enumerate(dims):
            downsample = merging_layer(dims[stage - 1], dim, norm_layer) if stage else None
            blocks = [block(stage, index, next(rates)) for index in range(self.depths[stage])]
            self.layers.append(Stage(blocks, downsample))

    def tokenize(self, x: Tensor, stage: int) -> Tensor:
        """Cut images into patches, or merge the patches of the previous stage's map; returns tokens (B, H * W, D)."""
        tokens: Tensor
        if stage == 0:
            tokens = self.patch_embed(fit_images(x, self.patch_size, "pad"))
            return tokens
        merge, features = cast("Stage", self.layers[stage]).downsample, x.movedim(1, -1)  # (B, H, W, D)
        tokens = merge(features)
        return tokens.flatten(1, 2)

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of Microsoft's code or torchvision under our names, any other one unchanged.

        It has a stage's merging at the end of the previous stage, saves masks, and names a table `absolute_pos_embed`.
        """
        state = rename_library(state)
        tables = [name for name, _ in self.named_parameters() if name.endswith(".pos_embed")]
        has_stages_merged_last = "layers.0.downsample.reduction.weight" in state  # also with our names of position
        position = {name: state[name] for name in state if has_stages_merged_last and name.startswith("position.")}
        others = {name: value for name, value in state.items() if name not in position}
        renamed = rename_by_timm(self, others, self.timm_filter) | position
        if len(tables) == 1 and "absolute_pos_embed" in renamed:
            renamed[tables[0]] = renamed.pop("absolute_pos_embed")
        return renamed
