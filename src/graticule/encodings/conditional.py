"""Conditional encodings: computed from the tokens by a convolution over their neighbors, between blocks or within."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.position.grid import Grid
from graticule.position.joining import Joining
from graticule.position.layer import LayerPosition
from graticule.position.places import by
from graticule.position.position import Encoding, Position, StageSpec, register_encoding
from graticule.registry.fields import Bounded, Channels, LayerIndex

#: Insert positions: the layers after which a module is inserted, one or several.
Places = int | tuple[int, ...]


def each_place(places: Places) -> tuple[int, ...]:
    """Return the insert positions as a tuple; a ValueError if there are none, or one twice."""
    different = (places,) if isinstance(places, int) else tuple(places)
    if not different or len(set(different)) < len(different):
        raise ValueError(f"`places` must be different layers, at least one, such as [0, 1, 2], got {places!r}.")
    return different


#: Key of the module before the first layer, at insert position -1.
_FIRST = "first"


class _Inserted(Position):
    """Modules at insert positions, from -1 on, for `depth` layers."""

    crops = False

    def __init__(self, places: Iterable[int], last: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        places = list(places)
        if not places:
            raise ValueError("`places` must name at least one insert position, got none.")
        for place in places:
            if not -1 <= place <= last:
                raise ValueError(
                    f"`places` must be from -1, before the first of the {depth} layers, to {last}, got {place}."
                )

    def set_grid(self, grid: Grid) -> None:
        """Do nothing: no parameter depends on the grid."""


class BetweenBlocks(_Inserted):
    """Applies PEGs to the residual stream: at insert position l after layer l, at -1 before the first layer.

    Reference: CPVT (Chu et al., 2023), section 5.2, "position index".

    Args:
        pegs: insert position -> PEG; insert positions are from -1 to depth - 1.
        depth: number of layers.
    """

    def __init__(self, pegs: Mapping[int, nn.Module], depth: int) -> None:
        super().__init__(pegs, depth - 1, depth)
        keys = {place: _FIRST if place == -1 else str(place) for place in sorted(pegs)}
        self.pegs = nn.ModuleDict({key: pegs[place] for place, key in keys.items()})

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of each layer for `grid`: functions of the tokens."""
        positions = [LayerPosition()] * self.depth
        for key, peg in self.pegs.items():
            act = partial(peg, grid=grid)
            if key == _FIRST:
                positions[0] = positions[0]._replace(map_before=act)
            else:
                positions[int(key)] = positions[int(key)]._replace(map_after=act)
        return positions

    def layer_lists(self) -> list[str]:
        return ["pegs"]

    def published_names(self) -> dict[str, str]:
        """Map `pos_block.i.proj...` of Twins' code, numbered in order."""
        return {
            f"pos_block.{i}.{name}": f"pegs.{key}.{name}"
            for i, (key, peg) in enumerate(self.pegs.items())
            for name, _ in peg.named_parameters()
        }


class BeforeProjections(_Inserted):
    """Computes the inputs of queries, keys and values: at insert position l, for the next layer, l + 1.

    So an insert position has the same meaning as between blocks, and -1 is for the first layer. CPVT's Table 16 says
    "position 0, as in our method" of CvT's projection; if it means the first layer, that is -1 here.

    Args:
        inputs: insert position -> module; insert positions are from -1 to depth - 2.
        depth: number of layers.
    """

    def __init__(self, inputs: Mapping[int, nn.Module], depth: int) -> None:
        super().__init__(inputs, depth - 2, depth)
        self.inputs = nn.ModuleDict({str(place + 1): inputs[place] for place in sorted(inputs)})

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of each layer for `grid`: functions of its normalized tokens."""
        positions = [LayerPosition()] * self.depth
        for key, module in self.inputs.items():
            positions[int(key)] = LayerPosition(inputs=partial(module, grid=grid))
        return positions

    def layer_lists(self) -> list[str]:
        return ["inputs"]


Convolution = Literal["depthwise", "separable", "dense"]
Padding = Literal["zeros", "circular", "replicate", "reflect", "none"]


@register_encoding("peg")
class Peg(Encoding):
    r"""Adds a zero-padded convolution over the grid to the tokens (PEG); prefix tokens keep their values.

    .. math:: y = x + F(x), \quad F = conv_{k \times k} \text{ with } (k - 1) / 2 \text{ zeros around the grid}

    With several layers F is a stack of convolution, batch norm and ReLU, with one residual connection. Only the zeros
    at the border carry information about the position; everything else is equivariant to translation, and nothing
    depends on the size of the grid. In a text it is a convolution along it, in a video or volume over all three axes.
    Published weights have Twins' names (`proj.0.weight`).

    Reference: Conditional Positional Encodings for Vision Transformers (CPVT, Chu et al., 2023), section 3.2,
    Algorithm 1, Tables 5, 6, 11 and 14. Choices that the paper leaves open, and its inconsistencies:

    - It counts a PEG without bias in Table 16 (1,728 parameters for Ti) and with bias in Table 8 (1,920).
      Algorithm 1 and Twins' code have a bias, and so do we.
    - Table 12's totals (5.9 and 6.1 M, 22.9 and 23.8 M) do not fit depth-wise convolutions at 5 and 11
      insert positions, as its text says: these have 5.69 and 5.70 M, 21.99 and 22.02 M. Separable ones at 6 and at 12
      insert positions give all four. Neither gives Table 4's 88 M for CPVT-B with five (86.5 M; 89.4 M with separable
      ones).
    - Table 5's 6.13 M for "12 convolutional layers (kernel size being 1)" fits two models: separable ones at
      12 insert positions, and one stack of 12 dense ones with batch norm and ReLU (`layers=12`); the text does not
      say which.
    - Section 4.4's "38952 - 37632 = 960" is 38,592 - 37,632, and 38,592 = 192^2 + 9 * 192 are the parameters of one
      separable layer; four have 154,368.
    - "Without zero paddings" (Table 11) a convolution returns fewer tokens than it gets. Here 'none' keeps the grid:
      tokens with an incomplete neighborhood get no encoding. So the border still differs from the interior;
      'circular' has no border at all.
    - Weights are initialized as in PyTorch's convolutions, as in DeiT's code, on which CPVT builds; in PVT and Twins
      from a normal of variance 2 / k^2, as in Twins' code.

    Args:
        kernel: k, odd.
        convolution: 'depthwise', 'separable' (depth-wise, then 1 x 1 over channels) or 'dense'.
        layers: number of convolutions; if more than one, each has batch norm and ReLU.
        padding: padding of the grid: 'zeros', 'circular', 'replicate', 'reflect' or 'none'.
        bias: whether convolutions have one.
        axes: the number of axes of the grid, from 1 to 3.
    """

    layered = False

    def __init__(
        self,
        dim: Channels,
        kernel: Bounded = 3,
        convolution: Convolution = "depthwise",
        layers: LayerIndex = 1,
        padding: Padding = "zeros",
        bias: bool = True,
        axes: int = 2,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"`layers` must be at least 1, got {layers}.")
        steps: list[nn.Module] = []
        for _ in range(layers):
            steps += _convolutions(dim, kernel, convolution, padding, bias, axes)
            if layers > 1:
                steps += [_BATCH_NORMS[axes - 1](dim), nn.ReLU()]
        self.proj = nn.Sequential(*steps)
        #: width of the border whose tokens have an incomplete neighborhood and get no encoding
        self.margin = layers * (kernel // 2) if padding == "none" else 0
        self.kernel, self.padding = kernel, padding

    @classmethod
    def position(
        cls,
        stage: StageSpec,
        joining: Joining,
        *,
        places: Places = (0,),
        acts_on: Literal["tokens", "queries_keys"] = "tokens",
        frozen: bool = False,
        **options: Any,
    ) -> Position:
        """Build one PEG per insert position.

        Args:
            stage: the sizes of the backbone.
            joining: 'default'; there is nothing to join.
            places: the layers after which a PEG is inserted; -1 is before the first.
            acts_on: the residual stream, or only the queries and keys of the next layer.
            frozen: do not train the weights (the statistics of a batch norm are still updated).
            options: of the constructor.
        """
        pegs = {place: cls.build(stage, stage.grid, options) for place in each_place(places)}
        if acts_on == "tokens":
            return BetweenBlocks(pegs, stage.depth).requires_grad_(not frozen)
        return BeforeProjections({place: QueryKeyPeg(peg) for place, peg in pegs.items()}, stage.depth).requires_grad_(
            not frozen
        )

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Add the convolution over `grid` to the tokens x: (B, N, D); returns (B, N, D).

        Raises:
            ValueError: if N is not the grid's, or the grid is too small for the kernel and the padding.
        """
        _check(x, grid, self.kernel, self.padding, self.margin)
        features = grid.to_map(x)  # a view: tokens have the memory layout of a channels-last map
        y = self.proj(features)
        y = features + (F.pad(y, [self.margin] * 2 * grid.ndim) if self.margin else y)
        return _with_prefix(x, y, grid)


class QueryKeyPeg(nn.Module):
    """Applies a PEG to the inputs of queries and keys but not of values, so that only position passes through it.

    It acts on the normalized tokens that enter attention; the paper says only that it is "only added when calculating Q
    and K".

    Reference: CPVT (Chu et al., 2023), section 5.1 (71.3 for DeiT-Ti, against 68.2 without and 72.4 for all).
    """

    def __init__(self, peg: Peg) -> None:
        super().__init__()
        self.peg = peg

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the inputs of queries, keys and values, (B, N, D) each, from x: (B, N, D)."""
        y = self.peg(x, grid)
        return y, y, x


@register_encoding("convolutional_projection")
class ConvolutionalProjection(Encoding):
    """Computes the inputs of queries, keys and values by one depth-wise convolution each.

    The class token is unchanged. The output of the convolution replaces the tokens and is not added to them.

    Reference: CvT (Wu et al., 2021), section 3.2, in the form of CPVT's Table 16 (Chu et al., 2023): its
    5,685,352 parameters are DeiT-Ti without position embedding, plus three convolutions of 192 * 9 + 192, so
    with a bias and without the batch norm that CvT has after each.

    Args:
        kernel: k, odd.
        padding: padding of the grid: 'zeros', 'circular', 'replicate' or 'reflect'.
        bias: whether convolutions have one.
        axes: the number of axes of the grid, from 1 to 3.
    """

    layered = False

    def __init__(
        self, dim: Channels, kernel: Bounded = 3, padding: Padding = "zeros", bias: bool = True, axes: int = 2
    ) -> None:
        super().__init__()
        if padding == "none":
            raise ValueError("`padding` must keep the grid's size to convolve queries, got 'none'.")
        self.q, self.k, self.v = (_convolutions(dim, kernel, "depthwise", padding, bias, axes)[0] for _ in range(3))
        self.kernel, self.padding = kernel, padding

    @classmethod
    def position(
        cls, stage: StageSpec, joining: Joining, *, places: Places = (0,), frozen: bool = False, **options: Any
    ) -> Position:
        """Build one instance per insert position, as in `Peg.position`.

        Args:
            stage: the sizes of the backbone.
            joining: 'default'.
            places: insert positions: at l, the queries, keys and values of layer l + 1 are computed like this.
            frozen: do not train the weights.
            options: of the constructor.
        """
        modules = {place: cls.build(stage, stage.grid, options) for place in each_place(places)}
        return BeforeProjections(modules, stage.depth).requires_grad_(not frozen)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the inputs of queries, keys and values, (B, N, D) each, from x: (B, N, D)."""
        _check(x, grid, self.kernel, self.padding)
        features = grid.to_map(x)
        q, k, v = (_with_prefix(x, convolution(features), grid) for convolution in (self.q, self.k, self.v))
        return q, k, v


#: Convolutions and batch norms of one, two and three axes.
_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _convolutions(dim: int, kernel: int, convolution: str, padding: str, bias: bool, axes: int) -> list[nn.Module]:
    if not 1 <= axes <= len(_CONVOLUTIONS):
        raise ValueError(f"`grid` must have from 1 to 3 axes to be convolved, as PyTorch can, got {axes} axes.")
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"`kernel` must be odd, so that it has a center, got {kernel}.")
    around: dict[str, Any] = {"padding": 0 if padding == "none" else kernel // 2}
    if padding != "none":
        around["padding_mode"] = padding
    groups = 1 if convolution == "dense" else dim
    layer = _CONVOLUTIONS[axes - 1]
    steps: list[nn.Module] = [layer(dim, dim, kernel, groups=groups, bias=bias, **around)]
    if convolution == "separable":
        steps.append(layer(dim, dim, 1, bias=bias))
    return steps


def _check(x: Tensor, grid: Grid, kernel: int, padding: str, margin: int = 0) -> None:
    if x.shape[1] != grid.tokens:
        raise ValueError(
            f"`x` must have as many tokens as the grid, {grid.prefix} + {' * '.join(map(str, grid.shape))} = "
            f"{grid.tokens}, got {x.shape[1]}."
        )
    least = {"circular": kernel // 2, "reflect": kernel // 2 + 1, "none": 2 * margin + 1}.get(padding, 1)
    if min(grid.shape) < least:
        raise ValueError(
            f"`grid` must have sides of at least {least} patches for a kernel of {kernel} with padding {padding!r}, "
            f"got {by(grid.shape)}."
        )


def _with_prefix(x: Tensor, features: Tensor, grid: Grid) -> Tensor:
    """Concatenate the prefix tokens of x: (B, N, D) and the patches of a map (B, D, H, W); returns (B, N, D).

    With prefix tokens this copies the patches, and the convolution has copied them, too, because it needs the images of
    a batch to be contiguous in memory. Without prefix tokens both are views.
    """
    patches = grid.from_map(features)
    return torch.cat([grid.split(x)[0], patches], 1) if grid.prefix else patches
