"""ViT-Adapter: feature maps of four resolutions from a plain pretrained ViT."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.dense.deformable import DeformableAttention, WindowedAttention, cell_centers, check_windowed
from graticule.dense.features import FeatureReader, register_neck, square_patch
from graticule.layers.attention import Attention
from graticule.position.grid import Crop, Grid
from graticule.registry.fields import Bounded, Ratio, ShareBelowOne, Side, SmallCount

Shapes = list[tuple[int, int]]
_norm = partial(nn.LayerNorm, eps=1e-6)


class SpatialPrior(nn.Module):
    """Computes maps of strides 4, 8, 16 and 32 from images by convolutions, all with the channels of the ViT.

    Reference: ViT-Adapter (Chen et al., 2023), section 3.2; the names are from its code.

    Args:
        in_chans: channels of the images.
        width: channels of the stem.
        dim: D.
        first: with 1, the finest map keeps the channels of the stem.
    """

    def __init__(self, in_chans: int, width: int, dim: int, first: int = 0) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_conv(in_chans, width, 2), *_conv(width, width), *_conv(width, width), nn.MaxPool2d(3, 2, 1)
        )
        self.conv2 = nn.Sequential(*_conv(width, 2 * width, 2))
        self.conv3 = nn.Sequential(*_conv(2 * width, 4 * width, 2))
        self.conv4 = nn.Sequential(*_conv(4 * width, 4 * width, 2))
        self.fc1 = nn.Identity() if first else nn.Conv2d(width, dim, 1)
        self.fc2 = nn.Conv2d(2 * width, dim, 1)
        self.fc3 = nn.Conv2d(4 * width, dim, 1)
        self.fc4 = nn.Conv2d(4 * width, dim, 1)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the four maps (B, D, H, W) of images (B, C, height, width)."""
        c1 = self.stem(images)
        c2 = self.conv2(c1)
        c3 = self.conv3(c2)
        c4 = self.conv4(c3)
        return [self.fc1(c1), self.fc2(c2), self.fc3(c3), self.fc4(c4)]


def _conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def _to_maps(tokens: Tensor, shapes: Shapes) -> list[Tensor]:
    """Return the maps (B, D, H, W) of tokens (B, S, D)."""
    parts = tokens.split([height * width for height, width in shapes], 1)
    return [part.mT.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


class DepthwiseOfLevels(nn.Module):
    """Applies one depth-wise 3 x 3 convolution to each of several maps, given as tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, shapes: Shapes) -> Tensor:
        """Map tokens (B, S, D) of maps of (H, W) to (B, S, D)."""
        return torch.cat([self.dwconv(level.contiguous()).flatten(2).mT for level in _to_maps(x, shapes)], 1)


class ConvolutionalMlp(nn.Module):
    """An MLP with a depth-wise convolution before its activation."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = DepthwiseOfLevels(hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, shapes: Shapes) -> Tensor:
        """Map tokens (B, S, D) of maps of (H, W) to (B, S, D)."""
        return self.fc2(self.act(self.dwconv(self.fc1(x), shapes)))


class Injector(nn.Module):
    r"""Attention of the tokens of the ViT to the spatial features.

    .. math:: x' = x + \gamma \, attention(LN(x), LN(c))

    gamma is initialized to zero, so a pretrained ViT is unchanged at first.
    """

    def __init__(self, dim: int, levels: int, num_heads: int, points: int, ratio: float) -> None:
        super().__init__()
        self.query_norm = _norm(dim)
        self.feat_norm = _norm(dim)
        self.attn = DeformableAttention(dim, levels, num_heads, points, ratio)
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, at: Tensor, spatial: Tensor, shapes: Shapes) -> Tensor:
        """Map tokens x: (B, N, D) at `at` (1, N, 1, 2) to (B, N, D); `spatial` is (B, S, D) of maps of (H, W)."""
        return x + self.gamma * self.attn(self.query_norm(x), at, self.feat_norm(spatial), shapes)


class Extractor(nn.Module):
    r"""Attention of the spatial features to the tokens of the ViT.

    .. math:: c' = c + attention(LN(c), LN(x)), \quad c'' = c' + MLP(LN(c'))
    """

    def __init__(self, dim: int, num_heads: int, points: int, ratio: float, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.query_norm = _norm(dim)
        self.feat_norm = _norm(dim)
        self.attn = DeformableAttention(dim, 1, num_heads, points, ratio)
        self.ffn = ConvolutionalMlp(dim, int(dim * mlp_ratio))
        self.ffn_norm = _norm(dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, spatial: Tensor, at: Tensor, x: Tensor, grid: tuple[int, int], shapes: Shapes) -> Tensor:
        """Map spatial features (B, S, D) at `at` (1, S, 1, 2) to (B, S, D); x: (B, H * W, D), the tokens."""
        spatial = spatial + self.attn(self.query_norm(spatial), at, self.feat_norm(x), [grid])
        return spatial + self.drop_path(self.ffn(self.ffn_norm(spatial), shapes))


class Interaction(nn.Module):
    """An injector before some blocks of the ViT and an extractor after them; the last has two more extractors."""

    def __init__(
        self, dim: int, num_heads: int, points: int, ratio: float, mlp_ratio: float, drop_path: float, last: bool
    ) -> None:
        super().__init__()
        self.injector = Injector(dim, 3, num_heads, points, ratio)
        extractor = partial(Extractor, dim, num_heads, points, ratio, mlp_ratio, drop_path)
        self.extractor = extractor()
        self.extra_extractors = nn.ModuleList(extractor() for _ in range(2 if last else 0))

    def extract(self, spatial: Tensor, at: Tensor, x: Tensor, grid: tuple[int, int], shapes: Shapes) -> Tensor:
        """Return the spatial features (B, S, D) after all extractors."""
        for extractor in (self.extractor, *self.extra_extractors):
            spatial = extractor(spatial, at, x, grid, shapes)
        return spatial


@register_neck("adapter")
class Adapter(FeatureReader):
    """Exchanges features between a convolutional branch and the blocks of a plain ViT by deformable attention.

    The branch has maps of strides 8, 16 and 32, whose cells are further tokens. Before each group of blocks the tokens
    of the ViT attend to them (injector); after it they attend to the tokens of the ViT (extractor). The blocks receive
    position information as in the ViT alone, before the injector: any encoding and joining, at any size.

    Both published forms are options: `added='each'` adds the tokens after group i to level i (segmentation), `'last'`
    adds those after the last block to all levels; with `window=14` all blocks except the last of each group attend
    within windows (detection). The norms are batch norms; `nn.SyncBatchNorm.convert_sync_batchnorm` converts them for
    several processes. Prefix tokens of the ViT pass through its blocks only and are not exchanged; the published models
    have none. They have a layer scale (`init_values=1.0` of the backbone).

    Reference: Vision Transformer Adapter for Dense Predictions (Chen et al., 2023).

    Args:
        backbone: a plain ViT with patches of 16 x 16 pixels.
        groups: number of groups of blocks; it divides the depth.
        width: channels of the stem of the spatial prior.
        points: points that a query samples per level.
        heads: heads of deformable attention.
        ratio: channels of the values of deformable attention, as a multiple of D.
        mlp_ratio: hidden channels of the MLPs of the extractors, as a multiple of D.
        drop_path: stochastic depth of these MLPs.
        added: 'each' or 'last', see above.
        window: side of the windows, in patches; 0 for none.
        first: index of the finest of the four maps that is returned, 0 or 1; detectors of one stage need no map of
            stride 4.
    """

    not_decayed = ("level_embed",)

    def __init__(
        self,
        backbone: Backbone,
        groups: SmallCount = 4,
        width: int = 64,
        points: SmallCount = 4,
        heads: Bounded = 6,
        ratio: Ratio = 1.0,
        mlp_ratio: Ratio = 0.25,
        drop_path: ShareBelowOne = 0.0,
        added: Literal["each", "last"] = "each",
        window: Side = 0,
        first: int = 0,
    ) -> None:
        super().__init__()
        if len(backbone.depths) > 1 or square_patch(backbone.coarsest_patch) != 16:
            raise ValueError(
                "`neck` must not be 'adapter' unless the backbone is a plain ViT with patches of 16 x 16 pixels, got "
                f"{type(backbone).__name__} of {len(backbone.depths)} stages."
            )
        (depth,), (dim,) = backbone.depths, backbone.embed_dims
        if groups < 1 or depth % groups or (added == "each" and groups != 4):
            raise ValueError(
                f"`groups` must divide the {depth} blocks, and be 4 where each group is added to a level, got {groups}."
            )
        if first not in (0, 1):
            raise ValueError(f"`first` must be 0 or 1, got {first}.")
        if window and backbone.num_prefix_tokens:
            raise ValueError(f"`window` must be 0 for a backbone with prefix tokens, got {window}.")
        backbone.prune_intermediate_layers([depth - 1], prune_norm=True)
        self.added = added
        self.blocks_per_group = depth // groups
        self.level_embed = nn.Parameter(torch.empty(3, dim))
        self.spm = SpatialPrior(backbone.in_chans, width, dim, first)
        self.interactions = nn.ModuleList(
            Interaction(dim, heads, points, ratio, mlp_ratio, drop_path, last=group == groups - 1)
            for group in range(groups)
        )
        self.up = nn.Identity() if first else nn.ConvTranspose2d(dim, dim, 2, 2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(dim) for _ in range(4))
        self.first = first
        if first:
            self.norms[0] = nn.Identity()
        self.channels, self.strides = (dim,) * (4 - first), (4, 8, 16, 32)[first:]
        self.init_weights()
        if window:
            with torch.no_grad():
                positions = backbone.position(backbone.grid)
            for index in range(depth):
                block: Any = backbone.block(0, index)
                if (index + 1) % self.blocks_per_group == 0:
                    continue
                check_windowed(positions[index])
                if type(getattr(block, "attn", None)) is not Attention:
                    kind = type(block).__name__
                    raise ValueError(f"`window` must be 0 for blocks without ordinary attention, got {kind}.")
                block.attn = WindowedAttention(block.attn, window)

    @torch.no_grad()
    def init_weights(self) -> None:
        nn.init.normal_(self.level_embed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, DeformableAttention):
                module.reset_parameters()

    def forward(self, backbone: Backbone, images: Tensor, crop: Crop | None = None) -> list[Tensor]:
        """Return maps of strides 4 (unless `first` is 1), 8, 16 and 32 of images whose sides are multiples of 32."""
        grid = backbone.grid_of(images).cropped(crop)
        if grid.height % 2 or grid.width % 2:
            height, width = images.shape[-2:]
            raise ValueError(f"`images` must have sides that are multiples of 32 pixels, got {height} x {width}.")
        finest, *maps = self.spm(images)
        shapes = [(x.shape[-2], x.shape[-1]) for x in maps]
        spatial = torch.cat([x.flatten(2).mT + level for x, level in zip(maps, self.level_embed, strict=True)], 1)
        tokens, spatial = self.exchange(backbone, images, grid, spatial, shapes)
        maps = _to_maps(spatial, shapes)
        levels, outputs = [finest if self.first else self.up(maps[0]) + finest, *maps], []
        for level, factor in list(enumerate((4.0, 2.0, 1.0, 0.5)))[self.first :]:
            x = grid.to_map(tokens[level if self.added == "each" else -1])
            x = x if factor == 1 else F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
            outputs.append(self.norms[level](levels[level] + x))
        return outputs

    def exchange(
        self, backbone: Backbone, images: Tensor, grid: Grid, spatial: Tensor, shapes: list[tuple[int, int]]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the tokens of the ViT after each group of blocks, (B, N, D) each, and the spatial features, (B, S, D).

        `spatial` has the features of the images, (B, C, height, width), in maps of (H, W).
        """
        positions, plane = backbone.position(grid), (grid.height, grid.width)
        at, at_spatial = cell_centers([plane], spatial), cell_centers(shapes, spatial)
        x, after, places = backbone.embed(images), [], backbone.block_arguments(0, grid)
        recompute = backbone.grad_checkpointing and torch.is_grad_enabled()
        for group, interaction in enumerate(self.interactions):
            assert isinstance(interaction, Interaction)
            for index in range(group * self.blocks_per_group, (group + 1) * self.blocks_per_group):
                x = positions[index].enter_block(x)
                x = backbone.pos_drop(x) if index == 0 else x
                if index == group * self.blocks_per_group:
                    prefix, patches = grid.split(x)
                    x = torch.cat([prefix, interaction.injector(patches, at, spatial, shapes)], 1)
                block, where = backbone.block(0, index), (positions[index], *places[index])
                x = backbone.recompute(block, x, *where) if recompute else block(x, *where)
                x = positions[index].leave_block(x)
            spatial = interaction.extract(spatial, at_spatial, grid.split(x)[1], plane, shapes)
            after.append(x)
        return after, spatial
