"""A refused change does not change the model."""

import pytest
import torch

import graticule
from graticule.hub.config import take_position
from tests.tiny import tiny


def test_a_position_that_cannot_be_built_leaves_the_present_one():
    model = tiny("learnable + gpsa(layers=1)", name="convit_tiny")
    before = model.position
    with pytest.raises(ValueError, match="`encoding` must keep the channels"):
        model.replace_position(take_position({"encoding": "pope"}))
    assert model.position is before


def test_pruning_to_a_layer_that_there_is_not_leaves_the_model():
    model = tiny(global_pool="avg").eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        with pytest.raises(ValueError, match="`indices` must be a number from 1 to 3"):
            model.prune_intermediate_layers([7])
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_liere_is_built_on_the_meta_device():
    with torch.device("meta"):
        model = graticule.create_model("vit_tiny_patch16_224", encoding="liere", depth=1)
    assert model.position.encoding.generators.is_meta
