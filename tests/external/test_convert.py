"""Models of timm are converted to ours and back, with equal outputs and equal bits."""

import pytest
import timm
import torch

import graticule
from tiny import SIZE, draw, holds, images


@pytest.fixture(scope="module")
def vit():
    return draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": (24, 40)})).double().eval()


def test_a_converted_model_computes_what_timms_does(vit):
    x = images(24, 40, dtype=torch.float64)
    torch.testing.assert_close(graticule.convert(vit)(x), vit(x), rtol=0, atol=1e-12)


def test_the_way_back_is_equal_in_every_bit(vit):
    back = graticule.to_timm(graticule.convert(vit))
    assert type(back) is type(vit)
    assert back.state_dict().keys() == vit.state_dict().keys()
    assert holds(back, vit.state_dict())
    x = images(24, 40, dtype=torch.float64)
    assert torch.equal(back(x), vit(x))


def test_another_joining_keeps_the_table_and_all_other_weights(vit):
    plain, joined = graticule.convert(vit), graticule.convert(vit, joining="lape")
    new = joined.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(new[name], value), name
    assert {name for name in new if name not in plain.state_dict()} == {
        f"position.joining.norms.{layer}.{leaf}" for layer in range(3) for leaf in ("weight", "bias")
    }


def test_with_another_position_there_is_no_way_back(vit):
    with pytest.raises(ValueError, match="`model` must come from `convert`"):
        graticule.to_timm(graticule.convert(vit, encoding="rope"))
