"""CPVT: insert positions of its PEGs, pooling, any size, and support of timm's tools and torch's compilers."""

import pytest
import torch
import torch.nn.functional as F

import graticule
from graticule import LayerPosition
from in_turn import in_turn, refusals
from tiny import SIZE, draw, full_size, images

NAMES = [f"cpvt_{size}{gap}_patch16_224" for size in ("tiny", "small", "base") for gap in ("", "_gap")]
SMALL = ["cpvt_tiny_patch16_224", "cpvt_tiny_gap_patch16_224"]
TOKEN, GAP = SMALL


def cpvt(name=TOKEN, **kwargs):
    return graticule.create_model(name, **{**SIZE, **kwargs})


def exact(name=TOKEN, **kwargs):
    return draw(cpvt(name, **kwargs)).double().eval()


def wide(*size, **kwargs):
    return images(*size, dtype=torch.float64, **kwargs)


@in_turn("name", NAMES)
def test_one_depthwise_peg_stands_after_the_first_block(name):
    model = full_size(name)
    assert list(model.position.pegs) == ["0"]
    (convolution,) = model.position.pegs["0"].proj
    assert (convolution.kernel_size, convolution.padding_mode) == ((3, 3), "zeros")
    assert convolution.groups == convolution.out_channels == model.embed_dim and convolution.bias is not None
    first, *others = model.position(model.grid)
    assert first == LayerPosition(map_after=first.map_after) and others == [LayerPosition()] * 11


def test_a_gap_model_has_no_class_token_and_its_norm_before_the_pooling():
    model = exact(GAP)
    assert (model.cls_token, model.num_prefix_tokens, model.global_pool) == (None, 0, "avg")
    assert isinstance(model.norm, torch.nn.LayerNorm) and isinstance(model.fc_norm, torch.nn.Identity)
    x = wide(32, 32)
    after = F.layer_norm([t for t, _ in model.each_layer(x)][-1].mean(1), (24,), model.norm.weight, model.norm.bias)
    assert (model(x) - model.head(after)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", TOKEN])
def test_class_token_and_pooling_can_be_compared_with_nothing_else_different(name):
    """In CPVT's Table 3, norms before the pooling in one model and after it in the other would confound them."""
    token, pooled = cpvt(name), cpvt(name, global_pool="avg", class_token=False, fc_norm=False)
    differ = {key: p.shape for key, p in token.named_parameters()}.items() ^ {
        key: p.shape for key, p in pooled.named_parameters()
    }.items()
    assert {key for key, _ in differ} <= {"cls_token", "position.encodings.0.pos_embed"}
    x = images()
    assert torch.equal(
        pooled.forward_head(pooled.forward_features(x), pre_logits=True),
        pooled.norm([tokens for tokens, _ in pooled.each_layer(x)][-1]).mean(1),
    )


test_a_class_token_that_the_pooling_contradicts_is_refused = refusals(
    (lambda: cpvt(class_token=False), "`class_token` must be True where `global_pool` is .* got False"),
    (lambda: cpvt(global_pool="avg", class_token=True), "`class_token` must be False .* got True"),
    (lambda: cpvt(GAP, class_token=True), "`class_token` must be False where `global_pool` is .* got True"),
    (lambda: cpvt(GAP, global_pool="token", class_token=False), "`class_token` must be True .* got False"),
)


def test_pegs_are_published_under_the_names_of_twins_in_their_order():
    published = graticule.published_state_dict(cpvt(encoding="peg(places=[2, -1, 0])"))
    names = sorted(key for key in published if key.startswith("pos_block"))
    assert names == [f"pos_block.{i}.proj.0.{leaf}" for i in range(3) for leaf in ("bias", "weight")]
    assert not any(key.startswith("position.") for key in published)
