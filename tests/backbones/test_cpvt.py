"""CPVT: insert positions of its PEGs, pooling, any size, and support of timm's tools and torch's compilers."""

import pytest
import torch
import torch.nn.functional as F

import graticule
from graticule import Grid
from in_turn import in_turn
from tiny import SIZE, assert_same, draw, full_size, images, spec

NAMES = [f"cpvt_{size}{gap}_patch16_224" for size in ("tiny", "small", "base") for gap in ("", "_gap")]
SMALL = ["cpvt_tiny_patch16_224", "cpvt_tiny_gap_patch16_224"]
TOKEN, GAP = SMALL
small = in_turn("name", SMALL)


def cpvt(name=TOKEN, **kwargs):
    return graticule.create_model(name, **{**SIZE, **kwargs})


def exact(name=TOKEN, **kwargs):
    """Return a model with every weight drawn, in float64 and evaluation mode."""
    return draw(cpvt(name, **kwargs)).double().eval()


def wide(*size, **kwargs):
    return images(*size, dtype=torch.float64, **kwargs)


def by_hand(peg, tokens, grid):
    """Compute x + conv(x) over the patches in a loop over the kernel; prefix tokens are unchanged."""
    convolution = peg.proj[0]
    k = convolution.kernel_size[0]
    image = tokens[:, grid.prefix :].mT.unflatten(-1, grid.shape)
    around = F.pad(image, [k // 2] * 4)
    taps = [
        around[..., i : i + grid.height, j : j + grid.width] * convolution.weight[:, 0, i, j, None, None]
        for i in range(k)
        for j in range(k)
    ]
    y = image + sum(taps) + convolution.bias[:, None, None]
    return torch.cat([tokens[:, : grid.prefix], y.flatten(2).mT], 1)


# Insert positions of PEGs


@in_turn("name", NAMES)
def test_one_depthwise_peg_stands_after_the_first_block(name):
    model = full_size(name)
    assert list(model.position.pegs) == ["0"]
    (convolution,) = model.position.pegs["0"].proj
    assert (convolution.kernel_size, convolution.padding_mode) == ((3, 3), "zeros")
    assert convolution.groups == convolution.out_channels == model.embed_dim
    assert convolution.bias is not None
    positions = model.position(model.grid)
    assert [position.map_after is not None for position in positions] == [True] + [False] * 11
    assert all(
        position.added_to_stream is position.after_norm is position.bias is position.map_before is None
        for position in positions
    )


@small
@in_turn("places", [(0,), (-1,), (2,), (0, 1), (-1, 1, 2)])
def test_the_forward_pass_is_the_blocks_with_pegs_at_their_places(name, places):
    """Computes the whole forward pass by hand, from the modules; the norm is before the pooling."""
    model = exact(name, encoding=spec("peg", places=[*places]))
    x = wide(24, 40)
    grid = Grid(3, 5, prefix=int(name == TOKEN))
    stream = model.patch_embed.proj(x).flatten(2).mT
    if grid.prefix:
        stream = torch.cat([model.cls_token.expand(2, -1, -1), stream], 1)
    if -1 in places:
        stream = by_hand(model.position.pegs["first"], stream, grid)
    for layer, block in enumerate(model.blocks):
        stream = stream + block.attn(block.norm1(stream))
        stream = stream + block.mlp(block.norm2(stream))
        if layer in places:
            stream = by_hand(model.position.pegs[str(layer)], stream, grid)
    end = F.layer_norm(stream, (24,), model.norm.weight, model.norm.bias, 1e-6)
    pooled = end[:, 0] if grid.prefix else end.mean(1)
    assert_same(model(x), pooled @ model.head.weight.T + model.head.bias)


# Pooling


def test_a_gap_model_has_no_class_token_and_its_norm_before_the_pooling():
    model = exact(GAP)
    assert (model.cls_token, model.num_prefix_tokens, model.global_pool) == (None, 0, "avg")
    assert isinstance(model.norm, torch.nn.LayerNorm)
    assert isinstance(model.fc_norm, torch.nn.Identity)
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


@in_turn(
    ("name", "kwargs", "wanted"),
    [
        (TOKEN, {"class_token": False}, True),
        (TOKEN, {"global_pool": "avg", "class_token": True}, False),
        (GAP, {"class_token": True}, False),
        (GAP, {"global_pool": "token", "class_token": False}, True),
    ],
)
def test_a_class_token_that_the_pooling_contradicts_is_refused(name, kwargs, wanted):
    with pytest.raises(ValueError, match=f"`class_token` must be {wanted} where `global_pool` is .* got {not wanted}"):
        cpvt(name, **kwargs)


# Sizes


def test_a_peg_beside_a_table_adds_to_what_the_table_says():
    model = exact(encoding="peg+learnable")
    assert {key.split(".")[2] for key, _ in model.position.named_parameters()} == {"pegs", "encodings"}
    x = wide(32, 32)
    both = model(x).detach()
    peg, table = model.position.parts
    with torch.no_grad():
        for parameter in peg.parameters():
            parameter.zero_()
    plain = graticule.create_model("deit_tiny_patch16_224", **SIZE).double().eval()
    state = {key: value for key, value in model.state_dict().items() if not key.startswith("position.")}
    plain.load_state_dict({**state, "pos_embed": table.encodings[0].pos_embed.detach()}, strict=True)
    assert_same(model(x), plain(x))
    assert (both - model(x)).abs().max() > 1e-3


# timm's interface


def test_pegs_are_published_under_the_names_of_twins_in_their_order():
    published = graticule.published_state_dict(cpvt(encoding="peg(places=[2, -1, 0])"))
    names = sorted(key for key in published if key.startswith("pos_block"))
    assert names == [f"pos_block.{i}.proj.0.{leaf}" for i in range(3) for leaf in ("bias", "weight")]
    assert not any(key.startswith("position.") for key in published)
