"""gMLP: gated MLPs on patches, with the mixing weights of the position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from graticule.backbones.mixer import SingleStage
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.checkpoints import released_posmlp
from graticule.layers.gating import Combine, GatedBlock
from graticule.layers.parts import norm_layer_of
from graticule.position.position import PositionBuilder
from graticule.registry.fields import Channels, Depth, Ratio, Side, SmallCount


class GMlp(SingleStage):
    """gMLP with any mixing encoding instead of its dense token layer; a pyramid of one stage.

    With 'sgu' it is gMLP as published, and as in timm; with 'lrpe_m', 'lrpe', 'glrpe', 'gqpe' or 'ggqpe' it is
    the gMLP of PosMLP's Tables 1 and 3. The gating unit's norm is for the dense matrix and the tables: with a
    softmax it is harmful (PosMLP, section 5.3). Parameter names are timm's, except in the position encoding.

    Reference: Pay Attention to MLPs (gMLP, Liu et al., 2021); PosMLP (Wang et al., 2022), Tables 1 and 3.

    Args:
        mlp_ratio: gamma, channels of the gating units as a multiple of D.
        stem_norm: whether a LayerNorm follows the patches, as in PosMLP's code; timm's gMLP has none.
        gate_norm: whether the gating unit has its LayerNorm; by default, unless the mixing weights are a softmax.
        combine: how the halves are combined (`GatingUnit`).
        others: as `Backbone`; `global_pool` is 'avg' or '' (none).
    """

    takes = frozenset({"added_to_stream", "map_before", "map_after", "mixing", "spatial_bias"})
    axes: ClassVar[tuple[int, ...]] = (2, 3)
    default_encoding = "sgu"

    def __init__(
        self,
        position: PositionBuilder,
        patch_size: Side | tuple[Side, ...] = 16,
        embed_dim: Channels = 256,
        num_blocks: Depth = 30,
        mlp_ratio: Ratio = 6.0,
        groups: SmallCount = 8,
        stem_norm: bool = False,
        gate_norm: bool | None = None,
        combine: Combine = "gate",
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        act_layer: type[nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        norm = norm_layer_of(norm_layer)
        mixed = int(embed_dim * mlp_ratio) // (1 if combine == "nonsplit" else 2)
        if mixed % groups:
            raise ValueError(f"`groups` must divide the {mixed} channels that are mixed, got {groups}.")
        super().__init__(patch_size=patch_size, embed_dims=(embed_dim,), depths=(num_blocks,), **kwargs)
        self.build_position(position, groups)
        self.build_head(norm)
        gate_norm = not self.has_softmax() if gate_norm is None else gate_norm
        block = partial(
            GatedBlock,
            embed_dim,
            mlp_ratio,
            nn.LayerNorm if gate_norm else None,  # eps is 1e-5, whatever the block's is, as in timm
            combine,
            self.proj_drop_rate,
            self.drop_path_rate,
            norm,
            act_layer or nn.GELU,
        )
        self.build_blocks(block, norm if stem_norm else None)
        self.finish()

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of PosMLP's released code in our layout, any other one unchanged."""
        return released_posmlp.to_own(self, state)


_FOR_28 = {
    **{"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 10},
    **{"embed_dim": 64, "mlp_ratio": 4.0, "num_blocks": 6},
}
register_sizes(GMlp, {"gmlp_nano_patch4_28": Size(168_246, _FOR_28)})  # for small images
_HALF = (0.5, 0.5, 0.5)
register_sizes(
    GMlp,
    {
        "gmlp_ti16_224": Size(5_867_328, {"embed_dim": 128}),
        "gmlp_s16_224": Size(19_422_656, hub="ra3_in1k"),
        "gmlp_b16_224": Size(73_075_392, {"embed_dim": 512}),
    },
    crop_pct=0.875,
    mean=_HALF,
    std=_HALF,
)
register_small("gMLP", "gmlp_s16_224", img_size=32, embed_dim=16, num_blocks=2, groups=2)
