"""Make a model of films or volumes of a model of images, which gives a film of one repeated image its outputs."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from graticule.backbones.base import Backbone
from graticule.backbones.pyramid import Pyramid
from graticule.encodings.per_frame import FilmPosition, PerFrame
from graticule.layers.tokenizers import Patches
from graticule.position.folded import Folded
from graticule.position.grid import Grid
from graticule.position.places import Shape
from graticule.surgery.change import Certificate
from graticule.surgery.fits.registry import Fit

#: Where the weights of a patch of an image are placed in a patch of several frames.
Placement = Literal["mean", "middle"]


def check_inflation(model: Backbone, film: Shape, patch: Shape) -> Grid:
    """Check that a model of images can become one of films of (depth, height, width); return their grid.

    Raises:
        ValueError: if its outputs for a film of one repeated image would differ from those for the image.
    """
    kind = type(model).__name__
    reason = model.one_image if 3 in model.axes else "its blocks have no third axis"
    if reason:
        raise ValueError(f"`img_size` must be (height, width) with {kind}, got {film}: {reason}.")
    if isinstance(model.position, Folded):
        raise ValueError("`model` must not be folded, to take films; call graticule.unfold(model) first.")
    if getattr(model, "pool_include_prefix", False):
        raise ValueError(
            "`model` must not pool prefix tokens with the patches, whose number grows with the frames; give one "
            "that pools patches alone."
        )
    if not isinstance(_embedding(model), Patches):
        raise ValueError(f"`model` must make its tokens by one layer, to take films, got {kind}.")
    if _embedding(model).frames > 1:
        raise ValueError(
            f"`model` must have patches of one frame, to take films, got {_embedding(model).frames} frames."
        )
    return Grid.of_image(film, patch, model.grid.prefix)


@torch.no_grad()
def inflate(model: Backbone, film: Shape, patch: Shape, placement: Placement = "mean") -> None:
    """Let a model of images take films of (depth, height, width), in place; height and width are those of its images.

    Args:
        model: a backbone that `check_inflation` accepts.
        film: in pixels, the first side in frames or slices.
        patch: the same for a patch, whose height and width are those of the model.
        placement: 'mean' if each of the frames of a patch has an equal part of the weights, 'middle' if the frame in
            the middle has all.
    """
    grid = check_inflation(model, film, patch)
    embedding = _embedding(model)
    flat = embedding.proj
    weight = torch.zeros(*flat.weight.shape[:2], *patch, dtype=flat.weight.dtype, device=flat.weight.device)
    if placement == "mean":
        weight += flat.weight[:, :, None] / patch[0]
    else:
        weight[:, :, patch[0] // 2] = flat.weight
    sides: Any = patch
    with torch.device("meta"):
        solid = nn.Conv3d(flat.in_channels, flat.out_channels, sides, sides, bias=flat.bias is not None)
    solid.weight, solid.bias = nn.Parameter(weight, flat.weight.requires_grad), flat.bias
    embedding.proj = solid.train(flat.training)
    embedding.set_sizes(film, patch)
    holder: Any = model.position if isinstance(model, Pyramid) else None
    image = model.position if holder is None else holder.stages[0]
    position = FilmPosition(image, grid, model.embed_dims[0]).to(weight).train(model.training)
    if holder is None:
        model.position = position
    else:
        holder.stages[0] = position
    model.position.axes = position.axes = grid.ndim
    sizes: Any = {"img_size": film, "patch_size": patch}
    vars(model).update(sizes, grid=grid, converted_from=None)
    old = "the position of images"
    if model.created is not None:
        words = model.created["arguments"]
        old = f"{words['encoding']} ({words['joining']})"
        spec = PerFrame.options(of=str(words["encoding"]), joined=str(words["joining"]))
        model.created = {**model.created, "arguments": {**words, **sizes, "encoding": str(spec), "joining": "default"}}
    table = next(name for name, _ in model.named_parameters() if name.endswith("time.encodings.0.pos_embed"))
    patches = "in equal parts in each frame" if placement == "mean" else "in the frame in the middle"
    new = (f"{table}: zeros", f"the weights of a patch: {patches} of {patch[0]}")
    model.certificate = Certificate((Fit(0, old, "per_frame", True),), (), new=new)


def _embedding(model: Backbone) -> Any:
    return getattr(model, "stem", None) or getattr(model, "patch_embed", None)
