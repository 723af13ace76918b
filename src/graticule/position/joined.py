"""Absolute encodings: a table and the joining that brings it to the layers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from graticule.encodings import AbsoluteEncoding, Learnable
from graticule.grid import Grid
from graticule.joining import Joining, LayerPosition, Unshared
from graticule.position.base import Position


class JoinedPosition(Position):
    """An absolute encoding, or one per layer, and the joining that brings it to the layers.

    A later stage of a pyramid can have no encoding of its own: it joins the table of the stage before (`stage`).
    """

    def __init__(self, encodings: Iterable[AbsoluteEncoding], joining: Joining) -> None:
        super().__init__()
        encodings = list(encodings)
        if encodings and len(encodings) != joining.tables:
            raise ValueError(
                f"`encodings` must be as many as {type(joining).__name__} takes, {joining.tables}, "
                f"got {len(encodings)}."
            )
        fixed = next((type(e).__name__ for e in encodings if not e.learnable), None)
        if len(encodings) > 1 and fixed:
            raise ValueError(
                f"`encoding` must be learnable where each layer has a table of its own, got {fixed}: "
                "its tables would all be the same; use the joining shared."
            )
        self.encodings = nn.ModuleList(encodings)
        self.joining = joining

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return one `LayerPosition` per layer for `grid`, with (N, D) as `pre` or `inner`."""
        return self.stage(grid, None)[0]

    def stage(self, grid: Grid, table: Tensor | None) -> tuple[list[LayerPosition], Tensor | None]:
        """Join the tables of this stage, or `table` if it has none."""
        if len(self.encodings):
            return self.joining.stage(*[encoding(grid) for encoding in self.encodings])
        if table is None:
            raise ValueError("`table` must be that of the stage before for a stage without an encoding, got None.")
        return self.joining.stage(table)

    def set_grid(self, grid: Grid) -> None:
        """Resample or recompute every table for `grid`."""
        for encoding in cast("Iterable[Any]", self.encodings):
            encoding.set_grid(grid)

    def layer_lists(self) -> list[str]:
        """The norms of LaPE, and the tables where each layer has one."""
        norms = ["joining.norms"] if hasattr(self.joining, "norms") else []
        return norms + ["encodings"] * isinstance(self.joining, Unshared)

    def published_names(self) -> dict[str, str]:
        """`pos_embed` as DeiT and timm have it; `pos_embed0...` and `blocks.l.pe_norm` as LaPE's code."""
        own_tables = isinstance(self.joining, Unshared)
        names = {
            f"pos_embed{i}" if own_tables else "pos_embed": f"encodings.{i}.pos_embed"
            for i in range(len(self.encodings))
        }
        for own, _ in self.joining.named_parameters():
            _, layer, *rest = own.split(".")
            names[f"blocks.{layer}.pe_norm.{rest[-1]}"] = f"joining.{own}"
        return names

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Bring a table to this grid: a learnable one is resampled, a formula needs none."""
        if not name.endswith("pos_embed") or value.ndim < 2:
            return value
        encoding = self.get_submodule(name.rpartition(".")[0])
        assert isinstance(encoding, AbsoluteEncoding)
        if value.shape[-1] != encoding.dim or math.prod(value.shape[:-2]) != 1:
            return value
        value = value.reshape(1, -1, encoding.dim)  # some are stored without the axis of one
        grid = encoding.grid
        old = grid.alike(value.shape[1] - grid.prefix, shape)
        if old is None:  # it has another number of prefix tokens: the loader names the mismatch
            return value if isinstance(encoding, Learnable) else None
        if old.shape == grid.shape:
            return value
        if not isinstance(encoding, Learnable):
            return None
        return Grid(*old.shape, grid.prefix).resize(value[0], grid, encoding.interpolation)[None]
