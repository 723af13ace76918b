"""PosMLP: a pyramid of gated MLPs that mix the tokens within windows by their positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from timm.layers import PatchEmbed
from timm.layers.helpers import to_2tuple
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from graticule.backbones.pyramid import Pyramid
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.token_model import init_weights
from graticule.checkpoints import released_posmlp
from graticule.layers.gating import Combine, GatedBlock
from graticule.layers.parts import for_timm, norm_layer_of
from graticule.position.grid import Grid
from graticule.position.position import PositionBuilder
from graticule.position.windows import Windows
from graticule.registry.fields import Bounded, Channels, Depth, Ratio, SmallCount

#: The norm after a convolution: over the batch for each channel, or over the channels of each position.
ConvNorm = Literal["batch", "layer"]
#: Rule for shifted windows: Swin's, or the rule of the authors' code.
Shift = Literal["swin", "released"]


class PosMlp(Pyramid):
    """PosMLP with any mixing encoding; by default GGQPE, and no norm in the gating unit.

    Where the paper leaves stem, merging, norms and initial values open, they are as in the authors' released code,
    so that its checkpoints load (`graticule.checkpoints.released_posmlp`) and give the same outputs.

    A window is never larger than the grid of its stage. Where windows do not tile the grid, which the paper leaves
    open and the authors' code refuses, the last windows of rows and columns are cut at its border, and so are shifted
    windows on all sides: no token has a weight for positions beyond the border. The weights are computed once per
    forward pass, for a window. An absolute encoding in addition to the mixing one is added before the first stage only
    (Table 7).

    With `shift='released'` shifted windows are as in the authors' code, which rolls the map: in GQPE and GGQPE the
    logits of tokens of opposite borders are lowered by 200, so a group whose other logits are lower still takes them;
    LRPE, GLRPE, LRPE-M and SGU mix opposite borders. Windows must then tile the grid. Not here is its SGU of more than
    two chunks, a chain of gates, which no released configuration has.

    Reference: PosMLP (Wang et al., 2022), section 4.2 and Table 11.

    Args:
        embed_dim: C, channels of the first stage, which double from stage to stage, or the channels of each stage.
        windows: side of each stage's windows, in patches.
        mlp_ratios: gamma of each stage.
        patch_embedding: 'conv' (ConvPE) or 'linear'.
        stem_norm: 'batch' or 'layer', the norm after the convolutions of the patch embedding 'conv'.
        patch_merging: 'conv' (ConvPM, depth-wise), 'dense_conv' (the same over all channels) or 'linear'.
        merging_norm: 'layer' or 'batch', the norm after the convolutions of the merging.
        gate_norm: whether the gating unit has a LayerNorm; by default, unless the mixing weights are a softmax: with
            'sgu' and the tables (Eq. 1, 10, 11) and not with Eq. 12.
        combine: how the halves are combined (`GatingUnit`).
        shift: which blocks shift their windows by half, for dense prediction (section 5.5): none if None; with 'swin',
            every second block of each stage, but not along an axis that one window covers, as in Swin; with
            'released', every second block of the network, always, with the mask of the authors' code.
        others: as `Backbone`; the sides of images are multiples of 32, `global_pool` is 'avg' or '' (none), and
            `proj_drop_rate` is after the last linear layer of each block, as in the released code.
    """

    takes = frozenset({"added_to_stream", "map_before", "map_after", "mixing", "spatial_bias"})
    needs = frozenset({"mixing"})
    stage_lists = ("downsamples", "blocks")
    first_conv = "downsamples.0.projs.0"
    default_encoding = "ggqpe"
    encoding_options: ClassVar = {"sgu": {"std": 0.02, "bias_start": 0.0}}  # as in the authors' code
    absolute_stages = 1
    merges = True

    def __init__(
        self,
        position: PositionBuilder,
        embed_dim: Channels | Sequence[Channels] = 96,
        depths: Sequence[Depth] = (2, 2, 18, 2),
        windows: Sequence[Bounded] = (14, 14, 14, 7),
        groups: Sequence[SmallCount] = (8, 16, 32, 64),
        mlp_ratios: Sequence[Ratio] = (4, 4, 4, 2),
        patch_embedding: Literal["conv", "linear"] = "conv",
        stem_norm: ConvNorm = "batch",
        patch_merging: Literal["conv", "dense_conv", "linear"] = "conv",
        merging_norm: ConvNorm = "layer",
        gate_norm: bool | None = None,
        combine: Combine = "gate",
        shift: Shift | None = None,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        act_layer: type[nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        norm = norm_layer_of(norm_layer)
        for name, changed, sampling in (
            ("stem_norm", stem_norm != "batch", patch_embedding),
            ("merging_norm", merging_norm != "layer", patch_merging),
        ):
            if changed and sampling == "linear":
                raise ValueError(f"`{name}` must be left out where sampling is linear, which has its own norm.")
        dims = [embed_dim << stage for stage in range(len(depths))] if isinstance(embed_dim, int) else list(embed_dim)
        if not len(depths) == len(dims) == len(windows) == len(groups) == len(mlp_ratios):
            raise ValueError(
                f"`windows`, `groups`, `mlp_ratios` and several `embed_dim` must have a value for each of the "
                f"{len(depths)} stages, got {len(windows)}, {len(groups)}, {len(mlp_ratios)} and {len(dims)}."
            )
        if patch_merging == "conv" and any(after % before for before, after in itertools.pairwise(dims)):
            raise ValueError(
                f"`embed_dim` must be multiples of the previous stage's channels with the patch merging 'conv', got "
                f"{tuple(dims)}."
            )
        for dim, ratio, s in zip(dims, mlp_ratios, groups, strict=True):
            mixed = int(dim * ratio) // (1 if combine == "nonsplit" else 2)
            if mixed % s:
                raise ValueError(f"`groups` must divide the {mixed} channels that their stage mixes, got {s}.")
        super().__init__(patch_size=4, embed_dims=dims, depths=depths, **kwargs)
        self.windows, self.shift = tuple(windows), shift
        self.build_position(position, groups)
        self.build_head(norm)
        gate_norm = not self.has_softmax() if gate_norm is None else gate_norm
        act_layer = act_layer or nn.GELU
        # the norm of linear patches has an eps of 1e-5, whatever the model's is, as in the released code
        stem: nn.Module = PatchEmbed(None, 4, self.in_chans, dims[0], nn.LayerNorm)
        if patch_embedding == "conv":
            stem = ConvPatchEmbed(self.in_chans, dims[0], stem_norm, act_layer)
        merging: Callable[[int, int], nn.Module] = LinearPatchMerging
        if patch_merging != "linear":
            merging = partial(ConvPatchMerging, norm=merging_norm, depthwise=patch_merging == "conv")
        self.downsamples = nn.ModuleList([stem, *itertools.starmap(merging, itertools.pairwise(dims))])
        rates = iter(self.drop_path_rates())
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                GatedBlock(
                    dim,
                    ratio,
                    norm if gate_norm else None,
                    combine,
                    proj_drop=(0.0, self.proj_drop_rate),
                    drop_path=next(rates),
                    norm_layer=norm,
                    act_layer=act_layer,
                )
                for _ in range(depth)
            )
            for dim, depth, ratio in zip(dims, depths, mlp_ratios, strict=True)
        )
        self.finish()

    def set_input_size(
        self, img_size: int | tuple[int, ...] | None = None, windows: Sequence[int] | None = None
    ) -> None:
        """Change the image size, or the windows, that position information is stored for.

        Quadratic encodings are functions of displacement, so they stay exact; tables, matrices and biases are
        resampled.

        Args:
            windows: side of each stage's windows, in patches; unchanged by default.
        """
        size = self.img_size if img_size is None else img_size
        if windows is not None:
            self.grid_at(to_2tuple(size))  # an error is raised before anything is changed
            are_sides = isinstance(windows, Sequence) and all(isinstance(side, int) and side > 0 for side in windows)
            if not are_sides or len(windows) != len(self.depths):
                raise ValueError(
                    f"`windows` must be a side of at least 1 for each of the {len(self.depths)} stages, got "
                    f"{list(windows) if isinstance(windows, Sequence) else windows}."
                )
            self.windows = tuple(windows)
        super().set_input_size(size)

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the first stage's grid, with the windows, of an image of `image` = (height, width), in pixels."""
        grid = super().grid_at(image).in_windows(self.windows[: len(self.depths)])
        if self.shift == "released":
            for stage in grid.pyramid(len(self.depths)):
                if any(side % step for side, step in zip(stage.shape, stage.within.shape, strict=True)):
                    raise ValueError(
                        f"`windows` must tile the grid of each stage with `shift='released'`, got a side of "
                        f"{stage.within.height} x {stage.within.width} on {stage.height} x {stage.width} patches."
                    )
        return grid

    def block_arguments(self, stage: int, grid: Grid) -> list[tuple[Windows]]:
        """Return the windows of the blocks, shifted as `shift` says."""
        if self.shift == "swin":
            return self.alternating_windows(stage, grid)
        window, earlier = grid.within, sum(self.depths[:stage])
        kinds = [Windows(grid, window)] * 2
        if self.shift == "released":
            kinds[1] = Windows(grid, window, (window.height // 2, window.width // 2), rolled=True)
        return [(kinds[(earlier + index) % 2],) for index in range(self.depths[stage])]

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize linear and convolutional weights from a normal of std 0.02, cut at 2; biases are zero."""
        init_weights(module, (nn.Linear, nn.Conv2d))

    def tokenize(self, x: Tensor, stage: int) -> Tensor:
        """Turn images, or the map of the previous stage, into tokens (B, H * W, D)."""
        return self.downsamples[stage](x)

    def merge_table(self, stage: int, table: Tensor, grid: Grid) -> Tensor:
        """Compute the table of a stage, (N, D), from the one of the previous stage, of `grid`, as for tokens."""
        if any(isinstance(module, nn.BatchNorm2d) for module in self.downsamples[stage].modules()):
            raise ValueError(
                "`merging_norm` must be 'layer' with a joining that merges the table like the tokens: BatchNorm "
                "would treat the table like images, got 'batch'."
            )
        return super().merge_table(stage, table, grid)

    def own_layout(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of the released code under our names and in our layout, any other one unchanged."""
        return released_posmlp.to_own(self, state)

    def released_layout(self) -> dict[str, Tensor]:
        """Return the state dict under the names and in the layout of the released code."""
        return released_posmlp.to_released(self)


class ConvPatchEmbed(nn.Module):
    """A patch embedding for patches of 4: three convolutions, each followed by a norm, with GELU between them.

    3 x 3 of stride 2 to C / 2 channels, 3 x 3 of stride 2 to C, and 1 x 1; the paper draws three convolutions, and
    everything else is as in the released code.

    Reference: PosMLP (Wang et al., 2022), section 4.2, Figure 2 (b).

    Args:
        in_chans: channels of the image.
        dim: C.
        norm: 'batch' for BatchNorm, 'layer' for LayerNorm.
        act_layer: the activation.
    """

    def __init__(self, in_chans: int, dim: int, norm: ConvNorm = "batch", act_layer: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        half = dim // 2
        self.projs = nn.ModuleList(
            [
                nn.Conv2d(in_chans, half, 3, stride=2, padding=1),
                nn.Conv2d(half, dim, 3, stride=2, padding=1),
                nn.Conv2d(dim, dim, 1),
            ]
        )
        self.norms = nn.ModuleList(_norm(norm, channels) for channels in (half, dim, dim))
        self.act = act_layer()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, height, width) to tokens (B, N, D)."""
        last = len(self.projs) - 1
        for layer, (proj, norm) in enumerate(zip(self.projs, self.norms, strict=True)):
            x = _normalized(norm, proj(x))
            x = x if layer == last else self.act(x)
        return x.flatten(2).transpose(1, 2)


class ConvPatchMerging(nn.Module):
    """A patch merging: a 3 x 3 convolution of stride 2, by default to twice the channels, followed by a norm.

    Reference: PosMLP (Wang et al., 2022), section 4.2, Figure 2 (c); the norm is as in the released code.

    Args:
        dim: D.
        out_dim: D'; a multiple of D if `depthwise`.
        norm: 'layer' for LayerNorm, 'batch' for BatchNorm.
        depthwise: D' / D output channels per input channel, two in the paper; if False, a dense convolution.
    """

    def __init__(self, dim: int, out_dim: int, norm: ConvNorm = "layer", depthwise: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, out_dim, 3, stride=2, padding=1, groups=dim if depthwise else 1)
        self.norm = _norm(norm, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map a map (B, D, H, W) to tokens (B, N / 4, D')."""
        return _normalized(self.norm, self.conv(x)).flatten(2).transpose(1, 2)


class LinearPatchMerging(PatchMerging):
    """A patch merging that concatenates four neighbors, normalizes them and maps 4D channels to 2D: timm's for Swin.

    Reference: PosMLP (Wang et al., 2022), Table 10, "PM Linear"; Swin Transformer (Liu et al., 2021).
    """

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__(dim, out_dim, for_timm(partial(nn.LayerNorm, eps=1e-6)))

    def forward(self, x: Tensor) -> Tensor:
        """Map a map (B, D, H, W) to tokens (B, N / 4, 2D)."""
        return super().forward(x.movedim(1, -1)).flatten(1, 2)


def _norm(kind: ConvNorm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-6) if kind == "batch" else nn.LayerNorm(channels, eps=1e-6)


def _normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalize a map (B, D, H, W)."""
    if isinstance(norm, nn.LayerNorm):
        out: Tensor = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    else:
        out = norm(x)
    return out


_NANO = {
    **{"img_size": 32, "in_chans": 1, "num_classes": 10, "embed_dim": 32, "depths": (2, 4)},
    **{"windows": (8, 4), "groups": (4, 8), "mlp_ratios": (4, 2)},
}
_AT_384 = {"img_size": 384, "windows": (12, 12, 24, 12)}
# The nano size is for small images. At 384 pixels the windows are 12, 12, 24 and 12; the paper does not give them. As
# at 224 pixels, the last two stages are one window each; in the first two the sides are the nearest to 14 that tile
# the grids. The authors' code has 14, 14, 14 and 7 at 384 pixels, too, which do not tile them, so it cannot run. Ours
# cost 18.6 G multiply-adds if counted like the paper's other rows, with the 5 s N^2 of the logits of every block, and
# 17.6 G without them, where its Table 2 prints 17.7 G. Counted with them, no windows that tile the grids and are equal
# in the first two stages give 17.7 G.
register_sizes(
    PosMlp,
    {
        "posmlp_nano_32": Size(71_162, _NANO, cfg={"pool_size": (4, 4)}),
        "posmlp_tiny_224": Size(20_925_538),
        "posmlp_small_224": Size(36_816_450, {"embed_dim": 128}),
        "posmlp_base_224": Size(81_976_834, {"embed_dim": 192}),
        "posmlp_tiny_384": Size(20_932_360, _AT_384, cfg={"pool_size": (12, 12), "crop_pct": 1.0}),
    },
    pool_size=(7, 7),
)
_SMALL = {"img_size": 16, "embed_dim": 8, "depths": (2, 2), "windows": (2, 2), "groups": (2, 2), "mlp_ratios": (2, 2)}
register_small("PosMLP", "posmlp_tiny_224", **_SMALL)
