"""Base class of Swin and Swin-MLP: stages that begin by merging patches; images of any size are padded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from graticule.backbones.pyramid import Pyramid


class MergingPyramid(Pyramid):
    """A pyramid that merges 2 x 2 patches between stages, whose channels double; the names are those of Swin's code.

    An absolute encoding is added before the first stage; for the later stages it is merged like the tokens.
    """

    stage_lists = ("layers",)
    absolute_stages = 1
    merges = True
    pads = True

    def build_stages(
        self,
        block: Callable[[int, int, float], nn.Module],
        in_chans: int,
        drop_path_rate: float,
        norm_layer: Callable[[int], nn.Module],
        merging_layer: Callable[..., nn.Module] = PatchMerging,
        patch_norm: bool = True,
    ) -> None:
        """Build the patch embedding and the stages.

        Args:
            block: builds a block from its stage, its index in the stage and its rate of stochastic depth.
            in_chans: channels of the image.
            drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
            norm_layer: builds a norm from its channels.
            merging_layer: builds the merging before a stage from the channels before and after it, and `norm_layer`.
            patch_norm: whether the patch embedding ends with a norm.
        """
        dims = self.embed_dims
        embedding: Any = PatchEmbed  # timm declares an int, but accepts a pair as well
        norm = norm_layer if patch_norm else None
        self.patch_embed = embedding(None, self.patch_size, in_chans, dims[0], norm_layer=norm, strict_img_size=False)
        rates = iter(torch.linspace(0, drop_path_rate, sum(self.depths), device="cpu").tolist())
        self.layers = nn.ModuleList()
        for stage, dim in enumerate(dims):
            downsample = merging_layer(dims[stage - 1], dim, norm_layer) if stage else nn.Identity()
            blocks = [block(stage, index, next(rates)) for index in range(self.depths[stage])]
            self.layers.append(Stage(downsample, blocks))

    def tokenize(self, x: Tensor, stage: int) -> Tensor:
        """Cut images into patches, or merge the patches of the previous stage's map; returns tokens (B, H * W, D)."""
        tokens: Tensor
        if stage == 0:
            tokens = self.patch_embed(pad_to(x, self.patch_size))
        else:
            tokens = cast("Stage", self.layers[stage]).downsample(x.permute(0, 2, 3, 1)).flatten(1, 2)
        return tokens

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of Microsoft's code under our names, any other one unchanged.

        Microsoft's code has a stage's merging at the end of the previous stage, saves masks and coordinates, and names
        an absolute table `absolute_pos_embed`.
        """
        shift = int("layers.0.downsample.reduction.weight" in state)
        if not shift and not any(name.endswith((".attn_mask", ".relative_position_index")) for name in state):
            return state
        tables = [name for name, _ in self.named_parameters() if name.endswith(".pos_embed")]
        found = {}
        for name, value in state.items():
            stage, end, leaf = name.removeprefix("layers.").partition(".downsample.")
            if end:
                name = f"layers.{int(stage) + shift}.downsample.{leaf}"
            elif name == "absolute_pos_embed" and len(tables) == 1:
                name = tables[0]
            if not name.endswith((".attn_mask", ".relative_coords_table", ".relative_position_index")):
                found[name] = value
        return found

    def stage_blocks(self, stage: int) -> nn.ModuleList:
        """Return the blocks of a stage."""
        return cast("Stage", self.layers[stage]).blocks


class Stage(nn.Module):
    """A stage with timm's names: the merging before it, and its blocks."""

    def __init__(self, downsample: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)


def pad_to(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Pad images with zeros, at the bottom and on the right, to multiples of `patch` = (height, width)."""
    below, right = (-side % step for side, step in zip(images.shape[-2:], patch, strict=True))
    return F.pad(images, (0, right, 0, below)) if below or right else images


torch.fx.wrap("pad_to")  # it compares sizes, so torch.fx records the call as one node
