"""Swin and Swin V2: equality with timm's at any size, masks of windows, tables that reach later stages by merging."""

import copy
import math
from collections import Counter
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from timm.models.swin_transformer_v2 import WindowAttention
from torch import nn

import graticule
from graticule import Grid, LayerPosition, published_state_dict
from graticule.backbones.swin import SwinTransformer
from graticule.backbones.swin_v2 import CosineWindowAttention
from graticule.encodings.build import build_position
from graticule.position.windows import Windows
from in_turn import in_turn, refusals
from tiny import assert_same, draw, images

TWO = {"img_size": 64, "window_size": 4, "depths": (2, 2), "num_heads": (2, 4)}
THREE = {"img_size": (64, 96), "window_size": 4, "depths": (2, 2, 2), "num_heads": (1, 2, 4)}
#: Arguments, and sizes of images; windows tile few of them.
BUILT = {
    "64, window 4": (TWO, [(64, 64), (96, 64), (80, 112), (36, 44), (52, 60)]),
    "64, window 4, four blocks": ({**TWO, "depths": (1, 4)}, [(64, 64), (52, 60)]),
    "56, window 7": ({**TWO, "img_size": 56, "window_size": 7}, [(56, 56), (64, 64), (60, 100), (28, 84)]),
    "64 x 96, three stages": (THREE, [(64, 96), (96, 64), (44, 76), (80, 80)]),
    "32, window 7": ({**TWO, "img_size": 32, "window_size": 7}, [(32, 32), (64, 64), (44, 36)]),
    "16 x 64, window 5": ({**TWO, "img_size": (16, 64), "window_size": 5}, [(16, 64), (64, 16), (60, 60)]),
}
JOININGS = [
    *(("learnable", joining) for joining in ("default", "shared", "unshared", "lape_sharing", "lape")),
    *((encoding, "lape") for encoding in ("sinusoidal_2d", "learnable+relative_bias", "relative_bias")),
    *((e, "default") for e in ("learnable+relative_bias", "relative_bias", "rope", "relative_bias+peg", "none")),
]
#: Joinings that pass a table to every layer, through the patch merging.
MERGED = [(e, j) for e, j in JOININGS if "learnable" in e and j in ("shared", "lape_sharing", "lape")]
joinings = in_turn(("encoding", "joining"), JOININGS)
merged = in_turn(("encoding", "joining"), MERGED)


def swin(encoding="relative_bias", joining="default", **kwargs):
    position = partial(build_position, encoding=encoding, joining=joining)
    sizes = {"embed_dim": 8, "num_classes": 5, **TWO, **kwargs}
    return draw(SwinTransformer(position, **sizes)).double().eval()


def timms(**kwargs):
    sizes = {"embed_dim": 8, "num_classes": 5, "drop_path_rate": 0.0, "strict_img_size": False, **TWO, **kwargs}
    return draw(timm.models.swin_transformer.SwinTransformer(**sizes)).double().eval()


def wide(height=64, width=64, batch=2):
    return images(height, width, batch, torch.float64)


@in_turn("built", BUILT)
@torch.no_grad()
def test_it_is_timms_swin_for_images_that_windows_do_not_tile(built):
    """Windows and shifts are those of timm's model for that size, whatever size ours is built for."""
    kwargs, sizes = BUILT[built]
    ours = swin(**kwargs)
    assert ours.load_state_dict(timms(**kwargs).state_dict(), strict=True)
    for size in sizes:
        x, reference = wide(*size), timms(**{**kwargs, "img_size": size})
        reference.load_state_dict(published_state_dict(graticule.resize(copy.deepcopy(ours), size)), strict=True)
        assert_same(ours(x), reference(x))
        assert_same(ours.forward_features(x), reference.forward_features(x).flatten(1, 2))


def resampled(table, old, new):
    maps = table.T.unflatten(1, [2 * side - 1 for side in old])
    maps = F.interpolate(maps[None], [2 * side - 1 for side in new], mode="bicubic", antialias=True)[0]
    return maps.flatten(1).T


@in_turn(
    ("size", "window", "windows"),
    [
        *((size, side, [(side, side)] * 2) for size, side in (((96, 64), 6), ((80, 112), 5), (64, 3), (None, 8))),
        *(((48, 24), 7, [(7, 6), (6, 3)]), (128, None, [(4, 4), (4, 4)])),
    ],
)
@torch.no_grad()
def test_another_input_size_and_window_make_it_timms_that_is_built_with_them(size, window, windows):
    ours = swin()
    before = copy.deepcopy(published_state_dict(ours))
    ours.set_input_size(size, window)
    after = published_state_dict(ours)
    for stage, new in enumerate(windows):
        for block in range(2):
            name = f"layers.{stage}.blocks.{block}.attn.relative_position_bias_table"
            assert_same(after[name], resampled(before.pop(name), (4, 4), new))
    assert all(torch.equal(after[name], value) for name, value in before.items())

    reference = timms(img_size=size or 64, window_size=window or 4)
    reference.load_state_dict(after, strict=True)
    x = wide(*ours.img_size)
    assert_same(ours(x), reference(x))


@pytest.mark.parametrize("size", [(32, 64), (64, 32)])
@torch.no_grad()
def test_microsofts_rule_shifts_neither_axis_where_one_window_covers_one(size):
    """timm's model, in whose second stage, of 4 x 8 patches, the shift is removed by hand."""
    reference, ours, x = timms(img_size=size), swin(img_size=size, shift="microsoft"), wide(*size)
    ours.load_state_dict(reference.state_dict(), strict=True)
    block = reference.layers[1].blocks[1]
    assert sorted(block.shift_size) == [0, 2] and not torch.allclose(ours(x), reference(x))
    block.shift_size, block.attn_mask = (0, 0), None
    assert_same(ours(x), reference(x))


def test_microsofts_windows_are_squares_of_the_shorter_side():
    assert swin(img_size=(16, 64)).windows == ((4, 4), (2, 4))
    assert swin(img_size=(16, 64), shift="microsoft").windows == ((4, 4), (2, 2))
    with pytest.raises(ValueError, match="`shift` must be one of"):
        swin(shift="released")


@joinings
@torch.no_grad()
def test_an_image_of_any_size_is_one_filled_up_with_zeros_to_whole_patches(encoding, joining):
    model = swin(encoding, joining)
    x = wide(33, 47)
    assert model(x).shape == (2, 5)
    assert model.forward_features(x).shape == (2, 5 * 6, 16)  # 9 x 12 patches, halved and rounded up
    assert_same(model(x), model(F.pad(x, (0, 1, 0, 3))))
    for size in ((1, 1), (5, 64), (63, 17)):
        assert model(wide(*size)).isfinite().all()


@torch.no_grad()
def test_the_mask_of_shifted_windows_is_computed_once_per_stage(monkeypatch):
    stages = []
    compute = Windows.strangers
    monkeypatch.setattr(Windows, "strangers", lambda self, *at: stages.append(self.grid.shape) or compute(self, *at))
    with torch.no_grad():
        swin(depths=(4, 6), num_heads=(1, 2), window_size=2)(images(64, 96, 1).double())
    assert stages == [(16, 24), (8, 12)]


def test_a_block_projects_and_attends_once_for_all_windows(monkeypatch):
    model, calls = swin(embed_dim=12), Counter()
    for name in ("linear", "scaled_dot_product_attention"):
        spy = partial(lambda name, call, *args, **kwargs: calls.update([name]) or call(*args, **kwargs), name)
        monkeypatch.setattr(F, name, partial(spy, getattr(F, name)))
    model(wide(80, 112, 3))
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert calls == {"linear": linear, "scaled_dot_product_attention": sum(model.depths)}


def test_a_window_is_no_larger_than_the_grid_and_a_stage_of_one_window_is_not_shifted():
    model = swin(img_size=(16, 48), window_size=7)  # grids 4 x 12 and 2 x 6
    stages = enumerate(model.position_grids(model.grid))
    where = [[windows for (windows,) in model.block_arguments(stage, at)[:2]] for stage, at in stages]
    actual = [[(windows.window.shape, windows.shift) for windows in stage] for stage in where]
    assert actual == [[((4, 7), (0, 0)), ((4, 7), (0, 3))], [((2, 6), (0, 0)), ((2, 6), (0, 0))]]
    tables = {name: value.shape for name, value in published_state_dict(model).items() if name.endswith("table")}
    assert tables == {
        f"layers.{stage}.blocks.{block}.attn.relative_position_bias_table": shape
        for stage, shape in enumerate([(7 * 13, 2), (3 * 11, 4)])
        for block in range(2)
    }


def test_windows_of_no_patch_are_refused_and_nothing_is_changed():
    with pytest.raises(ValueError, match=r"`window_size` must be (a whole number of )?at least 1, got 0\."):
        swin(window_size=0)
    model = swin()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"`window_size` must be (a whole number of )?at least 1, got 0\."):
        model.set_input_size(96, 0)
    assert (model.img_size, model.window_size) == ((64, 64), 4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="`global_pool` must be 'avg' or ''"):
        swin(global_pool="token")


def by_hand(merging, table, grid):
    """Merge a table (N, D) of `grid` as Swin merges patches: four neighbors, column by column, norm, projection."""
    height, width = grid.shape
    map_ = F.pad(table.unflatten(0, grid.shape), (0, 0, 0, width % 2, 0, height % 2))
    four = torch.cat([map_[0::2, 0::2], map_[1::2, 0::2], map_[0::2, 1::2], map_[1::2, 1::2]], -1)
    mean, var = four.mean(-1, keepdim=True), four.var(-1, unbiased=False, keepdim=True)
    normed = (four - mean) / (var + merging.norm.eps).sqrt() * merging.norm.weight + merging.norm.bias
    return (normed @ merging.reduction.weight.T).flatten(0, 1)


def given_to(model, grid):
    """Return the table that every layer receives, on the residual stream or after the norm."""
    return [p.after_norm if p.added_to_stream is None else p.added_to_stream for p in model.position(grid)]


@merged
@pytest.mark.parametrize("size", [(64, 96), (44, 76), (33, 47)])
@torch.no_grad()
def test_the_table_of_a_later_stage_is_the_table_before_merged_by_hand(encoding, joining, size):
    model = swin(encoding, joining, **THREE)
    grids = model.grid_at(size).pyramid(3, pad=True)
    parts = [stage if "+" not in encoding else stage.parts[0] for stage in model.position.stages]
    table = parts[0].encodings[0](grids[0])
    expected = []
    for stage, part in enumerate(parts):
        if stage:
            assert not len(part.encodings)
            table = by_hand(model.layers[stage].downsample, table, grids[stage - 1])
        for layer in range(2):
            joined = table if joining == "shared" else part.joining.norms[layer](table)
            expected.append(joined)
            if joining == "lape":
                table = joined  # Eq. 11 continues through the stages
    actual = given_to(model, grids[0])
    assert [table.shape for table in actual] == [(g.patches, 8 << s) for s, g in enumerate(grids) for _ in range(2)]
    for table_of_layer, other in zip(actual, expected, strict=True):
        assert_same(table_of_layer, other)


@torch.no_grad()
def test_a_peg_stands_after_the_first_block_of_every_stage_and_is_nothing_where_its_weights_are_zero():
    model = swin("relative_bias+peg", **THREE)
    plain = swin("relative_bias", **THREE)
    positions = model.position(model.grid)
    assert [position.map_after is not None for position in positions] == [True, False] * 3
    assert all(position.bias is not None for position in positions)
    state = published_state_dict(model)
    pegs = [name for name in state if name.startswith("pos_block.")]
    assert len(pegs) == 3 * 2
    plain.load_state_dict({name: value for name, value in state.items() if name not in pegs})
    x = wide(44, 76)
    assert (model(x) - plain(x)).abs().max() > 1e-3
    for name, value in state.items():
        if name in pegs:
            value.zero_()
    assert_same(model(x), plain(x))


V2 = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "num_classes": 5}


def coordinates(module):
    """Compute the table of coordinates of timm's module in float64, where it uses float32."""
    sides = []
    for side, trained in zip(module.window_size, module.pretrained_window_size, strict=True):
        t = torch.arange(1 - side, side, dtype=torch.float64) / max((trained or side) - 1, 1) * 8
        sides.append(t.sign() * torch.log2(t.abs() + 1) / math.log2(8))
    return torch.stack(torch.meshgrid(*sides, indexing="ij"), -1)[None]


def exact_v2(reference):
    for module in reference.modules():
        if isinstance(module, WindowAttention):
            module.relative_coords_table.copy_(coordinates(module))
    return reference


@torch.no_grad()
def draw_v2(model):
    """Draw every tensor, some logit scales beyond their limit, so that masked tokens matter."""
    for name, parameter in draw(model).named_parameters():
        if name.endswith("logit_scale"):
            parameter.add_(4.0)
    return model


def both_v2(**kwargs):
    # its masks are computed in the forward pass, since the stored ones do not fit a padded map before timm 1.0.31
    reference = exact_v2(draw_v2(TimmSwinV2(**{**V2, **kwargs}, strict_img_size=False)).double().eval())
    ours = graticule.create_model("swinv2_tiny_window8_256", **{**V2, **kwargs}).double().eval()
    ours.load_state_dict(reference.state_dict())
    return ours, reference


@pytest.mark.parametrize(
    "kwargs",
    [
        *({}, {"img_size": (32, 96)}, {"img_size": (48, 80)}, {"img_size": 32, "window_size": 8}),
        *({"pretrained_window_sizes": (3, 2)}, {"qkv_bias": False, "depths": (1, 3)}),
    ],
    ids=str,
)
@torch.no_grad()
def test_it_is_timms_with_every_weight_drawn(kwargs):
    ours, reference = both_v2(**kwargs)
    x = images(*ours.img_size, dtype=torch.float64)
    assert_same(ours(x), reference(x))
    published = published_state_dict(ours)
    assert published.keys() == reference.state_dict().keys()
    assert all(torch.equal(published[name], value) for name, value in reference.state_dict().items())


@torch.no_grad()
def test_at_another_size_it_is_timms_set_to_it_where_that_keeps_the_coordinates():
    ours, reference = both_v2(pretrained_window_sizes=(4, 4))
    reference.set_input_size(img_size=(96, 64), window_size=6)
    ours.set_input_size((96, 64), window_size=6)
    x = images(96, 64, dtype=torch.float64)
    assert_same(ours(x), exact_v2(reference)(x))


@pytest.mark.parametrize(("mask", "sign"), [(-100.0, -1.0), (None, 1.0)])
@torch.no_grad()
def test_tokens_attend_across_the_border_of_the_image_with_the_released_masks_alone(mask, sign):
    """Tokens are a on the left and -a on the right, q = -k: logits are -100 on the same side, 100 on the other."""
    attention = CosineWindowAttention(2, 1, qkv_bias=False, mask=mask).double()
    identity = torch.eye(2)
    attention.qkv.weight.copy_(torch.cat([identity, -identity, identity]))
    attention.proj.weight.copy_(identity)
    attention.proj.bias.zero_()
    attention.logit_scale.fill_(9.0)  # beyond the limit of ln 100
    grid = Grid(4, 8)
    a = torch.tensor([3.0, 4.0], dtype=torch.float64)
    tokens = a * torch.where(grid.coordinates()[:, 1:] < 4, 1.0, -1.0)
    y = attention(tokens[None], LayerPosition(), Windows(grid, Grid(4, 4), (0, 2)))[0].unflatten(0, grid.shape)
    # a window of columns 6, 7 and, at the opposite border, 0, 1, whose 100 - 100 outweighs -100 of the same side
    torch.testing.assert_close(y[:, :2], (sign * a).expand(4, 2, 2))
    torch.testing.assert_close(y[:, 2:4], (-a).expand(4, 2, 2))  # within a whole window the other side has 100


test_windows_of_a_pretraining_without_a_bias_that_knows_them_are_refused = refusals(
    ({"encoding": "rope", "pretrained_window_sizes": (4, 4)}, "`pretrained_window_sizes` must be left out without the"),
    ({"pretrained_window_sizes": (4,)}, "must have a positive value for each of the 2 stages, got"),
    call=lambda kwargs: graticule.create_model("swinv2_tiny_window8_256", **V2, **kwargs),
)
