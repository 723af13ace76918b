"""The position of a pyramid, whose grid shrinks from stage to stage, and of layers that pool queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import BiasPosition
from graticule.position.bias import BiasFunction
from graticule.position.grid import Grid
from graticule.position.layer import OF_PAIRS, LayerPosition
from graticule.position.position import CombinedPosition, NoPosition, Position, PositionBuilder
from graticule.position.rotation import PooledRotation, Rotation
from graticule.position.tokens import Axes, Function, Tokens, pick


class PyramidPosition(Position):
    """The positions of all stages; each grid has half the sides of the previous one.

    It is called with the grid of the first stage, with the windows of all stages. Every stage has its own encoding, as
    in PVT, unless only the first stages have an absolute one.

    **Tables of later stages.** If w is added to the residual stream once, it reaches a later stage as part of the
    tokens, through every patch merging P in between. If w is separate from the tokens and every layer gets it (LaPE,
    'shared'), it must be mapped to the channels of that stage in the same way: the stage joins P(w'), with w' the table
    that the joining of the previous stage returns (`Joining.join`): w itself, or, for LaPE, the output of its last
    norm, as in Eq. 11 (see `Lape`). P is shared with the tokens, weights and norm. Stages with their own tables, as in
    PVT, start from these.

    Reference: Pyramid Vision Transformer (PVT, Wang et al., 2021), section 3.2; LaPE (Yu et al., 2023), Eq. 11.

    Args:
        build: builds the position of a stage.
        grid: the grid of the first stage, with the windows of all stages, if any.
        dims: D of each stage.
        depths: number of layers of each stage.
        num_heads: h of each stage.
        prefix: number of prefix tokens of the last stage; the others have none.
        absolute_stages: number of stages, from the first, that can have an absolute encoding; None for all.
        merge: for every stage except the first, the function that computes a table of that stage, (N, D), from one of
            the previous stage and its grid; None if stages have their own tables.
        pad: whether odd sides are padded before they are halved.
        more: further arguments of `build`, for every stage.
    """

    def __init__(
        self,
        build: PositionBuilder,
        grid: Grid,
        *,
        dims: Sequence[int],
        depths: Sequence[int],
        num_heads: Sequence[int],
        prefix: int = 0,
        absolute_stages: int | None = None,
        merge: Sequence[Callable[[Tensor, Grid], Tensor]] | None = None,
        pad: bool = False,
        more: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.pad = pad
        self.depths = tuple(depths)
        self.prefix = prefix
        self.merge = merge
        within = [dict(given) for given in more or [{}] * len(depths)]
        for stage, given in enumerate(within):
            if absolute_stages is not None and stage >= absolute_stages:
                given["absolute"] = False
            if stage and merge is not None:
                given["merged"] = True
        self.stages = nn.ModuleList(
            build(at, dim=dim, depth=depth, num_heads=heads, **given)
            for at, dim, depth, heads, given in zip(self.grids(grid), dims, depths, num_heads, within, strict=True)
        )

    def grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of every stage; the first is `grid`."""
        return grid.pyramid(len(self.depths), self.prefix, self.pad)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return one `LayerPosition` per layer of all stages; `grid` is that of the first stage."""
        every: list[LayerPosition] = []
        grids, table = self.grids(grid), None
        for index, (stage, at) in enumerate(zip(cast("Iterable[Position]", self.stages), grids, strict=True)):
            if table is not None and self.merge is not None:
                table = self.merge[index - 1](table, grids[index - 1])
            given, table = stage.stage(at, table)
            every += given
        return every

    def keep(self, stages: int) -> None:
        """Keep the positions of the first `stages` stages."""
        if stages < len(self.depths):
            self.prefix = 0
        self.depths = self.depths[:stages]
        self.merge = None if self.merge is None else self.merge[: stages - 1]
        del self.stages[stages:]

    def layer_lists(self) -> list[str]:
        """Return the names of the lists of a single stage; none for several, which count their layers separately."""
        return super().layer_lists() if len(self.stages) == 1 else []

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of every stage; `grid` is that of the first."""
        for stage, at in zip(cast("Iterable[Position]", self.stages), self.grids(grid), strict=True):
            stage.set_grid(at)

    def published_names(self) -> dict[str, str]:
        """Map `pos_embed1...` of PVT's code and `pos_block.0...` of Twins' code, one per stage.

        Parameters of blocks are `layers.0.blocks...`, as in timm's Swin.

        Further tables or PEGs of a stage have no published name. With one stage the names are those of that stage.
        """
        if len(self.stages) == 1:
            return super().published_names()
        names = {}
        for index, stage in enumerate(cast("Iterable[Position]", self.stages)):
            known = stage.published_names()
            one_peg = not any(name.startswith("pos_block.1.") for name in known)
            for theirs, own in known.items():
                if theirs.startswith("blocks."):  # timm's Swin
                    names[f"layers.{index}.{theirs}"] = f"stages.{index}.{own}"
                elif theirs == "pos_embed":
                    names[f"pos_embed{index + 1}"] = f"stages.{index}.{own}"
                elif theirs.startswith("pos_block.0.") and one_peg:
                    names[theirs.replace("0", str(index), 1)] = f"stages.{index}.{own}"
        return names


class Pooling(NamedTuple):
    """The steps of queries and keys on a grid.

    queries: n, if every n-th row and column has queries.
    keys: the same for keys; one of the two is a multiple of the other.
    """

    queries: int
    keys: int

    @property
    def finer(self) -> int:
        """The smaller of the two steps."""
        return min(self)

    def of(self, given: LayerPosition, grid: Grid) -> LayerPosition:
        """Return the fields for pairs of pooled tokens, from those for all pairs of the finer grid."""
        queries, keys = (step // self.finer for step in self)
        return given if queries == keys == 1 else given.take(_Pooled(grid, (queries, keys)))


@dataclass(frozen=True)
class _Pooled(Tokens):
    """The queries and keys of every n-th row and column of a grid, from the steps of both."""

    grid: Grid
    steps: tuple[int, int]

    def rows(self, table: Tensor, axis: int = -2, fill: float = 0.0) -> Tensor:
        return pick(table, axis, self.grid.every(self.steps[0], table.device))

    def columns(self, table: Tensor, axis: int = -2) -> Tensor:
        return pick(table, axis, self.grid.every(self.steps[1], table.device))

    def rotation(self, rotation: Rotation) -> Rotation:
        return PooledRotation(*(rotation.take(self.grid.every(step)) for step in self.steps))

    def bias(self, function: Function) -> Function:
        own = getattr(function, "pooled", None)  # some functions can compute the pooled pairs only
        return partial(_of_pooled, function, self.grid, *self.steps) if own is None else own(*self.steps)

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        return function  # layers that pool take no functions other than a bias


def _of_pooled(function: BiasFunction, grid: Grid, of_queries: int, of_keys: int, queries: Tensor) -> Tensor:
    """Compute a bias, (B, heads, n, m), from the scaled queries of pooled tokens, (B, heads, n, d)."""
    rows, columns = (grid.every(step, queries.device) for step in (of_queries, of_keys))
    if of_queries > 1:
        whole = queries.new_zeros(*queries.shape[:2], grid.tokens, queries.shape[-1])
        queries = whole.index_copy(2, rows, queries)
    return function(queries)[..., rows, :][..., columns]


class PooledPosition(Position):
    """A position with one grid for the fields that are added to tokens, and another for pairs of tokens.

    Pooled tokens are at every n-th row and column of the grid, from the first on, the centers of their convolutions. So
    queries and keys are tokens of the finer of their two grids, for which encodings of pairs are built, and a layer
    gets the rows and columns of its queries and keys. This is MViTv2's rule for its tables.

    Args:
        build: builds a position for a grid.
        grid: the grid of the tokens that enter the layers.
        dim: D of these tokens.
        pooling: the steps of queries and keys of each layer.
        dims: D of the attention of each layer.
        num_heads: h of each layer.
        within: further fields of `Site`.

    Raises:
        ValueError: if a table is joined to pairs of tokens, or a position acts on the output of a layer that pools its
            queries.
    """

    crops = False  # a crop may begin between two pooled tokens

    def __init__(
        self,
        build: PositionBuilder,
        grid: Grid,
        *,
        dim: int,
        pooling: Sequence[Pooling],
        dims: Sequence[int],
        num_heads: Sequence[int],
        within: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.pooling, self.depth = tuple(pooling), len(pooling)
        kinds = list(zip(self.pooling, dims, num_heads, strict=True))
        whole = build(grid, dim=dim, depth=self.depth, num_heads=num_heads[0], **within)
        self.tokens = some_parts(whole, False, self.depth)
        #: The layers of each kind, with their position for pairs of tokens.
        self.layers = [[layer for layer, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)]
        self.pairs = nn.ModuleList()
        for (first, *_), layers in zip(self.layers, self.layers, strict=True):
            how, width, heads = kinds[first]
            at = grid.pooled(how.finer)
            position = build(at, dim=width, depth=self.depth, num_heads=heads, **{**within, "absolute": False})
            self.pairs.append(keep_layers(some_parts(position, True, self.depth), layers))
        self._check(grid, dim)

    @torch.no_grad()
    def _check(self, grid: Grid, dim: int) -> None:
        entering, _ = self.tokens.stage(grid, torch.zeros(grid.tokens, dim))  # as if there were a previous stage
        check_no_pairs(entering, "queries and keys are pooled: their pairs are of other grids")
        for layer, given in enumerate(entering):
            if given.after is not None and self.pooling[layer].queries > 1:
                raise ValueError(
                    f"`encoding` must not act on the output of layer {layer}, which pools its queries: the tokens are "
                    "then of another grid; use places=-1, or a layer before it."
                )

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return one `LayerPosition` per layer; `grid` is the grid of the tokens that enter."""
        return self.stage(grid, None)[0]

    def stage(self, grid: Grid, table: Tensor | None) -> tuple[list[LayerPosition], Tensor | None]:
        """Return the same for a stage, and the table of the tokens for the next stage."""
        given, last = self.tokens.stage(grid, table)
        given = list(given)
        for layers, position in zip(self.layers, cast("Iterable[Position]", self.pairs), strict=True):
            how = self.pooling[layers[0]]
            at = grid.pooled(how.finer)
            made = position(at)
            for layer in layers:
                of_pairs = how.of(made[layer], at)
                given[layer] = given[layer]._replace(**{name: getattr(of_pairs, name) for name in OF_PAIRS})
        return given, last

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the parameters."""
        self.tokens.set_grid(grid)
        for layers, position in zip(self.layers, cast("Iterable[Position]", self.pairs), strict=True):
            position.set_grid(grid.pooled(self.pooling[layers[0]].finer))

    def keep(self, layers: int) -> None:
        """Keep the position of the first `layers` layers, at least those of the first kind."""
        self.layers = [kept for own in self.layers if (kept := [layer for layer in own if layer < layers])]
        del self.pairs[len(self.layers) :]


def keep_layers(position: Position, layers: Collection[int]) -> Position:
    """Remove the relative encodings of all other layers, in place; returns the position."""
    for part in position.modules():
        if isinstance(part, BiasPosition):
            part.keep(layers)
    return position


def check_no_pairs(given: Sequence[LayerPosition], where: str) -> None:
    """Check that a joining adds its table to tokens, and fills no field for pairs of tokens.

    Raises:
        ValueError: with `where`, the condition and the reason, in the message.
    """
    for layer, position in enumerate(given):
        for field in OF_PAIRS:
            if getattr(position, field) is not None:
                raise ValueError(
                    f"`joining` must be one that adds the table to tokens where {where}, got one that gives layer "
                    f"{layer} `{field}`."
                )


def some_parts(position: Position, of_pairs: bool, depth: int) -> Position:
    """Return the parts of a position for pairs of tokens, or the other parts."""
    parts: Any = position.parts if isinstance(position, CombinedPosition) else [position]
    kept = [part for part in parts if part.of_pairs == of_pairs]
    if not kept:
        return NoPosition(depth)
    return kept[0] if len(kept) == 1 else CombinedPosition(kept)


class PooledPyramid(PyramidPosition):
    """The position of a pyramid that pools within attention: the layer that halves the grid gets the finer grid.

    A stage here consists of layers with inputs on the same grid, so the first layer of each published stage except the
    first is the last layer of the previous stage.
    """

    def keep(self, stages: int) -> None:
        """Keep the positions of the layers of the first `stages` published stages."""
        super().keep(stages)
        last: Any = self.stages[-1]
        last.keep(last.depth - 1)

    def published_names(self) -> dict[str, str]:
        """Map `pos_embed`, and `stages.1.blocks.0...` for parameters of blocks, of timm's MViTv2."""
        names = {}
        for index, stage in enumerate(cast("Iterable[Position]", self.stages)):
            last = self.depths[index] - 1
            for theirs, own in stage.published_names().items():
                if theirs == "pos_embed" and index == 0:
                    names[theirs] = f"stages.0.{own}"
                elif theirs.startswith("blocks."):
                    _, layer, leaf = theirs.split(".", 2)
                    halves = int(layer) == last and index + 1 < len(self.depths)
                    at = f"{index + 1}.blocks.0" if halves else f"{index}.blocks.{int(layer) + (index > 0)}"
                    names[f"stages.{at}.{leaf}"] = f"stages.{index}.{own}"
        return names
