"""Modules for a grid: their parameters are resampled and their computed buffers computed again for another grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn

from graticule.position.grid import Grid
from graticule.registry.checks import Checked


class GridModule(Checked, nn.Module):
    """A module for a grid, whose parameters may have values for its patches; these are resampled for another grid."""

    #: Whether it makes values for all pairs of patches at once; others check the memory for those that they make.
    dense: bool = True
    #: The grid, or the grid of a window, that it is built for.
    grid: Grid

    def check_pairs(self, grid: Grid, count: int) -> None:
        """Check that `count` values for each pair of patches of `grid` fit into the memory, if it makes them."""
        if not self.dense or torch.compiler.is_compiling():
            return
        like = next(chain(self.parameters(), self.buffers()), None)
        if like is None:
            grid.check_pairs(4 * count, torch.device("cpu"))
        elif not like.is_meta:
            grid.check_pairs(count * like.element_size(), like.device)

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors that follow from the arguments and `self.grid` alone, by name; here there are none.

        `init_non_persistent_buffers`, which a constructor calls, makes them buffers that no state dict has. They are
        computed again for another grid or dtype, on leaving the meta device, and when a state dict is loaded.
        """
        return {}

    @torch.no_grad()
    def init_non_persistent_buffers(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        """Compute the buffers of `compute_buffers`, by default as those that exist; timm calls it by this name."""
        buffers = list(self.buffers(recurse=False))
        at = device or next((value.device for value in buffers), None)
        known = next((value.dtype for value in buffers if value.is_floating_point()), torch.get_default_dtype())
        for name, value in self.compute_buffers(at, dtype or known).items():
            old = self._buffers.get(name)
            alike = old is not None and (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device)
            if old is None or not alike or old.is_inference():
                self.register_buffer(name, value, persistent=False)
            else:  # the same memory, which a recorded graph may read
                old.copy_(value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Compute the buffers again after a change of dtype, so that they are rounded once, or from the meta device."""
        before = [(value.dtype, value.is_meta) for value in self.buffers(recurse=False)]
        nn.Module._apply(self, fn, recurse)
        if before != [(value.dtype, value.is_meta) for value in self.buffers(recurse=False)]:
            self.init_non_persistent_buffers()
        return self

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Mapping[str, Any], *arguments: Any) -> None:
        """Load parameters and buffers, and compute the others: before, they may have been uninitialized memory."""
        super()._load_from_state_dict(state, prefix, metadata, *arguments)
        assigned = metadata.get("assign_to_params_buffers") and any(value.is_meta for value in self.buffers())
        devices = (value.device for value in chain(self.parameters(), self.buffers()) if not value.is_meta)
        self.init_non_persistent_buffers(next(devices, torch.get_default_device()) if assigned else None)

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample the values of the parameter `name` for another grid; here no parameter depends on it."""
        return value

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid of a value of a checkpoint for the parameter `name`; None if it cannot be inferred.

        `shape` is the (H, W) of the grid or window that the value is for, if the checkpoint records it.
        """
        return None

    def fit_parameter(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Make `value` of a checkpoint fit the parameter `name`, as `Position.fit`."""
        old = self.grid_of(name, value, shape)
        return value if old is None or old.shape == self.grid.shape else self.resample(name, value, old, self.grid)

    def at_grid(self, name: str, grid: Grid) -> Tensor:
        """Return the parameter `name`, resampled for `grid`."""
        value: Tensor = attrgetter(name)(self)  # not `get_parameter`: within `functional_call` it is any tensor
        return value if grid.has_shape(self.grid.shape) else self.resample(name, value, self.grid, grid)

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Set the grid, and resample the parameters for it, and buffers that were put in the place of parameters."""
        for part in outermost(self):
            part.set_grid(grid)
        buffers = {name: value for name, value in self.named_buffers(recurse=False) if value.is_floating_point()}
        others = buffers.keys() - (self.compute_buffers(None, torch.get_default_dtype()).keys() if buffers else ())
        tensors = {**dict(self.named_parameters()), **{name: buffers[name] for name in others}}
        for name, tensor in [] if grid == self.grid else tensors.items():
            value = self.resample(name, tensor, self.grid, grid)
            if value is not tensor:
                owner, _, leaf = name.rpartition(".")
                new = value.clone() if type(tensor) is Tensor else nn.Parameter(value.clone(), tensor.requires_grad)
                setattr(self.get_submodule(owner), leaf, new)
        self.grid = grid
        self.init_non_persistent_buffers()


def outermost(module: nn.Module) -> Iterator[Any]:
    """Yield the positions and modules for a grid in a module that are in no other one."""
    for child in module.children():
        if hasattr(child, "set_grid"):
            yield child
        else:
            yield from outermost(child)
