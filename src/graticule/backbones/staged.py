"""The stages of a backbone, and its forward pass from the image to the logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

from graticule.backbones.token_model import Crops, Images, TokenModel, check_image, forward_each
from graticule.layers.tokenizers import Fit, fit_images, on_axes, patch_grid
from graticule.position.grid import Crop, Grid
from graticule.position.position import PositionBuilder
from graticule.position.tokens import Subset
from graticule.registry.checks import format_value, sides
from graticule.registry.fields import Channels, Classes, Depth, ShareBelowOne, Side, SmallCount


class StagedModel(TokenModel):
    """Maps images to tokens or logits in one or several stages; `Backbone` adds timm's interface.

    A subclass turns an image into tokens (`tokenize`) and has blocks: modules that are called with tokens, their
    `LayerPosition` and their `Grid`. Its constructor takes a `PositionBuilder` as its first argument, and calls, in
    this order, `super().__init__`, `build_position`, `build_head` and `finish`; it may create parameters in between.
    All families have the arguments with a default, and pass them on as `**kwargs`.

    It accepts any image whose sides are multiples of the patch, or with another `fit` any image, whatever `img_size`
    is: position information is resampled or computed for its grid in the forward pass (`set_input_size` does it once).

    Arguments of several families mean the same in each, and a family describes only those that are its own: `position`
    builds the position (`graticule.encodings.PositionBuilder`), of a stage if there are several; `embed_dim` is D, of
    the first stage if it doubles from stage to stage; `depths` or `num_blocks` are the blocks and `num_heads` is h, of
    each stage; `groups` is s, the groups of channels of a mixing encoding, which it gets as `num_heads`; `mlp_ratio` is
    the hidden channels of the MLPs, as a multiple of D; `qkv_bias` says whether queries, keys and values have a bias;
    `attn_drop_rate` is the dropout on attention weights; `window_size` is the side or (rows, columns) of a window, in
    patches; `norm_layer` builds a norm from its channels, or is its name such as 'rmsnorm(eps=1e-5)', and `act_layer`
    is the MLPs' activation; `block_layer` builds a block.

    Args:
        patch_size: in pixels, one side or (height, width), of a patch of the first stage.
        embed_dims: D of each stage.
        depths: number of blocks of each stage.
        img_size: in pixels, one side or (height, width).
        in_chans: channels of the image.
        num_classes: 0 for no head.
        global_pool: one of `pools`.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout on the tokens that enter the first block of a stage.
        proj_drop_rate: dropout on the outputs of attention or mixing and of the MLPs, by the blocks of the family.
        drop_path_rate: stochastic depth of the last block (`drop_path_rates`).
        fit: what becomes of images whose sides are no multiples of the coarsest patch: 'exact' refuses them, 'floor'
            leaves out the rest at the bottom and on the right, as timm and transformers do, and 'pad' adds zeros there,
            as timm's `dynamic_img_pad`. Families that pad in each stage, such as Swin, have 'exact'.
    """

    #: Allowed values of `global_pool`.
    pools: ClassVar[tuple[str, ...]] = ("", "token", "avg")
    #: Names of the module lists with an entry per stage; empty with a single stage, whose blocks are `blocks`.
    stage_lists: ClassVar[tuple[str, ...]] = ()
    #: Default encoding of models that are built by name.
    default_encoding: ClassVar[str] = "learnable"
    #: True if the model cannot be built without its class token.
    needs_class_token: ClassVar[bool] = False
    #: Default options of encodings in this family, by the name of the encoding.
    encoding_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Arguments that select a module of the model; recipes and the command line do not offer them.
    hidden_arguments: ClassVar[frozenset[str]] = frozenset(
        {"position", "patch_norm"}.union(
            f"{part}_layer" for part in ("embed", "block", "norm", "act", "mlp", "head", "qkv", "attn", "merging")
        )
    )

    #: True if odd sides are padded before they are halved; `tokenize` must then pad them.
    pads: ClassVar[bool] = False
    #: The reason for which its blocks need all patches of the grid; '' if they take any subset (`keep`).
    whole_grid: ClassVar[str] = "its blocks need the whole grid"
    #: The numbers of axes of its inputs: 2 of images, 3 of videos and volumes.
    axes: ClassVar[tuple[int, ...]] = (2,)
    #: The share of the patches that training leaves out.
    patch_drop_rate: float = 0.0
    head: nn.Module
    #: h; one value per stage if there are several stages.
    num_heads: Any

    def __init__(
        self,
        *,
        patch_size: Side | tuple[Side, ...],
        embed_dims: Sequence[Channels],
        depths: Sequence[Depth],
        img_size: Side | tuple[Side, ...] = 224,
        in_chans: SmallCount = 3,
        num_classes: Classes = 1000,
        global_pool: str = "avg",
        drop_rate: ShareBelowOne = 0.0,
        pos_drop_rate: ShareBelowOne = 0.0,
        proj_drop_rate: ShareBelowOne = 0.0,
        drop_path_rate: ShareBelowOne = 0.0,
        fit: Fit = "exact",
    ) -> None:
        super().__init__()
        if len(embed_dims) != len(depths) or not depths:
            raise ValueError(
                f"`embed_dims` and `depths` must have a value for every stage, got {len(embed_dims)} and {len(depths)}."
            )
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.embed_dims, self.depths = tuple(embed_dims), tuple(depths)
        self.num_features = self.head_hidden_size = self.embed_dims[-1]
        self.num_prefix_tokens = 0
        numbers = [len(size) for size in (img_size, patch_size) if not isinstance(size, int)]
        axes = max(numbers, default=2)
        if axes not in self.axes or min(numbers, default=2) < 2:
            known = "height and width" if self.axes == (2,) else "2 or 3 axes"
            raise ValueError(f"`img_size` must have {known} in {type(self).__name__}, got {img_size}.")
        # typed as for an image, which nearly all models take
        self.img_size: tuple[int, int] = cast("Any", on_axes(img_size, axes))
        self.patch_size: tuple[int, int] = cast("Any", on_axes(patch_size, axes))
        if fit != "exact" and self.pads:
            raise ValueError(f"`fit` must be 'exact' in {type(self).__name__}, which pads each stage, got {fit!r}.")
        self.fit: Fit = fit
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.head_drop = nn.Dropout(drop_rate)
        self.proj_drop_rate, self.drop_path_rate = proj_drop_rate, drop_path_rate
        self.feature_info: list[dict[str, Any]] = []

    # Called by the constructor of a subclass

    def build_position(self, position: PositionBuilder, num_heads: int) -> None:
        """Build the position of the blocks; the prefix tokens must exist already."""
        self.prepare_position(num_heads)
        (dim,), (depth,) = self.embed_dims, self.depths
        self.position = position(self.grid, dim=dim, depth=depth, num_heads=num_heads)

    def prepare_position(self, num_heads: Any) -> None:
        """Check the pooling, and set the heads, the number of prefix tokens and the grid that position is built for."""
        self.check_pool(self.global_pool)
        self.num_heads = num_heads
        self.num_prefix_tokens = sum(token.shape[1] for token in self._prefix_tokens())
        self.grid = self.grid_at(self.img_size)

    def drop_path_rates(self) -> list[float]:
        """Return the rate of stochastic depth of each block: it grows linearly from 0 to the last block's."""
        return torch.linspace(0, self.drop_path_rate, sum(self.depths), device="cpu").tolist()

    def build_head(self, norm_layer: Callable[[int], nn.Module]) -> None:
        self.norm = norm_layer(self.num_features)
        self.head = self._classifier()

    # Defined or overridden by subclasses

    @abstractmethod
    def tokenize(self, x: Tensor, stage: int) -> Tensor:
        """Turn images or the map of the previous stage, (B, C, height, width), into tokens (B, H * W, D), row-major."""

    def stage_blocks(self, stage: int) -> nn.Sequential | nn.ModuleList:
        """Return the blocks of a stage, which are in the last of `stage_lists`."""
        if not self.stage_lists:
            return self.blocks
        stage_list = getattr(self, self.stage_lists[-1])[stage]
        return stage_list.blocks if isinstance(stage_list, Stage) else cast("nn.ModuleList", stage_list)

    def block(self, stage: int, index: int) -> nn.Module:
        return self.stage_blocks(stage)[index]

    def layer_grids(self, grid: Grid) -> list[Grid]:
        """Return, for each block, the grid of its input tokens, with windows; `grid` is the first stage's."""
        grids = self.position_grids(grid)
        return [at for at, depth in zip(grids, self.depths, strict=True) for _ in range(depth)]

    def block_arguments(self, stage: int, grid: Grid) -> list[tuple[Any, ...]]:
        """Return, for each block of a stage, its arguments after tokens and position: the `grid` of the stage."""
        return [(grid,)] * self.depths[stage]

    def check_pool(self, global_pool: str) -> None:
        """Check a value of `global_pool`."""
        if global_pool not in self.pools:
            raise ValueError(f"`global_pool` must be one of {', '.join(map(repr, self.pools))}, got {global_pool!r}.")
        if global_pool == "token" and not self._prefix_tokens():
            raise ValueError("`global_pool` must be 'avg' or '' where there is no class token, got 'token'.")

    @property
    def coarsest_patch(self) -> tuple[int, int]:
        """Return (height, width) in pixels of a patch of the last stage."""
        step = 1 << (len(self.depths) - 1)
        coarsest: Any = self.patch_size if step == 1 else tuple(side * step for side in self.patch_size)
        return cast("tuple[int, int]", coarsest)

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the first stage's grid of an image of `image` = (height, width), in pixels.

        Raises:
            ValueError: if a side is not a multiple of the coarsest patch, and `fit` is 'exact'.
        """
        prefix = self.num_prefix_tokens if len(self.depths) == 1 else 0
        return patch_grid(image, self.coarsest_patch, prefix, 1 << (len(self.depths) - 1), self.fit)

    def grid_of(self, images: Tensor) -> Grid:
        """Return the first stage's grid of images (B, C, height, width)."""
        axes = len(self.img_size)
        size = image_size(images, self.in_chans, axes, next(self.parameters(), None))
        return self.grid_at(cast("Any", tuple(size[axis] for axis in range(axes))))

    def position_grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of each stage; `grid` is the first stage's."""
        return grid.pyramid(len(self.depths), self.num_prefix_tokens)

    def _classifier(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()

    def _like_weights(self, module: nn.Module) -> nn.Module:
        """Move a new module to the device and dtype of the weights."""
        weight = next(self.block(0, 0).parameters())
        return module.to(weight.device, weight.dtype)

    # The forward pass, from the image to the logits

    def embed(self, x: Tensor, stage: int = 0) -> Tensor:
        """Turn images, or the map of the previous stage, into tokens (B, N, D), without position information."""
        tokens = self.tokenize(x if stage else fit_images(x, self.coarsest_patch, self.fit), stage)
        prefix = self._prefix_tokens() if stage + 1 == len(self.depths) else []
        prefix = [token.expand(tokens.shape[0], -1, -1) for token in prefix]
        # the output of a convolution is transposed; the layers want the channels of a token contiguous in memory
        return torch.cat([*prefix, tokens], 1) if prefix else tokens.contiguous()

    def each_layer(
        self, images: Tensor, crop: Crop | None = None, keep: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Grid]]:
        """Yield the tokens (B, N, D) after each block, and their grid, from images (B, C, height, width)."""
        grid = self.grid_of(images).cropped(crop)
        grids, positions = self.position_grids(grid), self.position(grid)
        tokens_kept = self.select_patches(images, grid, keep)
        if tokens_kept is not None:
            positions = [position.take(tokens_kept) for position in positions]
        x, first = images, 0
        for stage, depth in enumerate(self.depths):
            at = grids[stage]
            x = self.embed(x, stage)
            x = x if tokens_kept is None else tokens_kept.of(x)
            blocks = zip(self.stage_blocks(stage), self.block_arguments(stage, at), strict=True)
            layers = [(block, positions[first + index], where) for index, (block, where) in enumerate(blocks)]
            for tokens in self.run_blocks(x, layers):
                x = tokens
                yield x, at
            first += depth
            if stage + 1 < len(self.depths):
                x = at.to_map(x)

    def select_patches(self, images: Tensor, grid: Grid, keep: Tensor | None) -> Subset | None:
        """Return the tokens of the patches `keep`, with all prefix tokens; None for all tokens."""
        if keep is None or isinstance(keep, torch.fx.Proxy):  # torch.fx, which records the pass of all patches
            return None
        if self.whole_grid:
            raise ValueError(f"`keep` must be None in {type(self).__name__}: {self.whole_grid}.")
        if not isinstance(keep, Tensor) or keep.ndim not in (1, 2):
            raise ValueError(f"`keep` must be a tensor of indices, (n,) or (B, n), got {format_value(keep)}.")
        if keep.ndim == 2 and len(keep) != len(images):
            raise ValueError(f"`keep` must have a row for each of the {len(images)} images, got {len(keep)}.")
        if not keep.shape[-1]:
            raise ValueError("`keep` must have at least one patch, got none.")
        known = not (torch.compiler.is_compiling() or keep.is_meta)
        if known and not 0 <= keep.min() <= keep.max() < grid.patches:
            least, most = keep.min().item(), keep.max().item()
            raise ValueError(f"`keep` must be indices of {grid.patches} patches, from 0, got {least} to {most}.")
        return Subset(_with_prefix(keep, grid), grid.tokens)

    def forward_features(self, x: Tensor, crop: Crop | None = None, keep: Tensor | None = None) -> Tensor:
        """Turn images (B, C, height, width) into the last stage's tokens (B, N, D) after the final norm.

        Args:
            x: the images.
            crop: the part of a larger image that they show, as in `forward`.
            keep: the patches that are computed, as in `forward`.
        """
        grid = self.grid
        for tokens, at in self.each_layer(x, crop, keep):
            x, grid = tokens, at
        return self.final(x, grid)

    def features_of(self, layers: Sequence[tuple[Tensor, Grid]]) -> Tensor:
        """Turn the tokens after each layer, with their grids, into the features; here, those after the last layer."""
        return self.final(*layers[-1])

    def final(self, x: Tensor, grid: Grid) -> Tensor:
        """Turn the tokens after the last block, (B, N, D), into the features; here, by the final norm."""
        return self.norm(x)

    def pool(self, x: Tensor) -> Tensor:
        """Pool tokens (B, N, D) according to `global_pool`: (B, D)."""
        return global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool tokens (B, N, D) and classify: (B, num_classes), or (B, D) with `pre_logits`."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor | Images, crop: Crop | Crops | None = None, keep: Tensor | None = None) -> Any:
        """Classify images: (B, num_classes).

        Images of a list that have the same size and crop are computed together, in one forward pass per size and crop;
        the outputs are in the order of the list. In evaluation mode each equals the output for the image alone.

        Args:
            x: images (B, C, height, width), or a list of B images (C, height, width) of any sizes.
            crop: the part of a larger image that they show; they then have its position. For a list of
                images it can be a list, with None for a whole image.
            keep: the patches that are computed, as indices (n,) of the row-major grid, or (B, n) for other patches of
                each image; all others are left out before the first block, as in masked autoencoders and patch dropout.

        Raises:
            ValueError: if the encoding cannot encode a crop or a subset, or the lists cannot be combined.
        """
        if isinstance(x, (list, tuple)):
            if keep is not None:
                raise ValueError("`keep` must be None for a list of images; pass a batch of images of one size.")
            return forward_each(self, x, crop)
        if isinstance(crop, (list, tuple)):
            raise ValueError(f"`crop` must be one crop for a batch of images, got {len(crop)}; pass a list of images.")
        return self.forward_head(self.forward_features(x, crop, keep))


class Stage(nn.Module):
    """The blocks of a stage, and the merging of patches before them, with timm's names."""

    def __init__(self, blocks: Iterable[nn.Module], downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.downsample = nn.Identity() if downsample is None else downsample
        self.blocks = nn.ModuleList(blocks)


def _with_prefix(keep: Tensor, grid: Grid) -> Tensor:
    """Return the tokens of patches `keep`, (n,) or (B, n), after all prefix tokens."""
    prefix = torch.arange(grid.prefix, device=keep.device).expand(*keep.shape[:-1], -1)
    return torch.cat([prefix, keep + grid.prefix], -1)


def draw_patches(images: Tensor, grid: Grid, count: int) -> Subset:
    """Draw `count` patches of each image; their tokens, after all prefix tokens."""
    keep = torch.randn(len(images), grid.patches, device=images.device).argsort(-1)[:, :count]
    return Subset.known(_with_prefix(keep, grid), grid.tokens)


def image_size(images: Tensor, channels: int, axes: int = 2, weight: Tensor | None = None) -> Sequence[int]:
    """Return the (height, width) of images (B, channels, height, width), or (depth, height, width) on three `axes`.

    `weight` is one of the model's. Its device is not compared if it is moved when it is used: from the meta device, or
    as another kind of tensor, of which each process has a shard.
    """
    check_image(images)
    if type(weight) is nn.Parameter and images.device != weight.device and not weight.is_meta:
        raise ValueError(f"`x` must be on {weight.device}, the device of the weights, got {images.device}.")
    if not images.is_floating_point():
        raise ValueError(f"`x` must be normalized images of real numbers, got {images.dtype}.")
    if images.ndim != axes + 2 or images.shape[1] != channels:
        kind = "images" if axes == 2 else "videos or volumes"
        expected = f"(B, {channels}, {', '.join(sides(axes))})"
        more = ", whose depth this model has no axis for" if axes == 2 and images.ndim == 5 else ""
        raise ValueError(f"`x` must be {kind} {expected}, of the model's `in_chans`, got {tuple(images.shape)}{more}.")
    return images.shape[2:]


torch.fx.wrap("patch_grid")  # they compare sizes, so torch.fx records each call as one node
torch.fx.wrap("image_size")
torch.fx.wrap("fit_images")
