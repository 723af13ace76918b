"""Images of a model of any library: their size, channels and patches, as the model states them, and its call.

A model of films gets a strip: the frames of an image (B, C, T * height, width), one below the other, each repeated for
all frames of a patch. A model of packed patches gets those of the images.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

#: (height, width) of images in pixels, or (depth, height, width) of films.
Size = tuple[int, ...]

#: Names of the image size among the attributes of a model, its configuration, or a part of it.
_IMAGE_SIZES = ("img_size", "image_size")
#: Names of the part that cuts images into patches.
_STEMS = ("patch_embed", "stem", "embeds")


def call(model: nn.Module, images: Tensor | Mapping[str, Any]) -> Any:
    """Call a model with images of any size, or with a mapping of its keyword arguments.

    Models of transformers are asked to interpolate their tables for other sizes than their own, and a masked
    autoencoder to keep all patches in their order. Patches of Qwen-VL are in the order of the blocks that it merges.
    """
    if isinstance(images, Mapping):
        return model(**images)
    known = _arguments(model)
    given: dict[str, Any] = {}
    if (film := film_of(model)) is not None:
        if images.shape[-2] % film.size[0]:
            raise ValueError(
                f"`img_size` must be a strip of frames of {film.size[0]} rows, got {images.shape[-2]} rows."
            )
        frames = images.unflatten(2, (-1, film.size[0])).repeat_interleave(film.depth, 2)
        encoder = {"skip_predictor": True} if "skip_predictor" in known else {}
        return model(frames.transpose(1, 2), **encoder)
    if "grid_thw" in known:
        one: Any = model.config
        frames, merge = (getattr(one, f"{name}_size", 1) for name in ("temporal_patch", "spatial_merge"))
        row, grid = merged_patches(images, one.patch_size, frames, merge)
        return model(row, grid_thw=grid)
    if "spatial_shapes" in known:
        row, grid = merged_patches(images, cast("Any", model.config).patch_size)
        row = row.unflatten(0, (len(images), -1)).unflatten(2, (images.shape[1], -1)).transpose(2, 3).flatten(2)
        return model(row, row.new_ones(row.shape[:2], dtype=torch.long), grid[:, 1:])
    if "interpolate_pos_encoding" in known:
        own = image_size(model)
        given["interpolate_pos_encoding"] = own is not None and tuple(images.shape[-2:]) != own
    config: Any = getattr(model, "config", None)
    patch = pair(getattr(config, "patch_size", None))
    if "noise" not in known or patch is None or not hasattr(config, "mask_ratio"):
        return model(images, **given)
    patches = images.shape[-2] // patch[0] * (images.shape[-1] // patch[1])
    order = torch.arange(patches, device=images.device, dtype=torch.float32).expand(len(images), -1)
    ratio, config.mask_ratio = config.mask_ratio, 0.0
    try:
        return model(images, noise=order, **given)
    finally:
        config.mask_ratio = ratio


def merged_patches(images: Tensor, patch: int, frames: int = 1, merge: int = 1) -> tuple[Tensor, Tensor]:
    """Return the patches of images in one row, (B * N, C * frames * patch^2), and (1, H, W) of each, (B, 3).

    They are in the order of blocks of `merge` x `merge` patches, and of the patches within these; each image is
    repeated for all frames of a patch.
    """
    rows, columns = (side // patch for side in images.shape[-2:])
    cut = images.unflatten(3, (columns // merge, merge, patch)).unflatten(2, (rows // merge, merge, patch))
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :].expand(*(-1,) * 6, frames, -1, -1)
    return cut.flatten(5).flatten(0, 4), torch.tensor([[1, rows, columns]] * len(images), device=images.device)


@dataclass(frozen=True)
class Film:
    """The films of a model: the frames of a patch, the number of such slices, and (height, width) in pixels."""

    depth: int
    slices: int
    size: Size


def film_of(model: nn.Module) -> Film | None:
    """Return the films that a model of transformers takes, by its configuration; None if it takes images."""
    config: Any = getattr(model, "config", None)
    tubelet = getattr(config, "tubelet_size", None)
    frames = getattr(config, "num_frames", getattr(config, "frames_per_clip", None))
    size = pair(getattr(config, "image_size", getattr(config, "crop_size", None)))
    if tubelet is None or frames is None or size is None:
        return None
    depth = tubelet if isinstance(tubelet, int) else tubelet[0]
    return Film(depth, frames // depth, size)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set `model` to evaluation mode, without gradients, within the block; the random state of the CPU is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _arguments(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def check_pictures(model: nn.Module) -> None:
    """Check that a model can be called with single pictures, as far as its arguments and its convolutions say."""
    if film_of(model) is not None or not {"grid_thw", "spatial_shapes"}.isdisjoint(_arguments(model)):
        return
    needed = [
        name
        for name, one in _arguments(model).items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    kind = type(model).__name__
    if len(needed) > 1:
        raise ValueError(
            f"`model` must take pictures (B, C, height, width) alone, got {kind}, which needs {' and '.join(needed)}."
        )
    if any(isinstance(one, nn.Conv3d) for one in model.modules()):
        raise ValueError(
            f"`model` must take pictures (B, C, height, width), got {kind}, which cuts films into patches, but has no "
            "configuration that states their frames."
        )


def image_size(model: nn.Module) -> Size | None:
    """Return the (height, width) in pixels that a model is built for; None if it is not known.

    It is that of its stem, of the model, of timm's or transformers' configuration, or of any part. That of a model of
    films is the size of a strip. A model of packed patches has that of its table, or else of 16 x 16 patches.
    """
    if (film := film_of(model)) is not None:
        return film.slices * film.size[0], film.size[1]
    config: Any = getattr(model, "config", None)
    if "grid_thw" in _arguments(model) or hasattr(config, "num_patches"):
        patches = getattr(config, "num_patches", getattr(config, "num_position_embeddings", 256))
        return pair(math.isqrt(patches) * config.patch_size)
    stem = getattr(model, "patch_embed", None) or next(iter(getattr(model, "patch_embeds", [])), None)
    configured = (getattr(model, "default_cfg", None) or {}).get("input_size")
    given = [getattr(one, "img_size", None) for one in (stem, getattr(model, "stem", None), model)]
    given.append(configured and configured[1:])
    for holder in (model, getattr(model, "config", None), *model.children(), *model.modules()):
        given += [getattr(holder, name, None) for name in _IMAGE_SIZES]
    return next((found for one in given if (found := pair(one)) is not None), None)


def own_patch_size(model: nn.Module) -> Size | None:
    """Return the (height, width) in pixels of a patch, by its stem, the model or its configuration; None if unknown.

    If none of them says it, it is the stride of the first convolution, if its kernels do not overlap.
    """
    stem = next((one for name in _STEMS if (one := getattr(model, name, None)) is not None), None)
    holders = (stem, model, getattr(model, "config", None))
    tubelet = getattr(getattr(model, "config", None), "tubelet_size", None)
    if isinstance(tubelet, tuple | list):
        return pair(tubelet[1:])
    found = next((size for one in holders if (size := pair(getattr(one, "patch_size", None))) is not None), None)
    first = next((one for one in model.modules() if isinstance(one, nn.Conv2d)), None)
    if found is None and first is not None and first.stride == first.kernel_size:
        return pair(first.stride)
    return found


def image_channels(model: nn.Module) -> int:
    """Return the number of channels of the images of a model; 3 if it is not known."""
    first = next((one for one in model.modules() if isinstance(one, nn.Conv2d | nn.Conv3d)), None)
    return int(getattr(model, "in_chans", 0) or 0) or (3 if first is None else first.in_channels)


def window_of(block: nn.Module, names: Sequence[str] = ("window_size", "ws")) -> Size | None:
    """Return the first side or two sides, in patches, that a block or a part of it has under one of `names`."""
    values = (pair(getattr(one, name, None)) for one in block.modules() for name in names)
    return next((value for value in values if value is not None), None)


def pair(given: object) -> Size | None:
    """Return a side or two as (height, width); None for anything else."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given, given
    if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(side, int) for side in given):
        return int(given[0]), int(given[1])
    return None


def error_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def set_input_size(model: Any, size: Size) -> None:
    """Call `set_input_size` of a model, with its current windows if it would change them."""
    windows = {}
    if "window_size" in inspect.signature(model.set_input_size).parameters and not hasattr(model, "each_layer"):
        sides = [side for one in model.modules() if (side := pair(getattr(one, "window_size", None))) is not None]
        windows = {"window_size": sides[0]} if sides else {}
    model.set_input_size(size, **windows)


def by_image(x: Tensor, batch: int) -> Tensor:
    """Return a tensor (B, ...) as it is, and tokens (1, B * N, D) or (B * N, D) of packed images as (B, N, D)."""
    rows = x.shape[0]
    packed = rows > batch if x.ndim == 2 else x.ndim == 3 and rows != batch and rows == 1
    return x.reshape(batch, -1, x.shape[-1]) if packed and x.shape[-2] % batch == 0 else x
