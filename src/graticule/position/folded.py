"""Folded positions, which return constants instead of computing them from parameters and grid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import Position


class Folded(Position):
    """A position that returns constants instead of computing them, and keeps the original.

    It has the modules, parameters and names of the original.

    Args:
        original: the position that is folded.
    """

    def __init__(self, original: Position) -> None:
        super().__init__()
        self._original = (original,)  # not a submodule, which would change the names of the parameters
        self._share_modules()
        nn.Module.register_load_state_dict_post_hook(self, _fold_again)

    def _share_modules(self) -> None:
        for name, module in self.original.named_children():
            self.add_module(name, module)

    @property
    def original(self) -> Position:
        return self._original[0]

    def train(self, mode: bool = True) -> Self:
        """Set the mode, also of the original, from which it is taken when the constants are computed again."""
        self.original.train(mode)
        return super().train(mode)

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the parameters, and compute the constants again."""
        self.original.set_grid(grid)
        self._share_modules()
        self.fold()

    @abstractmethod
    def fold(self) -> None:
        """Compute the constants from the current parameters."""

    def _apply_to_both(self, fn: Callable[..., Any], recurse: bool) -> None:
        """Apply a function to all tensors, once to tensors of modules that are shared with the original."""
        nn.Module._apply(self, fn, recurse)
        apply: Callable[..., nn.Module] = self.original._apply
        apply(fn, recurse=False)

    def refuse_training(self) -> None:
        """Refuse to be called in training mode."""
        if self.training:
            raise RuntimeError(
                "`model` must not be in training mode: the model is folded, so its position information is constant; "
                "call graticule.unfold(model) to train it, or model.eval() to use it."
            )

    def published_names(self) -> dict[str, str]:
        return self.original.published_names()

    def layer_lists(self) -> list[str]:
        return self.original.layer_lists()


class FoldedPosition(Folded):
    """Returns constants for one grid instead of computing them from parameters and grid.

    Functions of the tokens (a PEG, Shaw's encoding) are kept. A change of dtype or device, a copy or a pickle may not
    reach the tensors or modules in such a function (in a closure, for example), so functions are created again after
    each of these.

    It keeps the original and has its state dict. The constants are computed again when a state dict is loaded, and at
    the next call after the parameters were changed in place or moved, which their versions and addresses tell (an
    average of weights, an optimizer, `vector_to_parameters`). While other tensors are in the place of the parameters
    (`torch.func.functional_call`), positions are computed from these. It refuses other grids and training mode.
    """

    def __init__(self, original: Position, grid: Grid) -> None:
        super().__init__(original)
        self.grid = grid
        self.fold()

    @torch.inference_mode(False)
    @torch.no_grad()
    def fold(self) -> None:
        self.stale = False  # True if functions must be created again
        sources = _Sources(self.original)
        known: dict[str, Tensor] = {}  # a table that several layers share is stored once

        def hold(value: Any, name: str) -> Any:
            if isinstance(value, Tensor):
                name = next((other for other, tensor in known.items() if tensor is value), name)
                if name not in known:
                    known[name] = value
                    self.register_buffer(name, value.detach().clone(), persistent=False)
                return _Constant(name)
            if not _is_named_tuple(value):
                return value
            return type(value)(*(hold(part, f"{name}_{field}") for field, part in value._asdict().items()))

        modes = [(module, module.training) for module in self.original.modules()]
        self.original.eval()  # constants are for inference, without the noise of training
        #: The position of each layer, with a `_Constant` instead of each tensor.
        self.layout = [hold(position, f"layer{layer}") for layer, position in enumerate(self.original(self.grid))]
        for module, training in modes:
            module.training = training
        #: What the constants are computed from; None if that is not known. Set last, as other threads read it.
        self.sources: _Sources | None = sources

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the constants, if `grid` is the folded one and the model is in evaluation mode."""
        self.refuse_training()
        if grid != self.grid:
            raise ValueError(
                f"`grid` must be the folded one: the model is folded for a grid of {self.grid.shape} patches "
                f"with {self.grid.prefix} prefix tokens, got {'a crop' if grid.crop else 'one'} of {grid.shape} with "
                f"{grid.prefix}; unfold it, or fold it with `img_size` for this size."
            )
        if grid.windows != self.grid.windows:
            raise ValueError(
                f"`grid` must have the folded windows: the model is folded for windows of {self.grid.windows} "
                f"patches, got {grid.windows}; call set_input_size with them, or unfold it."
            )
        if not torch.compiler.is_compiling():
            if self.sources is None or self.sources.have_changed():
                self.fold()
            if self.sources is not None and self.sources.are_replaced():
                return cast("list[LayerPosition]", self.original(grid))
        layout = self._with_functions() if self.stale else self.layout
        if not torch.compiler.is_compiling():  # functions from tracing are not kept
            self.layout, self.stale = layout, False
        return [self._unpack(position) for position in layout]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FoldedPosition:
        before = {name: buffer.dtype for name, buffer in self.named_buffers(recurse=False)}
        self._apply_to_both(fn, recurse)
        self.__dict__.update(self._without_functions())
        changed = any(buffer.dtype != before[name] for name, buffer in self.named_buffers(recurse=False))
        if changed and any(isinstance(value, Bias) and value.wide for position in self.layout for value in position):
            self.fold()
        self.sources = None  # computed again at the next call, when all modules are converted
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **self._without_functions(), "sources": None}

    def _without_functions(self) -> dict[str, Any]:
        """Return the state without functions; `forward` creates them again, when all modules are restored."""
        layout = list(map(_without_functions, self.layout))
        return {"layout": layout, "stale": self.stale or layout != self.layout}

    @torch.no_grad()
    def _with_functions(self) -> list[LayerPosition]:
        """Return the layout with new functions and the same constants."""
        return list(map(_renew, self.layout, self.original(self.grid)))

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, _Constant):
            return getattr(self, value.name)
        return type(value)(*map(self._unpack, value)) if _is_named_tuple(value) else value

    def set_grid(self, grid: Grid) -> None:
        """Fold for `grid` instead of the previous grid."""
        self.grid = grid
        super().set_grid(grid)

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, prefix={self.grid.prefix}"


class _Sources:
    """The tensors that constants are computed from, with their versions and addresses at that time.

    They are the parameters and buffers of a position, and of the backbone if that merges its tables.
    """

    def __init__(self, position: Position) -> None:
        merge = getattr(position, "merge", None) or ()
        parts = chain(position.modules(), *(how.func.__self__.modules() for how in merge[:1]))
        modules = {id(part): part for part in parts if not isinstance(part, Folded)}.values()
        holders = [holder for module in modules for holder in (module._parameters, module._buffers)]
        self.names = [(holder, name) for holder in holders for name, tensor in holder.items() if tensor is not None]
        self.tensors = [holder[name] for holder, name in self.names]
        self.stamps = self._read_stamps()

    def have_changed(self) -> bool:
        """Return whether a tensor was changed in place or moved; always if it cannot be known."""
        return not self.stamps or self._read_stamps() != self.stamps

    def are_replaced(self) -> bool:
        """Return whether other tensors are in the place of these."""
        return any(
            holder.get(name) is not tensor for (holder, name), tensor in zip(self.names, self.tensors, strict=True)
        )

    def _read_stamps(self) -> tuple[list[int], ...]:
        tensors: Any = self.tensors
        try:
            return [tensor._version for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
        except RuntimeError:  # one of inference mode has no version, one without storage no address
            return ()


@dataclass(frozen=True)
class _Constant:
    """Refers to the buffer called `name`."""

    name: str


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _renew(old: Any, new: Any) -> Any:
    """Return `old` with the functions of `new`; constants stay."""
    if isinstance(old, _Constant):
        return old
    return type(old)(*map(_renew, old, new)) if _is_named_tuple(old) else new


def _without_functions(value: Any) -> Any:
    """Return `value` with None instead of its functions."""
    if _is_named_tuple(value):
        return type(value)(*map(_without_functions, value))
    return None if callable(value) else value


def _fold_again(module: nn.Module, _: Any) -> None:
    cast("Folded", module).fold()


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
        #: Replaced by another one, never changed: threads may read it at once.
        self._folded: dict[Any, FoldedPosition] = {}

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the constants for `grid`, if the model is in evaluation mode."""
        self.refuse_training()
        if torch.compiler.is_compiling():
            return cast("list[LayerPosition]", self.original(grid))
        key = grid, grid.windows  # equality of grids ignores windows
        known = self._folded
        folded = known.get(key)
        if folded is None:
            folded = FoldedPosition(self.original, grid)
            folded.training = False
        others = [entry for entry in known.items() if entry[0] != key]
        self._folded = dict([*others[max(0, len(others) + 1 - self.most) :], (key, folded)])
        return cast("list[LayerPosition]", folded(grid))

    def fold(self) -> None:
        """Discard the constants; they are computed again from the current parameters."""
        self._folded = {}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FoldedSizes:
        self._apply_to_both(fn, recurse)
        self.fold()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folded": {}}

    def extra_repr(self) -> str:
        return f"sizes={self.most}"
