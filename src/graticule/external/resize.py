"""Resizing of models of transformers in place: what their constructors make of another size is all that changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from timm.layers.patch_embed import resample_patch_embed
from torch import Tensor, nn

from graticule.checkpoints.transfer import with_channels
from graticule.external.convert.sizes import attributes, build_empty, encoders_of, same_value, set_sizes, sizes_of
from graticule.external.convert.transformers import resampler_of
from graticule.external.images import call, error_line, evaluating, image_channels
from graticule.external.table_grids import (
    Change,
    GridTable,
    SwappedSides,
    Table,
    config_of,
    divide,
    find_table,
    in_rows,
    say_grid,
    set_grids,
)
from graticule.external.tracer import PositionTracer, nested_tensors
from graticule.hub.config import record_input
from graticule.layers.tokenizers import on_axes, patch_grid
from graticule.position.places import Shape, by
from graticule.position.resampling import build_resampler
from graticule.surgery.resize import LIBRARIES, restore_on_error

#: The largest side of a patch that is tried for the tables of the stages of a pyramid.
_LARGEST = 64
#: Resampler of biases of displacements, as BEiT and SAM resample theirs.
_OF_DISPLACEMENTS = "bilinear(antialias=False)"
#: Arguments of the method of RF-DETR that takes height and width as each other.
_OF_WINDOWS = ["embeddings", "height", "width"]
#: (image, patch) of each encoder in a model, which have one size of images.
_Sizes = list[tuple[Shape, Shape]]
#: The modules of a model that its class builds for its size, twice, as some values are drawn at random.
_Built = Sequence[Mapping[str, nn.Module]]


@LIBRARIES.register("transformers")
def resize_in_place(
    model: Any, img_size: Any = None, resampler: Any = None, patch_size: Any = None, channels: int | None = None
) -> Any:
    """Resize a model of transformers, or the encoders within it, in place.

    The model is built for both sizes without values: parameters, buffers and attributes that differ are those that
    change, and everything else stays the same object. Tables are those that the model computes itself for the size.
    Returns the model.
    """
    kind = type(model).__name__
    configs = encoders_of(getattr(module, "config", None) for module in model.modules())
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
    around = [part.config for part in model.modules() if hasattr(getattr(part, "config", None), "model_type")]
    with restore_on_error(model, *configs, *around):
        try:
            built = [dict(build_empty(model, model.config, seed).named_modules()) for seed in (0, 1)]
            if image[-1] != image[-2]:
                _read_grids(model, built, sizes)
            if size != image or patches != [patch for _, patch in sizes] or channels is not None:
                _resize(model, built, configs, size, patches, channels, resampler)
        except ValueError:
            raise
        except Exception as error:  # any error of another library
            raise ValueError(f"`img_size` {by(size)} is refused by {kind}: {error_line(error)}") from error
    return model


def _resize(
    model: Any,
    built: _Built,
    configs: Sequence[Any],
    size: Shape,
    patches: Sequence[Shape],
    channels: int | None,
    resampler: Any,
) -> None:
    """Resize a model; on errors it may be changed in part."""
    sizes = list(dict.fromkeys(map(sizes_of, configs)))
    image, other_patches = sizes[0][0], [patch for _, patch in sizes] != list(patches)
    patch = patches[0] if other_patches else None
    number = False
    try:
        changes = _changes(model, built, size, patch, channels)
    except Exception:  # its class divides lists
        if len(set(size[-2:])) > 1:
            raise
        number, changes = True, _changes(model, built, size, patch, channels, number=True)
    tables = _tables(changes, sizes, size, patches)
    comparable = not other_patches and channels is None and resampler is None
    if math.prod(size) == math.prod(image) and not other_patches:  # another grid of as many rows
        comparable &= any(isinstance(value, GridTable) for part in model.modules() for value in vars(part).values())
        same = {change.path for change in changes}
        for change, table in _tables(_changes(model, built, _double(image)), sizes, _double(image)).items():
            if change.path not in same:
                changes.append(Change(change.module, change.name, change.old, change.old))
                tables[changes[-1]] = table.at(size)
    parts: dict[str, Any] = dict(model.named_modules())
    _check_fits(parts, changes)
    if size[-1] != size[-2]:
        for part in parts.values():
            if list(inspect.signature(getattr(part, "window_partition", len)).parameters) == _OF_WINDOWS:
                part.window_partition = SwappedSides(part)
    runs = {part: _images(part, size, channels) for part in _callable_parts(model, image)}
    for change in changes:
        if change.old is None:  # windows
            _apply(parts, change, size)
    before: dict[nn.Module, list[Tensor]] = {}
    recorded: dict[int, Tensor] = {}
    if comparable:
        for part, images in runs.items():
            try:
                before[part], constants = _record(part, images)
            except Exception:  # one that only takes images of its own size
                continue
            recorded |= constants
    for change in changes:
        _apply(parts, change, size, tables.get(change), recorded, resampler)
    for part in parts.values():
        if getattr(part, "attention_bias_cache", None):  # of LeViT: biases of the old size
            part.attention_bias_cache = {}
    if resampler is not None and not tables:
        raise ValueError(
            f"`resampler` must be left out with {type(model).__name__}, which has no table, got {resampler}."
        )
    for config in configs:
        set_sizes(config, size, patch, channels, number)
    tokens, new_tokens = (math.prod(grid) for grid in (divide(image, sizes[0][1]), divide(size, patches[0])))
    around: list[Any] = [getattr(part, "config", None) for part in parts.values()]
    for config in around:
        if getattr(config, "image_seq_length", None) == tokens:  # of LLaVA, tokens of an image in a text
            config.image_seq_length = new_tokens
    set_grids(model, tables, size)
    record_input(model, channels or image_channels(model), size[-2:])
    for part, images in runs.items():
        with evaluating(part):
            after = list(nested_tensors(call(part, images)))
        if tables and part in before:
            _check_same(part, before[part], after, size)


def _double(image: Shape) -> Shape:
    return (*image[:-2], *(2 * side for side in image[-2:]))


def _changes(
    model: Any,
    built: _Built,
    size: Shape,
    patch: Shape | None = None,
    channels: int | None = None,
    number: bool = False,
) -> list[Change]:
    """Return what differs in a model that its class builds for other sizes than those of `built`."""
    config = deepcopy(model.config)
    for encoder in encoders_of([config]):
        set_sizes(encoder, size, patch, channels, number)
        if sizes_of(encoder)[0] != size:
            raise ValueError(
                f"`img_size` must be square for {type(encoder).__name__}, which counts patches, got {by(size)}; a "
                "model that resamples its table for each image needs no resizing."
            )
    olds, others = built
    news = dict(build_empty(model, config).named_modules())
    changes = []
    for name, part in news.items():
        if olds.keys() != news.keys() or type(olds[name]) is not type(part):
            raise ValueError(f"`img_size` must not change the layers of a model, as {by(size)} does, near {name!r}.")
        values, drawn = attributes(olds[name]), attributes(others[name])
        for key, new in attributes(part).items():
            old = values.get(key)
            is_random = not same_value(old, drawn.get(key)) and getattr(new, "shape", 0) == getattr(old, "shape", 0)
            if not same_value(old, new) and not is_random:
                changes.append(Change(name, key, old, new))
        if hasattr(part, "set_shift_and_window_size"):  # Swin's windows, which it also changes when it is called
            changes += [Change(name, key, None, getattr(part, key)) for key in ("window_size", "shift_size")]
    return changes


def _tables(
    changes: Sequence[Change], sizes: _Sizes, size: Shape, patches: Sequence[Shape] | None = None
) -> dict[Change, Table]:
    """Return the tables among the changes, of the grid of the patches or of a stage of a pyramid."""
    steps = [
        (image, patch, new) for (image, patch), new in zip(sizes, patches or [patch for _, patch in sizes], strict=True)
    ]
    if len(size) == 2 and steps[0][1] == steps[0][2]:
        steps += [(sizes[0][0], (side, side), (side, side)) for side in range(1, _LARGEST + 1)]
    grids = [(divide(image, patch), divide(size, new), new) for image, patch, new in steps]
    return {change: table for change in changes if (table := find_table(change, grids)) is not None}


def _read_grids(model: Any, built: _Built, sizes: _Sizes) -> None:
    """Let the methods of a model that read the rows of a table as a square read the grid that they have."""
    image = sizes[0][0]
    changes = _changes(model, built, _double(image))
    set_grids(
        model, {change: table.at(image) for change, table in _tables(changes, sizes, _double(image)).items()}, image
    )
    parts = dict(model.named_modules())
    for change in changes:
        if hasattr(parts[change.module], "precompute_positions"):
            _apply(parts, Change(change.module, change.name, change.old, change.old), image)


def _callable_parts(model: Any, image: Shape) -> list[Any]:
    """Return the model, or the encoders within it, that can be called with images of their size alone."""
    names = list(inspect.signature(model.forward).parameters)
    if hasattr(model, "main_input_name") and (
        (names[:1] and names[0].startswith("pixel_values")) or "grid_thw" in names
    ):
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


def _images(model: Any, size: Shape, channels: int | None = None) -> Any:
    """Return random images, a film (1, frames, C, height, width), or the arguments with packed patches of an image."""
    generator = torch.Generator().manual_seed(0)
    names = list(inspect.signature(model.forward).parameters)
    if "grid_thw" in names:
        grid = divide(size, sizes_of(model.config)[1])
        first = next(part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Conv3d | nn.Linear))
        patches = torch.randn(math.prod(grid), first.weight[0].numel(), generator=generator)
        counts = torch.tensor([[1, *grid]], device=model.device)
        return {names[0]: patches.to(model.device, model.dtype), "grid_thw": counts}
    images = torch.randn(1, *size[:-2], channels or image_channels(model), *size[-2:], generator=generator)
    return images.to(model.device, model.dtype)


def _record(model: nn.Module, images: Any) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the outputs of a model, and the constant that it adds to tokens, by the identity of its parameter."""
    tracer = PositionTracer(model)
    outputs = list(nested_tensors(tracer.run(images)))
    parameters, constants = dict(model.named_parameters()), {}
    for use in tracer.meetings:
        if use.kind == "added" and use.constant is not None and len(use.origins) == 1:
            constants[id(parameters.get(*use.origins))] = use.constant
    return outputs, constants


def _apply(
    parts: Mapping[str, nn.Module],
    change: Change,
    size: Shape,
    table: Table | None = None,
    recorded: Mapping[int, Tensor] = {},
    resampler: Any = None,
) -> None:
    """Make one change in a model."""
    part: Any = parts[change.module]
    old, new = {**vars(part), **part._parameters, **part._buffers}[change.name], change.new
    if isinstance(new, nn.Parameter):
        with torch.no_grad():
            if table is None:
                value = _kernel(parts, change, old)
            elif id(old) in recorded and recorded[id(old)].numel() == new.numel():
                value = recorded[id(old)].detach()
            else:
                default = _OF_DISPLACEMENTS if table.kind == "displacements" else None
                name = resampler or default or resampler_of(config_of(parts, change.module))
                value = table.resample(old, build_resampler(name, table.kind))
            value = value.reshape(new.shape).to(old.dtype, copy=True, memory_format=torch.contiguous_format)
        part._parameters[change.name] = nn.Parameter(value, old.requires_grad)
    elif isinstance(new, Tensor):
        if hasattr(part, "precompute_positions"):
            new = in_rows(new, divide(size, sizes_of(part.config)[1]))
            part.register_state_dict_pre_hook(say_grid)
        new = new.to(old.device, old.dtype if old.is_floating_point() else new.dtype)
        (part._buffers if change.name in part._buffers else vars(part))[change.name] = new
    else:
        setattr(part, change.name, new)


def _check_fits(parts: Mapping[str, nn.Module], changes: Sequence[Change]) -> None:
    """Check that the model has what its constructor makes for its size, where that changes."""
    for change in changes:
        part: Any = parts.get(change.module)
        values = {} if part is None else {**vars(part), **part._parameters, **part._buffers}
        if change.name not in values:
            raise ValueError(f"`{change.path}` must exist in the model, as its configuration has it, to be resized.")
        old = values[change.name]
        if isinstance(change.old, Tensor) and isinstance(old, Tensor) and old.shape != change.old.shape:
            raise ValueError(
                f"`{change.path}` must be {tuple(change.old.shape)}, as in the configuration of the model, to be "
                f"resized, got {tuple(old.shape)}; a table of other images needs their size in the configuration."
            )


def _kernel(parts: Mapping[str, nn.Module], change: Change, old: Tensor) -> Tensor:
    """Return the kernel of patches of another size or other channels."""
    shape = change.new.shape
    if old.ndim < 4 or old.shape[0] != shape[0]:
        raise ValueError(
            f"`model` must have no parameter of another size than a table of a known grid to be resized, got "
            f"{type(parts['']).__name__} with `{change.path}`, {tuple(old.shape)}, which would be {tuple(shape)}."
        )
    value = old if old.shape[1] == shape[1] else with_channels(old, shape[1])
    return value if value.shape == shape else resample_patch_embed(value, list(shape[-2:]))


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
