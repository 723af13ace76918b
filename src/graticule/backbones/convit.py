"""ConViT: layers with gated positional attention, and a class token that joins after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.layers.tokenizers import fit_images
from graticule.position.grid import Crop, Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder


class ConVit(VisionTransformer):
    """ConViT as published: a learnable table, gated positional attention in ten of twelve layers, then a class token.

    The class token joins the patches after the last layer with positional attention ('gpsa'), or before the first layer
    if there is none, and has no position. So `encoding="learnable + gpsa(layers=4)"` determines both the layers with
    gates and where the class token joins. In layers with gates the projection of the values starts as the identity.

    Parameter names are timm's, except in position encodings and in projections of layers with gates;
    `load_state_dict` accepts timm's. timm computes the positions of square grids only; here, other grids have the same
    formula.

    Reference: ConViT: Improving Vision Transformers with Soft Convolutional Inductive Biases (d'Ascoli et al., 2021).

    Args:
        position: builds the position of the patches.
        global_pool: 'token' (class token), 'avg' or ''.
        others: as `VisionTransformer`.
    """

    takes = VisionTransformer.takes - {"key_bias", "value_bias"}
    whole_grid = "its class token joins between the blocks"
    takes_why = "The class token has no position, and a function of all tokens cannot leave it out."
    published_parts = tuple(  # in timm
        (f"blocks.*.attn.qkv.{part}", f"blocks.*.attn.{part}") for part in ("qk", "v")
    )
    default_encoding = "learnable + gpsa(layers=10)"
    encoding_options: ClassVar = {"gpsa": {"bias": True}}

    def __init__(
        self, position: PositionBuilder, qkv_bias: bool = False, global_pool: str = "token", **kwargs: Any
    ) -> None:
        super().__init__(position, qkv_bias=qkv_bias, global_pool=global_pool, **{"fc_norm": False, **kwargs})

    def build_position(self, position: PositionBuilder, num_heads: int) -> None:
        """Build the position of the patches, and find the layer before which the class token joins.

        Raises:
            ValueError: if the last layer has positional attention.
        """
        super().build_position(position, num_heads)
        with torch.no_grad():
            positions = self.position(self.grid)
        if any(layer.rotary is not None and layer.rotary.channels is not None for layer in positions):
            raise ValueError(
                "`encoding` must keep the channels of queries and keys where the class token has no position, got one "
                "that doubles them (pope); use another rotation, or `class_token=False`."
            )
        joins_at = 1 + max((i for i, layer in enumerate(positions) if layer.positional is not None), default=-1)
        if joins_at == self.depths[0] and self.has_class_token:
            raise ValueError(
                f"`encoding` must leave the last of the {self.depths[0]} layers without positional attention, for the "
                "class token to join; use gpsa(layers=...), or `class_token=False`."
            )
        if not hasattr(self, "joins_at"):  # else the position of an existing model is replaced
            self.joins_at = joins_at

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the grid of the patches of an image of `image` = (height, width), in pixels."""
        return self.patch_embed.grid(image)

    def position_grids(self, grid: Grid) -> list[Grid]:
        return [grid]

    def embed(self, x: Tensor, stage: int = 0) -> Tensor:
        """Turn images into the tokens of their patches, (B, H * W, D)."""
        return self.tokenize(fit_images(x, self.coarsest_patch, self.fit), stage).contiguous()

    def each_layer(
        self, images: Tensor, crop: Crop | None = None, keep: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Grid]]:
        """Yield the tokens (B, N, D) after each block, and their grid, from images (B, C, height, width)."""
        grid = self.grid_of(images).cropped(crop)
        self.select_patches(images, grid, keep)
        positions, prefix = self.position(grid), self._prefix_tokens()
        layers, grids = [], []
        for index in range(self.depths[0]):
            position, at = positions[index], grid
            if prefix and index >= self.joins_at:
                position = _joined(position, torch.cat(prefix, 1), index == self.joins_at)
                at = _joined_grid(grid, self.num_prefix_tokens)
            layers.append((self.block(0, index), position, (at,)))
            grids.append(at)
        for index, tokens in enumerate(self.run_blocks(self.embed(images), layers)):
            yield tokens, grids[index]

    def keep(self, count: int) -> None:
        """Keep the first `count` blocks; without the others the class token may never join."""
        super().keep(count)
        if count <= self.joins_at:
            self.prefix_names, self.num_prefix_tokens = (), 0

    def finish(self) -> None:
        """Give layers with positional attention a separate projection of the values, and initialize the weights."""
        for index in range(self.joins_at):
            attention: Any = self.blocks[index].attn
            attention.qkv = ContentAndValues(self.embed_dim, bias=attention.qkv.bias is not None)
        super().finish()

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize linear weights; with gates, the projection of the values starts as the identity."""
        super().init_module(name, module)
        if name.endswith(".attn.qkv.v"):
            nn.init.eye_(cast("nn.Linear", module).weight)


def _joined(position: LayerPosition, prefix: Tensor, first: bool) -> LayerPosition:
    """Return a layer's position with prefix tokens (1, n, D); they join before it if it is the `first` with them."""
    joined = position.with_prefix(prefix.shape[1])
    if not first:
        return joined
    # `added_to_stream` is added to the patches; all else acts on the tokens after the prefix tokens have joined
    both = LayerPosition(map_before=partial(_join, prefix)).merge(joined._replace(added_to_stream=None))
    return both._replace(added_to_stream=position.added_to_stream)


def _join(prefix: Tensor, x: Tensor) -> Tensor:
    """Put prefix tokens before the patches x: (B, H * W, D)."""
    return torch.cat([prefix.expand(x.shape[0], -1, -1), x], 1)


def _joined_grid(grid: Grid, prefix: int) -> Grid:
    return replace(grid, prefix=prefix)


# a position and a grid are not tensors, so torch.fx records the calls as one node each
torch.fx.wrap("_joined")
torch.fx.wrap("_joined_grid")
torch.fx.wrap("fit_images")


class ContentAndValues(nn.Module):
    """A projection of tokens to queries and keys by one matrix, and to values by another.

    Args:
        dim: D.
        bias: whether both have a bias.
    """

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.qk = nn.Linear(dim, 2 * dim, bias=bias)
        self.v = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Project tokens (..., D) to queries, keys and values, (..., 3D)."""
        return torch.cat([self.qk(x), self.v(x)], -1)


register_sizes(
    ConVit,
    {
        "convit_tiny": Size(5_710_512, {"embed_dim": 192, "num_heads": 4}, hub="fb_in1k"),
        "convit_small": Size(27_777_322, {"embed_dim": 432, "num_heads": 9}, hub="fb_in1k"),
        "convit_base": Size(86_540_040, {"embed_dim": 768, "num_heads": 16}, hub="fb_in1k"),
    },
    crop_pct=0.875,
)
register_small(
    "ConViT", "convit_tiny", img_size=32, embed_dim=24, depth=2, num_heads=3, encoding="learnable + gpsa(layers=1)"
)
