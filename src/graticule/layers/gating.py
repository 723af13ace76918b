"""Gating units, which mix tokens by given weights and multiply the result with other channels, and their block."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, cast, get_args

import torch
from timm.layers import DropPath
from timm.layers.helpers import to_2tuple
from timm.models import register_notrace_module
from torch import Tensor, nn

from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition, MixingWeights
from graticule.position.windows import Tile, Windows

#: The ways to combine the two halves of the channels (PosMLP, Figure 3).
Combine = Literal["gate", "add", "concat", "nonsplit"]
#: Number that PosMLP's released code adds to the logits of tokens of opposite borders.
RELEASED_MASK = -200.0
#: A dropout rate, or one for each of two layers.
Drop = float | tuple[float, float]


def mix_tokens(x: Tensor, mixing: MixingWeights, bias: Tensor | None = None, windows: Windows | None = None) -> Tensor:
    r"""Mix the tokens of every group of channels by the weights of the group.

    .. math:: y_{i, g} = \sum_j W_{g, ij} x_{j, g} + b_i

    With `windows` the sum is over the tokens of i's window. At the border of the grid a window may be a part of a whole
    one: its tokens have the weights and the bias of their positions in a whole window, and a softmax is over the
    existing tokens. Weights without a softmax are sliced and not scaled: positions outside contribute nothing, as with
    zero padding.

    Args:
        x: (B, N, C), C a multiple of the number of groups.
        mixing: the weights of a window, (groups, M, M), `Displacements`, or a `TokenMlp`; by default the window is the
            whole grid.
        bias: (M,) or (groups, M).
        windows: the windows on the grid of the N tokens.
    """
    return _mixed(x, mixing, bias, windows).flatten(-2)


def _mixed(x: Tensor, mixing: MixingWeights, bias: Tensor | None, windows: Windows | None = None) -> Tensor:
    """Mix tokens x: (B, N, C) as `mix_tokens`; returns (B, N, groups, C / groups), which may be a view."""
    if windows is None or (windows.window == windows.grid and not any(windows.shift)):
        return _product(x[:, None, :, None, None], mixing, bias)[:, 0, :, 0, 0]
    strips = []
    for strip in _parts(x, mixing, bias, windows):
        row = []
        for part, weights, offsets in strip:
            y = _product(part, weights, offsets)
            # copied here and not by `flatten`, whose search for a view takes minutes with symbolic sizes
            row.append(y.contiguous().flatten(3, 4).flatten(1, 2))  # (B, rows, columns, groups, c)
        strips.append(torch.cat(row, 2) if len(row) > 1 else row[0])
    mixed: Tensor = torch.cat(strips, 1) if len(strips) > 1 else strips[0]
    return (mixed.roll(windows.shift, (1, 2)) if windows.rolled else mixed).flatten(1, 2)


def _parts(
    x: Tensor, mixing: MixingWeights, bias: Tensor | None, windows: Windows
) -> list[list[tuple[Tensor, MixingWeights, Tensor | None]]]:
    """Cut tokens into rectangles of one kind of window, (B, rows, h, columns, w, C), with the weights and the bias."""
    window = windows.window

    def split(part: Tensor, repeats: tuple[int, int], part_grid: Grid) -> Tensor:
        return part.unflatten(2, (repeats[1], part_grid.width)).unflatten(1, (repeats[0], part_grid.height))

    if windows.rolled:
        return [
            [
                (
                    split(part, (part.shape[1] // window.height, part.shape[2] // window.width), window),
                    _masked(mixing, near),
                    bias,
                )
                for part, near in strip
            ]
            for strip in windows.kinds(x)
        ]
    tokens = x.unflatten(1, windows.grid.shape)  # (B, H, W, C)
    return [
        [
            (
                split(tokens[:, tile.rows, tile.columns], tile.repeats, tile.part),
                *_weights_of(tile, window, mixing, bias),
            )
            for tile in strip
        ]
        for strip in windows.tiles()
    ]


def _masked(mixing: MixingWeights, near: Tensor | None) -> MixingWeights:
    """Return weights with `RELEASED_MASK` on the logits of tokens that are not `near`; unchanged without a softmax."""
    if near is None or not isinstance(mixing, Displacements) or not mixing.softmax:
        return mixing
    return (mixing._replace(softmax=False).matrix() + RELEASED_MASK * ~near).softmax(-1)


def _weights_of(
    tile: Tile, window: Grid, mixing: MixingWeights, bias: Tensor | None
) -> tuple[MixingWeights, Tensor | None]:
    """Return the weights and the bias for the part of a window that a tile covers."""
    if tile.part == window:
        return mixing, bias
    at = (tile.window_rows, tile.window_columns)
    if bias is not None:
        bias = bias.unflatten(-1, window.shape)[..., *at].flatten(-2)
    if isinstance(mixing, Displacements):
        return mixing.part(tile.part), bias
    if isinstance(mixing, TokenMlp):
        return mixing.part(window.shape, *at), bias
    pairs = mixing.unflatten(2, window.shape).unflatten(1, window.shape)[:, *at, *at]
    return pairs.flatten(3).flatten(1, 2), bias


def _product(x: Tensor, mixing: MixingWeights, bias: Tensor | None) -> Tensor:
    """Mix the tokens within each window of x: (B, rows, h, columns, w, C); returns (..., groups, C / groups).

    No shape has a size of -1, which an empty batch would not determine.
    """
    shape = x.shape[:5]
    if isinstance(mixing, TokenMlp) or (isinstance(mixing, Displacements) and mixing.weights is None):
        y = mixing.mix(x.transpose(2, 3).flatten(3, 4).flatten(0, 2))
        y = y.unflatten(-1, (mixing.groups, y.shape[-1] // mixing.groups))
        y = y if bias is None else y + torch.atleast_2d(bias).mT[..., None].to(x.dtype)
        y = y.unflatten(1, (shape[2], shape[4])).unflatten(0, (shape[0], shape[1], shape[3]))
        return y.transpose(2, 3)
    weights = cast("Tensor", mixing.weights if isinstance(mixing, Displacements) else mixing).to(x.dtype)
    # one copy puts samples and windows next to each other, for one large product per group;
    # flat in between: PyTorch 2.11 does not merge dimensions in export if their strides contain a dynamic batch size
    samples = (shape[0], shape[1], shape[3], x.shape[5] // len(weights))  # B, rows, columns, C / groups
    columns = x.unflatten(-1, (len(weights), samples[-1])).permute(5, 2, 4, 0, 1, 3, 6).contiguous().flatten()
    columns = columns.unflatten(0, (len(weights), shape[2] * shape[4], math.prod(samples)))
    y = weights @ columns if bias is None else torch.baddbmm(bias[..., None].to(x.dtype), weights, columns)
    y = y.unflatten(-1, samples).unflatten(1, (shape[2], shape[4]))
    result = y.permute(3, 4, 1, 5, 2, 0, 6)  # not copied
    return result


class GatingUnit(nn.Module):
    r"""Gates half of the channels by the other half, which is mixed over the tokens by the weights of the position.

    .. math:: Z = (W\, Norm(X_1) + b) \odot X_2

    X_1 is the second half of the channels and X_2 the first, as in timm, and groups are contiguous channels, as in
    PosMLP's paper; its code mixes the first half and interleaves the groups, which is converted to this order when its
    checkpoints are loaded. With LayerNorm and a dense W it is gMLP's SGU; without the norm and with a relative W it is
    PosMLP's PoSGU. Instead of the product there can be a sum ('add') or a concatenation ('concat'), and X_1 = X_2 = X
    can be all channels ('nonsplit').

    Reference: gMLP (Liu et al., 2021), Eq. 3-4; PosMLP (Wang et al., 2022), Eq. 1, 9-15 and Figure 3.

    Args:
        dim: C, input channels, even unless 'nonsplit'.
        norm_layer: builds the norm from its channels; None for no norm.
        combine: 'gate', 'add', 'concat' or 'nonsplit'.
    """

    def __init__(
        self, dim: int, norm_layer: Callable[[int], nn.Module] | None = None, combine: Combine = "gate"
    ) -> None:
        super().__init__()
        if combine not in get_args(Combine):
            raise ValueError(f"`combine` must be one of {', '.join(get_args(Combine))}, got {combine!r}.")
        if combine != "nonsplit" and dim % 2:
            raise ValueError(f"`dim` must be even, to be split in two halves, got {dim}.")
        self.combine = combine
        mixed = dim if combine == "nonsplit" else dim // 2
        self.out_dim = dim // 2 if combine in ("gate", "add") else dim
        self.norm = nn.Identity() if norm_layer is None else norm_layer(mixed)

    def forward(self, x: Tensor, position: LayerPosition, windows: Windows | None = None) -> Tensor:
        """Map x: (B, N, C) to (B, N, C / 2), or (B, N, C) with 'concat' and 'nonsplit'."""
        if position.mixing is None:
            raise ValueError("`position` must have the field `mixing`, got None; use a mixing encoding.")
        u, v = (x, x) if self.combine == "nonsplit" else x.chunk(2, -1)
        v = _mixed(self.norm(v), position.mixing, position.spatial_bias, windows)
        if self.combine == "concat":
            return torch.cat([u, v.flatten(-2)], -1)
        u = u.unflatten(-1, v.shape[-2:])
        return (u + v if self.combine == "add" else u * v).flatten(-2)

    def extra_repr(self) -> str:
        return f"combine={self.combine}"


class GatedMlp(nn.Module):
    """A gating unit between two linear layers, with timm's names."""

    def __init__(self, dim: int, hidden: int, gate: GatingUnit, act_layer: type[nn.Module], drop: Drop) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = act_layer()
        self.gate = gate
        self.fc2 = nn.Linear(gate.out_dim, dim)
        self.drop1, self.drop2 = (nn.Dropout(p) for p in to_2tuple(drop))

    def forward(self, x: Tensor, position: LayerPosition, windows: Windows | None = None) -> Tensor:
        """Map x: (B, N, D) to (B, N, D)."""
        return self.drop2(self.fc2(self.gate(self.drop1(self.act(self.fc1(x))), position, windows)))


@register_notrace_module  # torch.fx records the call as one node, because it depends on the position
class GatedBlock(nn.Module):
    r"""The block of gated MLPs.

    .. math:: x' = x + V\, s(\sigma(U LN(x)))

    Reference: gMLP (Liu et al., 2021), Eq. 1.

    Args:
        dim: D.
        mlp_ratio: gamma, input channels of the gating unit as a multiple of D.
        gate_norm: builds the norm of the gating unit; None for no norm.
        combine: as in `GatingUnit`.
        proj_drop: dropout rate after both linear layers, or one rate for each.
        others: as `Block`.
    """

    def __init__(
        self,
        dim: int,
        mlp_ratio: float,
        gate_norm: Callable[[int], nn.Module] | None,
        combine: Combine = "gate",
        proj_drop: Drop = 0.0,
        drop_path: float = 0.0,
        norm_layer: Callable[[int], nn.Module] = nn.LayerNorm,
        act_layer: type[nn.Module] = nn.GELU,
    ) -> None:
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.norm = norm_layer(dim)
        self.mlp_channels = GatedMlp(dim, hidden, GatingUnit(hidden, gate_norm, combine), act_layer, proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    @property
    def norm1(self) -> nn.Module:
        """The norm before the tokens are mixed, under its name in a transformer block."""
        return self.norm

    def forward(self, x: Tensor, position: LayerPosition, windows: Windows | None = None) -> Tensor:
        """Map tokens x: (B, N, D) to (B, N, D); they are mixed within `windows`, or on the whole grid."""
        return x + self.drop_path(self.mlp_channels(self.norm(x), position, windows))
