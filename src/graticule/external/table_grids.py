"""The grids of tables in models of transformers: which parameters are tables, and methods that read them as squares."""

from __future__ import annotations

import inspect
import math
import traceback
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graticule.external.convert.sizes import sizes_of
from graticule.external.convert.transformers import resampler_of
from graticule.position.places import Shape, by
from graticule.position.resampling import Resampler, build_resampler

#: Names of tables of displacements along one axis, of SAM and VitDet -> the axis.
_AXES = {"rel_pos_h": (-2,), "rel_pos_w": (-1,)}
#: Methods of transformers that resample a table and read its rows as a square; whether they take sides in pixels.
_METHODS = {"interpolate_pos_encoding": True, "_resize_pos_embed": False}
#: The most rows of a table that are not of its grid, such as class tokens.
_PREFIX = 16


@dataclass(frozen=True)
class Table:
    """A table of positions or displacements in a parameter.

    Its rows are the axes of the parameter from `start` to `stop`, with `prefix` further rows: before
    positions, as class tokens, and after displacements, as BEiT's. `patch` is the size of the patches of its
    grid in pixels, and displacements are along some `axes` of that. What is left of an image is padded to a patch, as
    in the stages of LeViT, or dropped (`pads`).
    """

    kind: Literal["positions", "displacements"]
    start: int
    stop: int
    patch: Shape
    axes: Sequence[int]
    prefix: int = 0
    pads: bool = True

    def sides(self, size: Shape) -> Shape:
        """Return the grid of the rows for images of a size."""
        steps = zip(size, self.patch, strict=True)
        grid = tuple(-(-side // step) if self.pads else side // step for side, step in steps)
        return grid if self.kind == "positions" else tuple(2 * grid[axis] - 1 for axis in self.axes)

    def resample(self, value: Tensor, old: Shape, new: Shape, resampler: Resampler) -> Tensor:
        """Return the parameter with the grid `new` instead of `old`."""
        rows = value.flatten(self.start, self.stop).movedim(self.start, -1)
        first = 0 if self.kind == "displacements" else self.prefix
        ahead, grid, behind = rows.split([first, math.prod(old), self.prefix - first], dim=-1)
        resampled = resampler(grid.unflatten(-1, old), new).flatten(-len(old))
        rows = torch.cat([ahead, resampled, behind], -1).movedim(-1, self.start)
        return rows if self.start == self.stop else rows.unflatten(self.start, new)


def divide(size: Shape, patch: Shape) -> Shape:
    """Return the grid of patches of an image, as many as fit."""
    return tuple(side // step for side, step in zip(size, patch, strict=True))


def find_table(name: str, shapes: Sequence[Shape], images: Sequence[Shape], patches: Sequence[Shape]) -> Table | None:
    """Return the table in the parameter `name`, by its shapes for two sizes of images; None if it is another."""
    differing = [axis for axis, sides in enumerate(zip(*shapes, strict=True)) if len(set(sides)) > 1]
    for patch in patches:
        grids = [divide(image, patch) for image in images]
        for start in range(len(shapes[0]) - len(patch)):  # of a map (1, H, W, D)
            stop = start + len(patch)
            if set(differing) <= set(range(start, stop)) and [shape[start:stop] for shape in shapes] == grids:
                return Table("positions", start, stop - 1, patch, range(len(patch)))
        if len(differing) == 1:
            (axis,), axes = differing, _AXES.get(name, range(len(patch)))
            for positions, pads in product((True, False), repeat=2):
                table = Table("positions" if positions else "displacements", axis, axis, patch, axes, pads=pads)
                prefix, other = (
                    shape[axis] - math.prod(table.sides(image)) for shape, image in zip(shapes, images, strict=True)
                )
                if prefix == other and 0 <= prefix <= (_PREFIX if name not in _AXES else 0):
                    return replace(table, prefix=prefix)
    return None


def set_methods(model: nn.Module, tables: Mapping[str, Table], size: Shape, for_any_size: bool = False) -> None:
    """Replace methods of modules whose classes only know squares, for images of `size` that are not; else restore them.

    Saving such a model by transformers warns. `tables` are by the name of their parameter. For images of any size the
    methods of squares are replaced, too: a class may compare sizes, which a program for all of them cannot.
    """
    parts: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    for part in dict.fromkeys(parts.values()):  # a block may be at several places
        for key in [key for key, value in vars(part).items() if getattr(value, "func", None) in _REPLACEMENTS]:
            delattr(part, key)
        for key in [key for key, hook in part._state_dict_pre_hooks.items() if hook is say_grid]:
            del part._state_dict_pre_hooks[key]
        if size[-1] != size[-2] and type(part).__name__ in (*_SWAPPED, _OF_COLUMNS):
            part.register_state_dict_pre_hook(say_grid)
    set_order(model, size)
    if size[-1] == size[-2] and not for_any_size:
        return
    for path, table in tables.items():
        name, _, key = path.rpartition(".")
        owner, above = parts[name], parts[name.rpartition(".")[0]]
        reader = owner if any(hasattr(type(owner), method) for method in _METHODS) else above
        methods = [method for method in _METHODS if hasattr(type(reader), method)]
        if table.kind == "displacements" or table.start != table.stop:
            methods = []
        for attribute, value in vars(reader).items():
            if attribute in (*methods, "forward") and getattr(value, "func", None) not in _REPLACEMENTS:
                raise _own_method(f"{path.rpartition('.')[0]}.{attribute}", size)
        for method in methods:
            patch = table.patch if _METHODS[method] else (1,) * len(size)
            resampler = build_resampler(resampler_of(config_of(parts, name)))
            setattr(reader, method, partial(read_table, owner, key, table, resampler, table.sides(size), patch))
        # a class whose constructor, or whose pass, only knows squares
        knows_squares = size in [getattr(part, "image_size", None) for part in (owner, reader)]
        if (
            knows_squares
            and methods
            and not for_any_size
            and "interpolate_pos_encoding" in inspect.signature(reader.forward).parameters
        ):
            reader.forward = partial(interpolate, reader)
        if (methods or knows_squares) and say_grid not in reader._state_dict_pre_hooks.values():
            reader.register_state_dict_pre_hook(say_grid)


def read_table(
    owner: nn.Module, name: str, table: Table, resampler: Resampler, grid: Shape, patch: Shape, *arguments: Any
) -> Tensor:
    """Return the table of `grid` (1, N, D) for the height and width, of patches of `patch`, that end the arguments."""
    resampled = table.resample(getattr(owner, name), grid, (*grid[:-2], *divide(arguments[-2:], patch[-2:])), resampler)
    return resampled.reshape(1, -1, resampled.shape[-1])


def interpolate(module: Any, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Any:
    """Embed images by a table of their size, where the class only does so if it is to interpolate."""
    if not interpolate_pos_encoding and tuple(pixel_values.shape[-2:]) != module.image_size:
        raise ValueError(f"`pixel_values` must be {by(module.image_size)} pixels, got {by(pixel_values.shape[-2:])}.")
    return type(module).forward(module, pixel_values, interpolate_pos_encoding=True)


def set_order(model: nn.Module, size: Shape) -> None:
    """Correct, for images of `size`, the classes that take height and width as each other."""
    for part in model.modules():
        layer: Any = part
        kind = type(part).__name__
        if kind in _SWAPPED:
            name, replacement = _SWAPPED[kind]
            if getattr(vars(part).get(name), "func", None) is replacement:
                delattr(part, name)
            sides = getattr(part, "window_size", size)  # of the table, which may not have been resized yet
            if sides[-1] != sides[-2]:
                if name in vars(part):
                    raise _own_method(name, size)
                setattr(part, name, partial(replacement, part))
        elif kind == _OF_COLUMNS and not layer.window_size:
            config = copy(layer.config)
            config.image_size = list(size)
            rows, columns = divide(size, sizes_of(config)[1])
            ids = layer.precompute_positions(config, 0)  # (y, x), column by column
            ids = ids.unflatten(0, (columns, rows)).transpose(0, 1).flip(-1).flatten(0, 1)
            layer.position_ids = ids.to(layer.position_ids)


def _own_method(name: str, size: Shape) -> ValueError:
    return ValueError(
        f"`model` must have the methods of its classes for {by(size)} pixels, which are not square, but {name} is "
        "another; undo this change first."
    )


def swap_sides(module: Any, embeddings: Tensor, height: int, width: int) -> Any:
    """Cut a map of tokens into windows, by a method that takes height and width as each other."""
    return type(module).window_partition(module, embeddings, width, height)


def swap_window(module: Any, *arguments: Any, **options: Any) -> Tensor:
    """Return biases from a table (height, width), by a method that reads it as (width, height)."""
    swapped = copy(module)
    swapped.window_size = module.window_size[::-1]
    return type(module).forward(swapped, *arguments, **options)


#: Classes that take height and width as each other, for a table or windows -> their method, and what replaces it.
_SWAPPED = {
    "BeitRelativePositionBias": ("forward", swap_window),
    "Data2VecVisionRelativePositionBias": ("forward", swap_window),
    "RfDetrDinov2Embeddings": ("window_partition", swap_sides),
}
#: A class with coordinates (x, y), column by column.
_OF_COLUMNS = "Sam3ViTLayer"
#: Functions that replace methods.
_REPLACEMENTS = (read_table, interpolate, swap_sides, swap_window)


def say_grid(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Warn, where a model is saved by `save_pretrained`, that transformers reads its grid as a square."""
    if any(frame.f_code.co_name == "save_pretrained" for frame, _ in traceback.walk_stack(None)):
        warnings.warn(
            f"{prefix.rstrip('.') or type(module).__name__} has a grid that is not square, which transformers alone "
            "reads as a square, or refuses; graticule.load(folder) reads it right.",
            stacklevel=2,
        )


def config_of(parts: Mapping[str, Any], name: str) -> Any:
    """Return the configuration of the innermost model that has a module."""
    while not hasattr(getattr(parts[name], "config", None), "model_type"):
        name = name.rpartition(".")[0]
    return parts[name].config
