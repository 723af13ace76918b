"""Freeze a model except for chosen parts, for fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from graticule.backbones.base import Backbone
from graticule.checkpoints.obstacles import check_intact
from graticule.position.folded import Folded
from graticule.registry.checks import checked, parse_freeze


@checked
def freeze(model: nn.Module, parts: str = "all-but-head") -> nn.Module:
    """Freeze the parameters of a model except for some parts, in place, and return the model.

    Modules that are frozen completely are put into evaluation mode, so that statistics of BatchNorm, dropout and
    stochastic depth do not change their features. `model.train()` undoes that: call `freeze` again after it.

    Args:
        model: one of our backbones, or a detector or a segmentation model with one.
        parts: 'all-but-' and the parts that are trained, joined by '+'. 'head' is the classifier, and all of a detector
            or a segmentation model outside of its backbone. 'position' is the parameters of the encoding and of the
            joining. 'last-N' is the last N blocks and the final norm.

    Raises:
        ValueError: for an unknown part, more blocks than there are, or a model in which nothing would be trained.

    Example:
        >>> import graticule
        >>> model = freeze(graticule.create_model("vit_nano_patch4_28"), "all-but-position+head")
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['position.encodings.0.pos_embed', 'head.weight', 'head.bias']
    """
    trained_parts = parse_freeze(parts)
    check_intact(model, "packed", values=False)
    backbone: Any = model if isinstance(model, Backbone) else getattr(model, "backbone", None)
    if not isinstance(backbone, Backbone):
        raise ValueError(
            f"`model` must be a backbone, a detector or a segmentation model of this library, got "
            f"{type(model).__name__}; graticule.convert makes a backbone of a model of timm or transformers."
        )
    if "position" in trained_parts and isinstance(backbone.position, Folded):
        raise ValueError("`model` must not be folded, to train its position; call graticule.unfold(model) first.")
    modules = [module for part in trained_parts for module in _modules(model, backbone, part)]
    trained = {parameter for module in modules for parameter in module.parameters()}
    if "head" in trained_parts and model is not backbone:
        trained |= set(model.parameters()) - set(backbone.parameters())
    # a table that is given by a formula stays fixed, also if the model was frozen before
    names = dict(model.named_parameters())
    fixed = vars(model).setdefault("_fixed", {name for name in names if not names[name].requires_grad})
    trained -= {parameter for name, parameter in names.items() if name in fixed}
    if not trained:
        raise ValueError(f"`freeze` must leave something to train, got {parts!r} of a model that has no such part.")
    for parameter in names.values():
        parameter.requires_grad_(parameter in trained)
    _set_modes(model)
    return model


def _modules(model: nn.Module, backbone: Backbone, part: str) -> Iterator[nn.Module]:
    if part == "position":
        yield backbone.position
    elif part == "head" and model is backbone:
        head = backbone.get_classifier()
        yield from head if isinstance(head, tuple) else (head,)
    elif part != "head":
        blocks = [backbone.block(stage, index) for stage, depth in enumerate(backbone.depths) for index in range(depth)]
        count = int(part.removeprefix("last-"))
        if count > len(blocks):
            raise ValueError(f"`freeze` must be of at most the {len(blocks)} blocks of the model, got {part!r}.")
        yield from blocks[-count:]
        yield from (
            module for name in ("norm", "fc_norm") if isinstance(module := getattr(backbone, name, None), nn.Module)
        )


def _set_modes(module: nn.Module) -> None:
    """Put the modules that are frozen completely into evaluation mode."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        module.eval()
        return
    for child in module.children():
        _set_modes(child)
