"""Convert a model of timm into one of ours, with its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.registry import CLASSES
from graticule.encodings.build import build_position
from graticule.external.convert.into_timm import Source, computed_names
from graticule.external.convert.parts import Conversion, read
from graticule.registry.checks import checked
from graticule.registry.specs import Spec
from graticule.surgery.change import change_position


@checked
def convert(
    model: nn.Module,
    encoding: str | Spec | None = None,
    joining: str | Spec | None = None,
    images: Tensor | None = None,
) -> Backbone:
    """Convert a model of timm into a backbone of this library, with its weights; `model` is not changed.

    The structure is read from the modules and attributes of the model, not from its name. Every tensor of the model
    corresponds to one of the backbone, and vice versa; so its outputs are those of `model`, including those of
    `forward_features` and intermediates. It accepts any image whose sides are multiples of the patch: tables are
    resampled as with timm's `dynamic_img_size`.

    With another encoding or joining the position is new and everything else is kept. The new position starts as close
    to the old one as possible (`change_position`): `joining="lape"` joins the table of the model, by norms that give
    each layer the contribution that the table made to it. `certificate` of the backbone reports what each layer keeps.

    Args:
        model: a model of timm.
        encoding: an encoding, as in `create_model`; that of the model by default.
        joining: a joining; 'default' by default.
        images: some preprocessed images, (B, C, height, width), on which a new position is fitted and the
            drift of the features is measured; by default it is fitted on the mean image.

    Raises:
        ValueError: if the class of the model, or a part of it, has no counterpart here; the part is named.
    """
    if images is not None and encoding is None and joining is None:
        raise ValueError("`images` must be left out where the position of the model stays.")
    conversion = read(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # all random weights are replaced
        ours = _build(model, conversion)
        names = _names(model, ours, conversion)
        ours.load_state_dict(_values(model, ours, names, conversion.reshaped))
    _copy_settings(model, ours, names)
    ours.timm_source = Source.of(model, names)
    if encoding is None and joining is None:
        return ours
    encoding = conversion.encoding if encoding is None else encoding
    return change_position(ours, encoding, joining or conversion.joining, images)


def _build(model: nn.Module, conversion: Conversion) -> Backbone:
    """Build the backbone on the device and with the dtype of the model."""
    words: dict[str, Any] = {"encoding": conversion.encoding, "joining": conversion.joining}
    build: Any = conversion.backbone
    ours: Backbone = build(partial(build_position, **words), **conversion.arguments)
    name = conversion.backbone.__name__
    if CLASSES.get(name) is conversion.backbone:
        ours.created = {"name": name, "arguments": {**conversion.arguments, **words}}
    weight = next(model.parameters())
    return ours.to(weight.device, weight.dtype)


def _names(model: nn.Module, ours: Backbone, conversion: Conversion) -> dict[str, tuple[str, ...]]:
    """Map the name of each tensor in timm to its name in our model, or its names if it is split.

    Raises:
        ValueError: if a tensor has no counterpart, or a tensor of our model has none or two.
    """
    published = {theirs: f"position.{own}" for theirs, own in ours.position.published_names().items()}
    names: dict[str, tuple[str, ...]] = {}
    for theirs in model.state_dict():
        given = conversion.names.get(theirs, published.get(theirs))
        own = published.get(ours.own_name(theirs), ours.own_name(theirs)) if given is None else given
        names[theirs] = own if isinstance(own, tuple) else (own,)
    places = ours.state_dict()
    taken = Counter(own for split in names.values() for own in split)
    lost = [theirs for theirs, split in names.items() if not places.keys() >= set(split)]
    twice = [theirs for theirs, split in names.items() if any(taken[own] > 1 for own in split)]
    empty = sorted(places.keys() - taken - computed_names(ours))
    kind = type(model).__name__
    if lost:
        raise ValueError(f"`model` must have no tensor without a counterpart here, got {kind} with {_some(lost)}.")
    if empty:
        raise ValueError(f"`model` must have all weights of {type(ours).__name__}, got {kind} without {_some(empty)}.")
    if twice:
        raise ValueError(f"`model` must have one tensor for each of ours, got {kind} with {_some(twice)}.")
    return names


def _values(
    model: nn.Module, ours: Backbone, names: Mapping[str, tuple[str, ...]], reshaped: Collection[str]
) -> dict[str, Tensor]:
    """Return the tensors of the model under our names and in our shapes.

    Raises:
        ValueError: if one has another shape.
    """
    there, here = model.state_dict(), ours.state_dict()
    found: dict[str, Tensor] = {}
    for theirs, split in names.items():
        value, shapes = there[theirs], [here[own].shape for own in split]
        if theirs in reshaped and value.numel() == shapes[0].numel():
            value = value.reshape(shapes[0])
        expected = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(split) > 1 else shapes[0]
        if value.shape != expected:
            kind = type(model).__name__
            raise ValueError(
                f"`{theirs}` of {kind} must be {tuple(expected)} to be converted, got {tuple(value.shape)}."
            )
        parts = value.split([shape[0] for shape in shapes]) if len(split) > 1 else [value]
        found.update(zip(split, parts, strict=True))
    return {name: here[name] for name in computed_names(ours)} | found


def _copy_settings(model: nn.Module, ours: Backbone, names: Mapping[str, tuple[str, ...]]) -> None:
    """Copy settings other than weights: the modes, `requires_grad` of the parameters, and timm's configuration."""
    ours.train(model.training)
    own = dict(ours.named_parameters())
    for theirs, parameter in model.named_parameters():
        for name in names[theirs]:
            own[name].requires_grad_(parameter.requires_grad)
    untyped: Any = ours
    for mode in ("grad_checkpointing", "distilled_training"):
        if hasattr(model, mode) and hasattr(ours, mode):
            setattr(ours, mode, getattr(model, mode))
    configuration = deepcopy(getattr(model, "pretrained_cfg", None))
    if isinstance(configuration, dict):
        # the size of the converted model, from which timm resolves the transforms
        configuration["input_size"] = (ours.in_chans, *ours.img_size)
        untyped.pretrained_cfg = untyped.default_cfg = configuration


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
