"""The image encoder of Segment Anything: a ViT whose layers attend within windows, except for a few global ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from timm.layers import LayerNorm2d
from timm.models.vision_transformer_sam import checkpoint_filter_fn
from torch import Tensor, nn

from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.swin import SwinTransformer
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.backbones.window_attention import WindowAttention
from graticule.checkpoints.layouts import rename_by_timm
from graticule.checkpoints.load import renamed_state_dict
from graticule.encodings.decomposed import Decomposed
from graticule.encodings.forms.pyramid import keep_layers, some_parts
from graticule.layers.attention import Attention
from graticule.layers.tokenizers import on_axes
from graticule.position.grid import Grid
from graticule.position.layer import OF_PAIRS, LayerPosition
from graticule.position.position import Position, PositionBuilder
from graticule.position.windows import Windows
from graticule.registry.fields import Channels, Side


class WindowedPosition(Position):
    """Position for a window in some layers, and for the whole grid in the others.

    Encodings that are added to tokens are for the whole grid in all layers. Each layer has its own relative
    encoding, for a window or for the grid; one that all layers share exists twice.

    Args:
        on_grid: the position of all layers on the whole grid.
        windowed: the position of all layers in a window.
        window: the grid of a window.
        layers: indices of the layers that attend within windows.
        depth: number of layers.
    """

    def __init__(
        self, on_grid: Position, windowed: Position, window: Grid, layers: Collection[int], depth: int
    ) -> None:
        super().__init__()
        self.window, self.layers = window, frozenset(layers)
        self.add_module("whole", keep_layers(on_grid, set(range(depth)) - self.layers))
        self.windowed = keep_layers(some_parts(windowed, True, depth), self.layers)

    @property
    def on_grid(self) -> Position:
        """The position of all layers on the whole grid, which checkpoints call `whole`."""
        return cast("Position", self.get_submodule("whole"))

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return one `LayerPosition` per layer for `grid`."""
        positions, windowed = list(self.on_grid(grid)), self.windowed(self.window)
        for layer in self.layers:
            of_pairs = {name: getattr(windowed[layer], name) for name in OF_PAIRS}
            positions[layer] = positions[layer]._replace(**of_pairs)
        return positions

    def set_grid(self, grid: Grid) -> None:
        """Change the grid that the parameters of the whole grid are stored for."""
        self.on_grid.set_grid(grid)


class SamVisionTransformer(VisionTransformer):
    """The image encoder of Segment Anything, a ViTDet: no class token, windows, a neck of two convolutions.

    Where windows do not tile the grid, it is padded with zeros, which are attended to, as in the authors' code.
    Encodings of pairs of tokens are built for a window in layers with windows (`WindowedPosition`), and tables of the
    other layers are resampled at other sizes. Parameter names are timm's, except in position encodings.

    Reference: Segment Anything (Kirillov et al., 2023), section A; ViTDet (Li et al., 2022), section 3.

    Args:
        global_layers: indices of the layers that attend to the whole grid.
        neck_dim: channels of the neck; None replaces it by a norm.
        global_pool: 'avg', 'max', 'avgmax' or '' (none).
        others: as `VisionTransformer`.
    """

    takes = SwinTransformer.takes
    whole_grid = "its blocks attend within windows of the map"
    published_parts = (*VisionTransformer.published_parts, ("head", "head.fc"))  # in timm
    default_encoding = "learnable + decomposed"

    def __init__(
        self,
        position: PositionBuilder,
        window_size: Side | tuple[Side, Side] = 14,
        global_layers: tuple[int, ...] = (2, 5, 8, 11),
        neck_dim: Channels | None = 256,
        global_pool: str = "avg",
        **kwargs: Any,
    ) -> None:
        if global_pool == "token" or kwargs.get("class_token") or kwargs.get("reg_tokens"):
            raise ValueError(
                "`class_token` must be False where layers attend within windows, which have patches only, without "
                "`reg_tokens`; use `global_pool` 'avg'."
            )
        # needed for building the position and the blocks
        self.window = Grid(*on_axes(window_size, 2))
        self.global_layers = frozenset(global_layers)
        self.neck_dim = neck_dim
        super().__init__(
            position, global_pool=global_pool, **{"class_token": False, "fc_norm": False, "final_norm": False, **kwargs}
        )
        self.num_features = self.head_hidden_size = neck_dim or self.embed_dim
        self.neck: nn.Module = LayerNorm2d(self.embed_dim)
        if neck_dim is not None:
            self.neck = nn.Sequential(
                nn.Conv2d(self.embed_dim, neck_dim, 1, bias=False),
                LayerNorm2d(neck_dim),
                nn.Conv2d(neck_dim, neck_dim, 3, padding=1, bias=False),
                LayerNorm2d(neck_dim),
            )

    def init_module(self, name: str, module: nn.Module) -> None:
        """Leave the layers as PyTorch initializes them, as in the released code."""

    def init_weights(self, mode: str = "") -> None:
        """Initialize the weights as in the released code, where tables of displacements start at zero."""
        super().init_weights(mode)
        for module in self.position.modules():
            if isinstance(module, Decomposed):
                for table in module.parameters():
                    nn.init.zeros_(table)

    def build_position(self, position: PositionBuilder, num_heads: int) -> None:
        """Build the position encodings of the whole grid and of a window."""
        (dim,), (depth,) = self.embed_dims, self.depths
        within = self.window.with_windows([self.window.shape])  # refuses encodings that need all pairs of tokens
        windowed = position(within, dim=dim, depth=depth, num_heads=num_heads, absolute=False)
        super().build_position(position, num_heads)
        layers = [layer for layer in range(depth) if layer not in self.global_layers]
        self.position = WindowedPosition(self.position, windowed, self.window, layers, depth)

    def attention_kind(self, layer: int) -> type[Attention]:
        """Return the class of the attention of a layer."""
        return Attention if layer in self.global_layers else WindowAttention

    def block_arguments(self, stage: int, grid: Grid) -> list[tuple[Grid | Windows]]:
        """Return, for each block, the grid, or its windows."""
        windows = Windows(grid, self.window)
        return [(grid if layer in self.global_layers else windows,) for layer in range(self.depths[0])]

    def layer_grids(self, grid: Grid) -> list[Grid]:
        """Return, for each block, the grid, with windows if the block attends within windows."""
        windowed = grid.with_windows([self.window.shape])
        return [grid if layer in self.global_layers else windowed for layer in range(self.depths[0])]

    def final(self, x: Tensor, grid: Grid) -> Tensor:
        """Apply the neck to the tokens after the last block, (B, N, D)."""
        features: Tensor = self.neck(grid.to_map(x))  # (B, C, H, W)
        return features.flatten(2).transpose(1, 2)

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict whose table has a row per token, as here, instead of a map, as in the released code."""
        state = rename_by_timm(self, state, checkpoint_filter_fn)
        table = state.get("pos_embed")
        return {**state, "pos_embed": table.flatten(1, 2)} if table is not None and table.ndim == 4 else state

    def released_layout(self) -> dict[str, Tensor]:
        state = renamed_state_dict(self)
        if "pos_embed" in state:
            state["pos_embed"] = state["pos_embed"].unflatten(1, self.grid.shape)
        return state

    def _classifier(self) -> nn.Module:
        return nn.Linear(self.neck_dim or self.embed_dim, self.num_classes) if self.num_classes else nn.Identity()

    def remove_norm(self) -> None:
        """Remove the neck, which takes the role of the final norm of other models, as in timm."""
        super().remove_norm()
        self.neck, self.neck_dim = nn.Identity(), None
        self.num_features = self.head_hidden_size = self.embed_dim


_LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16, "global_layers": (5, 11, 17, 23)}
_HUGE = {"embed_dim": 1280, "depth": 32, "num_heads": 16, "global_layers": (7, 15, 23, 31)}
_PIXELS = {"img_size": 1024, "num_classes": 0}  # the published encoders have no classifier
register_sizes(
    SamVisionTransformer,
    {
        "samvit_base_patch16": Size(89_670_912, _PIXELS, hub="sa1b", cfg={"crop_pct": 1.0}),
        "samvit_large_patch16": Size(308_278_272, {**_PIXELS, **_LARGE}, hub="sa1b", cfg={"crop_pct": 1.0}),
        "samvit_huge_patch16": Size(637_026_048, {**_PIXELS, **_HUGE}, hub="sa1b", cfg={"crop_pct": 1.0}),
        "samvit_base_patch16_224": Size(86_457_064, {"neck_dim": None}, encoding="decomposed"),
    },
)
_SMALL = {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 3, "window_size": 2}
register_small("SAM", "samvit_base_patch16", **_SMALL, global_layers=(1,), neck_dim=16)
