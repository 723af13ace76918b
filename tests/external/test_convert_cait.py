"""CaiT of timm is converted to ours and back, with equal outputs and equal bits."""

import pytest
import torch
from timm.models.cait import Cait
from timm_models import assert_same_bits, difference, in_float64, randomize

import graticule

SMALL = {"img_size": (32, 48), "patch_size": 8, "num_classes": 5, "embed_dim": 24, "depth": 2, "num_heads": 3}


def timms(**kwargs):
    """Build a small CaiT of timm with random parameters."""
    torch.manual_seed(0)
    return randomize(Cait(**{**SMALL, **kwargs})).eval()


@pytest.mark.parametrize(
    "form", [{}, {"global_pool": "avg", "qkv_bias": False}, {"depth_token_only": 3, "mlp_ratio_token_only": 2.0}]
)
def test_it_computes_what_timms_does_and_goes_back_with_equal_bits(form):
    with in_float64():
        theirs = timms(**form)
        ours = graticule.convert(theirs)
        assert difference(ours, theirs, 32, 48) < 1e-10
        assert_same_bits(graticule.to_timm(ours), theirs)
        assert graticule.published_state_dict(ours).keys() == theirs.state_dict().keys()


def test_it_computes_what_timms_does_in_float32_and_takes_other_sizes():
    theirs = timms()
    ours = graticule.convert(theirs)
    assert difference(ours, theirs, 32, 48) < 1e-5
    assert ours(torch.randn(1, 3, 64, 24)).shape == (1, 5)


def test_rates_of_dropout_are_kept_and_unsupported_models_are_named():
    theirs = timms(drop_path_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3)
    ours = graticule.convert(theirs)
    assert [block.drop_path1.drop_prob for block in ours.blocks] == [0.1, 0.1]
    assert ours.blocks[1].attn.attn_drop == 0.3 and ours.blocks_token_only[0].attn.proj_drop.p == 0.2
    theirs.blocks[1].mlp.act = torch.nn.ReLU()
    with pytest.raises(ValueError, match=r"`blocks \(act\)` of Cait must be the same to be converted"):
        graticule.convert(theirs)
    theirs.blocks_token_only = None
    with pytest.raises(ValueError, match="`blocks_token_only` of Cait must have blocks to be converted"):
        graticule.convert(theirs)
