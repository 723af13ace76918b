"""Absolute encodings: a table w of (N, D), one row per token of a grid, and its joining to the layers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from graticule.position.grid import Grid
from graticule.position.joining import JOININGS, Joining, PerLayer
from graticule.position.layer import LayerPosition
from graticule.position.places import by
from graticule.position.position import ENCODINGS, Encoding, NoPosition, Position, StageSpec
from graticule.registry.fields import Channels, Positive
from graticule.registry.specs import Spec

#: Largest difference of a table from a formula that counts as rounding: half precision, sines of rounded angles.
_ROUNDING = 1e-2


class AbsoluteEncoding(Encoding):
    """Makes the table w for a grid; a joining decides how w reaches the layers.

    The table of the grid that the encoding is built for is the parameter `pos_embed`, (1, N, D), with the name and
    shape of published checkpoints; a fixed one has no gradient. Papers count it as parameters either way (LaPE,
    Table 7: 38K for a fixed table as for a learnable one).
    """

    joinable_as = "table"
    #: True if the table of another grid is resampled from the stored one instead of computed.
    resampled: bool = False
    pos_embed: nn.Parameter

    def __init__(self, grid: Grid, dim: Channels) -> None:
        super().__init__()
        self.grid = grid
        self.dim = dim

    def forward(self, grid: Grid) -> Tensor:
        """Return w for `grid`, (N, D)."""
        if grid == self.grid:
            return self.pos_embed[0]
        return self.at(grid)

    def checked_table(self, grid: Grid) -> Tensor:
        """Return w for `grid`, (N, D), whose shape is checked."""
        return self.check_returned("forward", self(grid), "N, D", (grid.tokens, self.dim))

    @abstractmethod
    def at(self, grid: Grid) -> Tensor:
        """Return w for a grid other than the one it was built for, (N, D)."""

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Return the table of another grid, (1, N, D)."""
        return self.at(new)[None] if name == "pos_embed" else value

    def fit(self, table: Tensor, old: Grid) -> Tensor | None:
        """Resample a table of a checkpoint, (N', D) on the grid `old`; None if there is nothing to load."""
        return None

    def fit_parameter(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Resample a learnable table of a checkpoint for this grid."""
        if name != "pos_embed":
            return super().fit_parameter(name, value, shape)
        old = self.grid_of(name, value, shape)
        if old is None:  # another number of channels or prefix tokens: the loader reports the mismatch
            return value
        value = value.reshape(1, -1, self.dim)  # some are stored without the first axis
        if old.shape == self.grid.shape:
            return value
        table = self.fit(value[0], Grid(*old.shape, prefix=self.grid.prefix))
        return None if table is None else table[None]

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid of a table, (1, N', D) or (N', D), with as many rows for prefix tokens as here."""
        is_table = value.ndim > 1 and value.shape[-1] == self.dim and math.prod(value.shape[:-2]) == 1
        return (
            self.grid.infer_grid(value.shape[-2] - self.grid.prefix, shape)
            if name == "pos_embed" and is_table
            else None
        )

    @classmethod
    def position(cls, stage: StageSpec, joining: Joining, **options: Any) -> Position:
        """Build the table, or one table per layer, and join it.

        Raises:
            ValueError: if the joining needs one table per layer and the encoding is fixed.
        """
        before = stage.merged and joining.added_per_layer  # then the previous stage's table is used
        if not (before or stage.absolute or joining.per_layer):
            return NoPosition(stage.depth)
        count = 0 if before else joining.tables
        tables = [cls.build(stage, stage.grid, options) for _ in range(count)]
        if joining.per_layer and not any(parameter.requires_grad for parameter in tables[0].parameters()):
            raise ValueError(
                f"`joining` must not be {JOININGS.name_of(type(joining))!r} with the fixed encoding "
                f"{ENCODINGS.name_of(cls)!r}: the table of every layer would be the same; use 'shared', or a learnable "
                "encoding."
            )
        return JoinedPosition(tables, joining)


class FixedEncoding(AbsoluteEncoding):
    """A table from a formula: nothing is learned, and the table of another grid is computed, not resampled.

    With `spread` the table is multiplied by one factor, on every grid the same, such that the rows of the patches of
    the grid that it is built for have this standard deviation around their mean: what tells positions apart, and what a
    comparison with another table must make equal.
    """

    #: Options with which the formula gives other tables, to name the one that equals the table of a file.
    variants: ClassVar[list[dict[str, Any]]] = [{}]

    def __init__(
        self, grid: Grid, dim: Channels, temperature: Positive = 10_000.0, spread: float | None = None
    ) -> None:
        super().__init__(grid, dim)
        self.temperature = temperature
        self.spread = spread
        table = self.formula(grid)
        self.factor = 1.0
        if spread is not None:
            of_formula = _spread(grid.split(self.formula(grid, torch.device("cpu")))[1])  # also of a model on `meta`
            if not spread > 0 or not of_formula:
                raise ValueError(
                    f"`spread` must be positive, and the grid must have two patches or more, got spread {spread} for "
                    f"a grid of {by(grid.shape)}; leave it out for the spread of the formula."
                )
            self.factor = spread / of_formula
        self.pos_embed = nn.Parameter((self.factor * table)[None].to(torch.get_default_dtype()), requires_grad=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Compute the table on leaving the meta device, as a file need not have it."""
        left = self.pos_embed.is_meta
        super()._apply(fn, recurse)
        if left and not self.pos_embed.is_meta and getattr(self.pos_embed, "device_mesh", None) is None:
            self.pos_embed.data.copy_(self.at(self.grid))
        return self

    @abstractmethod
    def formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Compute the table of `grid` in float64, (N, D)."""

    def fit_parameter(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Return the table of a checkpoint for this grid if it is the formula's; None to compute it."""
        if value.is_meta:
            return value
        old = self.grid_of(name, value, shape)
        rows = value.double() if old is None else value.double().reshape(-1, self.dim)
        if old is not None and (factor := self.factor_of(rows, old)) is not None:
            if old.shape == self.grid.shape:
                return value.reshape(1, -1, self.dim)
            return None if factor == self.factor else (factor * self.formula(self.grid, value.device))[None].to(value)
        raise ValueError(
            f"`pos_embed` must be the table of the formula of {ENCODINGS.name_of(type(self))!r}, got another one, of "
            f"shape {tuple(value.shape)}: {self.advice(rows, old)}."
        )

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Load the table, with the factor of the model that it is of, whose grid may have been another."""
        super()._load_from_state_dict(*arguments)
        has_values = not self.pos_embed.is_meta and getattr(self.pos_embed, "device_mesh", None) is None
        if self.spread is not None and has_values:
            self.factor = self.factor_of(self.pos_embed[0].detach().double(), self.grid) or self.factor

    def advice(self, rows: Tensor, grid: Grid | None) -> str:
        """Name the encoding whose table on `grid` is `rows`, (N', D); else one that keeps any table."""
        fixed = [(name, kind) for name, kind in ENCODINGS.items() if issubclass(kind, FixedEncoding)]
        for name, kind in fixed:
            for options in kind.variants:
                with suppress(ValueError):  # another one may need another number of channels
                    if grid is not None and kind(self.grid, self.dim, **options).factor_of(rows, grid):
                        return f"it belongs to encoding={str(Spec(name, options))!r}"
        return "encoding='learnable' keeps any table and resamples it for other sizes, as the code of T2T-ViT does"

    def factor_of(self, rows: Tensor, grid: Grid) -> float | None:
        """Return the factor of the formula in a table on `grid`, (N', D); None if it is of no such table."""
        table, factor = self.formula(replace(grid, prefix=self.grid.prefix), rows.device), self.factor
        if self.spread is not None:  # the factor is that for the grid of the model that it was built for
            of_rows = float((rows * table).sum() / table.square().sum())
            factor = factor if math.isclose(of_rows, factor, rel_tol=1e-3) else of_rows
        return factor if factor > 0 and (rows - factor * table).abs().max() < _ROUNDING * factor else None

    def at(self, grid: Grid) -> Tensor:
        """Compute the table of `grid`, (N, D), in the dtype and on the device of the module."""
        return (self.factor * self.formula(grid, self.pos_embed.device)).to(self.pos_embed.dtype)


def _spread(rows: Tensor) -> float:
    """Return the standard deviation of rows around their mean, over rows and channels."""
    return float((rows - rows.mean(0)).square().mean().sqrt())


class JoinedPosition(Position):
    """An absolute encoding, or one per layer, and the joining that passes it to the layers.

    A later stage of a pyramid may have no encoding of its own: it joins the table of the previous stage (`stage`).
    """

    form = "table"

    def __init__(self, encodings: Iterable[AbsoluteEncoding], joining: Joining) -> None:
        super().__init__()
        encodings = list(encodings)
        if encodings and len(encodings) != joining.tables:
            raise ValueError(
                f"`encodings` must be as many as {type(joining).__name__} takes, {joining.tables}, "
                f"got {len(encodings)}."
            )
        own_tables = joining.per_layer and encodings
        self.encodings = PerLayer(encodings, joining.layer_indices) if own_tables else nn.ModuleList(encodings)
        self.joining = joining

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return one `LayerPosition` per layer for `grid`, with (N, D) as `added_to_stream` or `after_norm`."""
        return self.stage(grid, None)[0]

    def stage(self, grid: Grid, table: Tensor | None) -> tuple[list[LayerPosition], Tensor | None]:
        """Join the tables of this stage, or `table` if it has none."""
        if len(self.encodings):
            encodings = cast("Iterable[AbsoluteEncoding]", self.encodings)
            return self.joining.stage(*[encoding.checked_table(grid) for encoding in encodings])
        if table is None:
            raise ValueError("`table` must be the previous stage's for a stage without an encoding, got None.")
        return self.joining.stage(table)

    def set_grid(self, grid: Grid) -> None:
        for encoding in cast("Iterable[Any]", self.encodings):
            encoding.set_grid(grid)

    def layer_lists(self) -> list[str]:
        """Return the names of the lists of LaPE's norms, and of tables if each layer has one."""
        norms = ["joining.norms"] if hasattr(self.joining, "norms") else []
        return norms + ["encodings"] * self.joining.per_layer

    def published_names(self) -> dict[str, str]:
        """Map `pos_embed` of DeiT and timm, and `pos_embed0...` and `blocks.l.pe_norm` of LaPE's code."""
        own_tables = self.joining.per_layer
        names = {
            f"pos_embed{name}" if own_tables else "pos_embed": f"encodings.{name}.pos_embed"
            for name, encoding in self.encodings.named_children()
            if hasattr(encoding, "pos_embed")
        }
        for parameter, _ in self.joining.named_parameters():
            if parameter.startswith("norms."):
                _, layer, *_, leaf = parameter.split(".")
                names[f"blocks.{layer}.pe_norm.{leaf}"] = f"joining.{parameter}"
        return names


class ComputedEncoding(AbsoluteEncoding):
    """Computes the rows of the patches of any grid from its parameters; the rows of prefix tokens are zero."""

    @abstractmethod
    def rows(self, grid: Grid) -> Tensor:
        """Compute the rows of the patches of `grid`, (H * W, D)."""

    def forward(self, grid: Grid) -> Tensor:
        return self.at(grid)

    def at(self, grid: Grid) -> Tensor:
        rows = self.check_returned("rows", self.rows(grid), "H * W, D", (grid.patches, self.dim))
        return grid.with_prefix_rows(rows)
