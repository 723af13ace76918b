"""Images of a model of any library: their size, channels and patches, as the model states them, and its call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from graticule.layers.tokenizers import Fit, fit_for

#: (height, width) of images in pixels, or (depth, height, width) of volumes.
Size = tuple[int, ...]

#: Names of the image size among the attributes of a model, its configuration, or a part of it.
_IMAGE_SIZES = ("img_size", "image_size")
#: Names of the part that cuts images into patches.
_STEMS = ("patch_embed", "stem", "embeds")


def call(model: nn.Module, images: Tensor | Mapping[str, Any], interpolates: bool = False) -> Any:
    """Call a model with images of any size, or with a mapping of its keyword arguments.

    Models of transformers are asked to interpolate their tables for other sizes than their own, or always
    (`interpolates`), and a masked autoencoder to keep all patches in their order.
    """
    if isinstance(images, Mapping):
        return model(**images)
    known = _arguments(model)
    options: dict[str, Any] = {}
    config: Any = getattr(model, "config", None)
    if "spatial_shapes" in known:  # of packed patches
        side = config.patch_size
        rows, columns = (length // side for length in images.shape[-2:])
        cut = images.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 3, 5, 1)
        row = cut.reshape(len(images), rows * columns, -1)
        shapes = torch.tensor([[rows, columns]] * len(row), device=row.device)
        return model(row, row.new_ones(row.shape[:2], dtype=torch.long), shapes)
    if "interpolate_pos_encoding" in known:
        options["interpolate_pos_encoding"] = interpolates or (
            image_size(model) not in (None, tuple(images.shape[-2:]))
        )
    patch = pair(getattr(config, "patch_size", None))
    if "noise" not in known or patch is None or not hasattr(config, "mask_ratio"):
        return model(images, **options)
    patches = images.shape[-2] // patch[0] * (images.shape[-1] // patch[1])
    order = torch.arange(patches, device=images.device, dtype=torch.float32).expand(len(images), -1)
    ratio, config.mask_ratio = config.mask_ratio, 0.0
    try:
        return model(images, noise=order, **options)
    finally:
        config.mask_ratio = ratio


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set `model` to evaluation mode, without gradients, within the block; the random state of the CPU is restored."""
    modes = [(module, module.training) for module in model.modules()]
    embeddings: list[Any] = [part for part in model.modules() if getattr(part, "max_norm", None) is not None]
    # which change their tables when they are called
    tables = [(part.weight.data, part.weight.data.clone()) for part in embeddings]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for table, values in tables:
            table.copy_(values)
        for module, training in modes:
            module.training = training


def _arguments(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def check_takes_images(model: nn.Module) -> None:
    """Check that a model can be called with single images, as far as its arguments and its convolutions say."""
    if "spatial_shapes" in _arguments(model):
        return
    needed = [
        name
        for name, value in _arguments(model).items()
        if value.default is value.empty and value.kind in (value.POSITIONAL_ONLY, value.POSITIONAL_OR_KEYWORD)
    ]
    kind = type(model).__name__
    if len(needed) > 1:
        raise ValueError(
            f"`model` must take images (B, C, height, width) alone, got {kind}, which needs {' and '.join(needed)}."
        )
    if any(isinstance(part, nn.Conv3d) for part in model.modules()):
        raise ValueError(
            f"`model` must take images (B, C, height, width), got {kind}, which cuts videos into patches; "
            "graticule.convert takes some of them."
        )


def image_size(model: nn.Module) -> Size | None:
    """Return the (height, width) in pixels that a model is built for; None if it is not known.

    It is stated by its stem, the model, timm's or transformers' configuration, or any part. A model of packed patches
    has the size of its table.
    """
    if isinstance(model, FeatureGetterNet) and (size := image_size(model.model)):
        return size  # its own configuration has the usual one
    config: Any = getattr(model, "config", None)
    if hasattr(config, "num_patches"):
        return pair(math.isqrt(config.num_patches) * config.patch_size)
    stem = getattr(model, "patch_embed", None) or next(iter(getattr(model, "patch_embeds", [])), None)
    configured = (getattr(model, "default_cfg", None) or {}).get("input_size")
    sizes = [getattr(part, "img_size", None) for part in (stem, getattr(model, "stem", None), model)]
    sizes.append(configured and configured[1:])
    for holder in (model, config, *model.children(), *model.modules()):
        sizes += [getattr(holder, name, None) for name in _IMAGE_SIZES]
    return _first_pair(sizes)


def _first_pair(values: Iterable[object]) -> Size | None:
    """Return the first of some values that is a side or two; None without one."""
    return next((size for size in map(pair, values) if size is not None), None)


def own_patch_size(model: nn.Module) -> Size | None:
    """Return the (height, width) in pixels of a patch, by its stem, the model or its configuration; None if unknown.

    If none of them says it, it is the stride of the first convolution, if its kernels do not overlap.
    """
    stem = next((part for name in _STEMS if (part := getattr(model, name, None)) is not None), None)
    holders = (stem, model, getattr(model, "config", None))
    size = _first_pair(getattr(holder, "patch_size", None) for holder in holders)
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    return pair(first.stride) if size is None and first is not None and first.stride == first.kernel_size else size


def fit_of(model: nn.Module, stem: Any = None) -> Fit:
    """Return what a model does with sides that are no multiples of its patch, by its stem.

    It pads them with timm's `dynamic_img_pad`. A model that is built for such a size drops the rest.
    """
    stem = getattr(model, "patch_embed", None) if stem is None else stem
    if getattr(stem, "dynamic_img_pad", False):
        return "pad"
    size, patch = image_size(model), own_patch_size(model)
    return fit_for(size, patch) if size and patch else "exact"


def image_channels(model: nn.Module) -> int:
    """Return the number of channels of the images of a model; 3 if it is not known."""
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Conv3d)), None)
    return int(getattr(model, "in_chans", 0) or 0) or (3 if first is None else first.in_channels)


def window_of(block: nn.Module, names: Sequence[str] = ("window_size", "ws")) -> Size | None:
    """Return the first side or two sides, in patches, that a block or a part of it has under one of `names`."""
    return _first_pair(getattr(part, name, None) for part in block.modules() for name in names)


def pair(value: object) -> Size | None:
    """Return a side or two as (height, width); None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(side, int) for side in value):
        return int(value[0]), int(value[1])
    return None


def error_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def without_values(model: Any) -> Any:
    """Return a copy of a model whose parameters and buffers have no values."""
    memo = {id(value): value for value in [*model.parameters(), *model.buffers()]}
    return deepcopy(model, memo).to("meta")


#: Multiples of the patches, or of pixels, that are tried as the unit of the sides of a model.
_FACTORS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16, 24, 32, 64, 128)


def refused_size(
    kind: str, size: Size, error: Exception, run: Callable[[Size], object], patch: Size | None = (1, 1)
) -> ValueError:
    """Return the refusal of a size, with the rule that sizes near it show: what `run` raises an error on is not one.

    Multiples of `patch` are tried, and with None only a square.
    """

    def runs(*sizes: Size) -> bool:
        try:
            for near in sizes:
                run((*size[:-2], *near))
        except Exception:  # whatever a model raises
            return False
        return True

    sides = size[-2:]
    got = "x".join(map(str, size)).replace("x", " x ")
    for factor in _FACTORS if patch else ():
        units = [factor * side for side in (patch or ())[-2:]]
        least = [side // unit for side, unit in zip(sides, units, strict=True)]
        # three in a row are a rule
        nearest = [tuple((n + more) * unit for n, unit in zip(least, units, strict=True)) for more in (0, 1, 2)]
        is_like = all(len(set(near)) == len(set(sides)) for near in nearest)  # square, or not
        if nearest[0] != sides and all(least) and is_like and runs(*nearest):
            near = " or ".join(" x ".join(map(str, sizes)) for sizes in nearest[:2])
            unit = " and ".join(map(str, dict.fromkeys(units)))
            return ValueError(f"`img_size` must be multiples of {unit} for {kind}, such as {near}, got {got}.")
    if len(set(sides)) > 1 and runs((max(sides),) * 2):
        return ValueError(f"`img_size` must be square for {kind}, got {got}.")
    return ValueError(f"`img_size` must be one that {kind} runs on, got {got}, for which it raises {error_line(error)}")


def set_input_size(model: Any, size: Size) -> None:
    """Call `set_input_size` of a model, with its current windows if it would change them."""
    window = None
    if "window_size" in inspect.signature(model.set_input_size).parameters and not hasattr(model, "each_layer"):
        window = window_of(model, ("window_size",))
    model.set_input_size(size, **({} if window is None else {"window_size": window}))


def by_image(x: Tensor, batch: int) -> Tensor:
    """Return a tensor (B, ...) as it is, and tokens (1, B * N, D) or (B * N, D) of packed images as (B, N, D)."""
    rows = x.shape[0]
    packed = rows > batch if x.ndim == 2 else x.ndim == 3 and rows != batch and rows == 1
    return x.reshape(batch, -1, x.shape[-1]) if packed and x.shape[-2] % batch == 0 else x
