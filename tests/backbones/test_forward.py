"""A vision transformer with every encoding and joining: sizes, dtypes, gradients and sensitivity to order."""

import copy
import functools

import pytest
import torch
from torch import nn

import graticule
from graticule.backbones.vision_transformer import VisionTransformer
from in_turn import in_turn
from tiny import CLASSES, COVER, DEPTH, DIM, PAIRS, draw, images, spec, tiny

choices = in_turn(("encoding", "joining"), COVER)


@choices
def test_any_image_whose_sides_the_patch_divides_goes_in(encoding, joining):
    model = tiny(encoding, joining, "deit_tiny_distilled_patch16_224").eval()
    for height, width in ((32, 32), (24, 40), (16, 8)):
        x = images(height, width)
        tokens = model.num_prefix_tokens + height * width // 64
        features = model.forward_features(x)
        assert features.shape == (2, tokens, DIM)
        assert model.forward_head(features).shape == (2, CLASSES)
        assert model(x).isfinite().all()


@choices
def test_autocast_agrees_with_float32(encoding, joining):
    model = tiny(encoding, joining).eval()
    x = images()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    torch.testing.assert_close(logits.float(), model(x), rtol=0.05, atol=0.05)


def test_a_copy_takes_published_names_on_its_own_account():
    """The hook that renames them belongs to the copy, not to the model that it was copied from."""
    model = tiny("learnable", "lape")
    other = copy.deepcopy(model)
    other.set_input_size(40)
    published = graticule.published_state_dict(model)
    other.load_state_dict(published, strict=True)
    assert other.position.encodings[0].pos_embed.shape == (1, 26, DIM)


@pytest.mark.parametrize(("encoding", "joining"), [("learnable", "lape"), ("relative_bias", "lape")])
def test_two_models_share_no_state(encoding, joining):
    first, second = tiny(encoding, joining), tiny(encoding, joining)
    own = {tensor.data_ptr() for tensor in first.state_dict().values()}
    assert not own & {tensor.data_ptr() for tensor in second.state_dict().values()}
    second.set_grad_checkpointing()
    second.set_input_size(48)
    assert not first.grad_checkpointing
    assert first.grid.shape == (4, 4)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_the_same_seed_draws_the_same_model(name):
    torch.manual_seed(7)
    first = tiny("learnable", "lape", name).state_dict()
    torch.manual_seed(7)
    second = tiny("learnable", "lape", name).state_dict()
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def shuffled(x, order):
    """Put the 8 x 8 patches of images (B, 3, 32, 32) into another order."""
    patches = x.unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)[:, :, order]  # (B, 3, 16, 8, 8)
    return patches.unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)


def test_shuffling_moves_patches_and_nothing_else():
    x = images()
    assert torch.equal(shuffled(x, torch.arange(16)), x)
    order = torch.randperm(16)
    assert torch.equal(shuffled(shuffled(x, order), order.argsort()), x)


@pytest.mark.parametrize("pool", ["avg", "token", "max"])
def test_without_position_the_logits_do_not_see_the_order_of_the_patches(pool):
    model = draw(tiny("none", global_pool=pool)).double().eval()
    x = images(dtype=torch.float64)
    torch.testing.assert_close(model(shuffled(x, torch.randperm(16))), model(x), rtol=0, atol=1e-11)


@in_turn(("encoding", "joining"), [pair for pair in PAIRS if pair[0] not in ("none", "log_n")])
def test_with_position_the_logits_see_the_order_of_the_patches(encoding, joining):
    model = draw(tiny(encoding, joining, global_pool="avg")).double().eval()
    x = images(dtype=torch.float64)
    assert (model(shuffled(x, torch.randperm(16))) - model(x)).abs().max() > 1e-6


def test_an_even_relative_bias_does_not_see_two_patches_swap_but_an_absolute_table_does():
    """When two patches swap, only the sign of their offset changes: an even bias does not."""
    x = images(8, 16, dtype=torch.float64)
    swapped = torch.cat([x[..., 8:], x[..., :8]], -1)
    kwargs = {"img_size": (8, 16), "global_pool": "avg"}
    relative, absolute = (draw(tiny(name, **kwargs)).double().eval() for name in ("relative_bias", "learnable"))
    with torch.no_grad():
        for encoding in relative.position.encodings:
            table = encoding.relative_position_bias_table
            table.copy_(table + table.flip(0))
    torch.testing.assert_close(relative(swapped), relative(x), rtol=0, atol=1e-12)
    assert (absolute(swapped) - absolute(x)).abs().max() > 1e-6


@choices
def test_position_depends_on_the_grid_and_not_on_the_image(encoding, joining):
    """So a model's position can be computed without an image; fields that depend on tokens are functions of them."""
    model = draw(tiny(encoding, joining)).eval()
    positions = model.position(model.grid)
    assert len(positions) == DEPTH
    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, layer=layer: seen.append((layer, args[1])))
    seen = []
    model(images())
    for layer, position in seen:
        assert_same_position(positions[layer], position)
    assert len(seen) == DEPTH


def assert_same_position(ours, theirs):
    """Compare tensors, functions with their bound arguments, and tuples of them."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, tuple | list):
        for one, other in zip(ours, theirs, strict=True):
            assert_same_position(one, other)
    elif isinstance(ours, functools.partial):
        assert ours.func == theirs.func and ours.keywords == theirs.keywords
        assert_same_position(ours.args, theirs.args)
    else:
        assert ours == theirs


@pytest.mark.parametrize("joining", ["shared", "unshared", "lape", "lape_sharing"])
def test_the_forward_pass_is_the_blocks_with_each_layers_position(joining):
    """Computes the whole forward pass by hand, from the modules."""
    model = draw(tiny("learnable", spec(joining, layers=2))).double().eval()
    x = images(dtype=torch.float64)
    w = [encoding.pos_embed for encoding in model.position.encodings]
    stream = torch.cat([model.cls_token.expand(2, -1, -1), model.patch_embed.proj(x).flatten(2).transpose(1, 2)], 1)
    inner = w[0]
    for layer, block in enumerate(model.blocks):
        y = 0.0
        if layer < 2 and joining in ("shared", "unshared"):
            stream = stream + w[layer if joining == "unshared" else 0]
        elif layer < 2:
            inner = model.position.joining.norms[layer](inner if joining == "lape" else w[0])
            y = inner
        stream = stream + block.attn(block.norm1(stream) + y)
        stream = stream + block.mlp(block.norm2(stream))
    torch.testing.assert_close(model(x), model.head(model.norm(stream)[:, 0]), rtol=0, atol=1e-11)


@in_turn(
    ("kwargs", "message"),
    [
        (
            {"global_pool": "mean"},
            r"`global_pool` must be one of '', 'token', 'avg', 'avgmax', 'max', 'map', 'seq', got 'mean'",
        ),
        ({"class_token": False}, "`class_token` must be True where `global_pool` is 'token', got False"),
        ({"depth": 0}, "`depth` must be at least 1, got 0"),
        ({"num_classes": -1}, "`num_classes` must be at least 0, got -1"),
        ({"in_chans": 0}, "`in_chans` must be at least 1, got 0"),
        ({"drop_path_rate": 1.0}, r"`drop_path_rate` must be in \[0, 1\), got 1.0"),
        ({"num_heads": 5}, "`embed_dim` must be a multiple of `num_heads`, got 24 with 5 heads"),
        ({"img_size": 30}, "`img_size` must be a positive multiple .*nearest sizes are 24 and 32"),
    ],
)
def test_invalid_arguments_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        tiny(**kwargs)


@in_turn("shape", [(2, 1, 32, 32), (3, 32, 32), (32, 32), (1, 3, 2, 32, 32)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"`x` must be images \(B, 3, height, width\), .* got \(.*32, 32\)"):
        tiny()(torch.zeros(shape))


def test_an_image_that_the_patch_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="got width 30 with a patch of 8; the nearest sizes are 24 and 32"):
        tiny()(images(32, 30))


@in_turn("kwargs", [{"global_pool": "avg"}, {"class_token": False}])
def test_a_distilled_model_without_its_tokens_is_refused(kwargs):
    with pytest.raises(ValueError, match="`global_pool` must be 'token' in a distilled model"):
        tiny(name="deit_tiny_distilled_patch16_224", **kwargs)


def test_an_unknown_output_format_is_refused():
    with pytest.raises(ValueError, match="`output_fmt` must be 'NCHW' or 'NLC', got 'NHWC'"):
        tiny().forward_intermediates(images(), output_fmt="NHWC")


def test_stochastic_depth_grows_linearly_from_nothing():
    model = tiny(depth=4, drop_path_rate=0.3)
    for path in ("drop_path1", "drop_path2"):
        first, *rest = [getattr(block, path) for block in model.blocks]
        assert isinstance(first, nn.Identity)
        assert [module.drop_prob for module in rest] == pytest.approx([0.1, 0.2, 0.3], abs=1e-7)


def test_dropout_is_where_its_argument_says_and_in_training_alone():
    for rate in ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"):
        model = draw(tiny("learnable", "lape", **{rate: 0.5}))
        x = images(batch=8)
        assert not torch.equal(model.train()(x), model(x)), rate
        assert torch.equal(model.eval()(x), model(x)), rate


def test_weights_are_drawn_as_deit_draws_them():
    model = tiny("learnable", "lape", embed_dim=96, depth=4)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert not module.bias.any(), name
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.15), name
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all(), name
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.4)


def test_a_model_of_ones_own_position_can_be_built():
    """A backbone takes any object that builds a `Position`, without a name for it."""
    from graticule.position.position import NoPosition

    def build(grid, *, dim, depth, num_heads):
        assert (grid.tokens, dim, depth, num_heads) == (17, 24, 3, 3)
        return NoPosition(depth)

    model = VisionTransformer(build, img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
    assert model(images()).shape == (2, CLASSES)
