"""Views of any model of images."""

from __future__ import annotations

from typing import cast

from torch import nn

from graticule.backbones.base import Backbone
from graticule.backbones.token_model import TokenModel
from graticule.external.backbone_view import BackboneView
from graticule.external.debiased import Debiased, DebiasedView
from graticule.external.timm_view import TimmView, own_size
from graticule.external.view import ModelView, Size


def view_of(model: nn.Module, img_size: Size | None = None) -> ModelView:
    """Return the view of a backbone of this library, or of another model whose blocks are found by structure.

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
    view = TimmView(model, own_size(model) or img_size)
    return view if img_size is None else view.sized(img_size)
