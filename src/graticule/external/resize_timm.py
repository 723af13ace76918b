"""Resizing of models of timm in place, whose class has no `set_input_size`: as their conversion, Hiera, SAM 2's."""

from __future__ import annotations

from typing import Any

from timm.layers.helpers import to_2tuple
from timm.models.hiera import Hiera, Reroll, Unroll
from timm.models.hieradet_sam2 import HieraDet
from torch import nn

from graticule.external.convert.back import to_timm
from graticule.external.convert.conversion import convert
from graticule.external.convert.parts import can_convert
from graticule.external.convert.transformers import CUBIC
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
