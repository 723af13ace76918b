"""MLP-Mixer, ResMLP and GFNet: tokens are mixed by the weights of the position, then channels by an MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import DropPath, Mlp, lecun_normal_
from timm.models import register_notrace_module
from timm.models.mlp_mixer import checkpoint_filter_fn
from torch import Tensor, nn

from graticule.backbones.pyramid import Pyramid
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.token_model import TokenModel
from graticule.checkpoints.layouts import rename_by_timm
from graticule.layers.gating import mix_tokens
from graticule.layers.parts import norm_layer_of
from graticule.layers.tokenizers import Patches
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder
from graticule.position.windows import Windows
from graticule.registry.fields import Channels, Depth, Ratio, Side, SmallCount


class SingleStage(Pyramid):
    """A pyramid of one stage, whose blocks mix tokens by the position's weights; names and initial weights of timm.

    Stochastic depth has the same rate in all blocks, as in timm.
    """

    needs = frozenset({"mixing"})
    first_conv = "stem.proj"

    def build_blocks(self, block: Callable[[], nn.Module], stem_norm: Callable[[int], nn.Module] | None = None) -> None:
        """Build the patch embedding, optionally with a norm after it, and the blocks, one by one."""
        (self.embed_dim,), (count,) = self.embed_dims, self.depths
        self.stem = Patches(
            self.img_size, self.patch_size, self.in_chans, self.embed_dim, norm_layer=stem_norm, fit=self.fit
        )
        self.blocks = nn.Sequential(*[block() for _ in range(count)])

    def set_input_size(self, img_size: int | tuple[int, ...] | None = None) -> None:
        """Change the image size that position information is stored for."""
        super().set_input_size(img_size)
        self.stem.set_input_size(img_size=self.img_size)

    def block_arguments(self, stage: int, grid: Grid) -> list[tuple[Windows, ...]]:
        """Return nothing for each block: tokens are mixed on the whole grid, without windows."""
        return [()] * self.depths[stage]

    def tokenize(self, x: Tensor, stage: int) -> Tensor:
        """Turn the patches of images into tokens (B, H * W, D)."""
        return self.stem(x)

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize the weights: Xavier uniform, biases of standard deviation 1e-6 in the blocks, the head at zero."""
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            lecun_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear) and name.startswith("head"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.normal_(module.bias, std=1e-6)


class Affine(nn.Module):
    """The map alpha * x + beta, per channel, which ResMLP uses instead of a norm; with timm's names."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, 1, dim))
        self.beta = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift x: (..., D)."""
        return torch.addcmul(self.beta.view(-1), self.alpha.view(-1), x)


@register_notrace_module  # torch.fx records the call as one node: the computation depends on the position
class MixerBlock(nn.Module):
    r"""A block that mixes tokens by the position's weights, then channels by an MLP.

    .. math:: x' = x + \lambda_1 (W (LN(x) + p) + b), \quad x'' = x' + \lambda_2 MLP(LN(x'))

    where W is `mixing` of the layer's position, b its `spatial_bias` and p its `after_norm`, if any. W may be an MLP
    over the tokens. lambda_1 and lambda_2 have a value per channel with `layer_scale`; without it they are 1.

    Reference: MLP-Mixer (Tolstikhin et al., 2021), Eq. 1; ResMLP (Touvron et al., 2021), Eq. 2-3.

    Args:
        proj_drop: dropout rate after the mixing and in the MLP.
        layer_scale: initial value of lambda_1 and lambda_2; no scales if None.
        others: as `Block`.
    """

    pre_norm = True

    def __init__(
        self,
        dim: int,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        norm_layer: Callable[[int], nn.Module] = nn.LayerNorm,
        act_layer: type[nn.Module] = nn.GELU,
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.mix_drop = nn.Dropout(proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp_channels = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop)
        self.ls1, self.ls2 = (
            None if layer_scale is None else nn.Parameter(torch.full((dim,), float(layer_scale))) for _ in range(2)
        )

    def forward(self, x: Tensor, position: LayerPosition, windows: Windows | None = None) -> Tensor:
        """Map tokens x: (B, N, D) to (B, N, D); they are mixed within `windows`, or on the whole grid."""
        y = self.mix(x, position, windows)
        x = x + self.drop_path(y if self.ls1 is None else self.ls1 * y)
        y = self.mlp_channels(self.norm2(x))
        return x + self.drop_path(y if self.ls2 is None else self.ls2 * y)

    def mix(self, x: Tensor, position: LayerPosition, windows: Windows | None) -> Tensor:
        """Normalize tokens x: (B, N, D), and mix them."""
        if position.mixing is None:
            raise ValueError("`position` must say how tokens are mixed, got nothing; use a mixing encoding.")
        y = position.add_after_norm(self.norm1(x))
        return self.mix_drop(mix_tokens(y, position.mixing, position.spatial_bias, windows))


class Mixer(SingleStage):
    """MLP-Mixer with any mixing encoding instead of its token-mixing MLP; a pyramid of one stage.

    With 'token_mlp' it is MLP-Mixer as published, and as in timm. timm has a dropout within the token-mixing MLP as
    well; here there is one after it. Parameter names are timm's, except in position encodings.

    Reference: MLP-Mixer: An all-MLP Architecture for Vision (Tolstikhin et al., 2021).

    Args:
        layer_scale: initial value of the scales per channel after both parts of a block; no scales if None.
        others: as `Backbone`; `global_pool` is 'avg' or '' (none).
    """

    takes = frozenset({"added_to_stream", "map_before", "after_norm", "map_after", "mixing", "spatial_bias"})
    axes: ClassVar[tuple[int, ...]] = (2, 3)
    default_encoding = "token_mlp"

    def __init__(
        self,
        position: PositionBuilder,
        patch_size: Side | tuple[Side, ...] = 16,
        embed_dim: Channels = 512,
        num_blocks: Depth = 8,
        mlp_ratio: Ratio = 4.0,
        groups: SmallCount = 8,
        layer_scale: float | None = None,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        act_layer: type[nn.Module] | None = None,
        block_layer: Callable[..., nn.Module] = MixerBlock,
        **kwargs: Any,
    ) -> None:
        if embed_dim % groups:
            raise ValueError(f"`groups` must divide the {embed_dim} channels, got {groups}.")
        norm = norm_layer_of(norm_layer)
        super().__init__(patch_size=patch_size, embed_dims=(embed_dim,), depths=(num_blocks,), **kwargs)
        self.build_position(position, groups)
        self.build_head(norm)
        block = partial(
            block_layer,
            embed_dim,
            mlp_ratio,
            self.proj_drop_rate,
            self.drop_path_rate,
            layer_scale,
            norm,
            act_layer or nn.GELU,
        )
        self.build_blocks(block)
        self.finish()


class ResMlp(Mixer):
    """ResMLP with any mixing encoding instead of its linear layer over the tokens.

    With 'sgu', a dense matrix, it is ResMLP as published, and as in timm: affine maps instead of norms, and a scale
    after both parts of a block. Weights and scales start as in the authors' code. `load_state_dict` accepts timm's
    weights and the authors' weights.

    Reference: ResMLP: Feedforward networks for image classification with data-efficient training (Touvron et al.,
    2021).

    Args:
        layer_scale: initial value of the scales per channel after both parts of a block.
        norm_layer: builds the module that replaces a norm, from its channels; `Affine` by default.
        others: as `Mixer`.
    """

    init_module = TokenModel.init_module  # as in the authors' code
    default_encoding = "sgu"
    encoding_options: ClassVar = {"sgu": {"std": 0.02, "bias_start": 0.0}}
    published_parts = (
        ("blocks.*.mlp_channels.gate.proj", "blocks.*.linear_tokens"),
    )  # of the matrix, in timm's gMLP and ResMLP

    def __init__(
        self,
        position: PositionBuilder,
        embed_dim: Channels = 384,
        num_blocks: Depth = 12,
        layer_scale: float | None = 0.1,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            position,
            embed_dim=embed_dim,
            num_blocks=num_blocks,
            layer_scale=layer_scale,
            norm_layer=norm_layer or Affine,
            **kwargs,
        )

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of the authors' code under timm's names, any other one unchanged."""
        return rename_by_timm(self, state, checkpoint_filter_fn)


@register_notrace_module  # torch.fx records the call as one node: the computation depends on the position
class FilterBlock(MixerBlock):
    r"""A block that mixes tokens by the position's weights, then channels by an MLP, with one residual connection.

    .. math:: x' = x + MLP(LN(W (LN(x) + p) + b))

    where W is `mixing` of the layer's position, b its `spatial_bias` and p its `after_norm`, if any.

    Reference: GFNet (Rao et al., 2021), section 3.2 and its code.
    """

    def forward(self, x: Tensor, position: LayerPosition, windows: Windows | None = None) -> Tensor:
        """Map tokens x: (B, N, D) to (B, N, D); they are mixed within `windows`, or on the whole grid."""
        y = self.mix(x, position, windows)
        return x + self.drop_path(self.mlp_channels(self.norm2(y)))


class GfNet(Mixer):
    """GFNet with any mixing encoding instead of its global filter; a pyramid of one stage.

    By default it is GFNet as published: a learnable table, added once, and a filter per channel in every layer
    ('learnable + global_filter'), applied by Fourier transforms. `load_state_dict` accepts the weights
    of the authors' code.

    Reference: Global Filter Networks for Image Classification (GFNet, Rao et al., 2021).

    Args:
        groups: groups of channels that share a filter; one per channel by default.
        others: as `Mixer`, except `layer_scale`.
    """

    init_module = TokenModel.init_module  # as in the authors' code
    default_encoding = "learnable + global_filter"
    published_parts = (("stem", "patch_embed"), ("blocks.*.mlp_channels", "blocks.*.mlp"))  # in the authors' code
    encoding_options: ClassVar = {"global_filter": {"bias": False}}

    def __init__(
        self,
        position: PositionBuilder,
        embed_dim: Channels = 256,
        num_blocks: Depth = 12,
        groups: SmallCount | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("layer_scale") is not None:
            raise ValueError(f"`layer_scale` must be left out in GFNet, got {kwargs['layer_scale']}.")
        super().__init__(
            position,
            embed_dim=embed_dim,
            num_blocks=num_blocks,
            groups=embed_dim if groups is None else groups,
            block_layer=FilterBlock,
            **kwargs,
        )


_HALF = (0.5, 0.5, 0.5)
_BASE, _LARGE = {"embed_dim": 768, "num_blocks": 12}, {"embed_dim": 1024, "num_blocks": 24}
register_sizes(
    Mixer,
    {
        "mixer_s32_224": Size(19_104_624, {"patch_size": 32}),
        "mixer_s16_224": Size(18_528_264),
        "mixer_b32_224": Size(60_293_428, {"patch_size": 32, **_BASE}),
        "mixer_b16_224": Size(59_880_472, _BASE, hub="goog_in21k_ft_in1k"),
        "mixer_l32_224": Size(206_939_264, {"patch_size": 32, **_LARGE}),
        "mixer_l16_224": Size(208_196_168, _LARGE, hub="goog_in21k_ft_in1k"),
    },
    crop_pct=0.875,
    mean=_HALF,
    std=_HALF,
)
_BIG = {"patch_size": 8, "embed_dim": 768, "num_blocks": 24, "layer_scale": 1e-6}
register_sizes(
    ResMlp,
    {
        "resmlp_12_224": Size(15_350_872, hub="fb_in1k"),
        "resmlp_24_224": Size(30_020_680, {"num_blocks": 24, "layer_scale": 1e-5}, hub="fb_in1k"),
        "resmlp_36_224": Size(44_690_488, {"num_blocks": 36, "layer_scale": 1e-6}, hub="fb_in1k"),
        "resmlp_big_24_224": Size(129_138_280, _BIG, hub="fb_in1k"),
    },
    crop_pct=0.875,
)
register_small("MLP-Mixer", "mixer_s16_224", img_size=32, embed_dim=16, num_blocks=2, groups=2)
register_small("ResMLP", "resmlp_12_224", img_size=32, embed_dim=16, num_blocks=2, groups=2)
register_sizes(
    GfNet,
    {
        "gfnet_ti_224": Size(7_511_784),
        "gfnet_xs_224": Size(15_985_768, {"embed_dim": 384}),
        "gfnet_s_224": Size(24_869_608, {"embed_dim": 384, "num_blocks": 19}),
        "gfnet_b_224": Size(43_120_616, {"embed_dim": 512, "num_blocks": 19}),
    },
)
register_small("GFNet", "gfnet_ti_224", img_size=32, embed_dim=16, num_blocks=2, groups=2)
