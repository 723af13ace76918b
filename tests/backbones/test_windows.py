"""Windows of a trained PosMLP: changed in place or by a checkpoint with other windows, folded or not."""

import copy

import pytest
import torch

import graticule
from graticule import Grid, fold, load_checkpoint, unfold
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.sgu import resize_pairs
from graticule.layers.gating import mix_tokens
from graticule.position.folded import FoldedPosition
from graticule.position.resampling import BICUBIC
from in_turn import in_turn
from tiny import count, draw, spec, without_memory

SIZES = {
    "img_size": 64,  # grids of 16, 8, 4 and 2 patches per side
    "embed_dim": 16,
    "depths": (2, 1, 2, 1),
    "windows": (4, 4, 4, 2),
    "groups": (2, 4, 4, 8),
    "num_classes": 5,
}
MIXING = ["sgu", "lrpe", "glrpe", "lrpe_m", "gqpe", "ggqpe"]
RESAMPLED = ["sgu", "lrpe", "glrpe", "lrpe_m", "learnable+lrpe", "ggqpe"]  # the last has a bias per position
NO_BIAS = "ggqpe(bias=False)"
LARGER, SMALLER, UNTILED = (8, 8, 4, 2), (2, 4, 2, 1), (6, 3, 3, 2)


def posmlp(encoding="ggqpe", **kwargs):
    """Return a small PosMLP in float64 and evaluation mode, with all parameters drawn."""
    return draw(graticule.create_model("posmlp_tiny_224", encoding=encoding, **SIZES | kwargs)).double().eval()


def image(*size):
    """Return images of 64 pixels, or of (height, width)."""
    return torch.randn(2, 3, *(size or (64, 64)), dtype=torch.float64)


def state_of(model):
    """Return a copy of the state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def mixing_of(model):
    """Return the mixing position of every stage."""
    return [part for part in model.position.modules() if isinstance(part, MixingPosition)]


def assert_same_state(model, state):
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert [name for name, value in state.items() if not torch.equal(found[name], value)] == []


def assert_windows(model, windows, grids=(16, 8, 4, 2)):
    """Check that the model, its blocks and its positions have the same windows."""
    assert model.windows == tuple(windows)
    for stage, (side, grid, part) in enumerate(zip(windows, grids, mixing_of(model), strict=True)):
        whole = model.grid.pyramid(4)[stage]
        assert {given.window for (given,) in model.where(stage, whole)} == {whole.within}
        assert part.grid == Grid(min(side, grid), min(side, grid))
        assert {encoding.grid for encoding in part.encodings} == {part.grid}


# Functions of displacement


@pytest.mark.parametrize("form", ["alpha", "gamma", "gamma_gamma_t"])
def test_a_quadratic_model_loses_nothing_on_the_way_there_and_back(form):
    model, x = posmlp(spec("ggqpe", bias=False, form=form)), image()
    before, state = model(x), state_of(model)
    model.set_input_size(windows=LARGER)
    assert not torch.allclose(model(x), before)
    model.set_input_size((32, 96), windows=SMALLER)
    model.set_input_size(64, windows=SIZES["windows"])
    assert_same_state(model, state)
    assert torch.equal(model(x), before)


def test_image_size_and_windows_change_together():
    model, other = posmlp(NO_BIAS), posmlp(NO_BIAS, img_size=(96, 64), windows=(6, 4, 3, 2))
    other.load_state_dict(model.state_dict(), strict=True)
    model.set_input_size((96, 64), windows=(6, 4, 3, 2))
    assert model.img_size == (96, 64) and model.grid == Grid(24, 16)
    assert mixing_of(model)[3].grid == Grid(2, 2)
    x = image(96, 64)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-12)


def test_what_is_left_out_stays():
    model = posmlp()
    model.set_input_size(windows=LARGER)
    assert model.img_size == (64, 64) and model.windows == LARGER
    model.set_input_size(96)
    assert model.img_size == (96, 96) and model.windows == LARGER
    assert_windows(model, LARGER, (24, 12, 6, 3))
    x, state = image(96, 96), state_of(model)
    before = model(x)
    model.set_input_size()
    assert model.img_size == (96, 96) and model.windows == LARGER
    assert_same_state(model, state)
    assert torch.equal(model(x), before)


def test_after_a_change_tokens_mix_within_their_new_window_and_no_further():
    model = posmlp(NO_BIAS)
    model.set_input_size(windows=LARGER)
    moved = reached(model, 0, 0, place=(0, 0))
    assert moved[:8, :8].all() and moved.count_nonzero() == 64


# Shifted windows


def reached(model, stage, index, place):
    """Return which tokens of a 16 x 16 grid of the first stage a change of the token at `place` affects, (16, 16)."""
    block, (row, column) = model.block(stage, index), place
    tokens = model.embed(torch.randn(1, 3, 64, 64, dtype=torch.float64), stage)
    changed = tokens.clone()
    changed[:, row * 16 + column] += torch.randn(16, dtype=torch.float64)
    given = model.position(model.grid)[index], *model.where(stage, model.grid)[index]
    return (block(changed, *given) - block(tokens, *given)).abs().sum(-1).view(16, 16)


@pytest.mark.parametrize("window", [2, 4, 8])
def test_shifted_windows_are_shifted_by_half_the_new_side(window):
    """The second block's windows start at half a side; before them are parts of windows."""
    model = posmlp(NO_BIAS, shift="swin")
    model.set_input_size(windows=(window, 4, 4, 2))
    half = window // 2
    inside = reached(model, 0, 1, (half, half))
    assert inside[half : half + window, half : half + window].all() and inside.count_nonzero() == window**2
    corner = reached(model, 0, 1, (0, 0))
    assert corner[:half, :half].all() and corner.count_nonzero() == half**2
    unshifted = reached(model, 0, 0, (half, half))
    assert unshifted[:window, :window].all() and unshifted.count_nonzero() == window**2


@in_turn("encoding", MIXING)
def test_shifted_windows_follow_with_every_encoding(encoding):
    model = posmlp(encoding, shift="swin")
    model.set_input_size(windows=LARGER)
    other = posmlp(encoding, shift="swin", windows=LARGER)
    other.load_state_dict(model.state_dict(), strict=True)
    x = image()
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-12)


# The border of the image

BORDERS = [
    ((4, 4, 4, 2), None),  # tiled without parts
    ((4, 4, 4, 2), "swin"),
    ((6, 3, 3, 2), None),
    ((6, 3, 3, 2), "swin"),
]
borders = in_turn(("windows", "shift"), BORDERS)


def cut(grid, window, index, shift):
    """Compute by hand which tokens share a window of a block, (N, N), and their index in a whole window, (N,)."""
    move = [step // 2 for step in window.shape]
    if shift is None or index % 2 == 0:
        move = [0, 0]
    elif shift == "swin":  # not along an axis that one window covers
        move = [by if step < side else 0 for by, step, side in zip(move, window.shape, grid.shape, strict=True)]
    moved, sides = grid.coordinates() - torch.tensor(move), torch.tensor(window.shape)
    number, (y, x) = moved // sides, (moved % sides).unbind(-1)
    return (number[:, None] == number[None]).all(-1), y * window.width + x


@in_turn(
    ("encoding", "product", "windows", "shift"),
    [
        *[(encoding, product, *BORDERS[-1]) for encoding in MIXING for product in ("matrix", "displacement")],
        *[(encoding, "displacement", *border) for encoding in ("lrpe_m", "ggqpe") for border in BORDERS[:-1]],
    ],
)
def test_no_token_receives_from_outside_its_window_or_the_image(encoding, product, windows, shift):
    """Weights are cut from those of a whole window and, after a softmax, renormalized; beyond, gradients are zero."""
    model = posmlp(spec(encoding, product=product), windows=windows, shift=shift)
    layers, layer = model.position(model.grid), 0
    for stage, grid in enumerate(model.grid.pyramid(4)):
        window = grid.window(windows[stage])
        for index in range(model.depths[stage]):
            given, (shifted,) = layers[layer], model.where(stage, grid)[index]
            seen, place = cut(grid, window, index, shift)
            x = torch.randn(1, grid.patches, 2 * model.embed_dims[stage], dtype=torch.float64, requires_grad=True)
            mixed = mix_tokens(x, given.mixing, None, shifted)
            whole = given.mixing if isinstance(given.mixing, torch.Tensor) else given.mixing.matrix()
            expected = whole[:, place][:, :, place] * seen
            if encoding.endswith("gqpe"):
                expected = expected / expected.sum(-1, keepdim=True)
                ones = mix_tokens(torch.ones_like(x), given.mixing, None, shifted)
                torch.testing.assert_close(ones, torch.ones_like(x), rtol=0, atol=1e-12)
            by_hand = torch.einsum("gij,bjgc->bigc", expected, x.unflatten(-1, (len(whole), -1))).flatten(-2)
            torch.testing.assert_close(mixed, by_hand, rtol=0, atol=1e-10)
            for i in (0, grid.patches // 2, grid.patches - 1):
                (gradient,) = torch.autograd.grad(mixed[0, i].sum(), x, retain_graph=True)
                assert torch.equal(gradient[0].any(-1), seen[i])
            layer += 1


@borders
def test_a_token_of_a_part_of_a_window_has_the_bias_of_its_place(windows, shift):
    model = posmlp("glrpe", windows=windows, shift=shift)
    with torch.no_grad():
        for part in mixing_of(model):
            for encoding in part.encodings:
                encoding.relative_position_table.zero_()
    grid, given, (shifted,) = model.grid, model.position(model.grid)[1], model.where(0, model.grid)[1]
    _, place = cut(grid, grid.window(windows[0]), 1, shift)
    x = torch.randn(1, grid.patches, 32, dtype=torch.float64)
    expected = given.spatial_bias[place][None, :, None].expand_as(x)
    torch.testing.assert_close(mix_tokens(x, given.mixing, given.spatial_bias, shifted), expected)


@in_turn("encoding", MIXING)
def test_layers_work_on_the_tokens_of_the_image_alone(encoding):
    """If windows do not tile the grid, no padding token passes through a linear layer."""
    model = posmlp(encoding, windows=(6, 3, 3, 2), shift="swin")
    seen = []
    for blocks in model.blocks:
        for block in blocks:
            block.mlp_channels.fc1.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[:2]))
    model(image())
    assert seen == [(2, 256), (2, 256), (2, 64), (2, 16), (2, 16), (2, 4)]


def test_stochastic_depth_drops_samples_and_not_windows():
    model = posmlp(drop_path_rate=0.5).train()
    whole = model.grid_at((128, 128))
    block, grid = model.block(2, 1), whole.pyramid(4)[2]
    x = torch.randn(64, 64, 64, dtype=torch.float64)
    kept = (block(x, model.position(whole)[4], *model.where(2, grid)[1]) != x).flatten(1)
    assert torch.equal(kept.any(1), kept.all(1)) and 0 < kept.any(1).sum() < 64


# Tables, matrices and biases


@in_turn(("encoding", "windows"), [*((one, UNTILED) for one in RESAMPLED), ("lrpe_m", LARGER), ("lrpe_m", SMALLER)])
def test_what_depends_on_the_window_is_resampled_as_from_a_checkpoint_of_other_windows(encoding, windows, tmp_path):
    """In both directions: from the windows of training to others, and back."""
    model, x = posmlp(encoding), image()
    for given in (windows, SIZES["windows"]):
        torch.save(model.state_dict(), tmp_path / "model.pth")
        loaded = load_checkpoint(posmlp(encoding, windows=given), tmp_path / "model.pth")
        model.set_input_size(windows=given)
        assert_same_state(loaded, model.state_dict())
        assert torch.equal(loaded(x), model(x))


@in_turn(("encoding", "windows"), [*((one, UNTILED) for one in MIXING), ("lrpe_m", LARGER), ("lrpe_m", SMALLER)])
def test_a_resampled_model_is_a_model_of_those_windows(encoding, windows):
    model, other, x = posmlp(encoding), posmlp(encoding, windows=windows), image()
    model.set_input_size(windows=windows)
    assert_windows(model, windows)
    shapes = [{name: value.shape for name, value in made.state_dict().items()} for made in (model, other)]
    assert shapes[0] == shapes[1]
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-12)


def test_tables_matrices_and_biases_are_resampled_as_maps():
    model = posmlp("lrpe_m")
    before = state_of(model)
    model.set_input_size(windows=LARGER)
    found, own, new = model.state_dict(), Grid(4, 4), Grid(8, 8)
    for stage, layer in ((0, 0), (0, 1), (1, 0)):
        name = f"position.stages.{stage}.encodings.{layer}"
        table = before[f"{name}.second.relative_position_table"].unflatten(1, (7, 7))
        resized = BICUBIC(table, (15, 15)).flatten(1) / 4  # rows keep their sum
        assert torch.equal(found[f"{name}.second.relative_position_table"], resized)
        matrix = before[f"{name}.first.weight"]
        resized = found[f"{name}.first.weight"]
        assert torch.equal(resized, resize_pairs(matrix, own, new))
        bias = f"position.stages.{stage}.biases.{layer}"
        assert torch.equal(found[bias], BICUBIC(before[bias].view(1, 4, 4), (8, 8)).flatten())
    unchanged = [name for name in before if not name.startswith(("position.stages.0", "position.stages.1"))]
    assert [name for name in unchanged if not torch.equal(found[name], before[name])] == []


@pytest.mark.parametrize("encoding", ["sgu", "lrpe", "glrpe", "lrpe_m"])
def test_rows_that_sum_to_one_do_so_in_windows_larger_than_trained_and_the_bias_stays(encoding):
    model = posmlp(encoding)
    with torch.no_grad():
        for part in mixing_of(model):
            for name, parameter in part.named_parameters():
                share = 2 if "second" in name or "first" in name else 1
                parameter.fill_(0.25 if "biases" in name else 1 / (share * part.grid.patches))
    model.set_input_size(128, windows=(16, 16, 8, 4))
    for part, side in zip(mixing_of(model), (16, 16, 8, 4), strict=True):
        for layer, bias in zip(part.encodings, part.biases, strict=True):
            rows = layer(part.grid).sum(-1)
            torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-12)
            torch.testing.assert_close(bias, torch.full_like(bias, 0.25), rtol=0, atol=1e-12)
            assert rows.shape[1] == side * side


def test_what_is_not_trained_stays_so():
    model = posmlp("lrpe_m")
    for part in mixing_of(model)[:2]:
        part.requires_grad_(False)
    model.set_input_size(windows=UNTILED)
    learned = [{p.requires_grad for p in part.parameters()} for part in mixing_of(model)]
    assert learned == [{False}, {False}, {True}, {True}]


# Windows larger than the grid


@in_turn("encoding", MIXING)
def test_windows_larger_than_the_grid_shrink_to_it(encoding):
    model, other, x = posmlp(encoding), posmlp(encoding, windows=(16, 8, 4, 2)), image()
    model.set_input_size(windows=(100, 9, 14, 7))
    assert_windows(model, (100, 9, 14, 7))
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-12)


def test_windows_larger_than_the_grid_have_its_shape_if_it_is_no_square():
    model = posmlp("lrpe")
    model.set_input_size((64, 96), windows=(20, 20, 5, 5))
    assert [part.grid for part in mixing_of(model)] == [Grid(16, 20), Grid(8, 12), Grid(4, 5), Grid(2, 3)]
    table = mixing_of(model)[1].encodings[0].relative_position_table
    assert table.shape == (1, 15 * 23)
    assert model(image(64, 96)).shape == (2, 5)


def test_a_window_that_was_larger_than_the_grid_grows_with_it():
    model = posmlp(NO_BIAS, windows=(4, 4, 4, 7))
    assert mixing_of(model)[3].grid == Grid(2, 2)
    model.set_input_size(256)
    assert mixing_of(model)[3].grid == Grid(7, 7)
    other = posmlp(NO_BIAS, windows=(4, 4, 4, 7), img_size=256)
    other.load_state_dict(model.state_dict(), strict=True)
    x = image(256, 256)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-12)


# Checkpoints of other windows


@in_turn("encoding", ["sgu", "lrpe", "glrpe", "lrpe_m", "ggqpe"])
@in_turn("folded", [False, True])
def test_a_checkpoint_of_other_windows_is_resampled_as_set_input_size_does_it(encoding, folded, tmp_path):
    path, x = tmp_path / "model.pth", image()
    other = posmlp(encoding, windows=LARGER)
    torch.save(other.state_dict(), path)
    model = posmlp(encoding)
    load_checkpoint(fold(model) if folded else model, path)
    other.set_input_size(windows=SIZES["windows"])
    assert_same_state(model, other.state_dict())
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-12)


def test_a_quadratic_checkpoint_of_other_windows_without_a_bias_fits_as_it_is(tmp_path):
    source = posmlp(NO_BIAS, windows=LARGER)
    torch.save(source.state_dict(), tmp_path / "model.pth")
    model = load_checkpoint(posmlp(NO_BIAS), tmp_path / "model.pth")
    assert_same_state(model, source.state_dict())


# Folded models


@in_turn("encoding", [*MIXING, "learnable+ggqpe"])
@in_turn("product", ["matrix", "displacement"])
def test_a_folded_model_changes_windows_as_an_unfolded_one_does(encoding, product):
    model, x = posmlp(spec(encoding, product=product)), image(64, 96)
    twin = fold(copy.deepcopy(model))
    for made in (model, twin):
        made.set_input_size((64, 96), windows=LARGER)
    assert isinstance(twin.position, FoldedPosition)
    assert_same_state(twin, model.state_dict())
    torch.testing.assert_close(twin(x), model(x), rtol=0, atol=1e-12)
    unfold(twin)
    assert twin.windows == LARGER
    assert torch.equal(twin(x), model(x))


def test_a_folded_position_is_refused_for_other_windows():
    model = fold(posmlp())
    with pytest.raises(ValueError, match=r"folded for windows of \(\(4, 4\), .* got \(\)"):
        model.position(Grid(16, 16))


# Refusals


@in_turn(
    ("img_size", "windows", "said"),
    [
        (None, (4, 4, 4), r"`windows` must be a side of at least 1 for each of the 4 stages, got \[4, 4, 4\]"),
        (None, (4, 4, 4, 2, 2), r"`windows` must be .* got \[4, 4, 4, 2, 2\]"),
        (None, (), r"`windows` must be .* got \[\]"),
        (None, (8, 0, 4, 2), r"`windows` must be .* got \[8, 0, 4, 2\]"),
        (None, (8, 8, 8, -1), r"`windows` must be .* got \[8, 8, 8, -1\]"),
        *((None, windows, "`windows` must be a side") for windows in ((4.5, 4, 4, 2), 7, ("a", 2, 2, 2))),
        (96, (8, 8, 8), "`windows` must be"),
        (80, (8, 8, 8, 4), "`img_size` must be a positive multiple .* the nearest sizes are 64 and 96"),
        ((64, 80), (8, 8, 8, 4), "`img_size` must be a positive multiple .* got width 80"),
        (0, (8, 8, 8, 4), "`img_size` must be a positive multiple"),
        (80, None, "`img_size` must be a positive multiple"),
    ],
)
@in_turn(("encoding", "folded"), [("lrpe_m", False), ("learnable+ggqpe", True)])
def test_invalid_arguments_are_refused_before_anything_is_changed(encoding, folded, img_size, windows, said):
    model, x = posmlp(encoding), image()
    model = fold(model) if folded else model
    before, state = model(x), state_of(model)
    with pytest.raises(ValueError, match=said):
        model.set_input_size(img_size, windows)
    assert model.img_size == (64, 64) and model.grid == Grid(16, 16)
    assert_windows(model, SIZES["windows"])
    assert_same_state(model, state)
    assert torch.equal(model(x), before)


# With an absolute encoding


@pytest.mark.parametrize("absolute", ["learnable", "sinusoidal_2d"])
def test_an_absolute_encoding_stands_before_the_first_stage_alone(absolute):
    """PosMLP, Table 7."""
    model = posmlp(f"{absolute}+ggqpe")
    given = model.position(model.grid)
    assert given[0].pre.shape == (256, 16)
    assert [layer.pre for layer in given[1:]] == [None] * 5
    assert all(layer.mixing is not None for layer in given)


def test_a_learnable_absolute_encoding_has_a_parameter_a_patch_and_channel_of_the_first_stage():
    assert count(posmlp("learnable+ggqpe")) - count(posmlp()) == 16 * 16 * 16
    with without_memory():
        plain, more = (graticule.create_model("posmlp_tiny_224", encoding=e) for e in ("ggqpe", "learnable+ggqpe"))
    assert count(more) - count(plain) == 56 * 56 * 96


def test_an_absolute_encoding_is_added_to_the_tokens_of_the_first_stage():
    model, plain, x = posmlp("learnable+ggqpe"), posmlp(), image()
    table = model.position.stages[0].parts[0].encodings[0].pos_embed
    state = {name.replace("stages.0.parts.1.", "stages.0."): value for name, value in model.state_dict().items()}
    del state["position.stages.0.parts.0.encodings.0.pos_embed"]
    plain.load_state_dict(state, strict=True)
    assert not torch.allclose(model(x), plain(x))
    embed = plain.embed
    plain.embed = lambda x, stage: embed(x, stage) + (table[0] if stage == 0 else 0)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)


def test_an_absolute_encoding_does_not_depend_on_the_windows_and_follows_the_image():
    model = posmlp(f"learnable+{NO_BIAS}")
    state = state_of(model)
    model.set_input_size(windows=LARGER)
    assert_same_state(model, state)
    name = "position.stages.0.parts.0.encodings.0.pos_embed"
    model.set_input_size((64, 96), windows=SMALLER)
    table = Grid(16, 16).resize(state[name][0], Grid(16, 24))
    torch.testing.assert_close(model.state_dict()[name][0], table, rtol=0, atol=1e-12)


@torch.no_grad()
def test_an_axis_that_one_window_covers_is_not_shifted():
    sizes = {"img_size": (16, 32), "windows": (4, 4)}
    model = (
        draw(graticule.create_model("posmlp_nano_32", encoding="lrpe(bias=False)", shift="swin", **sizes))
        .double()
        .eval()
    )
    block, given = model.block(0, 1), (model.position(model.grid)[1], *model.where(0, model.grid)[1])
    x = torch.randn(1, 32, 32, dtype=torch.float64)
    changed = x.clone()
    changed[:, 0] += torch.randn(32)  # the token at (0, 0) of 4 x 8, one window high and two wide
    moved = (block(changed, *given) - block(x, *given)).norm(dim=-1).view(4, 8)
    assert moved[:, :2].all() and moved.count_nonzero() == 8


def rolled(x, grid, window, mask):
    """Mix tokens x: (B, N, C) by the weights for each `mask`, (M, M), in the windows of the rolled map."""
    (height, width), (h, w) = grid.shape, window.shape
    move = h // 2, w // 2
    y = x.unflatten(1, grid.shape).roll([-by for by in move], (1, 2))
    region = [
        sum((torch.arange(side) >= side - cut).long() for cut in (step, by))
        for side, step, by in zip(grid.shape, window.shape, move, strict=True)
    ]
    kind = 3 * region[0][:, None] + region[1]
    out = torch.empty_like(y)
    for top in range(0, height, h):
        for left in range(0, width, w):
            at = (slice(top, top + h), slice(left, left + w))
            one = kind[at].flatten()
            weights = mask(-200.0 * (one[:, None] != one).double())  # (groups, M, M)
            tokens = y[:, *at].flatten(1, 2).unflatten(-1, (len(weights), -1))
            out[:, *at] = torch.einsum("gij,bjgc->bigc", weights, tokens).flatten(-2).unflatten(1, (h, w))
    return out.roll(move, (1, 2)).flatten(1, 2)


@in_turn("product", ["matrix", "displacement"])
@in_turn(("size", "stage"), [((64, 64), 0), ((32, 64), 1), ((64, 64), 2)])
@torch.no_grad()
def test_released_windows_have_the_mask_of_the_authors_code_also_where_groups_are_extreme(size, stage, product):
    """A group whose center is far away has logits below -200 for all neighbors, so it takes the opposite border."""
    model = posmlp(spec("ggqpe", bias=False, product=product), img_size=size, shift="released", depths=(2, 2, 2, 1))
    grid = model.grid.pyramid(4)[stage]
    encoding = mixing_of(model)[stage].encodings.get_submodule("1")
    encoding.center[0] = torch.tensor([300.0, -400.0])
    encoding.matrix[0] = torch.eye(2)
    given = model.position(model.grid)[2 * stage + 1]
    logits = encoding.logits(grid.within)
    pairs = given.mixing._replace(table=logits, softmax=False).matrix()
    x = torch.randn(2, grid.patches, 2 * model.embed_dims[stage], dtype=torch.float64)
    mixed = mix_tokens(x, given.mixing, None, *model.where(stage, grid)[1])
    expected = rolled(x, grid, grid.within, lambda mask: (pairs + mask).softmax(-1))
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-10)
    hard = rolled(x, grid, grid.within, lambda mask: (pairs + 1e6 * mask).softmax(-1))
    assert not torch.allclose(hard, expected)


@in_turn("encoding", ["sgu", "lrpe", "glrpe", "lrpe_m", "ggqpe"])
@torch.no_grad()
def test_released_windows_without_a_softmax_mix_opposite_borders(encoding):
    options = {"softmax": False} if encoding == "ggqpe" else {}
    model = posmlp(spec(encoding, bias=False, **options), shift="released")
    given = model.position(model.grid)[1]
    weights = given.mixing if isinstance(given.mixing, torch.Tensor) else given.mixing.matrix()
    x = torch.randn(2, 256, 32, dtype=torch.float64)
    mixed = mix_tokens(x, given.mixing, None, *model.where(0, model.grid)[1])
    torch.testing.assert_close(mixed, rolled(x, model.grid, Grid(4, 4), lambda _: weights), rtol=0, atol=1e-10)


def test_released_windows_that_do_not_tile_a_grid_are_refused():
    with pytest.raises(ValueError, match="`windows` must tile the grid of each stage with `shift='released'`"):
        posmlp(shift="released", windows=(5, 8, 4, 2))
    with pytest.raises(ValueError, match="`windows` must tile"):
        posmlp(shift="released")(image(96, 64))


@torch.no_grad()
def test_channels_of_every_stage_can_be_given():
    sizes = {"embed_dim": (8, 16, 16, 48), "groups": (2, 4, 4, 8)}
    model = posmlp(**sizes)
    assert [module.conv.out_channels for module in model.downsamples[1:]] == [16, 16, 48]
    assert model(image()).shape == (2, 5)
    assert posmlp(embed_dim=(16, 24, 32, 16), patch_merging="dense_conv")(image()).shape == (2, 5)
    with pytest.raises(ValueError, match="`embed_dim` must be multiples of those of the previous stage"):
        posmlp(embed_dim=(16, 24, 48, 48))
    with pytest.raises(ValueError, match="several `embed_dim` must have a value for each of the 4 stages"):
        posmlp(embed_dim=(16, 32))


def test_the_released_code_counts_shifted_blocks_through_the_whole_network():
    for shift, expected in (("released", [0, 1, 0, 1, 0, 1]), ("swin", [0, 0, 1, 0, 0, 0])):  # the last is one window
        model = posmlp(shift=shift, depths=(1, 2, 1, 2), windows=(2, 2, 2, 2))
        where = [model.where(stage, grid) for stage, grid in enumerate(model.grid.pyramid(4))]
        assert [any(windows.shift) for stage in where for (windows,) in stage] == [bool(moves) for moves in expected]
