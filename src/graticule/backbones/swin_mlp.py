"""Swin-MLP: tokens are mixed within shifted windows by the weights of the position, then channels by an MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from graticule.backbones.mixer import MixerBlock
from graticule.backbones.pyramid import MergingPyramid
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.checkpoints.load import renamed_state_dict
from graticule.layers.parts import norm_layer_of
from graticule.position.grid import Grid
from graticule.position.position import PositionBuilder
from graticule.position.windows import Windows
from graticule.registry.checks import checked


class SwinMlp(MergingPyramid):
    """Swin with token mixing instead of attention; any mixing encoding gives the weights of its windows.

    With 'gsgu(group_bias=True)', a dense matrix and a bias for each group of channels ("head"), it is Swin-MLP as
    published, where this is a grouped 1-d convolution. Shifted windows are cut at the border of the grid, which equals
    the zero padding of the authors' code. That code accepts one image size; here any is accepted, as in
    `SwinTransformer`, and windows that do not tile the grid are cut, too. The matrices start with the standard
    deviation of a convolution in PyTorch, for windows of 8, but from a normal distribution.

    Reference: Swin Transformer (Liu et al., 2021), appendix A3.3, Swin-Mixer, and its code.

    Args:
        others: as `Backbone`; `global_pool` is 'avg' or '' (none).
    """

    published_parts = (  # in the authors' code; for the matrices, our name is that of timm's gMLP
        (".mlp_channels.gate.proj.", ".spatial_mlp."),
        (".mlp_channels.", ".mlp."),
    )
    takes = frozenset({"pre", "before", "inner", "after", "mixing", "spatial_bias"})
    needs = frozenset({"mixing"})
    default_encoding = "gsgu"
    encoding_options: ClassVar = {"gsgu": {"std": 0.0722, "bias_start": 0.0, "group_bias": True}}

    def __init__(
        self,
        position: PositionBuilder,
        img_size: int | tuple[int, int] = 256,
        patch_size: int = 4,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        groups: Sequence[int] = (4, 8, 16, 32),
        window_size: int = 8,
        mlp_ratio: float = 4.0,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        norm = nn.LayerNorm if norm_layer is None else norm_layer_of(norm_layer)
        dims = [embed_dim << stage for stage in range(len(depths))]
        for dim, s in zip(dims, groups, strict=False):
            if dim % s:
                raise ValueError(f"`groups` must divide the {dim} channels of their stage, got {s}.")
        super().__init__(img_size=img_size, patch_size=patch_size, embed_dims=dims, depths=depths, **kwargs)
        self.window_size = window_size
        self.build_position(position, groups)
        self.build_head(norm)

        def block(stage: int, index: int, drop_path: float) -> nn.Module:
            return MixerBlock(dims[stage], mlp_ratio, self.proj_drop_rate, drop_path, norm_layer=norm)

        self.build_stages(block, norm)
        self.finish()

    @checked
    def set_input_size(self, img_size: int | tuple[int, ...] | None = None, window_size: int | None = None) -> None:
        """Change the image size, or the windows, that position information is stored for.

        Args:
            window_size: side of a window, in patches; unchanged by default.
        """
        size = to_2tuple(self.img_size if img_size is None else img_size)
        if window_size is not None:
            self.grid_at(size).window(window_size)  # an error is raised before anything is changed
            self.window_size = window_size
        super().set_input_size(size)

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the first stage's grid, with the windows, of an image of `image` = (height, width), in pixels."""
        return super().grid_at(image).in_windows((self.window_size,) * len(self.depths), pad=True)

    def where(self, stage: int, grid: Grid) -> list[tuple[Windows]]:
        """Return the windows of the blocks, of which every second one shifts them."""
        return self.alternating_windows(stage, grid)

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of the authors' code under our names and in our layout, any other one unchanged.

        Their code has a stage's merging at the end of the previous stage, and one convolution over all groups and
        tokens of a window.
        """
        found = {}
        for name, value in super().own_layout(state).items():
            if name.endswith(".spatial_mlp.weight") and value.ndim == 3:
                value = value.unflatten(0, (-1, value.shape[1])).squeeze(-1)
            elif name.endswith(".spatial_mlp.bias") and value.ndim == 1:
                pairs = state.get(name.removesuffix("bias") + "weight")
                if pairs is not None and pairs.ndim == 3:
                    value = value.unflatten(0, (-1, pairs.shape[1]))
            found[name] = value
        return found

    def released_layout(self) -> dict[str, Tensor]:
        """Return the state dict under the names and in the layout of the authors' code."""
        found = {}
        for name, value in renamed_state_dict(self).items():
            kind, _, rest = name.partition(".")
            stage, _, leaf = rest.partition(".")
            if kind == "layers" and leaf.startswith("downsample."):
                name = f"layers.{int(stage) - 1}.{leaf}"
            elif name.endswith(".spatial_mlp.weight") and value.ndim == 3:
                value = value.flatten(0, 1)[..., None]
            elif name.endswith(".spatial_mlp.bias") and value.ndim == 2:
                value = value.flatten()
            found[name] = value
        return found


_BASE = {"img_size": 224, "embed_dim": 128, "depths": (2, 2, 18, 2), "window_size": 7}
register_sizes(
    SwinMlp,
    {
        "swin_mlp_tiny_c24_patch4_window8_256": Size(20_386_632),
        "swin_mlp_tiny_c12_patch4_window8_256": Size(21_152_072, {"groups": (8, 16, 32, 64)}),
        "swin_mlp_tiny_c6_patch4_window8_256": Size(22_682_952, {"groups": (16, 32, 64, 128)}),
        "swin_mlp_base_patch4_window7_224": Size(60_659_416, _BASE, cfg={"pool_size": (7, 7)}),
    },
    pool_size=(8, 8),
)
_SMALL = {"img_size": 32, "embed_dim": 8, "depths": (2, 2), "groups": (2, 4), "window_size": 4}
register_small("Swin-MLP", "swin_mlp_tiny_c24_patch4_window8_256", **_SMALL)
