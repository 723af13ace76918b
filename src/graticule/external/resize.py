"""Resizing of models of transformers in place: what their constructors make of another size is all that changes."""

from __future__ import annotations

import inspect
import math
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from timm.layers.patch_embed import resample_patch_embed
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from graticule.checkpoints.transfer import with_channels
from graticule.external.convert.transformers import SIZES, rebuild, resampler_of, set_sizes, sizes_of
from graticule.external.images import call, error_line, evaluating, image_channels
from graticule.external.tracer import PositionTracer
from graticule.layers.tokenizers import on_axes, patch_grid
from graticule.position.places import Shape, by
from graticule.position.resampling import Resampler, build_resampler
from graticule.surgery.resize import LIBRARIES, restore_on_error

#: The methods of transformers that resample a table and read its rows as a square.
_METHODS = ("interpolate_pos_encoding", "_resize_pos_embed")
#: The largest side of a patch that is tried for the tables of the stages of a pyramid.
_LARGEST = 64


@dataclass(frozen=True, eq=False)
class _Change:
    """What the constructors make of an attribute of a module for the old size and for the new one."""

    module: str
    name: str
    old: Any
    new: Any

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


@dataclass(frozen=True)
class _Grid:
    """The grids of a table at the old and at the new size, and the patch, in pixels, at the new one."""

    old: Shape
    new: Shape
    patch: Shape


@dataclass(frozen=True)
class _Table:
    """Where the rows of a grid are in a tensor: the axes from `start` to `stop`, after `prefix` other rows."""

    kind: Literal["positions", "displacements"]
    start: int
    stop: int
    prefix: int
    old: Shape
    new: Shape
    patch: Shape = ()

    def resample(self, value: Tensor, resampler: Resampler, size: Shape | None = None) -> Tensor:
        """Return the tensor with the rows of another grid."""
        rows = value.flatten(self.start, self.stop).movedim(self.start, -1)
        count = math.prod(self.old)
        first = 0 if self.kind == "displacements" else self.prefix  # BEiT's further rows are the last ones
        ahead, grid, behind = rows.split([first, count, self.prefix - first], dim=-1)
        resampled = resampler(grid.unflatten(-1, self.old), self.new if size is None else size)
        rows = torch.cat([ahead, resampled.flatten(-len(self.old)), behind], -1).movedim(-1, self.start)
        return rows if self.start == self.stop else rows.unflatten(self.start, self.new)


class GridTable:
    """Resamples the table of a module, whose rows are a grid that need not be square, for images of any size.

    It replaces, on one module, the method of the class that reads the rows as a square.
    """

    def __init__(self, owner: nn.Module, name: str, table: _Table, resampler: Resampler, patch: Shape) -> None:
        self.owner, self.name, self.table, self.resampler, self.patch = owner, name, table, resampler, patch

    def __call__(self, *arguments: Any, **others: Any) -> Tensor:
        """Return the table (1, N, D) for the height and width that end the arguments."""
        sides = zip(arguments[-2:], self.patch[-2:], strict=True)
        size = (*self.table.old[:-2], *(side // step for side, step in sides))
        value = getattr(self.owner, self.name)
        resampled = self.table.resample(value, self.resampler, size)
        return resampled.reshape(1, -1, resampled.shape[-1])


def say_grid(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Warn, where a model is saved by `save_pretrained`, that others read its table as a square."""
    if any(frame.f_code.co_name == "save_pretrained" for frame, _ in traceback.walk_stack(None)):
        grids = [by(value.table.old) for value in vars(module).values() if isinstance(value, GridTable)]
        warnings.warn(
            f"the table of {prefix.rstrip('.') or type(module).__name__} has {' and '.join(grids)} rows, which "
            "transformers alone reads as a square where it interpolates; graticule.load(folder) does not, nor does a "
            "model that was opened by transformers after graticule.resize(model, its size).",
            stacklevel=2,
        )


@LIBRARIES.register("transformers")
def resize_in_place(
    model: Any, img_size: Any = None, resampler: Any = None, patch_size: Any = None, channels: int | None = None
) -> None:
    """Resize a model of transformers, or the encoders within it, in place.

    The model is built for both sizes without values: parameters, buffers and attributes that differ are those that
    change, and everything else stays the same object. Tables are those that the model computes itself for the size.
    """
    kind = type(model).__name__
    configs = _encoders(getattr(module, "config", None) for module in model.modules())
    sizes = list(dict.fromkeys(map(sizes_of, configs)))
    if len({image for image, _ in sizes}) != 1 or (patch_size is not None and len(sizes) > 1):
        what = " and ".join(f"{by(image)} with patches of {by(patch)}" for image, patch in sizes) or "none"
        raise ValueError(
            f"`model` must have encoders of images of one size in its configuration, got {what} in {kind}; encoders "
            "within a model can be resized one by one, and a model that takes any size needs no resizing."
        )
    image = sizes[0][0]
    size = image if img_size is None else on_axes(img_size, len(image))
    if len(size) != len(image):
        names = "(height, width)" if len(image) == 2 else "(frames, height, width), as the model has volumes"
        raise ValueError(f"`img_size` must be {names}, got {by(size)}.")
    patches = [patch if patch_size is None else on_axes(patch_size, len(patch)) for _, patch in sizes]
    for patch in patches:
        patch_grid(size, patch)  # refuses other sizes with its own message
    with restore_on_error(model, *configs):
        try:
            if image[-1] != image[-2]:
                _read_grids(model, image, sizes)
            if size != image or patches != [patch for _, patch in sizes] or channels is not None:
                _resize(model, configs, size, patches, channels, resampler)
        except ValueError:
            raise
        except Exception as error:  # any error of another library
            raise ValueError(f"`img_size` {by(size)} is refused by {kind}: {error_line(error)}") from error


def _resize(
    model: Any, configs: Sequence[Any], size: Shape, patches: Sequence[Shape], channels: int | None, resampler: Any
) -> None:
    """Resize a model; on errors it may be changed in part."""
    sizes = list(dict.fromkeys(map(sizes_of, configs)))
    image, same_patches = sizes[0][0], [patch for _, patch in sizes] == list(patches)
    changes = _changes(model, size, None if same_patches else patches[0], channels)
    grids = _grids(sizes, size, patches)
    tables = {change: table for change in changes if (table := _find_table(change, grids)) is not None}
    comparable = same_patches and channels is None and resampler is None
    runs = _callable_parts(model, image)
    pictures = {part: _images(part, size, channels) for part in runs}
    parts = dict(model.named_modules())
    for change in changes:
        if change.old is None:  # windows
            _apply(parts, change, None, {}, None)
    before: dict[nn.Module, Any] = {}
    recorded: dict[int, Tensor] = {}
    if comparable:
        for part in runs:
            try:
                before[part], constants = _record(part, pictures[part])
            except Exception:  # one that only takes images of its own size
                continue
            recorded |= constants
    for change in changes:
        _apply(parts, change, tables.get(change), recorded, resampler)
    for part in parts.values():
        if getattr(part, "attention_bias_cache", None):  # of LeViT: biases of the old size
            part.attention_bias_cache = {}
    for config in configs:
        set_sizes(config, size, None if same_patches else patches[0], channels)
    _set_grids(model, tables, size)
    for part in runs:
        with evaluating(part):
            after = list(_tensors(call(part, pictures[part])))
        if tables and part in before:
            _check_same(part, before[part], after, size)


def _encoders(configs: Iterable[Any]) -> list[Any]:
    """Return those configurations, and those within them, that have an image size, each object once."""
    known: dict[int, Any] = {}

    def add(config: Any) -> bool:
        if not hasattr(config, "model_type"):
            return False
        within = [name for name, value in vars(config).items() if add(value)]
        has_size = any(getattr(config, name, None) is not None for name in SIZES)
        if has_size and "backbone_config" not in within:  # whose size it is
            known[id(config)] = config
        return has_size

    for config in configs:
        add(config)
    return list(known.values())


def _changes(model: Any, size: Shape, patch: Shape | None = None, channels: int | None = None) -> list[_Change]:
    """Return what differs in a model that its class builds for other sizes."""
    config = deepcopy(model.config)
    for encoder in _encoders([config]):
        set_sizes(encoder, size, patch, channels)
    built = [_skeleton(model, *arguments) for arguments in ((model.config, 0), (model.config, 1), (config, 0))]
    olds, others, news = (dict(skeleton.named_modules()) for skeleton in built)
    changes = []
    for name, part in news.items():
        if olds.keys() != news.keys() or type(olds[name]) is not type(part):
            raise ValueError(f"`img_size` must not change the layers of a model, as {by(size)} does, near {name!r}.")
        values, drawn = _attributes(olds[name]), _attributes(others[name])
        for key, new in _attributes(part).items():
            old = values.get(key)
            if not _same(old, new) and (
                _same(old, drawn.get(key)) or getattr(new, "shape", 0) != getattr(old, "shape", 0)
            ):
                changes.append(_Change(name, key, old, new))  # what is drawn at random does not count
        if hasattr(part, "set_shift_and_window_size"):  # Swin's windows, which it also changes when it is called
            changes += [_Change(name, key, None, getattr(part, key)) for key in ("window_size", "shift_size")]
    return changes


def _skeleton(model: nn.Module, config: Any, seed: int) -> nn.Module:
    """Build a model of the class of `model` whose parameters have no values."""
    handle = register_module_parameter_registration_hook(
        lambda module, name, value: nn.Parameter(value.to("meta"), value.requires_grad)
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built: nn.Module = rebuild(model, config)
            return built
    finally:
        handle.remove()


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, the buffers and the plain attributes of a module."""
    values = {**vars(module), **module._parameters, **module._buffers}
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and (value.is_meta or torch.equal(value, other))
    return type(value) is type(other) and bool(value == other)


def _grids(sizes: Sequence[tuple[Shape, Shape]], size: Shape, patches: Sequence[Shape]) -> list[_Grid]:
    """Return the grids that a table may have: of the patches, or with the same patches of the stages of a pyramid."""
    pairs = [(image, patch, new) for (image, patch), new in zip(sizes, patches, strict=True)]
    if pairs[0][1] == pairs[0][2] and len(size) == 2:
        pairs += [(pairs[0][0], (side, side), (side, side)) for side in range(1, _LARGEST + 1)]
    return [_Grid(_divide(image, patch), _divide(size, new), new) for image, patch, new in pairs]


def _divide(size: Shape, patch: Shape) -> Shape:
    return tuple(side // step for side, step in zip(size, patch, strict=True))


def _find_table(change: _Change, grids: Sequence[_Grid]) -> _Table | None:
    """Return where the rows of a grid are in a parameter whose shape changes; None if there are none."""
    if not isinstance(change.new, nn.Parameter) or change.old.ndim > 4 - (change.name == "weight"):
        return None
    old, new = tuple(change.old.shape), tuple(change.new.shape)
    differing = [axis for axis, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    for grid in grids:
        axes = len(grid.old)
        for start in range(len(old) - axes):  # of a map (1, H, W, D)
            stop = start + axes
            rest = old[:start] + old[stop:] == new[:start] + new[stop:]
            if rest and old[start:stop] == grid.old and new[start:stop] == grid.new:
                return _Table("positions", start, stop - 1, 0, grid.old, grid.new, grid.patch)
        if len(differing) != 1:
            continue
        axis = differing[0]
        pairs: list[tuple[Any, Shape, Shape]] = [("positions", grid.old, grid.new)]
        offsets = [tuple(2 * side - 1 for side in sides) for sides in (grid.old, grid.new)]
        pairs += [("displacements", offsets[0], offsets[1])]
        pairs += [("displacements", offsets[0][n : n + 1], offsets[1][n : n + 1]) for n in range(axes)]
        for kind, before, after in pairs:
            prefix = old[axis] - math.prod(before)
            if prefix == new[axis] - math.prod(after) and prefix in (range(17) if len(before) > 1 else (0,)):
                return _Table(kind, axis, axis, prefix, before, after, grid.patch)
    return None


def _callable_parts(model: Any, image: Shape) -> list[Any]:
    """Return the model, or the encoders within it, that can be called with images of their size alone."""
    names = [name for name, _ in zip(inspect.signature(model.forward).parameters, range(1), strict=False)]
    if hasattr(model, "main_input_name") and names and (names[0].startswith("pixel_values") or _is_packed(model)):
        try:
            with evaluating(model):
                call(model, _images(model, image))
            return [model]
        except Exception as error:  # SAM needs points, its encoder does not
            reason = error_line(error)
        if not any(_callable_parts(child, image) for child in model.children()):
            kind = type(model).__name__
            raise ValueError(
                f"`model` must run on images of its size, {by(image)}, to be resized, got {kind}: {reason}"
            )
    return [part for child in model.children() for part in _callable_parts(child, image)]


def _is_packed(model: nn.Module) -> bool:
    return "grid_thw" in inspect.signature(model.forward).parameters


def _images(model: Any, size: Shape, channels: int | None = None) -> Any:
    """Return random images, a film (1, frames, C, height, width), or the arguments with packed patches of an image."""
    generator = torch.Generator().manual_seed(0)
    count = channels or image_channels(model)
    if _is_packed(model):
        grid = _divide(size, sizes_of(model.config)[1])
        first = next(part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Conv3d | nn.Linear))
        patches = torch.randn(math.prod(grid), first.weight[0].numel(), generator=generator)
        name = next(iter(inspect.signature(model.forward).parameters))
        return {
            name: patches.to(model.device, model.dtype),
            "grid_thw": torch.tensor([[1, *grid]], device=model.device),
        }
    images = torch.randn(1, *size[:-2], count, *size[-2:], generator=generator)
    return images.to(model.device, model.dtype)


def _record(model: nn.Module, images: Tensor) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the outputs of a model, and the constant that it adds to tokens, by the identity of its parameter."""
    tracer = PositionTracer(model)
    outputs = list(_tensors(tracer.run(images)))
    constants = {}
    for use in tracer.meetings:
        if use.kind == "added" and use.constant is not None and len(use.origins) == 1:
            constants[id(dict(model.named_parameters()).get(*use.origins))] = use.constant
    return outputs, constants


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _apply(
    parts: Mapping[str, nn.Module],
    change: _Change,
    table: _Table | None,
    recorded: Mapping[int, Tensor],
    resampler: Any,
) -> None:
    """Make one change in a model."""
    part: Any = parts.get(change.module)
    values = {} if part is None else {**vars(part), **part._parameters, **part._buffers}
    if change.name not in values:
        raise ValueError(f"`{change.path}` must exist in the model, as its configuration has it, to be resized.")
    old = values[change.name]
    if isinstance(change.old, Tensor) and isinstance(old, Tensor) and old.shape != change.old.shape:
        raise ValueError(
            f"`{change.path}` must be {tuple(change.old.shape)}, as in the configuration of the model, to be resized, "
            f"got {tuple(old.shape)}; a table of other images needs their size in the configuration."
        )
    new = change.new
    if isinstance(new, nn.Parameter):
        kind = type(parts[""]).__name__
        if table is None and (old.ndim < 4 or old.shape[:1] != new.shape[:1]):
            raise ValueError(
                f"`model` must have no parameter of another size than a table of a known grid to be resized, "
                f"got {kind} with `{change.path}`, {tuple(old.shape)}, which would be {tuple(new.shape)}."
            )
        with torch.no_grad():
            if table is None:  # the kernel of patches
                value = old if old.shape[1] == new.shape[1] else with_channels(old, new.shape[1])
                if value.shape != new.shape:
                    value = resample_patch_embed(value, list(new.shape[-2:]))
            elif id(old) in recorded and recorded[id(old)].numel() == new.numel() and resampler is None:
                value = recorded[id(old)].detach()
            else:
                name = resampler or (
                    "bilinear(antialias=False)"
                    if table.kind == "displacements"
                    else resampler_of(_config(parts, change.module))
                )
                value = table.resample(old, build_resampler(name, table.kind))
            value = value.reshape(new.shape).to(old.dtype, copy=True, memory_format=torch.contiguous_format)
        part._parameters[change.name] = nn.Parameter(value, old.requires_grad)
    elif isinstance(new, Tensor):
        new = new.to(old.device, old.dtype if old.is_floating_point() else new.dtype)
        (part._buffers if change.name in part._buffers else vars(part))[change.name] = new
    else:
        setattr(part, change.name, new)


def _config(parts: Mapping[str, Any], name: str) -> Any:
    """Return the configuration of the innermost model that has a module."""
    while not hasattr(getattr(parts[name], "config", None), "model_type"):
        name = name.rpartition(".")[0]
    return parts[name].config


def _read_grids(model: Any, image: Shape, sizes: Sequence[tuple[Shape, Shape]]) -> None:
    """Let the methods of a model that read the rows of a table as a square read the grid that they have."""
    double = tuple(2 * side for side in image)
    changes = _changes(model, double)
    grids = _grids(sizes, double, [patch for _, patch in sizes])
    tables = {change: table for change in changes if (table := _find_table(change, grids)) is not None}
    _set_grids(model, {change: replace(table, new=table.old) for change, table in tables.items()}, image)


def _set_grids(model: nn.Module, tables: Mapping[_Change, _Table], size: Shape) -> None:
    """Set the grids of resized tables in the modules whose methods read them, unless these are square."""
    parts: dict[str, Any] = dict(model.named_modules())
    for change, table in tables.items():
        owner = parts[change.module]
        reader = (
            owner if any(hasattr(type(owner), name) for name in _METHODS) else parts[change.module.rpartition(".")[0]]
        )
        for name in _METHODS:
            if not hasattr(type(reader), name) or table.kind == "displacements" or table.start != table.stop:
                continue
            vars(reader).pop(name, None)
            hooks = reader._state_dict_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is say_grid]:
                del hooks[key]
            if size[-1] != size[-2]:
                resampler = build_resampler(resampler_of(_config(parts, change.module)))
                patch = table.patch if name == _METHODS[0] else (1, 1)
                grid = replace(table, old=table.new)
                setattr(reader, name, GridTable(owner, change.name, grid, resampler, patch))
                reader.register_state_dict_pre_hook(say_grid)


def _check_same(model: nn.Module, before: Sequence[Tensor], after: Sequence[Tensor], size: Shape) -> None:
    """Check that the outputs of a model are those that it had with the table that it resampled itself."""
    same = len(before) == len(after)
    for old, new in zip(before, after, strict=False):
        tolerance = 1e-4 if old.dtype in (torch.float32, torch.float64) else 0.05
        same &= old.shape == new.shape and torch.allclose(
            new, old, rtol=0, atol=tolerance * float(old.nan_to_num().abs().max()), equal_nan=True
        )
    if not same:
        raise ValueError(
            f"`img_size` must be one at which {type(model).__name__} uses its own table as it is, got {by(size)}, "
            "where its outputs with the table that it has resampled differ."
        )
