"""Resizing of models of transformers in place: as their conversion, or by the table that they compute."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from timm.layers.helpers import to_2tuple
from torch import nn

from graticule.external.convert.back import to_transformers
from graticule.external.convert.conversion import convert
from graticule.external.convert.parts import can_convert
from graticule.external.convert.transformers import rebuild
from graticule.external.images import call, error_line, evaluating
from graticule.external.structure import find_structure
from graticule.position.places import by
from graticule.surgery.resize import LIBRARIES, resize


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
