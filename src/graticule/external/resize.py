"""Resizing of models of transformers in place: what their constructors make of another size is all that changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from timm.layers.patch_embed import resample_patch_embed
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from graticule.checkpoints.skeleton import COMPARED, attributes, check_untouched, differences, same_value
from graticule.checkpoints.transfer import with_channels
from graticule.external.convert.sizes import build_empty, configs_of, encoders_of, resize_configs, set_counts, sizes_of
from graticule.external.convert.transformers import resampler_of
from graticule.external.images import call, evaluating, image_channels, refused_size, without_values
from graticule.external.replay import replaying
from graticule.external.table_grids import Table, config_of, divide, find_table, set_methods, set_order
from graticule.external.tracer import PositionTracer, nested_tensors
from graticule.hub.config import record_input
from graticule.layers.tokenizers import fit_for, on_axes, patch_grid
from graticule.position.places import Shape, by
from graticule.position.resampling import build_resampler
from graticule.surgery.resize import LIBRARIES, restore_on_error

#: The largest side of a patch that is tried for the tables of the stages of a pyramid.
_LARGEST = 64
#: Resampler of biases of displacements, as BEiT and SAM resample theirs.
_OF_DISPLACEMENTS = "bilinear(antialias=False)"
#: What differs between two models: name of the parameter, buffer or attribute -> both values.
_Changes = dict[str, tuple[Any, Any]]


@LIBRARIES.register("transformers")
def resize_parts(model: nn.Module, **sizes: Any) -> None:
    """Resize a model of transformers, or those in a module of another library; see `resize_in_place`."""
    parts = _outermost(model)
    if parts != [model] and any(hasattr(part, "set_input_size") for part in model.modules()):
        raise ValueError(
            f"`model` must have models of one library, got {type(model).__name__} with some of timm and of "
            "transformers; resize them one by one."
        )
    with restore_on_error(model, *configs_of(getattr(part, "config", None) for part in model.modules())):
        for part in parts:
            resize_in_place(part, **sizes)


def _outermost(module: nn.Module) -> list[nn.Module]:
    """Return a model of transformers, or those in a module of another library that are within no other one."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.models.")]
    if kinds and hasattr(getattr(module, "config", None), "model_type"):  # also a subclass of the user
        return [module]
    return [part for child in module.children() for part in _outermost(child)]


def resize_in_place(
    model: Any, img_size: Any = None, resampler: Any = None, patch_size: Any = None, channels: int | None = None
) -> Any:
    """Resize a model of transformers, or the encoders within it, in place.

    The model is built for both sizes without values: parameters, buffers and attributes that differ are those that
    change, and everything else stays the same object. Tables are those that the model computes itself for the size.
    Returns the model.
    """
    kind = type(model).__name__
    configs = configs_of(getattr(module, "config", None) for module in model.modules())
    sizes = list(dict.fromkeys(map(sizes_of, encoders_of(configs))))
    if len({image for image, _ in sizes}) != 1 or (patch_size is not None and len(sizes) > 1):
        pairs = " and ".join(f"{by(image)} with patches of {by(patch)}" for image, patch in sizes) or "none"
        raise ValueError(
            f"`model` must have encoders of images of one size in its configuration, got {pairs} in {kind}; encoders "
            "within a model can be resized one by one, and a model that takes any size needs no resizing."
        )
    image = sizes[0][0]
    size = image if img_size is None else on_axes(img_size, len(image))
    if len(size) != len(image):
        names = "(height, width)" if len(image) == 2 else "(frames, height, width), as the model has volumes"
        raise ValueError(f"`img_size` must be {names}, got {by(size)}.")
    patch = None if patch_size is None else on_axes(patch_size, len(sizes[0][1]))
    for _, old_patch in sizes:
        patch_grid(size, patch or old_patch, fit=fit_for(image, old_patch))  # refuses other sizes with its own message
    changes = size != image or patch not in (None, sizes[0][1]) or channels is not None
    if resampler is not None and not changes:
        raise ValueError(f"`resampler` must come with another `img_size` for {kind}, which does not keep it.")
    try:
        with restore_on_error(model, *configs):
            built = build_empty(model, model.config)
            tables = find_tables(model, built, sizes)
            if image[-1] != image[-2]:
                set_methods(model, tables, image)
            if changes:
                _resize(model, built, tables, configs, size, patch, channels, resampler)
    except _RefusedError as refusal:
        error: Any = refusal.__cause__
        run = partial(_run_empty, model, image, patch, channels)
        if _raises(run, image) or not _raises(run, size):  # what depends on values, or is outside of the encoders
            raise refused_size(kind, size, error, partial(run, with_values=True), None) from error
        raise refused_size(kind, size, error, run, patch or sizes[0][1]) from error
    return model


def _raises(run: Callable[[Shape], object], size: Shape) -> bool:
    try:
        run(size)
    except Exception:  # whatever a model raises
        return True
    return False


def _run_empty(
    model: Any, image: Shape, patch: Shape | None, channels: int | None, size: Shape, with_values: bool = False
) -> None:
    """Run the encoders of a model that its class builds for a size, on shapes alone; or all of it, on any values."""
    built, other = build_empty(model, model.config), _build(model, size, patch, channels)
    encoders = [sizes_of(encoder) for encoder in encoders_of([model.config])]
    tables = find_tables(model, built, encoders)
    new_tables = _with_patch(tables, encoders[0][1], patch)
    count = _count_tokens(built, tables, image)
    new_count = count and _count_new_tokens(model, other, new_tables, size, patch, channels)
    copy = other if with_values else without_values(other)
    set_methods(copy, new_tables, size)
    names = {part: name for name, part in model.named_modules()}
    with evaluating(copy):
        for part in _callable_parts(model, image):
            encoder: Any = copy.get_submodule(names[part])
            call(encoder, _images(encoder, size, channels))
        inputs = _inputs(built, image, count) if with_values else {}
        if inputs and not _raises(lambda _: built.eval()(**inputs), image):
            copy(**_inputs(copy, size, new_count, channels))


class _RefusedError(Exception):
    """An error of a model, or of the library, on images of a size."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Mark the errors of a library as refusals of a size, unless they are our own."""
    try:
        yield
    except Exception as error:
        if isinstance(error, _RefusedError) or str(error).startswith("`img_size`"):
            raise
        raise _RefusedError from error


def _resize(
    model: Any,
    built: nn.Module,
    tables: Mapping[str, Table],
    configs: Sequence[Any],
    size: Shape,
    patch: Shape | None,
    channels: int | None,
    resampler: Any,
) -> None:
    """Resize a model; on errors it may be changed in part."""
    image, old_patch = sizes_of(encoders_of(configs)[0])
    patch = None if patch == old_patch else patch
    if resampler is not None and not tables:
        raise ValueError(
            f"`resampler` must be left out with {type(model).__name__}, which has no table, got {resampler}."
        )
    other = _build(model, size, patch, channels)
    changes = _changes(built, other, size)
    set_order(built, image)
    _check_fits(model, built, changes)
    new_tables = _with_patch(tables, old_patch, patch)
    count = _count_tokens(built, tables, image)
    counts = {}
    if count is not None:
        with _refusals():
            counts[count] = _count_new_tokens(model, other, new_tables, size, patch, channels)
    trial = _inputs(model, image, count)
    if trial:
        try:
            _run(model, trial)
        except Exception:  # it has other arguments, too, or is not for images of this size
            trial = {}
    runs = {part: _images(part, size, channels) for part in _callable_parts(model, image)}
    news = dict(other.named_modules())
    for name, part in model.named_modules():
        if hasattr(part, "set_shift_and_window_size"):  # Swin's windows, which it also changes when it is called
            part.window_size, part.shift_size = news[name].window_size, news[name].shift_size
    set_order(model, size)
    with replaying(model, [*changes, *tables]):
        # of another grid of as many rows, it would take its table as it is
        is_other = math.prod(size) != math.prod(image) and patch is None and channels is None and resampler is None
        before, constants = _trace(runs) if tables and is_other else ({}, {})
        places: set[tuple[int, str]] = set()
        for path, table in tables.items():
            owner, _, leaf = path.rpartition(".")
            if (place := (id(model.get_submodule(owner)), leaf)) in places:  # of a block that the model has twice
                changes.pop(path, None)
                continue
            places.add(place)
            grids = table.sides(image), new_tables[path].sides(size)
            if path in changes or (grids[0] != grids[1] and math.prod(grids[0]) == math.prod(grids[1])):
                _, new = changes.pop(path, (None, other.get_parameter(path)))
                _resample(model, path, new.shape, table, grids, constants, resampler)
        for path, (_, new) in changes.items():
            _set(model, path, new)
        for part in model.modules():
            if getattr(part, "attention_bias_cache", None):  # of LeViT: biases of the old size
                part.attention_bias_cache = {}
        resize_configs(configs, size, patch, channels)
        patches, new_patches = math.prod(divide(image, old_patch)), math.prod(divide(size, patch or old_patch))
        set_counts(configs, {patches: new_patches, **counts}, complete=count is not None)
        set_methods(model, new_tables, size)
        record_input(model, channels or image_channels(model), size[-2:])
        after = {}
        with _refusals(), evaluating(model):
            for part, images in runs.items():
                after[part] = list(nested_tensors(call(part, images)))
            if trial:
                model(**_inputs(model, size, count and counts[count], channels))
    for part, outputs in before.items():
        _check_same(part, outputs, after[part], size)


def _build(model: Any, size: Shape, patch: Shape | None = None, channels: int | None = None) -> nn.Module:
    config = deepcopy(model.config)
    with _refusals():
        resize_configs([config], size, patch, channels)
    for encoder in encoders_of([config]):
        if sizes_of(encoder)[0] != size:
            raise ValueError(
                f"`img_size` must be square for {type(encoder).__name__}, which counts patches, got {by(size)}; a "
                "model that resamples its table for each image needs no resizing."
            )
    with _refusals():
        return build_empty(model, config)


def _changes(built: nn.Module, other: nn.Module, size: Shape) -> _Changes:
    """Return what differs in a model that its class builds for other sizes than `built` has."""
    olds, changes = dict(built.named_modules()), {}
    for name, part in other.named_modules():
        if name not in olds or type(olds[name]) is not type(part):
            raise ValueError(f"`img_size` must not change the layers of a model, as {by(size)} does, near {name!r}.")
        values = attributes(olds[name])
        for key, new in attributes(part).items():
            if not isinstance(new, COMPARED):
                continue
            old = values.get(key)
            # values that are drawn at random, and saved with the model
            is_saved = key in part._buffers and key not in part._non_persistent_buffers_set
            if not same_value(old, new) and not (is_saved and new.shape == getattr(old, "shape", None)):
                changes[f"{name}.{key}".lstrip(".")] = old, new
    return changes


def find_tables(model: Any, built: nn.Module, sizes: Sequence[tuple[Shape, Shape]]) -> dict[str, Table]:
    """Return the tables of a model, which are those parameters that grow with the grid of an encoder or of a stage."""
    image = sizes[0][0]
    double = (*image[:-2], *(2 * side for side in image[-2:]))
    patches = [patch for _, patch in sizes]
    if len(image) == 2:
        patches += [(side, side) for side in range(1, _LARGEST + 1)]
    tables = {}
    for path, (old, new) in _changes(built, _build(model, double), double).items():
        if isinstance(new, nn.Parameter):
            shapes = tuple(old.shape), tuple(new.shape)
            if (table := find_table(path.rpartition(".")[2], shapes, (image, double), patches)) is not None:
                tables[path] = table
    return tables


def _callable_parts(model: Any, image: Shape) -> list[Any]:
    """Return the model, or the encoders within it, that can be called with images of their size alone."""
    names, error = list(inspect.signature(model.forward).parameters), None
    if hasattr(model, "main_input_name") and (
        (names[:1] and names[0].startswith("pixel_values")) or "grid_thw" in names
    ):
        images = _images(model, image)
        try:
            _run(model, images)
            return [model]
        except Exception as raised:  # SAM needs points, its encoder does not
            error = raised
    parts = [part for child in model.children() for part in _callable_parts(child, image)]
    if error is not None and not parts:
        raise ValueError(
            f"`model` must run on images of its size, {by(image)}, alone to be resized, got {type(model).__name__}, "
            "whose forward pass fails on them."
        ) from error
    return parts


def _run(model: Any, inputs: Any) -> None:
    """Call a model, on shapes alone where its class allows it; errors come from its call."""
    with suppress(Exception):
        copy = without_values(model)
        with evaluating(copy):
            call(copy, tree_map_only(Tensor, lambda x: x.to("meta"), inputs))
            return
    with evaluating(model):
        call(model, inputs)


def _images(model: Any, size: Shape, channels: int | None = None) -> Any:
    """Return random images, a video (1, frames, C, height, width), or the arguments with packed patches of an image."""
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


def _with_patch(tables: Mapping[str, Table], old: Shape, patch: Shape | None) -> dict[str, Table]:
    """Return tables of a model whose patches of the size `old` have another size, or the same for None."""
    return {
        path: table if patch is None or table.patch != old else replace(table, patch=patch)
        for path, table in tables.items()
    }


def _count_tokens(skeleton: Any, tables: Mapping[str, Table], size: Shape) -> int | None:
    """Return the number of tokens that a model of language has for an image; None if it needs more than images."""
    try:
        return _tokens_of(skeleton, tables, size) if hasattr(skeleton, "get_image_features") else None
    except Exception:  # whatever a model raises
        return None


def _count_new_tokens(
    model: Any, other: Any, tables: Mapping[str, Table], size: Shape, patch: Shape | None, channels: int | None
) -> int:
    """Return the number of tokens of an image of a new size, which must not be read as a square."""
    if size[-1] != size[-2]:  # a grid of 2 x 8 has as many tokens as a square, and one of 2 x 16 has not
        wide = (*size[:-1], 2 * size[-1])
        _tokens_of(_build(model, wide, patch, channels), tables, wide)
    return _tokens_of(other, tables, size)


def _tokens_of(skeleton: Any, tables: Mapping[str, Table], size: Shape) -> int:
    """Return the number of features of an image, by a pass without values."""
    model = without_values(skeleton)
    set_methods(model, tables, size)
    with evaluating(model):
        images = torch.empty(1, image_channels(model), *size, device="meta", dtype=model.dtype)
        features = nested_tensors(model.get_image_features(pixel_values=images).pooler_output)
        return sum(x.numel() // x.shape[-1] for x in features)


def _inputs(model: Any, size: Shape, count: int | None, channels: int | None = None) -> dict[str, Tensor]:
    """Return random images with a text or a prompt, for a model that needs both; none for one that needs images."""
    names = set(inspect.signature(model.forward).parameters)
    if "pixel_values" not in names or len(size) != 2:
        return {}
    config, device = model.config, model.device
    text = getattr(config, "text_config", config)
    token = next((getattr(config, name, None) for name in ("image_token_id", "image_token_index")), None)
    end = min(getattr(text, "eos_token_id", None) or 1, getattr(text, "vocab_size", math.inf) - 1)
    ids = [0 if token is None else token] * (count or 1) + [end]
    prompts = {
        "decoder_input_ids" if "decoder_input_ids" in names else "input_ids": torch.tensor([ids], device=device),
        "input_points": torch.tensor([[[[side / 2 for side in reversed(size)]]]], device=device),
    }
    prompts = {name: value for name, value in prompts.items() if name in names}
    return {"pixel_values": _images(model, size, channels), **prompts} if prompts else {}


def _trace(runs: Mapping[Any, Any]) -> tuple[dict[Any, list[Tensor]], dict[int, Tensor]]:
    """Return the outputs of parts for their images, as far as they take these before they are resized.

    Also returns the constants that they add to tokens, by the identity of the parameter that each comes from.
    """
    outputs, constants = {}, {}
    for part, images in runs.items():
        tracer = PositionTracer(part)
        try:
            outputs[part] = list(nested_tensors(tracer.run(images)))
        except Exception:  # one that only takes images of its own size
            continue
        parameters = dict(part.named_parameters())
        for use in tracer.uses:
            if use.kind == "added" and use.constant is not None and len(use.source_parameters) == 1:
                constants[id(parameters.get(*use.source_parameters))] = use.constant
    return outputs, constants


def _holder(model: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary of a module that holds a parameter, buffer or attribute, and its name there."""
    name, _, key = path.rpartition(".")
    part: Any = model.get_submodule(name)
    return next((values for values in (part._parameters, part._buffers) if key in values), vars(part)), key


def _resample(
    model: nn.Module,
    path: str,
    shape: torch.Size,
    table: Table,
    grids: tuple[Shape, Shape],
    constants: Mapping[int, Tensor],
    resampler: Any,
) -> None:
    """Set a parameter to its table of another grid: that which the model adds itself to tokens, where it is known."""
    values, key = _holder(model, path)
    old = values[key]
    value = constants.get(id(old))
    if value is None or value.numel() != shape.numel():
        default = _OF_DISPLACEMENTS if table.kind == "displacements" else None
        name = default or resampler_of(config_of(dict(model.named_modules()), path.rpartition(".")[0]))
        value = table.resample(old.detach(), *grids, build_resampler(resampler or name, table.kind))
    if value.numel() != shape.numel():
        raise _unknown(model, path, old, shape)
    value = value.detach().reshape(shape).to(old.dtype, copy=True, memory_format=torch.contiguous_format)
    values[key] = nn.Parameter(value, old.requires_grad)


def _set(model: nn.Module, path: str, new: Any) -> None:
    """Set a parameter, buffer or attribute to its value for another size; a parameter is the kernel of patches."""
    values, key = _holder(model, path)
    old = values[key]
    if isinstance(new, nn.Parameter):
        if old.ndim < 4 or old.shape[0] != new.shape[0]:
            raise _unknown(model, path, old, new.shape)
        value = old.detach() if old.shape[1] == new.shape[1] else with_channels(old.detach(), new.shape[1])
        value = value if value.shape == new.shape else resample_patch_embed(value, list(new.shape[-2:]))
        new = nn.Parameter(value.to(old.dtype, copy=True).contiguous(), old.requires_grad)
    elif isinstance(new, Tensor):
        new = new.to(old.device, old.dtype if old.is_floating_point() else new.dtype)
    values[key] = new


def _unknown(model: nn.Module, path: str, old: Tensor, shape: torch.Size) -> ValueError:
    return ValueError(
        f"`model` must have no parameter of another size than a table of a known grid to be resized, got "
        f"{type(model).__name__} with `{path}`, {tuple(old.shape)}, which would be {tuple(shape)}."
    )


def _check_fits(model: nn.Module, built: nn.Module, changes: _Changes) -> None:
    """Check that the model has what its constructor makes for its size, where that changes."""
    olds: dict[str, Any] = dict(built.named_modules())
    for name, part in model.named_modules():
        if hasattr(part, "set_shift_and_window_size"):
            layer: Any = part
            window = olds[name].window_size
            # else its class has set them for a grid that is smaller than a window
            if layer.shift_size or not (layer.window_size < window or min(layer.input_resolution) <= window):
                for key in ("window_size", "shift_size"):
                    check_untouched(model, f"{name}.{key}", getattr(layer, key), getattr(olds[name], key))
    for path, (expected, _) in changes.items():
        try:
            values, key = _holder(model, path)
            old = values[key]
        except (AttributeError, KeyError):
            raise ValueError(f"`{path}` must exist in the model, as its configuration has it, to be resized.") from None
        if isinstance(expected, Tensor) and isinstance(old, Tensor) and old.shape != expected.shape:
            raise ValueError(
                f"`{path}` must be {tuple(expected.shape)}, as in the configuration of the model, to be "
                f"resized, got {tuple(old.shape)}; a table of other images needs their size in the configuration."
            )
        name, _, leaf = path.rpartition(".")
        key = "max_norm" if isinstance(expected, nn.Parameter) else leaf  # with which an embedding changes its table
        value, right = (attributes(side.get_submodule(name)).get(key) for side in (model, built))
        check_untouched(model, f"{name}.{key}", value, right)


def _check_same(model: Any, before: Sequence[Tensor], after: Sequence[Tensor], size: Shape) -> None:
    """Check that the outputs of a model are those that it had with the table that it resampled itself."""
    same = len(before) == len(after)
    for old, new in zip(before, after, strict=False):
        tolerance = 1e-4 if old.dtype in (torch.float32, torch.float64) else 0.05
        same &= old.shape == new.shape and torch.allclose(
            new, old, rtol=0, atol=tolerance * float(old.nan_to_num().abs().max()), equal_nan=True
        )
    if not same:
        others = differences(model, build_empty(model, model.config))
        changes = [f"{place} is {actual}, not {expected}" for place, actual, expected in others]
        raise ValueError(
            f"`img_size` must be one at which {type(model).__name__} uses its own table as it is, got {by(size)}, "
            "where its outputs with the table that it has resampled differ"
            f"{'; a change of its class may be the cause: ' if changes else ''}{', '.join(changes[:3])}."
        )
