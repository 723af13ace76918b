"""The table of fits: old kind, new kind -> the function that fits the parameters of the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from graticule.backbones.sam import WindowedPosition
from graticule.encodings.forms.pyramid import PyramidPosition
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import CombinedPosition, NoPosition, Position
from graticule.registry.registry import NameTable
from graticule.surgery.fits.contributions import Contribution

FitFunction = Callable[[Any, Any, "Before"], Any]
Function = TypeVar("Function", bound=FitFunction)


@dataclass(frozen=True)
class Before:
    """State of a stage before its position was replaced.

    grid: the grid of the stage, with its windows.
    positions: the position of each layer.
    contributions: the contribution of the table to each layer; None if it was not measured.
    target: the table that a new encoding is fitted to, (N, D); for fits of tables.
    """

    grid: Grid
    positions: Sequence[LayerPosition]
    contributions: Sequence[Contribution | None]
    target: Tensor | None = None


@dataclass(frozen=True)
class Fit:
    """Report of the fit of a part of the new position.

    stage: index of the stage.
    old, new: names of the old and the new part.
    fitted: whether it was fitted to the old one; if not, it has its initial values, or the old ones of the same name.
    why: reason for which nothing could be fitted; may be empty.
    """

    stage: int
    old: str
    new: str
    fitted: bool
    why: str = ""


#: (old class, new class) -> function of the old module, the new one, and `Before`. For encodings and positions it sets
#: the parameters of the new one, and returns True or False for success, or a text with the reason for which no fit
#: exists; for joinings it returns the tables to be joined, or the reason for which there are none.
FITS: NameTable[tuple[type[nn.Module], type[nn.Module]], FitFunction] = NameTable("fit", "graticule.surgery.fits")


def register_fit(old: type[nn.Module], new: type[nn.Module]) -> Callable[[Function], Function]:
    """Return a decorator that registers the fit of a new kind of encoding or joining to an old one."""

    def add(function: Function) -> Function:
        FITS[old, new] = function
        return function

    return add


def find_fit(old: type[nn.Module], new: type[nn.Module]) -> FitFunction | None:
    """Return the fit that is registered for two classes or their base classes; the new class has priority."""
    pairs = ((before, after) for after in new.__mro__ for before in old.__mro__)
    return next((FITS[pair] for pair in pairs if pair in FITS), None)


def fit_position(new: Position, old: Position, before: Sequence[Before]) -> list[Fit]:
    """Fit the new position of a model to the one that it had, stage by stage; `before` has the state of each stage."""
    fits = []
    for stage, was, now, state in _states(old, new, before):
        for part in _parts(now):
            former = _counterpart(part, _parts(was), _parts(now))
            former = NoPosition(len(state.positions)) if former is None else former
            function = find_fit(type(former), type(part))
            result: bool | str = False if function is None else function(former, part, state)
            fitted = result is True or (_same(former, part) and part.form != "table")
            why = result if isinstance(result, str) and not fitted else ""
            fits.append(Fit(stage, _name(former), _name(part), fitted, why))
    return fits


def _states(old: Position, new: Position, before: Sequence[Before]) -> Iterator[tuple[int, Position, Position, Before]]:
    """Yield, for all grids, the index of the stage, the old position, the new one, and the state before."""
    pairs: Iterable[tuple[Any, Any]] = [(old, new)]
    if isinstance(old, PyramidPosition) and isinstance(new, PyramidPosition):
        pairs = zip(cast("Any", old).stages, cast("Any", new).stages, strict=True)
    for stage, ((was, now), state) in enumerate(zip(pairs, before, strict=True)):
        if isinstance(was, WindowedPosition):
            yield stage, was.on_grid, now.on_grid, replace(state, positions=was.on_grid(state.grid))
            positions = was.windowed(was.window)
            yield stage, was.windowed, now.windowed, Before(was.window, positions, [None] * len(positions))
        else:
            yield stage, was, now, state


def _parts(position: Position) -> list[Position]:
    if isinstance(position, CombinedPosition):
        return list(cast("Any", position.parts))
    return [] if isinstance(position, NoPosition) else [position]


def _same(old: Position, new: Position) -> bool:
    """Return True if two parts have equal parameters, as after `transfer` of an unchanged part."""
    before, after = old.state_dict(), new.state_dict()
    same = type(old) is type(new) and before.keys() == after.keys() and bool(before)
    return same and all(torch.equal(value, after[name]) for name, value in before.items())


def _counterpart(part: Position, old: Sequence[Position], new: Sequence[Position]) -> Position | None:
    """Return the old part that a new one replaces: of the same form, or a table that becomes a bias or a rotation."""
    same = [other for other in old if (other.form == part.form if part.form else type(other) is type(part))]
    if not same and part.form and not any(other.form == "table" for other in new):
        same = [other for other in old if other.form == "table"]
    return same[0] if same else None


def _name(position: Position) -> str:
    if isinstance(position, NoPosition):
        return "nothing"
    encodings = list(getattr(position, "encodings", [])) or [getattr(position, "encoding", position)]
    joining = getattr(position, "joining", None)
    name = type(encodings[0]).__name__
    return name if joining is None else f"{name}, {type(joining).__name__}"
