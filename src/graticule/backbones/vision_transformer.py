"""ViT, with any encoding and any joining."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from timm.layers import AttentionPoolLatent
from timm.models.eva import checkpoint_filter_fn as of_eva
from timm.models.vision_transformer import checkpoint_filter_fn as of_vit
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.staged import draw_patches
from graticule.backbones.token_model import init_linear
from graticule.checkpoints.layouts import rename_by_timm, rename_library
from graticule.layers.attention import Attention
from graticule.layers.block import Block, block_layer_of
from graticule.layers.parts import (
    HEADS,
    SequencePool,
    act_layer_of,
    build_mlp,
    build_projection,
    for_timm,
    norm_layer_of,
)
from graticule.layers.tokenizers import Patches, Tokenizer, on_axes
from graticule.position.grid import Grid
from graticule.position.position import PositionBuilder
from graticule.position.tokens import Subset
from graticule.registry.checks import checked, known_name
from graticule.registry.fields import Channels, Depth, Positive, Ratio, ShareBelowOne, Side, SmallCount, SmallWhole


class VisionTransformer(Backbone):
    """A ViT: blocks over the patches of an image and prefix tokens, each with its `LayerPosition`, then a pooling.

    Parameter names are timm's, except in `position`; `load_state_dict` also accepts published names.

    Reference: An Image Is Worth 16x16 Words (Dosovitskiy et al., 2021); DeiT (Touvron et al., 2021).

    Args:
        patch_size: in pixels, one side or (height, width), or (depth, height, width).
        global_pool: 'token' (class token), 'avg', 'max', 'avgmax', 'map' (attention of a learned query, as SigLIP),
            'seq' (sequence pooling) or '' (none).
        act_layer: the MLPs' activation, or its name such as 'quick_gelu'.
        embed_layer: builds the tokenizer from image size, patch size, channels and D.
        block_layer: builds a block, or its name: 'pre_norm', 'post_norm', 'parallel' (attention and MLP side by side),
            'parallel_branches' (two attentions, then two MLPs) or 'attention_drop_path' (no stochastic depth of MLPs).
        qk_scale: factor of the attention logits instead of d^(-1/2).
        init_values: initial weights of LayerScale, in the order attention and MLP; 0 or None for no LayerScale.
        qk_norm: whether queries and keys go through norms over the channels of a head.
        scale_attn_norm: whether the output of attention goes through a norm before its projection.
        scale_mlp_norm: whether the MLPs' hidden channels go through a norm.
        proj_bias: whether attention's output projection and the MLPs have biases.
        qkv_layer: the projection to queries, keys and values: 'fused', 'separate', or these without a bias of the keys,
            'no_key_bias' and 'separate_no_key_bias'.
        mlp_layer: the MLPs: 'mlp', 'swiglu' or 'swiglu_packed', or a constructor with timm's arguments of an MLP.
        pre_norm: whether the tokens go through a norm before the first block, as in CLIP; patches then have no bias.
        patch_norm: builds a norm of the patches, or its name; none by default.
        patch_bias: whether the patches have a bias; by default they do without `pre_norm`.
        patch_frames: number of frames of a patch, of a model of videos that takes images, each repeated so often.
        pool_num_heads: heads of the attention of 'map'; h by default.
        pool_mlp_ratio: hidden channels of the MLP of 'map', as a multiple of D; `mlp_ratio` by default.
        class_token: whether there is one; as in timm, another `global_pool` leaves it unused unless this is False.
        reg_tokens: number of register tokens.
        fc_norm: norm after pooling instead of before, or its name; by default, if `global_pool` is a pooling of
            patches, as in timm. CPVT's models always have it before.
        patch_drop_rate: share of the patches that training leaves out, other ones of each image and in each pass.
        final_norm: whether there is a norm after the last block.
        pool_include_prefix: whether prefix tokens are pooled too.
        head_layer: the classifier: 'linear', 'linear_no_bias' or 'tanh' (a linear layer and tanh).
        others: as `Backbone`; `img_size` can also be (depth, height, width), of videos and volumes.
    """

    takes = Backbone.takes | Block.takes
    whole_grid: ClassVar[str] = ""
    axes: ClassVar[tuple[int, ...]] = (2, 3)
    pools: ClassVar[tuple[str, ...]] = ("", "token", "avg", "avgmax", "max", "map", "seq")
    prefix_names: tuple[str, ...] = ("cls_token", "reg_token")
    #: Biases and projections that timm's ViT lacks have their names in BEiT and EVA.
    published_parts: ClassVar[tuple[tuple[str, str], ...]] = tuple(
        (f"blocks.*.attn.qkv.{part}", f"blocks.*.attn.{part}")
        for part in ("q_bias", "k_bias", "v_bias", "q_proj", "k_proj", "v_proj")
    )

    patch_embed: Patches | Tokenizer

    def __init__(
        self,
        position: PositionBuilder,
        patch_size: Side | tuple[Side, ...] = 16,
        global_pool: str = "token",
        embed_dim: Channels = 768,
        depth: Depth = 12,
        num_heads: SmallCount = 12,
        mlp_ratio: Ratio = 4.0,
        qkv_bias: bool = True,
        attn_drop_rate: ShareBelowOne = 0.0,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        act_layer: str | type[nn.Module] | None = None,
        embed_layer: Callable[..., Patches | Tokenizer] = Patches,
        block_layer: str | Callable[..., nn.Module] = "pre_norm",
        qk_scale: Positive | None = None,
        init_values: float | tuple[float, float] | None = None,
        qk_norm: bool = False,
        scale_attn_norm: bool = False,
        scale_mlp_norm: bool = False,
        proj_bias: bool = True,
        qkv_layer: str = "fused",
        mlp_layer: str | Callable[..., nn.Module] = "mlp",
        pre_norm: bool = False,
        patch_norm: str | Callable[[int], nn.Module] | None = None,
        patch_bias: bool | None = None,
        patch_frames: Side = 1,
        pool_num_heads: SmallCount | None = None,
        pool_mlp_ratio: Ratio | None = None,
        class_token: bool = True,
        reg_tokens: SmallWhole = 0,
        fc_norm: bool | str | None = None,
        patch_drop_rate: ShareBelowOne = 0.0,
        final_norm: bool = True,
        pool_include_prefix: bool = False,
        head_layer: str = "linear",
        **kwargs: Any,
    ) -> None:
        patches: dict[str, Any] = {} if patch_bias in (None, True) and not pre_norm else {"bias": bool(patch_bias)}
        if kwargs.get("fit", "exact") != "exact":
            patches["fit"] = kwargs["fit"]
        if patch_frames > 1:
            patches["frames"] = patch_frames
        if patch_norm is not None:
            patches["norm_layer"] = for_timm(norm_layer_of(patch_norm))
        if patches and embed_layer is not Patches:
            raise ValueError(
                "`pre_norm`, `patch_norm`, `patch_bias`, `patch_frames` and `fit` must be left out where tokens are "
                "not made by one layer."
            )
        if global_pool != "map" and (pool_num_heads or pool_mlp_ratio):
            raise ValueError(
                "`pool_num_heads` and `pool_mlp_ratio` must be left out unless `global_pool` is 'map', got "
                f"{global_pool!r}."
            )
        if embed_dim % (pool_num_heads or 1):
            raise ValueError(f"`pool_num_heads` must divide the {embed_dim} channels, got {pool_num_heads}.")
        if pool_include_prefix and global_pool in ("", "token"):
            raise ValueError(f"`pool_include_prefix` must be False with `global_pool` {global_pool!r}, got True.")
        if patch_drop_rate and self.whole_grid:
            raise ValueError(f"`patch_drop_rate` must be 0 in {type(self).__name__}: {self.whole_grid}.")
        super().__init__(
            patch_size=patch_size, embed_dims=(embed_dim,), depths=(depth,), global_pool=global_pool, **kwargs
        )
        fc_norm = global_pool in ("avg", "avgmax", "max") if fc_norm is None else fc_norm
        self.embed_dim = embed_dim
        self.patch_drop_rate = patch_drop_rate
        self.has_class_token = class_token
        self.pool_include_prefix = pool_include_prefix
        self.head_layer = known_name("head_layer", head_layer, HEADS)
        norm, act, build = norm_layer_of(norm_layer), act_layer_of(act_layer), block_layer_of(block_layer)
        hidden, drop = int(embed_dim * mlp_ratio), self.proj_drop_rate
        is_plain = mlp_layer == "mlp" and proj_bias and not scale_mlp_norm

        def block(layer: int, drop_path: float) -> nn.Module:
            mlp = None
            if not is_plain:
                of_hidden = norm if scale_mlp_norm else None
                mlp = build_mlp(mlp_layer, embed_dim, hidden, act, of_hidden, proj_bias, drop)
            attention = self.attention_kind(layer)(
                embed_dim,
                num_heads,
                attn_drop=attn_drop_rate,
                proj_drop=drop,
                scale=qk_scale,
                proj_bias=proj_bias,
                qkv=build_projection(qkv_layer, embed_dim, qkv_bias),
                qk_norm=norm if qk_norm else None,
                inner_norm=norm if scale_attn_norm else None,
            )
            return build(
                embed_dim,
                num_heads,
                mlp_ratio,
                qkv_bias,
                attn=attention,
                proj_drop=drop,
                drop_path=drop_path,
                norm_layer=norm,
                act_layer=act or nn.GELU,
                init_values=init_values,
                **({} if mlp is None else {"mlp": mlp}),
            )

        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        self._add_prefix_tokens()
        self.patch_embed = embed_layer(self.img_size, self.patch_size, self.in_chans, embed_dim, **patches)
        self.build_position(position, num_heads)
        self.norm_pre = norm(embed_dim) if pre_norm else nn.Identity()
        self.blocks = nn.Sequential(*(block(layer, rate) for layer, rate in enumerate(self.drop_path_rates())))
        self.norm = norm(embed_dim) if final_norm and not fc_norm else nn.Identity()
        self.attn_pool: nn.Module | None = SequencePool(embed_dim) if global_pool == "seq" else None
        if global_pool == "map":
            self.attn_pool = AttentionPoolLatent(
                embed_dim,
                num_heads=pool_num_heads or num_heads,
                mlp_ratio=pool_mlp_ratio or mlp_ratio,
                norm_layer=for_timm(norm),
                act_layer=act or nn.GELU,
            )
        of_pooled = norm_layer_of(fc_norm) if isinstance(fc_norm, str) else norm
        self.fc_norm = of_pooled(embed_dim) if final_norm and fc_norm else nn.Identity()
        self.head = self._classifier()
        self.finish()

    def _classifier(self) -> nn.Module:
        build = HEADS[self.head_layer]
        return build(self.num_features, self.num_classes) if self.num_classes else nn.Identity()

    def _add_prefix_tokens(self) -> None:
        """Create the prefix tokens that a subclass has in addition to the class and register tokens."""

    def check_pool(self, global_pool: str) -> None:
        """Check a value of `global_pool`."""
        if global_pool == "token" and not self.has_class_token:
            raise ValueError("`class_token` must be True where `global_pool` is 'token', got False.")
        super().check_pool(global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new linear one for `num_classes`; 0 for none."""
        if self.pools == ("token",):
            global_pool = global_pool or None  # timm passes '' when it removes the head
        self.head_layer = "linear"
        if self.created is not None and "head_layer" in self.created["arguments"]:
            self.created = {**self.created, "arguments": {**self.created["arguments"], "head_layer": "linear"}}
        if global_pool == "map" and self.global_pool != "map":
            raise ValueError("`global_pool` must be 'map' from the start, as it has weights, got it for another model.")
        super().reset_classifier(num_classes, global_pool)
        if self.global_pool == "seq" and not isinstance(self.attn_pool, SequencePool):
            self.attn_pool = SequencePool(self.embed_dim)
            self._like_weights(self.attn_pool)
            init_linear(self.attn_pool)
        if self.global_pool not in ("map", "seq"):
            self.attn_pool = None

    @checked
    def set_input_size(
        self, img_size: Side | tuple[Side, ...] | None = None, patch_size: Side | tuple[Side, ...] | None = None
    ) -> None:
        """Change the image or patch size that position information is stored for.

        Args:
            patch_size: in pixels, one side or (height, width); unchanged by default.
        """
        axes = len(self.img_size)
        image: Any = on_axes(self.img_size if img_size is None else img_size, axes)
        patch: Any = on_axes(self.patch_size if patch_size is None else patch_size, axes)
        self.patch_embed.set_input_size(img_size=image, patch_size=patch)
        self.patch_size = patch
        super().set_input_size(image)

    @property
    def coarsest_patch(self) -> tuple[int, int]:
        """Return (height, width) in pixels of the patch of a token."""
        return cast("tuple[int, int]", self.patch_embed.reduction)

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the grid of an image of `image` = (height, width), in pixels."""
        return self.patch_embed.grid(image, self.num_prefix_tokens)

    def select_patches(self, images: Tensor, grid: Grid, keep: Tensor | None) -> Subset | None:
        """Return the tokens of the patches `keep`, or of random ones in training with `patch_drop_rate`."""
        if keep is None and self.training and self.patch_drop_rate:
            count = max(1, int(grid.patches * (1 - self.patch_drop_rate)))
            return draw_patches(images, grid, count)
        return super().select_patches(images, grid, keep)

    def tokenize(self, x: Tensor, stage: int = 0) -> Tensor:
        """Turn images (B, C, height, width) into tokens (B, H * W, D), row-major."""
        return self.patch_embed(x)

    def remove_head(self) -> None:
        """Remove the classifier and the norm of the pooled tokens."""
        super().remove_head()
        self.fc_norm = nn.Identity()

    def pool(self, x: Tensor) -> Tensor:
        """Pool tokens (B, N, D) according to `global_pool`: (B, D)."""
        if self.attn_pool is not None:
            x = self.attn_pool(x if self.pool_include_prefix else x[:, self.num_prefix_tokens :])
        else:
            x = global_pool_nlc(x, self.global_pool, self.num_prefix_tokens, self.pool_include_prefix)
        return self.fc_norm(x)

    def start(self, x: Tensor) -> Tensor:
        """Turn the tokens with their position into the input of the first block, (B, N, D)."""
        x = self.norm_pre(super().start(x))
        return x

    def attention_kind(self, layer: int) -> type[Attention]:
        """Return the class of the attention of a layer."""
        return Attention

    def own_name(self, published: str) -> str:
        """Return our name for a parameter that BEiT, EVA and DINOv2 may call otherwise, such as LayerScale."""
        return super().own_name(re.sub(r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma", published))

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of the codes of CLIP, EVA, DINOv2, torchvision and others under timm's names."""
        state = rename_library(state)
        chunks = {match.groups() for name in state if (match := re.match(r"blocks\.(\d+)\.(\d+)\.", name))}
        if len({block for _, block in chunks}) == len(chunks):  # of DINOv2's training, not the stages of a pyramid
            state = {re.sub(r"^blocks\.\d+\.(\d+\.)", r"blocks.\1", name): value for name, value in state.items()}
        if "rope_embed.periods" not in state:  # else timm's filter of DINOv3 reads the names
            state = {"reg_token" if _REGISTERS.fullmatch(name) else name: value for name, value in state.items()}
        return rename_by_timm(self, state, of_eva if any(map(_OF_EVA.search, state)) else of_vit)


#: Names of the registers in DINOv2's and DINOv3's codes and others.
_REGISTERS = re.compile(r"register_tokens?|storage_tokens?|reg_tokens|registers")
#: Parts of names that timm's filter of EVA and DINOv3 reads, and its filter of a ViT does not.
_OF_EVA = re.compile(r"^(?!beit3\.).*(?:\.mlp\.(?:w[123]|w12|ffn_ln)\.|inner_attn_ln|\.periods|visual\.pos_embed)")


class DistilledVisionTransformer(VisionTransformer):
    """DeiT with a distillation token, which has its own head.

    In evaluation the logits are the mean of the two heads; in training, too, unless
    `set_distilled_training()` requests both, as in timm.

    Reference: Training data-efficient image transformers & distillation through attention (Touvron et al., 2021).
    """

    pools = ("token",)  # its heads read prefix tokens
    prefix_names = ("cls_token", "dist_token", "reg_token")
    needs_class_token = True
    classifiers = ("head", "head_dist")

    def __init__(self, position: PositionBuilder, **kwargs: Any) -> None:
        super().__init__(position, **kwargs)
        self.distilled_training = False
        self.head_dist = self._classifier()
        init_linear(self.head_dist)

    def _add_prefix_tokens(self) -> None:
        self.dist_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))

    def set_distilled_training(self, enable: bool = True) -> None:
        """Return the logits of both heads, as a pair, in training."""
        self.distilled_training = enable

    def get_classifier(self) -> Any:
        return self.head, self.head_dist

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifiers by new ones of `num_classes` outputs; 0 for none."""
        super().reset_classifier(num_classes, global_pool)
        self.head_dist = self._like_weights(self._classifier())

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """Classify tokens (B, N, D) by class and distillation token."""
        cls, dist = self.head_drop(x[:, 0]), self.head_drop(x[:, 1])
        if pre_logits:
            return (cls + dist) / 2
        cls, dist = self.head(cls), self.head_dist(dist)
        if self.training and self.distilled_training:
            return cls, dist
        return (cls + dist) / 2


#: D and h of DeiT's sizes that are smaller than the default, with 12 blocks.
TINY = {"embed_dim": 192, "num_heads": 3}
SMALL = {"embed_dim": 384, "num_heads": 6}
_FOR_28 = {
    **{"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 10},
    **{"depth": 6, "num_heads": 4, "mlp_ratio": 2.0},
}
_HALF = (0.5, 0.5, 0.5)
_AUGREG = "augreg_in21k_ft_in1k"
# The nano and micro sizes are for small images.
register_sizes(
    VisionTransformer,
    {
        "vit_nano_patch4_28": Size(205_962, {**_FOR_28, "embed_dim": 64}),
        "vit_micro_patch4_28": Size(805_130, {**_FOR_28, "embed_dim": 128}),
    },
)
register_sizes(
    VisionTransformer,
    {
        "vit_tiny_patch16_224": Size(5_717_416, TINY, hub=_AUGREG),
        "vit_small_patch16_224": Size(22_050_664, SMALL, hub=_AUGREG),
        "vit_small_patch32_224": Size(22_878_952, {"patch_size": 32, **SMALL}, hub=_AUGREG),
        "vit_base_patch8_224": Size(86_576_872, {"patch_size": 8}, hub=_AUGREG),
        "vit_base_patch16_224": Size(86_567_656, hub=_AUGREG),
        "vit_base_patch32_224": Size(88_224_232, {"patch_size": 32}, hub=_AUGREG),
    },
    mean=_HALF,
    std=_HALF,
)
register_small("ViT, DeiT", "vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3)

_AT_384: dict[str, Any] = {"arguments": {"img_size": 384}, "cfg": {"crop_pct": 1.0}}
register_sizes(
    VisionTransformer,
    {
        "deit_tiny_patch16_224": Size(5_717_416, TINY, hub="fb_in1k"),
        "deit_small_patch16_224": Size(22_050_664, SMALL, hub="fb_in1k"),
        "deit_base_patch16_224": Size(86_567_656, hub="fb_in1k"),
        "deit_base_patch16_384": Size(86_859_496, hub="fb_in1k", **_AT_384),
    },
)
register_sizes(
    DistilledVisionTransformer,
    {
        "deit_tiny_distilled_patch16_224": Size(5_910_800, TINY, hub="fb_in1k"),
        "deit_small_distilled_patch16_224": Size(22_436_432, SMALL, hub="fb_in1k"),
        "deit_base_distilled_patch16_224": Size(87_338_192, hub="fb_in1k"),
        "deit_base_distilled_patch16_384": Size(87_630_032, hub="fb_in1k", **_AT_384),
    },
)
register_small("DeiT, distilled", "deit_tiny_distilled_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3)
