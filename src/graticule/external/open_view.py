"""Views of any model of images."""

from __future__ import annotations

from typing import cast

from torch import nn

from graticule.backbones.base import Backbone
from graticule.backbones.token_model import TokenModel
from graticule.external.backbone_view import BackboneView
from graticule.external.convert.conversion import convert
from graticule.external.debiased import Debiased, DebiasedView
from graticule.external.images import Size, image_size
from graticule.external.structure_view import StructureView
from graticule.external.view import ModelView


def view_of(model: nn.Module, img_size: Size | None = None) -> ModelView:
    """Return the view of a backbone of this library, or of another model.

    A model that `graticule.convert` takes is converted, so that its view is that of a backbone, with the same outputs;
    the structure of any other model is found by a recorded pass.

    Args:
        model: takes images (B, C, height, width).
        img_size: (height, width) in pixels; that of the model by default. The view of a model of another library that
            is built for another size is that of a copy.

    Raises:
        ValueError: if no blocks are found, no image size is known, or the model refuses it.
    """
    if isinstance(model, Debiased):
        return DebiasedView(model, view_of(model.backbone, img_size))
    if isinstance(model, Backbone) or hasattr(model, "each_layer"):
        return BackboneView(cast("Backbone", model), img_size)
    if isinstance(model, TokenModel):
        raise ValueError(f"`model` must take images, got {type(model).__name__}, which takes texts.")
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose functions are not recorded
    converted = convert_stock(model)
    if converted is not None:
        return BackboneView(converted, img_size)
    view = StructureView(model, image_size(model) or img_size)
    return view if img_size is None else view.sized(img_size)


def convert_stock(model: nn.Module) -> Backbone | None:
    """Return a model of another library as one of ours; None if it does not convert, or has hooks, which would be lost.

    It is `graticule.convert` for a model of which nothing was changed after it was built.
    """
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return None
    try:
        return convert(model)
    except ValueError:
        return None
