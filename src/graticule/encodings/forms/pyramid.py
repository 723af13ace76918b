"""The position of a pyramid, whose grid shrinks from stage to stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from graticule.encodings.forms.bias import BiasPosition
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import CombinedPosition, NoPosition, Position, PositionBuilder


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
    ) -> None:
        super().__init__()
        self.pad = pad
        self.depths = tuple(depths)
        self.prefix = prefix
        self.merge = merge
        within: list[dict[str, Any]] = [{} for _ in depths]
        for stage, fields in enumerate(within):
            if absolute_stages is not None and stage >= absolute_stages:
                fields["absolute"] = False
            if stage and merge is not None:
                fields["merged"] = True
        self.stages = nn.ModuleList(
            build(at, dim=dim, depth=depth, num_heads=heads, **fields)
            for at, dim, depth, heads, fields in zip(self.grids(grid), dims, depths, num_heads, within, strict=True)
        )

    def grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of every stage; the first is `grid`."""
        return grid.pyramid(len(self.depths), self.prefix, self.pad)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return one `LayerPosition` per layer of all stages; `grid` is the first stage's."""
        every: list[LayerPosition] = []
        grids, table = self.grids(grid), None
        for index, (stage, at) in enumerate(zip(cast("Iterable[Position]", self.stages), grids, strict=True)):
            if table is not None and self.merge is not None:
                table = self.merge[index - 1](table, grids[index - 1])
            positions, table = stage.stage(at, table)
            every += positions
        return every

    def keep(self, stages: int) -> None:
        """Keep the positions of the first `stages` stages."""
        if stages < len(self.depths):
            self.prefix = 0
        self.depths = self.depths[:stages]
        self.merge = None if self.merge is None else self.merge[: stages - 1]
        del self.stages[stages:]

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of every stage; `grid` is the first stage's."""
        for stage, at in zip(cast("Iterable[Position]", self.stages), self.grids(grid), strict=True):
            stage.set_grid(at)

    def published_names(self) -> dict[str, str]:
        """Map `pos_embed1...` of PVT's code and `pos_block.0...` of Twins' code, one per stage.

        Parameters of blocks are `layers.0.blocks...`, as in timm's Swin.

        Further tables or PEGs of a stage have no published name. With one stage the names are the stage's.
        """
        if len(self.stages) == 1:
            return super().published_names()
        names = {}
        for index, stage in enumerate(cast("Iterable[Position]", self.stages)):
            known = stage.published_names()
            one_peg = not any(name.startswith("pos_block.1.") for name in known)
            for published, parameter in known.items():
                if published.startswith("blocks."):  # timm's Swin
                    names[f"layers.{index}.{published}"] = f"stages.{index}.{parameter}"
                elif published == "pos_embed":
                    names[f"pos_embed{index + 1}"] = f"stages.{index}.{parameter}"
                elif published.startswith("pos_block.0.") and one_peg:
                    names[f"pos_block.{index}.{published.removeprefix('pos_block.0.')}"] = f"stages.{index}.{parameter}"
        return names


def keep_layers(position: Position, layers: Collection[int]) -> Position:
    """Remove the relative encodings of all other layers, in place; returns the position."""
    for part in position.modules():
        if isinstance(part, BiasPosition):
            part.keep(layers)
    return position


def some_parts(position: Position, of_pairs: bool, depth: int) -> Position:
    """Return the parts of a position for pairs of tokens, or the other parts."""
    parts: Any = position.parts if isinstance(position, CombinedPosition) else [position]
    chosen = [part for part in parts if part.of_pairs == of_pairs]
    if not chosen:
        return NoPosition(depth)
    return chosen[0] if len(chosen) == 1 else CombinedPosition(chosen)
