"""What backbones of several stages share: the road through the stages, and timm's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.layers.helpers import to_2tuple
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graticule.backbones.vision_transformer import init_linear
from graticule.checkpoints import register_names
from graticule.checks import checked
from graticule.encodings import MixingEncoding, PositionBuilder, PyramidPosition, check_fields
from graticule.grid import Grid
from graticule.layer_position import LayerPosition

POOLS = ("", "token", "avg")


class Pyramid(nn.Module, ABC):
    """Stages of blocks, each on a grid of half the sides of the one before.

    Any image whose sides are multiples of the coarsest patch goes in, whatever `img_size` is. The final norm
    stands before the pooling, as in PVT's and Swin's code.

    Args:
        position: builds the position of a stage.
        img_size: pixels, a side or (height, width).
        patch_size: pixels, a side or (height, width), of the first stage.
        in_chans: channels of the image.
        num_classes: 0 for no head.
        global_pool: 'token' (class token), 'avg' or '' (none).
        embed_dims: D of each stage.
        depths: blocks of each stage.
        num_heads: h of each stage.
        prefix: prefix tokens of the last stage.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout on the tokens that enter a stage.
        norm_layer: builds the final norm from D.
        windows: side of each stage's windows, which a position may want to know.
    """

    #: What an encoding may say to a layer of this family, fields of `LayerPosition`.
    takes: frozenset[str] = frozenset({"pre", "before", "inner", "after"})
    #: What it must say.
    needs: frozenset[str] = frozenset()
    #: How many stages, from the first, have an absolute encoding if one is asked for; None for all.
    absolute_stages: int | None = None
    #: Whether odd sides are filled up before they are halved; `embed` then does so.
    pads: bool = False
    #: Whether the table of a later stage is that of the stage before, merged as the tokens are.
    merges: bool = False
    #: The module lists that have an entry for every stage, joined by '|'.
    stage_lists: str

    @checked
    def __init__(
        self,
        position: PositionBuilder,
        *,
        img_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        in_chans: int,
        num_classes: int,
        global_pool: str,
        embed_dims: Sequence[int],
        depths: Sequence[int],
        num_heads: Sequence[int],
        prefix: int,
        drop_rate: float,
        pos_drop_rate: float,
        norm_layer: Callable[[int], nn.Module],
        windows: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if not len(embed_dims) == len(depths) == len(num_heads):
            raise ValueError(
                "`embed_dims`, `depths` and `num_heads` must say something for every stage, got "
                f"{len(embed_dims)}, {len(depths)} and {len(num_heads)} stages."
            )
        _check(global_pool, prefix, num_classes)
        for name, value in (("depths", min(depths, default=0)), ("in_chans", in_chans)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.embed_dims, self.depths = tuple(embed_dims), tuple(depths)
        self.num_features = self.head_hidden_size = self.embed_dims[-1]
        self.num_prefix_tokens = prefix
        self.patch_size = to_2tuple(patch_size)
        self.img_size = to_2tuple(img_size)
        self.grad_checkpointing = False
        self.grid = self.grid_at(self.img_size)
        self.position = PyramidPosition(
            position,
            self.grid,
            dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            prefix=prefix,
            windows=windows,
            absolute_stages=self.absolute_stages,
            merge=[partial(self.merge_table, stage) for stage in range(1, len(depths))] if self.merges else None,
            pad=self.pads,
        )
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.feature_info = [
            {"module": self._block_name(stage), "num_chs": dim, "reduction": max(self.patch_size) << stage}
            for stage, dim in enumerate(self.embed_dims)
        ]
        self.norm = norm_layer(self.num_features)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._classifier()
        register_names(self)

    def _finish(self) -> None:
        """Draw the weights and check what the layers are told; a family calls it when all its layers are there."""
        self.init_weights()
        with torch.no_grad():
            check_fields(self.position(self.grid), self.takes, self.needs, type(self).__name__)

    # What a family says of itself

    @abstractmethod
    def embed(self, stage: int, x: Tensor) -> Tensor:
        """Turn images or the map of the stage before, (B, C, height, width), into tokens (B, N, D), row by row."""

    def position_grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of every stage, `grid` being the first's."""
        return grid.pyramid(len(self.depths), self.num_prefix_tokens, self.pads)

    def merge_table(self, stage: int, table: Tensor, grid: Grid) -> Tensor:
        """Make the table of a stage, (N, D), from that of the stage before, of `grid`, as the tokens are made."""
        return self.embed(stage, grid.to_map(table[None]))[0]

    @abstractmethod
    def block(self, stage: int, index: int) -> Any:
        """Return a block of a stage: a module of tokens, `LayerPosition` and grid."""

    @abstractmethod
    def _block_name(self, stage: int) -> str:
        """Name of the module that holds the last block of a stage."""

    def _prefix(self) -> Tensor | None:
        """The prefix tokens of the last stage, (1, prefix, D)."""
        return None

    def _classifier(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()

    @torch.no_grad()
    def init_weights(self, mode: str = "") -> None:
        """Draw linear weights and prefix tokens from a normal of std 0.02, cut at 2 (absolute); biases are zero."""
        if mode:
            raise ValueError(f"`mode` must be '', the one initialisation that there is, got {mode!r}.")
        for name, module in self.named_modules():
            if not name.startswith("position."):
                init_linear(module)
        prefix = self._prefix()
        if prefix is not None:
            trunc_normal_(prefix, std=0.02)

    # What timm's tools ask of a model

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of the class token and of all that says where tokens are.

        The weights that mix tokens are left to the optimizer's rule, as any weight: with timm's, what has two
        dimensions or more decays. So it is in timm's gMLP and in PosMLP's code.
        """
        mixing = [module for module in self.position.modules() if isinstance(module, MixingEncoding)]
        decayed = {id(parameter) for module in mixing for parameter in module.parameters()}
        kept = {name for name, parameter in self.position.named_parameters() if id(parameter) not in decayed}
        published = {theirs for theirs, own in self.position.published_names().items() if own in kept}
        return {f"position.{name}" for name in kept} | published | {"cls_token"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that put parameters into a group a stage, with what it is told of position, and the end."""
        return {
            "stem": r"^patch_embeds?\.(?:0\.)?(?:proj|norm)",
            "blocks": [(rf"^(?:{self.stage_lists}|position\.stages)\.(\d+)", None), (r"^norm|^cls_token", (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute each block's activations again in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> Any:
        """Return the classifier."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a fresh classifier of `num_classes` in; 0 for none."""
        global_pool = self.global_pool if global_pool is None else global_pool
        _check(global_pool, self.num_prefix_tokens, num_classes)
        self.global_pool = global_pool
        self.num_classes = num_classes
        weight = next(self.norm.parameters())
        self.head = self._classifier().to(weight.device, weight.dtype)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Make another image size the one that position information is held for."""
        grid = self.grid_at(to_2tuple(img_size))
        self.position.set_grid(grid)
        self.img_size, self.grid = to_2tuple(img_size), grid

    # The forward pass, from the image to the logits

    def grid_at(self, image: tuple[int, int]) -> Grid:
        """Return the first stage's grid of an image of `image` = (height, width), in pixels.

        Raises:
            ValueError: if a side is not a multiple of the coarsest patch, or empty where odd sides are filled up.
        """
        if self.pads:
            if min(image) < 1:
                raise ValueError(f"`img_size` must be at least 1 x 1, got {image[0]} x {image[1]}.")
            return Grid(*(-(-side // patch) for side, patch in zip(image, self.patch_size, strict=True)))
        step = 2 ** (len(self.depths) - 1)
        coarse = Grid.of_image(image, self.coarsest_patch)
        return Grid(coarse.height * step, coarse.width * step)

    @property
    def coarsest_patch(self) -> tuple[int, int]:
        """(height, width) in pixels of a patch of the last stage."""
        step = 2 ** (len(self.depths) - 1)
        return self.patch_size[0] * step, self.patch_size[1] * step

    def each_layer(self, images: Tensor) -> Iterator[tuple[Tensor, Grid]]:
        """Yield the tokens (B, N, D) after each block, and their grid, from images (B, C, height, width)."""
        grid = self.grid_at((images.shape[-2], images.shape[-1]))
        positions = iter(self.position(grid))
        x = images
        for stage, at in enumerate(self.position_grids(grid)):
            x = self.embed(stage, x)
            if at.prefix:
                prefix = self._prefix()
                assert prefix is not None
                x = torch.cat([prefix.expand(x.shape[0], -1, -1), x], 1)
            for index in range(self.depths[stage]):
                position: LayerPosition = next(positions)
                x = position.enter(x)
                if index == 0:
                    x = self.pos_drop(x)
                block = self.block(stage, index)
                if self.grad_checkpointing and torch.is_grad_enabled():
                    x = checkpoint(block, x, position, at, use_reentrant=False)
                else:
                    x = block(x, position, at)
                x = position.leave(x)
                yield x, at
            if stage + 1 < len(self.depths):
                x = at.to_map(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Turn images (B, C, height, width) into the last stage's tokens (B, N, D) after the norm."""
        for tokens, _ in self.each_layer(x):
            x = tokens
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return what chosen stages make of images (B, C, height, width), as timm does.

        Args:
            x: images (B, C, height, width).
            indices: the last n stages if an int, these stages if a list, all if None.
            norm: apply the final norm to the last stage's.
            stop_early: run no stage behind the last one wanted.
            output_fmt: 'NCHW', the one that there is.
            intermediates_only: return the list alone, without the final tokens, which are those of the last stage
                that was run, behind the norm if that is the last one.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"`output_fmt` must be 'NCHW', got {output_fmt!r}.")
        take, last = feature_take_indices(len(self.depths), indices)
        ends = [sum(self.depths[: stage + 1]) for stage in range(len(self.depths))]
        maps = []
        layer = 0
        for layer, (tokens, grid) in enumerate(self.each_layer(x), start=1):
            x = tokens
            if layer in ends and ends.index(layer) in take:
                final = norm and layer == ends[-1]
                maps.append(grid.to_map(self.norm(tokens) if final else tokens).contiguous())
            if stop_early and layer == ends[last]:
                break
        if intermediates_only:
            return maps
        return self.norm(x) if layer == ends[-1] else x, maps

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool tokens (B, N, D) and classify: (B, num_classes), or (B, D) with `pre_logits`."""
        if self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(1)
        elif self.global_pool == "token":
            x = x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images (B, C, height, width): (B, num_classes)."""
        return self.forward_head(self.forward_features(x))


def _check(global_pool: str, prefix: int, num_classes: int) -> None:
    if num_classes < 0:
        raise ValueError(f"`num_classes` must be at least 0, got {num_classes}.")
    if global_pool not in POOLS:
        raise ValueError(f"`global_pool` must be one of {', '.join(map(repr, POOLS))}, got {global_pool!r}.")
    if global_pool == "token" and not prefix:
        raise ValueError("`global_pool` must be 'avg' or '' where there is no class token, got 'token'.")
