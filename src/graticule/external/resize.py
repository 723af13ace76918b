"""Resizing of models of timm and transformers in place: as their conversion, or by the table that they compute."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from timm.layers.helpers import to_2tuple
from timm.models.hiera import Hiera, Reroll, Unroll
from timm.models.hieradet_sam2 import HieraDet
from torch import nn

from graticule.external.convert.back import to_timm, to_transformers
from graticule.external.convert.conversion import convert
from graticule.external.convert.parts import can_convert
from graticule.external.convert.transformers import CUBIC, rebuild
from graticule.external.images import call, error_line, evaluating
from graticule.external.structure import find_structure
from graticule.position.places import Shape, by
from graticule.position.resampling import BICUBIC, build_resampler
from graticule.surgery.resize import LIBRARIES, resize


@LIBRARIES.register("timm")
def resize_timm(model: Any, img_size: Any, **others: Any) -> None:
    """Resize a model of timm in place, whose class has no `set_input_size`: as its conversion, or Hiera, or SAM 2's."""
    if can_convert(model):
        resized = to_timm(resize(convert(model), img_size, **others))
        vars(model).clear()
        vars(model).update(vars(resized))
        return
    if not isinstance(model, Hiera | HieraDet) or img_size is None or any(size is not None for size in others.values()):
        raise ValueError(
            f"`model` must be of this library, have timm's `set_input_size`, or be converted first, got "
            f"{type(model).__name__}. A model that accepts images of any size needs no resizing; of Hiera, only "
            "`img_size` can be changed."
        )
    size = to_2tuple(img_size)
    if isinstance(model, HieraDet):
        shape = _tokens(size, model.patch_embed.proj.stride, model.pos_embed_window.shape[-2:], "windows")
        table = build_resampler(CUBIC)(model.pos_embed.detach(), shape)  # that of a window is repeated
        model.pos_embed = nn.Parameter(table.contiguous(), model.pos_embed.requires_grad)
        model.global_pos_size = to_2tuple(shape)
    else:
        shape = _tokens(size, model.patch_stride, model.mask_unit_size, "mask units")
        if model.pos_embed is not None and model.pos_embed_win is None:
            table = BICUBIC(model.pos_embed.detach().mT.unflatten(-1, model.tokens_spatial_shape), shape).flatten(2).mT
            model.pos_embed = nn.Parameter(table.contiguous(), model.pos_embed.requires_grad)
        strides = [model.q_stride] * (len(model.stage_ends) - 1)
        model.tokens_spatial_shape = list(shape)
        model.mask_spatial_shape = [side // step for side, step in zip(shape, model.mask_unit_size, strict=True)]
        model.unroll = Unroll(size, model.patch_stride, strides)
        model.reroll = Reroll(size, model.patch_stride, strides, model.stage_ends, model.q_pool)
    if known := getattr(model, "pretrained_cfg", None):
        config = {**known, "input_size": (model.in_chans, *size)}
        vars(model).update(pretrained_cfg=config, default_cfg=config)


def _tokens(size: Shape, stride: Shape, window: Shape, name: str) -> Shape:
    """Return the grid of tokens of an image, which must have whole windows."""
    unit = tuple(step * side for step, side in zip(stride, window, strict=True))
    if any(side % step for side, step in zip(size, unit, strict=True)):
        raise ValueError(f"`img_size` must be a multiple of the {name}, {by(unit)} pixels, got {by(size)}.")
    return tuple(side // step for side, step in zip(size, stride, strict=True))


@LIBRARIES.register("transformers")
def resize_in_place(model: nn.Module, **sizes: Any) -> None:
    """Resize a model of transformers as its conversion is, or by its own table, and adapt its configuration."""
    resized = to_transformers(resize(convert(model), **sizes)) if can_convert(model) else _by_table(model, **sizes)
    vars(model).clear()
    vars(model).update(vars(resized))


def _by_table(model: Any, img_size: Any, **others: Any) -> nn.Module:
    """Return a model that stores the table that `model` computes for images of another size; it need not convert.

    What is added to the tokens is recorded in a pass at that size. The outputs at that size are the same.
    """
    kind, size = type(model).__name__, to_2tuple(img_size)
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"`{name}` must be left out with {kind}, which `convert` does not take, got {value}.")
    present = getattr(getattr(model, "config", None), "image_size", None)
    if present is None or img_size is None or len(size) != 2:
        raise ValueError(
            f"`img_size` must be (height, width), of a model with an image_size in its configuration, got {img_size} "
            f"for {kind}."
        )
    there, state = find_structure(model, size), model.state_dict()
    tables = {name: site.rows() for site in there.of_kind("absolute table") for name in site.origins if name in state}
    config = deepcopy(model.config)
    images = torch.randn(1, there.channels, *size, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    try:
        config.image_size = size[0] if isinstance(present, int) and size[0] == size[1] else list(size)
        with torch.random.fork_rng(devices=[]):
            resized: Any = rebuild(model, config)
        for name, value in resized.state_dict().items():
            if name in tables and value.shape != state[name].shape:
                state[name] = tables[name].reshape(value.shape)
        resized.load_state_dict(state)
        for name, value in model.named_parameters():
            resized.get_parameter(name).requires_grad_(value.requires_grad)
        resized.to(model.device, model.dtype)
        with evaluating(model), evaluating(resized):
            inputs = images.to(model.device)
            before, after = (next(iter(call(part, inputs).values())) for part in (model, resized))
    except Exception as error:  # any error of another library
        raise ValueError(f"`img_size` {by(size)} is refused by {kind}: {error_line(error)}") from error
    if not torch.allclose(before, after, rtol=0, atol=1e-4 * float(before.abs().max())):
        raise ValueError(
            f"`img_size` must be one at which {kind} uses its own table as it is, got {by(size)}, where its outputs "
            "with the table that it has resampled differ."
        )
    resized.train(model.training)
    return cast("nn.Module", resized)
