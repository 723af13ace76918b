"""Constants in the place of what depends on parameters and grid alone."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from graticule.grid import Grid
from graticule.joining import LayerPosition
from graticule.position.base import Position


class FoldedPosition(Position):
    """Constants for one grid in the place of what depends on parameters and grid alone.

    What depends on the tokens (a PEG, Shaw's encoding) stays the function of them that it is.

    It keeps the original, so that nothing is lost, and its state dict is the original's: the constants are
    computed anew when one is loaded. It refuses another grid and refuses to be trained.
    """

    def __init__(self, original: Position, grid: Grid) -> None:
        super().__init__()
        # not a module of its own, which would change the names of the parameters: the two share what they hold
        self.__dict__["original"] = original
        self._modules = original._modules
        self.grid = grid
        self.fold()
        self.register_load_state_dict_post_hook(_fold_again)

    original: Position

    @torch.no_grad()
    def fold(self) -> None:
        """Compute the constants from the parameters as they are now."""
        self.layout: list[list[Any]] = []  # for every layer and field: the name of a constant, a function, or None
        seen: dict[int, str] = {}  # a table that several layers share is kept once
        keep: list[Tensor] = []
        for layer, position in enumerate(self.original(self.grid)):
            held: list[Any] = []
            for field, value in zip(position._fields, position, strict=True):
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen[id(value)] = f"layer{layer}_{field}"
                    keep.append(value)  # so that no id is used twice
                    self.register_buffer(seen[id(value)], value.detach().clone(), persistent=False)
                held.append(seen[id(value)] if isinstance(value, Tensor) else value)
            self.layout.append(held)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the constants, if `grid` is the folded one and the model is in evaluation mode."""
        if self.training:
            raise RuntimeError(
                "the model is folded, its position information is constant and would not be trained; call "
                "graticule.unfold(model) first, or model.eval() to use it."
            )
        if grid != self.grid:
            raise ValueError(
                f"the model is folded for a grid of {self.grid.shape} patches with {self.grid.prefix} prefix tokens, "
                f"got one of {grid.shape} with {grid.prefix}; unfold it, or fold it with `img_size` for this size."
            )
        return [
            LayerPosition(*(getattr(self, value) if isinstance(value, str) else value for value in held))
            for held in self.layout
        ]

    def set_grid(self, grid: Grid) -> None:
        """Fold for `grid` instead."""
        self.original.set_grid(grid)
        self.grid = grid
        self.fold()

    def published_names(self) -> dict[str, str]:
        """The published names of the original."""
        return self.original.published_names()

    def layer_lists(self) -> list[str]:
        """The lists of the original."""
        return self.original.layer_lists()

    def fit(self, name: str, value: Tensor) -> Tensor | None:
        """Let the original fit `name`."""
        return self.original.fit(name, value)

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, prefix={self.grid.prefix}"


def _fold_again(module: nn.Module, _: Any) -> None:
    cast("FoldedPosition", module).fold()
