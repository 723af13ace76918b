"""GFNet: tokens mixed by a learned filter of the frequencies of the grid."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.models import register_notrace_module
from torch import Tensor

from graticule.backbones.mixer import Mixer, MixerBlock
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.layers.gating import mix_tokens
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder
from graticule.position.windows import Windows


@register_notrace_module  # torch.fx records the call as one node: the computation depends on the position
class FilterBlock(MixerBlock):
    r"""A block that mixes tokens by the position's weights, then channels by an MLP, with one residual connection.

    .. math:: x' = x + MLP(LN(W (LN(x) + p) + b))

    where W is `mixing` of the layer's position, b its `spatial_bias` and p its `inner`, if any.

    Reference: GFNet (Rao et al., 2021), section 3.2 and its code.
    """

    def forward(self, x: Tensor, position: LayerPosition, windows: Windows | None = None) -> Tensor:
        """Map tokens x: (B, N, D) to (B, N, D); they are mixed within `windows`, or on the whole grid."""
        if position.mixing is None:
            raise ValueError("`position` must say how tokens are mixed, got nothing; use a mixing encoding.")
        y = position.inside(self.norm1(x))
        y = self.mix_drop(mix_tokens(y, position.mixing, position.spatial_bias, windows))
        mixed: Tensor = x + self.drop_path(self.mlp_channels(self.norm2(y)))
        return mixed


class GfNet(Mixer):
    """GFNet with any mixing encoding instead of its global filter; a pyramid of one stage.

    By default it is GFNet as published: a learnable table, added once, and a filter per channel in every layer
    ('learnable + global_filter'), applied as a convolution over displacements. `load_state_dict` accepts the weights
    of the authors' code.

    Reference: Global Filter Networks for Image Classification (GFNet, Rao et al., 2021).

    Args:
        groups: groups of channels that share a filter; one per channel by default.
        others: as `Mixer`, except `layer_scale`.
    """

    default_encoding = "learnable + global_filter"
    published_parts = (("stem.", "patch_embed."), (".mlp_channels.", ".mlp."))  # in the authors' code
    encoding_options: ClassVar = {"global_filter": {"bias": False, "product": "displacement"}}

    def __init__(
        self,
        position: PositionBuilder,
        embed_dim: int = 256,
        num_blocks: int = 12,
        groups: int | None = None,
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
