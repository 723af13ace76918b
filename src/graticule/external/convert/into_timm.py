"""Convert a converted model back to timm, with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.layers import RelPosMlp
from torch import nn

from graticule.backbones.base import Backbone
from graticule.external.convert.conversion import convert
from graticule.external.convert.source import Source, fill, source_of
from graticule.position.grid import Grid
from graticule.registry.checks import checked


@checked
def to_timm(model: Backbone, like: nn.Module | None = None) -> nn.Module:
    """Return a model of `convert` as timm's, with its present weights; `model` is not changed.

    The round trip is bit-equal. A changed image size or number of classes is also set in timm's model.

    Args:
        model: a backbone that was converted from timm.
        like: for a backbone that was saved and opened again: a model of timm that is built as the converted one was;
            its values are not used.

    Raises:
        ValueError: if it was not, or if timm's model cannot represent its position.
    """
    source = source_of(model, "timm") if like is None else _source_like(model, like)
    weight = next(model.parameters())
    there = source.empty(weight.device)
    for bias in there.modules():
        if isinstance(bias, RelPosMlp) and not any(bias.pretrained_window_size):
            bias.pretrained_window_size = bias.window_size  # ours keeps the size that its bias is relative to
    _resize(there, model)
    return fill(there, source, model).to(weight.device, weight.dtype)


def _source_like(model: Backbone, like: nn.Module) -> Source:
    """Return the structure of `like`, whose converted model must be built as `model` is.

    Raises:
        ValueError: if it is built in another way.
    """
    converted = convert(like)
    sizes = ("img_size", "num_classes", "global_pool")
    one, other = (
        {} if each.created is None else {"name": each.created["name"], **each.created["arguments"]}
        for each in (converted, model)
    )
    differing = sorted(key for key in {*one, *other} - {*sizes} if one.get(key) != other.get(key))
    if not other or differing:
        what = f"another {', '.join(differing)}" if other else "no known arguments"
        raise ValueError(
            f"`like` must be built as the model that `model` was converted from, got {type(like).__name__}: the model "
            f"has {what}."
        )
    return source_of(converted, "timm")


def _resize(there: Any, model: Backbone) -> None:
    """Set the image size and the classifier of timm's model to those of ours."""
    size = getattr(there.patch_embed, "img_size", None) if hasattr(there, "patch_embed") else None
    windows = getattr(model, "windows", None)
    other_windows = windows is not None and windows != tuple(stage.blocks[0].window_size for stage in there.layers)
    if size is not None and (tuple(size) != model.img_size or other_windows):
        if not hasattr(there, "set_input_size"):
            raise ValueError(
                f"`model` must have the image size of timm's, {size[0]} x {size[1]}, which {type(there).__name__} "
                f"cannot change, got {model.img_size[0]} x {model.img_size[1]}."
            )
        if windows is None:
            there.set_input_size(img_size=model.img_size)
        else:
            _resize_windows(there, model, windows)
    if there.num_classes != model.num_classes or there.global_pool != model.global_pool:
        there.reset_classifier(model.num_classes, model.global_pool)


def _resize_windows(there: Any, model: Backbone, windows: Sequence[tuple[int, int]]) -> None:
    """Set the image size and the windows of timm's Swin to those of ours.

    Its own `set_input_size` accepts the windows of every stage from timm 1.0.31 on, and then scales these with the
    image when it is called with only a size. Earlier versions accept one window for all stages.
    """
    if hasattr(there, "_ref_window_sizes"):
        there.set_input_size(img_size=model.img_size, window_size=windows)
        return
    there.patch_embed.set_input_size(img_size=model.img_size)
    grids = Grid(*there.patch_embed.grid_size).pyramid(len(windows), pad=True)
    for stage, grid, window in zip(there.layers, [grids[0], *grids[:-1]], windows, strict=True):
        stage.set_input_size(grid.shape, window)  # the grid before its patch merging
