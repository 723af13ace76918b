"""A vision transformer with every encoding and joining: sizes, dtypes, gradients and sensitivity to order."""

import copy

import torch

import graticule
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.position.position import NoPosition
from in_turn import in_turn, refusals
from tiny import CLASSES, DIM, PAIRS, assert_same, draw, images, shuffle_patches, tiny


def test_a_copy_takes_published_names_on_its_own_account():
    """The hook that renames them belongs to the copy, not to the model that it was copied from."""
    model = tiny("learnable", "lape")
    other = copy.deepcopy(model)
    other.set_input_size(40)
    published = graticule.published_state_dict(model)
    other.load_state_dict(published, strict=True)
    assert other.position.encodings[0].pos_embed.shape == (1, 26, DIM)


@in_turn("pool", ["avg", "token", "max"])
@in_turn("encoding", ["none", "peg(kernel=1, places=(-1, 0, 1, 2))"])
def test_without_position_the_logits_do_not_see_the_order_of_the_patches(encoding, pool):
    model = draw(tiny(encoding, global_pool=pool)).double().eval()
    x = images(24, 40, dtype=torch.float64)
    assert_same(model(shuffle_patches(x, torch.randperm(15))), model(x))


PEGS = ("peg(places=-1)", "peg(padding='circular')", "peg(acts_on='queries_keys')", "peg(kernel=27)")


@in_turn(
    ("encoding", "joining"),
    [*(pair for pair in PAIRS if pair[0] not in ("none", "log_n")), *((peg, "default") for peg in PEGS)],
)
def test_with_position_the_logits_see_the_order_of_the_patches(encoding, joining):
    model = draw(tiny(encoding, joining, global_pool="avg")).double().eval()
    x = images(24, 40, dtype=torch.float64)
    assert (model(shuffle_patches(x, torch.randperm(15))) - model(x)).abs().max() > 1e-6


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
    assert_same(relative(swapped), relative(x), 1e-12)
    assert (absolute(swapped) - absolute(x)).abs().max() > 1e-6


test_invalid_arguments_are_refused_by_name = refusals(
    (
        {"global_pool": "mean"},
        r"`global_pool` must be one of '', 'token', 'avg', 'avgmax', 'max', 'map', 'seq', got 'mean'",
    ),
    ({"class_token": False}, "`class_token` must be True where `global_pool` is 'token', got False"),
    ({"depth": 0}, "`depth` must be at least 1, got 0"),
    ({"num_classes": -1}, "`num_classes` must be at least 0, got -1"),
    ({"in_chans": 0}, "`in_chans` must be at least 1, got 0"),
    ({"drop_path_rate": 1.0}, r"`drop_path_rate` must be less than 1, got 1.0"),
    ({"num_heads": 5}, "`embed_dim` must be a multiple of `num_heads`, got 24 with 5 heads"),
    ({"img_size": 30}, "`img_size` must be a positive multiple .*nearest sizes are 24 and 32"),
    call=lambda kwargs: tiny(**kwargs),
)


test_images_of_another_shape_are_refused = refusals(
    *((shape, r"`x` must be images \(B, 3, height, width\), .* got") for shape in ((2, 1, 32, 32), (3, 32, 32))),
    ((1, 3, 2, 32, 32), r"`x` must be images \(B, 3, height, width\), .* got"),
    ((2, 3, 32, 30), "got width 30 with a patch"),
    call=lambda shape: tiny()(torch.zeros(shape)),
)


def test_a_model_of_ones_own_position_can_be_built():
    """A backbone takes any object that builds a `Position`, without a name for it."""

    def build(grid, *, dim, depth, num_heads):
        assert (grid.tokens, dim, depth, num_heads) == (17, 24, 3, 3)
        return NoPosition(depth)

    model = VisionTransformer(build, img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
    assert model(images()).shape == (2, CLASSES)
