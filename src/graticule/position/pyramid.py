"""A position a stage, for backbones whose grid shrinks on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from graticule.encodings import AbsoluteEncoding
from graticule.grid import Grid
from graticule.joining import LayerPosition
from graticule.position.base import Position, PositionBuilder


class PyramidPosition(Position):
    """The positions of all stages, one after another; each grid has half the sides of the one before.

    It takes the first stage's grid. Every stage has an encoding of its own, as PVT has, unless absolute encodings
    are for the first stages only.

    Reference: Pyramid Vision Transformer (PVT, Wang et al., 2021), section 3.2.

    Args:
        build: builds the position of a stage.
        grid: of the first stage.
        dims: D of each stage.
        depths: layers of each stage.
        num_heads: h of each stage.
        prefix: prefix tokens of the last stage; the others have none.
        windows: side of each stage's windows, for encodings that act within windows.
        absolute_stages: how many stages, from the first, have an absolute encoding if one is asked for; None for all.
        merge: for every stage but the first, what makes a table of that stage, (N, D), from one of the stage before
            and its grid; for joinings that tell every layer the table (`MergedTable`).
        pad: whether odd sides are filled up before they are halved.
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
        windows: Sequence[int] | None = None,
        absolute_stages: int | None = None,
        merge: Sequence[Callable[[Tensor, Grid], Tensor]] | None = None,
        pad: bool = False,
    ) -> None:
        super().__init__()
        self.pad = pad
        self.depths = tuple(depths)
        self.prefix = prefix
        within: list[dict[str, Any]] = [{} for _ in depths]
        for stage, given in enumerate(within):
            if windows is not None:
                given["window"] = windows[stage]
            if absolute_stages is not None and stage >= absolute_stages:
                given["absolute"] = False
        self.stages = nn.ModuleList()
        for stage, (at, dim, depth, heads, given) in enumerate(
            zip(self.grids(grid), dims, depths, num_heads, within, strict=True)
        ):
            if stage and merge is not None and (table := _table(self.stages[stage - 1])) is not None:
                given["merge"] = partial(_merged, table, merge[stage - 1])
            self.stages.append(build(at, dim=dim, depth=depth, num_heads=heads, **given))

    def grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of every stage, the first being `grid`.

        Raises:
            ValueError: if a side cannot be halved often enough.
        """
        return grid.pyramid(len(self.depths), self.prefix, self.pad)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Say what each layer of every stage gets, `grid` being the first stage's."""
        return [given for stage, at in zip(self.stages, self.grids(grid), strict=True) for given in stage(at)]

    def set_grid(self, grid: Grid) -> None:
        """Pass every stage its grid, `grid` being the first's."""
        for stage, at in zip(cast("Iterable[Position]", self.stages), self.grids(grid), strict=True):
            stage.set_grid(at)

    def published_names(self) -> dict[str, str]:
        """`pos_embed1...` as PVT's code, `pos_block.0...` as Twins', stages counted; both have one a stage.

        What blocks have of their own is `layers.0.blocks...`, as timm's Swin.

        What has more of them in a stage has no published name. With one stage the names are that stage's.
        """
        if len(self.stages) == 1:
            (stage,) = cast("Iterable[Position]", self.stages)
            return {theirs: f"stages.0.{own}" for theirs, own in stage.published_names().items()}
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

    def fit(self, name: str, value: Tensor) -> Tensor | None:
        """Let the stage that owns `name` fit it."""
        _, index, own = name.split(".", 2)
        return cast("Position", self.stages[int(index)]).fit(own, value)


def _table(stage: nn.Module) -> AbsoluteEncoding | None:
    """The one table of a stage, if it has one."""
    found = [module for module in stage.modules() if isinstance(module, AbsoluteEncoding)]
    return found[0] if len(found) == 1 else None


def _merged(table: AbsoluteEncoding, merge: Callable[[Tensor, Grid], Tensor], grid: Grid) -> Tensor:
    """Make the table of a stage for `grid` from that of the stage before."""
    if grid.finer is None:
        raise ValueError(f"`grid` must come from `Grid.pyramid`, to know the stage before, got {grid}.")
    return merge(table(grid.finer), grid.finer)
