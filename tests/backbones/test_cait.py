"""CaiT: heads are mixed before and after the softmax, and only the class token attends in the last layers."""

import pytest
import torch

import graticule
from graticule.backbones.cait import TalkingHeadsAttention
from graticule.layers.attention import Attention
from in_turn import in_turn
from tiny import draw


def cait(**kwargs):
    """Build a small model with every parameter random, in float64."""
    sizes = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return draw(graticule.create_model("cait_xxs24_224", **{**sizes, **kwargs})).double().eval()


@in_turn("encoding", ["relative_bias + rope + log_n", "irpe(on='qkv')", "gpsa", "kerple"])
@torch.no_grad()
def test_heads_that_are_mixed_by_the_identity_are_those_of_plain_attention(encoding):
    grid = graticule.Grid(3, 4)
    position = graticule.build_position(grid, dim=24, depth=1, num_heads=3, encoding=encoding).double()
    (given,) = draw(position)(grid)
    plain, talking = Attention(24, 3).double(), TalkingHeadsAttention(24, 3).double()
    talking.load_state_dict(plain.state_dict(), strict=False)
    for projection in (talking.proj_l, talking.proj_w):
        torch.nn.init.eye_(projection.weight)
        torch.nn.init.zeros_(projection.bias)
    x = torch.randn(2, grid.tokens, 24, dtype=torch.float64)
    torch.testing.assert_close(talking(x, given), plain(x, given), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_head_that_is_mixed_into_another_brings_its_bias_along():
    talking = TalkingHeadsAttention(6, 2).double()
    talking.qkv.weight.zero_(), talking.qkv.bias.zero_()
    talking.proj_l.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]])), talking.proj_l.bias.zero_()
    bias = torch.randn(2, 4, 4, dtype=torch.float64)
    weights = talking.weights(torch.zeros(1, 4, 6, dtype=torch.float64), graticule.LayerPosition(bias=bias))
    torch.testing.assert_close(weights[0], bias.flip(0).softmax(-1))


@torch.no_grad()
def test_the_class_token_changes_no_patch_and_reads_all_of_them():
    model = cait()
    x = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    (*_, (patches, grid)) = model.each_layer(x)
    tokens = model.forward_features(x)
    assert grid.prefix == 0 and tokens.shape[1] == grid.patches + 1
    torch.testing.assert_close(tokens[:, 1:], model.norm(patches))
    moved = model.final(patches.flip(1), grid)  # it is independent of the order
    torch.testing.assert_close(moved[:, 0], tokens[:, 0])
    for index in range(grid.patches):
        other = patches.clone()
        other[:, index, 0] += 1
        assert not torch.allclose(model.final(other, grid)[:, 0], tokens[:, 0])


def test_a_pruned_model_has_no_class_token_and_what_does_not_fit_is_refused():
    model = cait()
    model.prune_intermediate_layers([0])
    assert model.cls_token is None and not len(model.blocks_token_only)
    assert model(torch.zeros(1, 3, 32, 48, dtype=torch.float64)).shape == (1, 24, 24)
    for wrong in ({"class_token": False}, {"reg_tokens": 1}, {"init_values": 0.0}, {"depth_token_only": 0}):
        with pytest.raises(ValueError, match=r"`class_token` must be True|`init_values` must be positive"):
            cait(**wrong)
