"""Effects of views with another position, and of another size: of tokens, content and values of position."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

import graticule
from graticule.analysis import audit
from graticule.analysis.effect import FeatureComparison, resampled, resize_images
from graticule.external.traced_model import TracedModel, view_of
from graticule.external.view import Pass, Unavailable, nearest, permutation
from graticule.position.folded import Folded
from graticule.position.grid import Grid
from in_turn import in_turn
from tiny import SIZE, assert_same, draw, shuffle_patches, tiny
from tiny import images as draw_images

#: Every form of position information: tables, biases, rotations, functions of the tokens.
FORMS = [
    *[("learnable", "default"), ("learnable", "lape"), ("learnable", "queries_keys"), ("relative_bias", "default")],
    *[("rope", "default"), ("rope_mixed", "default"), ("liere", "default"), ("pope", "default"), ("peg", "default")],
    *[("shaw", "default"), ("irpe", "default"), ("gpsa", "default"), ("log_n", "default")],
    ("learnable+rope+peg", "default"),
]


@in_turn(("encoding", "joining"), FORMS)
def test_shuffling_positions_is_shuffling_patches(encoding, joining):
    """Patch i with the position of i' equals patch i at i', since only position distinguishes the patches."""
    model = draw(tiny(encoding, joining, img_size=(24, 40))).double().eval()
    images = draw_images(24, 40, dtype=torch.float64)
    result = view_of(model).shuffled(seed=3).run(images)
    order = permutation(15, 3)  # patch i gets the position of order[i]
    moved = view_of(model).run(shuffle_patches(images, order.argsort()))
    for (x, grid), (y, _) in zip(result.layers, moved.layers, strict=True):
        prefix, expected = grid.split(y)
        torch.testing.assert_close(grid.split(x)[1], expected[:, order], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(grid.split(x)[0], prefix, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("encoding", "joining"), [("learnable", "lape"), ("peg", "default"), ("rope", "default")])
def test_a_model_without_position_is_that_of_encoding_none(encoding, joining):
    model, bare = draw(tiny(encoding, joining)).eval(), tiny("none").eval()
    state = model.state_dict()
    bare.load_state_dict({name: state[name] for name in bare.state_dict()})
    images = draw_images()
    result, expected = view_of(model).without_position().run(images), view_of(bare).run(images)
    assert_same(result.logits, expected.logits, 0)


def test_the_position_of_a_larger_image_is_that_of_its_nearest_patches():
    model = draw(tiny("rope")).double().eval()
    images = draw_images(dtype=torch.float64)
    larger = view_of(model, (96, 96))  # 12 x 12 patches, of which 1, 4, 7 and 10 are used
    result = view_of(model).with_position_of(larger).run(images)
    with torch.no_grad():
        spread = list(model.each_layer(images, crop=graticule.Crop((12, 12), (0, 0, 12, 12))))
    for (x, _), (y, _) in zip(result.layers, spread, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    assert nearest(Grid(2, 2), Grid(4, 6)).tolist() == [7, 10, 19, 22]  # of 1, 3 in 4 rows and 1, 4 in 6 columns
    assert nearest(Grid(4, 2), Grid(2, 4)).tolist() == [1, 3, 1, 3, 5, 7, 5, 7]  # each row of 2 is that of two rows


def test_gated_mlps_cannot_do_without_position():
    model = graticule.create_model("posmlp_nano_32", num_classes=3, in_chans=3)
    with pytest.raises(Unavailable, match="mixes tokens by position information alone"):
        view_of(model).without_position()
    before, after = (view.run(draw_images()) for view in (view_of(model), view_of(model).shuffled()))
    assert not torch.equal(before.logits, after.logits)


class Linear(nn.Module):
    """Uses pixels plus a table as tokens; each layer doubles them."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(2, 2, 1)
        self.patch_embed.weight.data = torch.eye(2)[..., None, None]
        self.patch_embed.bias.data.zero_()
        self.pos_embed = nn.Parameter(torch.arange(12.0).view(1, 6, 2))
        self.blocks = nn.ModuleList([Double(), Double()])
        self.img_size = (2, 3)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).mT + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_the_effect_of_zeroing_a_linear_model_is_the_one_by_hand():
    model, images = Linear(), torch.randn(3, 2, 2, 3)
    view = view_of(model)
    before, after = view.run(images), view.without_position().run(images)
    comparison = FeatureComparison("zeroed", spreads=[1.0, 100.0])
    comparison.add(before, after, torch.tensor([0, 1, 0]))
    effect = comparison.effect()
    # the table is 0 to 11, whose squares sum to 506 over 6 tokens; layer l multiplies it by 2 ** l
    np.testing.assert_allclose(effect.change, [[2 * (506 / 6) ** 0.5] * 3, [4 * (506 / 6 / 100) ** 0.5] * 3], rtol=1e-6)
    tokens = images.flatten(2).mT
    expected = torch.cosine_similarity(tokens, tokens + model.pos_embed, dim=-1).mean(1).detach()
    np.testing.assert_allclose(effect.cosine[1], expected, rtol=1e-5)
    assert effect.same.tolist() == (before.logits.argmax(1) == after.logits.argmax(1)).double().tolist()


def test_accuracies_are_compared_by_mcnemars_exact_test():
    labels = torch.zeros(8, dtype=torch.long)
    right, wrong = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    layers = [(torch.zeros(8, 1, 1), Grid(1, 1))]
    before = Pass(layers, torch.stack([right] * 7 + [wrong]))
    after = Pass(layers, torch.stack([right] * 2 + [wrong] * 5 + [right]))  # five become wrong, one becomes right
    comparison = FeatureComparison("change", [1.0])
    comparison.add(before, after, labels)
    effect = comparison.effect()
    assert effect.p_value == pytest.approx(2 * (1 + 6) / 2**6)  # two-sided, of six that differ
    mean, error = effect.accuracy
    differences = 100 * np.array([0, 0, -1, -1, -1, -1, -1, 1])
    assert (mean, error) == pytest.approx((-50, differences.std(ddof=1) / 8**0.5))


def test_features_at_another_size_are_resampled_and_prefix_tokens_kept():
    ramp = torch.arange(4.0).repeat_interleave(4)[None, :, None]  # the row of each patch of 4 x 4
    tokens = torch.cat([torch.full((1, 1, 1), 9.0), ramp], 1)
    result = resampled(tokens, Grid(4, 4, prefix=1), Grid(2, 2, prefix=1))
    assert result.flatten()[0] == 9 and result[0, 1] == result[0, 2] and result[0, 1] + result[0, 3] == pytest.approx(3)
    assert resampled(tokens, Grid(4, 4, prefix=1), Grid(4, 4, prefix=1)) is tokens


STOCK = {
    "vit_tiny_patch16_224": {"img_size": (64, 96), "depth": 2},
    "vit_small_patch16_rope_mixed_224": {"img_size": (64, 96), "depth": 2, "embed_dim": 96, "num_heads": 3},
    "vit_relpos_small_patch16_224": {"img_size": (64, 96), "depth": 2, "embed_dim": 96, "num_heads": 3},
    "beit_base_patch16_224": {"img_size": (64, 96), "depth": 2, "embed_dim": 96, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": (56, 84), "depth": 2},
}


@in_turn("name", STOCK)
def test_shuffling_positions_of_a_model_of_timm_is_shuffling_patches(name):
    model = draw(timm.create_model(name, num_classes=3, **STOCK[name])).double().eval()
    if "mixed" in name:
        model.rope.float()  # timm 1.0.26 multiplies its coordinates with frequencies in float32
    height, width = STOCK[name]["img_size"]
    images, side = draw_images(height, width, dtype=torch.float64), height // 4
    order = permutation(24, 3)
    for view in (view_of(model), TracedModel(model)):  # converted, and as it is
        before, result = view.run(images), view.shuffled(seed=3).run(images)
        moved = view.run(shuffle_patches(images, order.argsort(), side))
        (x, grid), (y, _) = result.layers[-1], moved.layers[-1]
        torch.testing.assert_close(grid.split(x)[1], grid.split(y)[1][:, order], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(grid.split(x)[1], grid.split(before.layers[-1][0])[1])
        without = view.without_position()
        (a, _), (b, _) = (without.run(images).layers[-1], without.run(shuffle_patches(images, order, side)).layers[-1])
        torch.testing.assert_close(grid.split(a)[1][:, order], grid.split(b)[1], rtol=1e-9, atol=1e-9)
        after = view.run(images)
        assert all(torch.equal(p, q) for (p, _), (q, _) in zip(before.layers, after.layers, strict=True))


def test_an_edit_replaces_the_tokens_of_a_model_of_timm_and_of_a_pyramid():
    for model, size in (
        (timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3), 32),
        (tiny("learnable"), 32),
    ):
        view, images = view_of(model), draw_images(size, size)
        result = view.run(images, lambda layer, x, grid: torch.full_like(x, float(layer)))
        assert [float(x.unique()) for x, _ in result.layers] == [float(layer) for layer in range(len(result.layers))]
        assert torch.equal(view.run(images, lambda layer, x, grid: x).logits, view.run(images).logits)


def test_blocks_and_windows_of_timms_swin_are_found():
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=(64, 128), window_size=(4, 4), depths=(2, 2), embed_dim=12, num_heads=(1, 2), num_classes=3,
    )  # fmt: skip
    view = view_of(swin)
    assert [grid.shape for grid in view.grids((64, 128))] == [(16, 32), (16, 32), (8, 16), (8, 16)]
    assert TracedModel(swin).position_parameters == {"bias of displacements": 49 * (1 + 1 + 2 + 2)}
    first = view.attention(draw_images(64, 128))[0]
    assert first.weights.shape == (2 * 4 * 8, 1, 16, 16) and first.queries.shape == (4, 4)
    np.testing.assert_allclose(first.weights.sum(-1), 1, atol=1e-6)
    before = view.run(draw_images(64, 128)).logits
    assert not torch.equal(before, view.shuffled().run(draw_images(64, 128)).logits)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="a list named blocks, layers or stages, as in timm, got Sequential"):
        view_of(nn.Sequential(nn.Conv2d(3, 4, 1)), (8, 8))
    with pytest.raises(ValueError, match="which takes texts"):
        view_of(graticule.create_language_model("lm_nano", vocab_size=5, context=8))


def test_the_position_of_a_model_that_is_folded_for_all_sizes_is_computed_where_it_is_timed():
    model = graticule.fold(tiny("learnable").eval(), sizes=2)
    folded = model.position
    seen = []

    def note(position, args, kwargs):
        seen.append(position)

    for variant in (folded, folded.original):
        variant.register_forward_pre_hook(note, with_kwargs=True)
    computed = view_of(model).variants()["computed"]
    seen.clear()  # folding it again also computes it
    with torch.no_grad():
        computed(torch.randn(1, 3, 32, 32))
    assert seen == [folded.original] and not isinstance(seen[0], Folded) and model.position is folded


#: Threads that ask why another size is worse: rf-detr#715, MAE-pytorch#39, Swin#363, open_clip#76, track_on#3.
IMAGE_SIZES = ((32, 32), (48, 64), (64, 64))
WITHOUT_CLASS = {"class_token": False, "global_pool": "avg"}


class Wrapped(nn.Module):
    """A model of a class that no library knows, so its structure is found by a recorded pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images)


def effects(model, sizes=IMAGE_SIZES):
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
    passes, result = effects(timm.create_model("swin_tiny_patch4_window7_224", **swin), IMAGE_SIZES[::2])
    assert list(passes) == ["64 x 64"] and "several grids" in result.unavailable["causes at 64 x 64"]
