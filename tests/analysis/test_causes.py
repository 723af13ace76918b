"""The effect of another size is split into that of more tokens, of their content, and of the values of position.

Threads that ask why another size is worse: rf-detr#715, MAE-pytorch#39, Swin-Transformer#363, open_clip#76, track_on#3.
"""

import pytest
import timm
import torch
from torch import nn

from graticule.analysis import audit
from graticule.analysis.effect import resize_images
from tiny import SIZE, draw, tiny

SIZES = ((32, 32), (48, 64), (64, 64))
WITHOUT_CLASS = {"class_token": False, "global_pool": "avg"}


class Wrapped(nn.Module):
    """A model of a class that no library knows, so its structure is found by a recorded pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images)


def effects(model, sizes=SIZES):
    """Return the effects of the passes by name, and what could not be measured."""
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sized = {size: resize_images(images, size) for size in sizes}
    result = audit(model.double().eval(), sized, (32, 32), timed=False, causes=True)
    return {effect.name: effect for effect in (*result.causes, *result.sizes.values())}, result


def other(**options):
    torch.manual_seed(0)
    return draw(timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **SIZE, **options))


MODELS = {
    "ours": lambda: draw(tiny("learnable", **WITHOUT_CLASS)),
    "timm": lambda: other(**WITHOUT_CLASS),
    "unknown class": lambda: Wrapped(other(**WITHOUT_CLASS)),
}


@pytest.mark.parametrize("model", MODELS)
def test_repeated_patches_with_repeated_positions_change_nothing(model):
    """Without prefix tokens, and a whole number of copies, attention and means are the same."""
    passes, result = effects(MODELS[model]())
    assert list(passes) == [
        *("48 x 64, tokens", "48 x 64, content", "64 x 64, tokens", "64 x 64, content", "48 x 64", "64 x 64")
    ]
    assert passes["64 x 64, tokens"].change.max() < 1e-6 < passes["48 x 64, tokens"].change.min()
    assert passes["48 x 64, tokens"].change.max() < passes["48 x 64, content"].change.mean() / 2
    for size in ("48 x 64", "64 x 64"):
        assert abs(passes[f"{size}, content"].change - passes[size].change).max() > 1e-4
    if model != "unknown class":
        assert sum(row[0].startswith("at ") for row in result.summary()) == 6


def test_without_position_the_values_change_nothing():
    passes, _ = effects(tiny("none"))
    assert (passes["48 x 64, content"].change == passes["48 x 64"].change).all()
    assert passes["48 x 64, tokens"].change.min() > 0  # the class token has less weight among more


def test_a_recorded_model_has_the_causes_of_the_model_that_is_known():
    (known, _), (found, _) = effects(other()), effects(Wrapped(other()))
    assert known.keys() == found.keys() and len(known) == 6
    for name, effect in known.items():
        assert abs(effect.change - found[name].change).max() < 1e-6


def test_patches_that_are_left_out_are_not_compared():
    """Without attention between patches, those that are left keep their features bit by bit."""
    model = tiny("learnable", **WITHOUT_CLASS)
    for block in model.blocks:
        nn.init.zeros_(block.attn.proj.weight)
    passes, _ = effects(model, ((32, 32), (16, 24)))
    assert passes["16 x 24, tokens"].change.max() < 1e-12 < passes["16 x 24, content"].change.min()


def test_a_pyramid_says_why_it_has_none():
    swin = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 3)}
    passes, result = effects(timm.create_model("swin_tiny_patch4_window7_224", **swin), SIZES[::2])
    assert list(passes) == ["64 x 64"] and "several grids" in result.unavailable["causes at 64 x 64"]
