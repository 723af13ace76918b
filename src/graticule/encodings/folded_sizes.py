"""A folded position for any number of grids, with constants of the last few."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from graticule.encodings.base import Position
from graticule.encodings.folded import Folded, FoldedPosition
from graticule.grid import Grid
from graticule.layer_position import LayerPosition


class FoldedSizes(Folded):
    """Folds the original for each new grid of an input, and keeps the constants of the last ones.

    It refuses training mode, as a position that is folded for one grid does. Constants are computed again after a
    change of dtype or device, in a copy, and when a state dict is loaded. Compiled and exported models do not use them:
    they compute position from the parameters.

    Args:
        original: the position that is folded.
        most: maximum number of grids whose constants are kept.
    """

    def __init__(self, original: Position, most: int) -> None:
        super().__init__(original)
        if most < 1:
            raise ValueError(f"`sizes` must be at least 1, got {most}.")
        self.most = most
        self._kept: OrderedDict[Any, FoldedPosition] = OrderedDict()
        nn.Module.register_load_state_dict_post_hook(self, _forget)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the constants for `grid`, if the model is in evaluation mode."""
        self.refuse_training()
        if torch.compiler.is_compiling():
            return cast("list[LayerPosition]", self.original(grid))
        key = grid, grid.windows  # equality of grids ignores windows
        folded = self._kept.pop(key, None)
        if folded is None:
            folded = FoldedPosition(self.original, grid)
            folded.training = False
        self._kept[key] = folded
        if len(self._kept) > self.most:
            self._kept.popitem(last=False)
        return cast("list[LayerPosition]", folded(grid))

    def fold(self) -> None:
        """Discard the constants; they are computed again from the current parameters."""
        self._kept.clear()

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the parameters."""
        self.original.set_grid(grid)
        self.fold()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FoldedSizes:
        nn.Module._apply(self, fn, recurse)
        # the modules shared with the original have already been changed
        apply: Callable[..., nn.Module] = self.original._apply
        apply(fn, recurse=False)
        self.fold()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}

    def extra_repr(self) -> str:
        return f"sizes={self.most}"


def _forget(module: nn.Module, _: Any) -> None:
    cast("FoldedSizes", module).fold()
