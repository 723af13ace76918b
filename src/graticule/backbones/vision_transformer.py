"""ViT and DeiT, plain and distilled, with any encoding and any joining."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.layers.helpers import to_2tuple
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graticule.checkpoints import register_names
from graticule.checks import checked
from graticule.encodings import PositionBuilder, check_fields
from graticule.grid import Grid
from graticule.layer_position import LayerPosition
from graticule.layers import Attention, Block, Patches

POOLS = ("", "token", "avg", "avgmax", "max", "seq")
#: What an encoding may say to a layer, fields of `LayerPosition`.
TAKES = frozenset({"pre", "before", "inner", "inputs", "bias", "rotary", "query_scale", "after"})


class VisionTransformer(nn.Module):
    """Tokens of an image's patches through pre-norm blocks, each told of its position by `position(grid)`.

    The interface is timm's, and so are the names of the parameters but for those of `position`; published
    names are taken by `load_state_dict` as well.

    Any image whose sides are multiples of the patch goes in, whatever `img_size` is: position information is
    resampled or computed for its grid in the forward pass (`set_input_size` does it once and for all).

    Reference: An Image Is Worth 16x16 Words (Dosovitskiy et al., 2021); DeiT (Touvron et al., 2021).

    Args:
        position: builds what says to each layer where the tokens are (`graticule.encodings.PositionBuilder`).
        img_size: pixels, a side or (height, width).
        patch_size: pixels, a side or (height, width).
        in_chans: channels of the image.
        num_classes: 0 for no head.
        global_pool: 'token' (class token), 'avg', 'max', 'avgmax', 'seq' (sequence pooling) or '' (none).
        embed_dim: D.
        depth: number of blocks.
        num_heads: h.
        mlp_ratio: hidden channels of the MLPs, as a multiple of D.
        qkv_bias: whether queries, keys and values have a bias.
        class_token: whether there is one; as in timm it stays, unused, with another `global_pool` unless it is False.
        reg_tokens: number of register tokens.
        fc_norm: norm after pooling instead of before; by default, where `global_pool` is a pooling of patches, as in
            timm. CPVT's models have it before in any case.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout on the tokens that enter the first block.
        proj_drop_rate: dropout on the outputs of attention and MLP.
        attn_drop_rate: dropout on attention weights.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        norm_layer: builds a norm from D.
        act_layer: the MLPs' activation.
        embed_layer: builds what turns images into tokens from image size, patch size, channels and D.
        block_layer: builds a block.
        qk_scale: what the attention logits are multiplied by, in the place of d^(-1/2).
    """

    prefix_names: tuple[str, ...] = ("cls_token", "reg_token")

    @checked
    def __init__(
        self,
        position: PositionBuilder,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        reg_tokens: int = 0,
        fc_norm: bool | None = None,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: Callable[[int], nn.Module] | None = None,
        act_layer: type[nn.Module] | None = None,
        embed_layer: Callable[..., Any] = Patches,
        block_layer: Callable[..., nn.Module] = Block,
        qk_scale: float | None = None,
    ) -> None:
        super().__init__()
        _check(global_pool, class_token, depth, num_classes, in_chans, drop_path_rate)
        norm_layer = norm_layer or partial(nn.LayerNorm, eps=1e-6)
        act_layer = act_layer or nn.GELU
        fc_norm = global_pool in ("avg", "avgmax", "max") if fc_norm is None else fc_norm

        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.has_class_token = class_token
        self.grad_checkpointing = False

        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        self._add_prefix_tokens()
        self.num_prefix_tokens = sum(token.shape[1] for token in self._prefix_tokens())
        self.patch_embed = embed_layer(to_2tuple(img_size), to_2tuple(patch_size), in_chans, embed_dim)
        self.grid = self.grid_at(to_2tuple(img_size))
        self.position = position(self.grid, dim=embed_dim, depth=depth, num_heads=num_heads)
        check_fields(self.position(self.grid), TAKES, (), type(self).__name__)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()  # stochastic depth decay rule
        self.blocks = nn.Sequential(
            *[
                block_layer(
                    embed_dim,
                    num_heads,
                    mlp_ratio,
                    qkv_bias,
                    attn=Attention(embed_dim, num_heads, qkv_bias, attn_drop_rate, proj_drop_rate, qk_scale),
                    proj_drop=proj_drop_rate,
                    drop_path=rate,
                    norm_layer=norm_layer,
                    act_layer=act_layer,
                )
                for rate in rates
            ]
        )
        reduction = self.patch_embed.reduction
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": reduction} for i in range(depth)
        ]
        self.norm = nn.Identity() if fc_norm else norm_layer(embed_dim)
        self.fc_norm = norm_layer(embed_dim) if fc_norm else nn.Identity()
        self.attn_pool = nn.Linear(embed_dim, 1) if global_pool == "seq" else None
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._classifier()
        register_names(self)
        self.init_weights()

    def _add_prefix_tokens(self) -> None:
        """Make the prefix tokens that a subclass has beside the class and register tokens."""

    def _prefix_tokens(self) -> list[Tensor]:
        tokens = (getattr(self, name) for name in self.prefix_names)
        return [token for token in tokens if token is not None]

    def _classifier(self) -> nn.Module:
        return nn.Linear(self.embed_dim, self.num_classes) if self.num_classes else nn.Identity()

    @torch.no_grad()
    def init_weights(self, mode: str = "") -> None:
        """Draw linear weights and prefix tokens from a normal of std 0.02, cut at 2 (absolute); biases are zero.

        As DeiT and LaPE's code; timm differs in the class token (std 1e-6). `mode` is there for timm's sake and
        takes only ''.
        """
        if mode:
            raise ValueError(f"`mode` must be '', the one initialisation that there is, got {mode!r}.")
        for name, module in self.named_modules():
            if not name.startswith("position."):
                init_linear(module)
        for token in self._prefix_tokens():
            trunc_normal_(token, std=0.02)

    # What timm's tools ask of a model

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the prefix tokens and of all that says where tokens are, fixed tables and LaPE's norms included."""
        position = {f"position.{name}" for name, _ in self.position.named_parameters()}
        return position | set(self.position.published_names()) | set(self.prefix_names)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that put parameters into the stem, a block each (with what its layer alone has) and the end."""
        lists = "|".join(re.escape(name) for name in self.position.layer_lists()) or "(?!)"
        return {
            "stem": rf"^cls_token|^dist_token|^reg_token|^patch_embed|^position\.(?!(?:{lists})\.\d)",
            "blocks": [(rf"^(?:blocks|position\.(?:{lists}))\.(\d+)", None), (r"^norm", (99999,))],
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
        _check(global_pool, self.has_class_token, len(self.blocks), num_classes, self.in_chans, 0.0)
        self.global_pool = global_pool
        self.num_classes = num_classes
        weight = next(self.blocks.parameters())
        if global_pool == "seq" and self.attn_pool is None:
            self.attn_pool = nn.Linear(self.embed_dim, 1).to(weight.device, weight.dtype)
            init_linear(self.attn_pool)
        if global_pool != "seq":
            self.attn_pool = None
        self.head = self._classifier().to(weight.device, weight.dtype)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Make another image or patch size the one that position information is held for."""
        image = to_2tuple(self.patch_embed.img_size if img_size is None else img_size)
        patch = to_2tuple(self.patch_embed.patch_size if patch_size is None else patch_size)
        self.patch_embed.set_input_size(img_size=image, patch_size=patch)
        grid = self.grid_at(image)
        self.position.set_grid(grid)
        self.grid = grid

    # The forward pass, from the image to the logits

    @property
    def img_size(self) -> tuple[int, int]:
        """(height, width), in pixels, that position information is held for."""
        return to_2tuple(self.patch_embed.img_size)

    @property
    def coarsest_patch(self) -> tuple[int, int]:
        """(height, width) in pixels of what a token stands for."""
        return (
            self.patch_embed.patch_size
            if isinstance(self.patch_embed, Patches)
            else to_2tuple(self.patch_embed.reduction)
        )

    def grid_at(self, image: tuple[int, int]) -> Grid:
        """Return the grid of an image of `image` = (height, width), in pixels.

        Raises:
            ValueError: if a side is not a multiple of the patch, or whatever else the tokeniser asks for.
        """
        height, width = self.patch_embed.grid_shape(image)
        return Grid(height, width, self.num_prefix_tokens)

    def grid_of(self, images: Tensor) -> Grid:
        """Return the grid of images (B, C, height, width)."""
        return self.grid_at((images.shape[-2], images.shape[-1]))

    def embed(self, images: Tensor) -> Tensor:
        """Turn images (B, C, height, width) into tokens (B, N, D), before any position information."""
        tokens = self.patch_embed(images)
        prefix = [token.expand(tokens.shape[0], -1, -1) for token in self._prefix_tokens()]
        # the patch embedding hands over a transposed map; the layers want each token in one piece
        return torch.cat([*prefix, tokens], 1) if prefix else tokens.contiguous()

    def each_layer(self, images: Tensor, layers: int | None = None) -> Iterator[tuple[Tensor, Grid]]:
        """Yield the tokens (B, N, D) after each of the first `layers` blocks, and their grid."""
        grid = self.grid_of(images)
        positions = self.position(grid)
        x = self.embed(images)
        for layer, block in enumerate(self.blocks[:layers]):
            position: LayerPosition = positions[layer]
            x = position.enter(x)
            if layer == 0:
                x = self.pos_drop(x)
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, position, grid, use_reentrant=False)
            else:
                x = block(x, position, grid)
            x = position.leave(x)
            yield x, grid

    def forward_features(self, x: Tensor) -> Tensor:
        """Turn images (B, C, height, width) into tokens (B, N, D) after the last block and norm."""
        for tokens, _ in self.each_layer(x):
            x = tokens
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """Return what chosen blocks make of images (B, C, height, width), as timm does.

        Args:
            x: images (B, C, height, width).
            indices: the last n blocks if an int, these blocks if a list, all if None.
            return_prefix_tokens: pair every map with its prefix tokens (B, prefix, D).
            norm: apply the final norm to the intermediates.
            stop_early: run no block behind the last one wanted.
            output_fmt: 'NCHW' for (B, D, H, W), 'NLC' for (B, H * W, D).
            intermediates_only: return the list alone, without the final tokens.
            output_dict: return a dictionary: `image_intermediates`, and unless `intermediates_only`,
                `image_features`; with prefix tokens, `image_intermediates_prefix`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"`output_fmt` must be 'NCHW' or 'NLC', got {output_fmt!r}.")
        grid = self.grid_of(x)
        take, last = feature_take_indices(len(self.blocks), indices)
        taken = []
        for layer, (tokens, _) in enumerate(self.each_layer(x, last + 1 if stop_early else None)):
            x = tokens
            if layer in take:
                taken.append(self.norm(tokens) if norm else tokens)
        prefix = [grid.split(tokens)[0] for tokens in taken]
        maps = [grid.to_map(tokens).contiguous() if output_fmt == "NCHW" else grid.split(tokens)[1] for tokens in taken]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": maps}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        found: list[Any] = list(zip(maps, prefix, strict=True)) if with_prefix else maps
        return found if intermediates_only else (self.norm(x), found)

    def prune_intermediate_layers(
        self,
        indices: int | list[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Throw away what the intermediates of `indices` do not need; returns the kept indices."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool tokens (B, N, D) and classify: (B, num_classes), or (B, D) with `pre_logits`."""
        if self.attn_pool is not None:
            patches = x[:, self.num_prefix_tokens :]
            x = (self.attn_pool(patches).softmax(1).transpose(1, 2) @ patches).squeeze(1)
        else:
            x = global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens)
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images (B, C, height, width): (B, num_classes)."""
        return self.forward_head(self.forward_features(x))


def init_linear(module: nn.Module) -> None:
    """Draw the weights of a linear layer as DeiT does; other modules are left alone."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _check(
    global_pool: str, class_token: bool, depth: int, num_classes: int, in_chans: int, drop_path_rate: float
) -> None:
    if global_pool not in POOLS:
        raise ValueError(f"`global_pool` must be one of {', '.join(map(repr, POOLS))}, got {global_pool!r}.")
    if global_pool == "token" and not class_token:
        raise ValueError("`class_token` must be True where `global_pool` is 'token', got False.")
    for name, value, least in (
        ("depth", depth, 1),
        ("num_classes", num_classes, 0),
        ("in_chans", in_chans, 1),
    ):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    if not 0 <= drop_path_rate < 1:
        raise ValueError(f"`drop_path_rate` must be in [0, 1), got {drop_path_rate}.")
