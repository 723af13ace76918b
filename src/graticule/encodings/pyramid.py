"""The position of a pyramid: one position per stage, for backbones whose grid shrinks on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from graticule.encodings.base import Position, PositionBuilder
from graticule.grid import Grid
from graticule.layer_position import LayerPosition


class PyramidPosition(Position):
    """Holds the positions of all stages; each grid has half the sides of the one before.

    It takes the first stage's grid, with the windows of all stages. Every stage has its own encoding, as in PVT, unless
    absolute encodings are for the first stages only.

    **Tables of later stages.** Where w is added to the residual stream once, it reaches a later stage as part of the
    tokens, through every patch merging P on the way. Where w is kept beside the tokens and every layer gets it (LaPE,
    'shared'), it has to reach the channels of that stage the same way, so the stage joins P(w'), with w' the table that
    the joining of the stage before returns (`Joining.join`): w itself, or, for LaPE, what the last norm made of it,
    as Eq. 11 asks (see `Lape`). P is shared with the tokens, weights and norm. Stages with their own tables, as
    PVT's, start again from them.

    Reference: Pyramid Vision Transformer (PVT, Wang et al., 2021), section 3.2; LaPE (Yu et al., 2023), Eq. 11.

    Args:
        build: builds the position of a stage.
        grid: of the first stage, with the windows of all stages if they have some.
        dims: D of each stage.
        depths: layers of each stage.
        num_heads: h of each stage.
        prefix: prefix tokens of the last stage; the others have none.
        absolute_stages: how many stages, from the first, have an absolute encoding if one is asked for; None for all.
        merge: for every stage but the first, the function that makes a table of that stage, (N, D), from one of the
            stage before and its grid; None where stages have tables of their own.
        pad: whether odd sides are padded before they are halved.
        more: what `build` is called with besides, for every stage.
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
        within: list[dict[str, Any]] = [dict(given) for given in more or [{}] * len(depths)]
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
        """Return the grid of every stage, the first being `grid`.

        Raises:
            ValueError: if a side cannot be halved often enough.
        """
        return grid.pyramid(len(self.depths), self.prefix, self.pad)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return one `LayerPosition` per layer of all stages, `grid` being the first stage's."""
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
        """Return the lists of a single stage; the layers of several stages are not counted from the first."""
        return super().layer_lists() if len(self.stages) == 1 else []

    def set_grid(self, grid: Grid) -> None:
        """Pass every stage its grid, `grid` being the first's."""
        for stage, at in zip(cast("Iterable[Position]", self.stages), self.grids(grid), strict=True):
            stage.set_grid(at)

    def published_names(self) -> dict[str, str]:
        """`pos_embed1...` as PVT's code, `pos_block.0...` as Twins', stages counted; both have one per stage.

        Parameters of blocks are `layers.0.blocks...`, as timm's Swin.

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
