"""Small models of timm for tests, with random tensors, in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import timm
import torch
from torch import nn

import graticule
from tiny import draw

#: Arguments of `create_model` for a small model of any plain transformer of timm; its grid is not square.
SMALL: dict[str, Any] = {
    "img_size": (32, 48),
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 2,
    "num_classes": 5,
}


def build(name: str, **kwargs: Any) -> Any:
    """Build a small model of timm with random parameters, in evaluation mode."""
    return draw(timm.create_model(name, **{**SMALL, **kwargs})).eval()


def changed(build: Callable[[], Any], change: Callable[[Any], object]) -> Callable[[], Any]:
    """Return a function that builds a model and changes it."""

    def build_changed() -> Any:
        model = build()
        change(model)
        return model

    return build_changed


def attribute(path: str, value: object) -> Callable[[Any], None]:
    """Return a change of an attribute of a model."""
    owner, _, leaf = path.rpartition(".")
    return lambda model: setattr(attrgetter(owner)(model) if owner else model, leaf, value)


def within(change: AbstractContextManager[Any], build: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that builds a model and converts it while a change of a class or of a module lasts."""

    def build_within() -> Any:
        with change:
            return graticule.convert(build())

    return build_within


def difference(ours: Any, original: Any, *size: int) -> float:
    """Return the largest difference of the outputs for two images of (height, width), relative to the largest output.

    Features and intermediates are compared as well.
    """
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        outputs, expected = (
            [model(x), model.forward_features(x), *model.forward_intermediates(x, intermediates_only=True)]
            for model in (ours, original)
        )
    assert [value.shape for value in outputs] == [value.shape for value in expected]
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in zip(outputs, expected, strict=True)
    )


def assert_same_bits(model: nn.Module, other: nn.Module) -> None:
    """Compare the classes and all tensors of two models."""
    assert type(model) is type(other)
    state, others = model.state_dict(), other.state_dict()
    assert state.keys() == others.keys()
    for name, value in state.items():
        assert value.dtype == others[name].dtype, name
        assert torch.equal(value, others[name]), name
