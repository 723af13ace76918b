"""The grids of tables in models of transformers: which parameters are tables, and methods that read them as squares."""

from __future__ import annotations

import inspect
import math
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graticule.external.convert.transformers import resampler_of
from graticule.position.places import Shape, by
from graticule.position.resampling import Resampler, build_resampler

#: The methods of transformers that resample a table and read its rows as a square.
_METHODS = ("interpolate_pos_encoding", "_resize_pos_embed")


@dataclass(frozen=True, eq=False)
class Change:
    """What the constructors make of an attribute of a module for the old size and for the new one."""

    module: str
    name: str
    old: Any
    new: Any

    @property
    def path(self) -> str:
        """The name of the attribute in the model."""
        return f"{self.module}.{self.name}".lstrip(".")


@dataclass(frozen=True)
class Table:
    """A table of positions or displacements in a parameter.

    Its rows are the axes from `start` to `stop`, with `prefix` further rows: before those of positions, as class
    tokens, and after those of displacements, as BEiT's. `old` and `new` are its grids, and `patch` is the size of their
    patches in pixels.
    """

    kind: Literal["positions", "displacements"]
    start: int
    stop: int
    prefix: int
    old: Shape
    new: Shape
    patch: Shape

    def at(self, size: Shape) -> Table:
        """Return the table for images of another new size."""
        grid = divide(size, self.patch)
        return replace(self, new=grid if self.kind == "positions" else tuple(2 * side - 1 for side in grid))

    def resample(self, value: Tensor, resampler: Resampler, size: Shape | None = None) -> Tensor:
        """Return the parameter with the rows of another grid, by default of the new one."""
        rows = value.flatten(self.start, self.stop).movedim(self.start, -1)
        first = 0 if self.kind == "displacements" else self.prefix
        ahead, grid, behind = rows.split([first, math.prod(self.old), self.prefix - first], dim=-1)
        resampled = resampler(grid.unflatten(-1, self.old), self.new if size is None else size)
        rows = torch.cat([ahead, resampled.flatten(-len(self.old)), behind], -1).movedim(-1, self.start)
        return rows if self.start == self.stop else rows.unflatten(self.start, self.new)


def divide(size: Shape, patch: Shape) -> Shape:
    """Return the grid of patches of an image, as many as fit."""
    return tuple(side // step for side, step in zip(size, patch, strict=True))


def find_table(change: Change, grids: Sequence[tuple[Shape, Shape, Shape]]) -> Table | None:
    """Return the table in a parameter whose shape changes, by its old and new grid and patch; None if it is another."""
    if not isinstance(change.new, nn.Parameter) or change.old.ndim > 4 - (change.name == "weight"):
        return None
    shapes = tuple(change.old.shape), tuple(change.new.shape)
    axes = [axis for axis, (old, new) in enumerate(zip(*shapes, strict=True)) if old != new]
    for old, new, patch in grids:
        for start in range(len(shapes[0]) - len(old)):  # of a map (1, H, W, D)
            stop = start + len(old)
            if set(axes) <= set(range(start, stop)) and [shape[start:stop] for shape in shapes] == [old, new]:
                return Table("positions", start, stop - 1, 0, old, new, patch)
        if len(axes) != 1:
            continue
        rows = [shape[axes[0]] for shape in shapes]
        spans = [tuple(2 * side - 1 for side in grid) for grid in (old, new)]
        pairs: list[tuple[Any, Sequence[Shape]]] = [("positions", (old, new)), ("displacements", spans)]
        pairs += [("displacements", [span[axis : axis + 1] for span in spans]) for axis in range(len(old))]
        for kind, sides in pairs:
            prefix, other = (count - math.prod(grid) for count, grid in zip(rows, sides, strict=True))
            if prefix == other and 0 <= prefix <= (16 if len(sides[0]) > 1 else 0):
                return Table(kind, axes[0], axes[0], prefix, sides[0], sides[1], patch)
    return None


class GridTable:
    """Resamples the table of a module, whose rows are a grid that need not be square, for images of any size.

    It replaces, on one module, the method of its class that reads the rows as a square.
    """

    def __init__(self, owner: nn.Module, name: str, table: Table, resampler: Resampler) -> None:
        self.owner, self.name, self.table, self.resampler = owner, name, table, resampler

    def __call__(self, *arguments: Any, **others: Any) -> Tensor:
        """Return the table (1, N, D) for the height and width that end the arguments."""
        sides = zip(arguments[-2:], self.table.patch[-2:], strict=True)
        size = (*self.table.old[:-2], *(side // step for side, step in sides))
        resampled = self.table.resample(getattr(self.owner, self.name), self.resampler, size)
        return resampled.reshape(1, -1, resampled.shape[-1])


class SwappedSides:
    """Cuts a map of tokens into windows, where the method of RF-DETR takes height and width as each other."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Return the tokens of the windows."""
        windows: Tensor = type(self.module).window_partition(self.module, embeddings, width, height)
        return windows


def in_rows(ids: Tensor, grid: Shape) -> Tensor:
    """Return the coordinates (x, y) of SAM 3's tokens, (N, 2), row by row; its class has (y, x) column by column."""
    return ids.unflatten(0, (grid[1], grid[0])).transpose(0, 1).flip(-1).flatten(0, 1)


def interpolate(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Let the embeddings of a class that only knows square images use their table for the images of their size."""
    images, *flags = arguments or (options["pixel_values"],)
    if not any((*flags, options.get("interpolate_pos_encoding"))) and tuple(images.shape[-2:]) != module.image_size:
        raise ValueError(f"`pixel_values` must be {by(module.image_size)} pixels, got {by(images.shape[-2:])}.")
    return (), {"pixel_values": images, "interpolate_pos_encoding": True}


def say_grid(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Warn, where a model is saved by `save_pretrained`, that transformers reads its grid as a square."""
    if any(frame.f_code.co_name == "save_pretrained" for frame, _ in traceback.walk_stack(None)):
        warnings.warn(
            f"{prefix.rstrip('.') or type(module).__name__} has a grid that is not square, which transformers alone "
            "reads as a square, or refuses; graticule.load(folder) reads it right, and so does a model of transformers "
            "after graticule.resize(model, its size).",
            stacklevel=2,
        )


def set_grids(model: nn.Module, tables: Mapping[Change, Table], size: Shape) -> None:
    """Set the new grids of tables where methods read them, and how else images that are not square are read."""
    parts: dict[str, Any] = dict(model.named_modules())
    for change, table in tables.items():
        owner = parts[change.module]
        above = parts[change.module.rpartition(".")[0]]
        reader = owner if any(hasattr(type(owner), name) for name in _METHODS) else above
        if (
            getattr(owner, "image_size", None) == size
            and size[-1] != size[-2]
            and say_grid not in owner._state_dict_pre_hooks.values()
        ):
            owner.register_state_dict_pre_hook(say_grid)  # of a class whose constructor only knows squares
        for name in _METHODS:
            if not hasattr(type(reader), name) or table.kind == "displacements" or table.start != table.stop:
                continue
            _forget(reader, name)
            if size[-1] == size[-2]:
                continue
            grid = replace(table, old=table.new, patch=table.patch if name == _METHODS[0] else (1, 1))
            resampler = build_resampler(resampler_of(config_of(parts, change.module)))
            setattr(reader, name, GridTable(owner, change.name, grid, resampler))
            reader.register_state_dict_pre_hook(say_grid)
            if hasattr(reader, "window_partition"):
                reader.window_partition = SwappedSides(reader)
            flags = inspect.signature(reader.forward).parameters
            if getattr(reader, "image_size", None) == size and "interpolate_pos_encoding" in flags:
                reader.register_forward_pre_hook(interpolate, with_kwargs=True)


def _forget(reader: Any, name: str) -> None:
    """Remove what `set_grids` has set on a module."""
    for key in (name, "window_partition"):
        vars(reader).pop(key, None)
    for hooks in (reader._state_dict_pre_hooks, reader._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in (say_grid, interpolate)]:
            del hooks[key]
            reader._forward_pre_hooks_with_kwargs.pop(key, None)


def config_of(parts: Mapping[str, Any], name: str) -> Any:
    """Return the configuration of the innermost model that has a module."""
    while not hasattr(getattr(parts[name], "config", None), "model_type"):
        name = name.rpartition(".")[0]
    return parts[name].config
