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
from tiny import assert_same, draw, spec

#: Grids of 16, 8, 4 and 2 patches per side.
SIZES = {"img_size": 64, "embed_dim": 16, "depths": (2, 1, 2, 1), "windows": (4, 4, 4, 2), "groups": (2, 4, 4, 8)}
SIZES["num_classes"] = 5
MIXING = ["sgu", "lrpe", "glrpe", "lrpe_m", "gqpe", "ggqpe"]
NO_BIAS = "ggqpe(bias=False)"
LARGER, SMALLER, UNTILED = (8, 8, 4, 2), (2, 4, 2, 1), (6, 3, 3, 2)


def posmlp(encoding="ggqpe", **kwargs):
    return draw(graticule.create_model("posmlp_tiny_224", encoding=encoding, **SIZES | kwargs)).double().eval()


def image(*size):
    return torch.randn(2, 3, *(size or (64, 64)), dtype=torch.float64)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def mixing_of(model):
    return [part for part in model.position.modules() if isinstance(part, MixingPosition)]


def assert_same_state(model, state):
    actual = model.state_dict()
    assert actual.keys() == state.keys()
    assert [name for name, value in state.items() if not torch.equal(actual[name], value)] == []


def assert_windows(model, windows, grids=(16, 8, 4, 2)):
    """Check that the model, its blocks and its positions have the same windows."""
    assert model.windows == tuple(windows)
    for stage, (side, grid, part) in enumerate(zip(windows, grids, mixing_of(model), strict=True)):
        image_grid = model.grid.pyramid(4)[stage]
        assert {at.window for (at,) in model.block_arguments(stage, image_grid)} == {image_grid.within}
        assert part.grid == Grid(min(side, grid), min(side, grid))
        assert {encoding.grid for encoding in part.encodings} == {part.grid}


def reached(model, stage, index, place):
    """Return which tokens of a 16 x 16 grid of the first stage a change of the token at `place` affects, (16, 16)."""
    block, (row, column) = model.block(stage, index), place
    tokens = model.embed(torch.randn(1, 3, 64, 64, dtype=torch.float64), stage)
    changed = tokens.clone()
    changed[:, row * 16 + column] += torch.randn(16, dtype=torch.float64)
    inputs = model.position(model.grid)[index], *model.block_arguments(stage, model.grid)[index]
    return (block(changed, *inputs) - block(tokens, *inputs)).abs().sum(-1).view(16, 16)


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


BORDERS = [(windows, shift) for windows in ((4, 4, 4, 2), (6, 3, 3, 2)) for shift in (None, "swin")]


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
    ("encoding", "windows", "shift"),
    [
        *[(encoding, *BORDERS[-1]) for encoding in MIXING],
        *[(encoding, *border) for encoding in ("lrpe_m", "ggqpe") for border in BORDERS[:-1]],
    ],
)
def test_no_token_receives_from_outside_its_window_or_the_image(encoding, windows, shift):
    """Weights are cut from those of a whole window and, after a softmax, renormalized; beyond, gradients are zero."""
    model = posmlp(encoding, windows=windows, shift=shift)
    layers, layer = model.position(model.grid), 0
    for stage, grid in enumerate(model.grid.pyramid(4)):
        window = grid.window(windows[stage])
        for index in range(model.depths[stage]):
            position, (shifted,) = layers[layer], model.block_arguments(stage, grid)[index]
            seen, place = cut(grid, window, index, shift)
            x = torch.randn(1, grid.patches, 2 * model.embed_dims[stage], dtype=torch.float64, requires_grad=True)
            mixed = mix_tokens(x, position.mixing, None, shifted)
            matrix = position.mixing if isinstance(position.mixing, torch.Tensor) else position.mixing.matrix()
            expected = matrix[:, place][:, :, place] * seen
            if encoding.endswith("gqpe"):
                expected = expected / expected.sum(-1, keepdim=True)
                ones = mix_tokens(torch.ones_like(x), position.mixing, None, shifted)
                assert_same(ones, torch.ones_like(x), 1e-12)
            by_hand = torch.einsum("gij,bjgc->bigc", expected, x.unflatten(-1, (len(matrix), -1))).flatten(-2)
            assert_same(mixed, by_hand, 1e-10)
            for i in (0, grid.patches // 2, grid.patches - 1):
                (gradient,) = torch.autograd.grad(mixed[0, i].sum(), x, retain_graph=True)
                assert torch.equal(gradient[0].any(-1), seen[i])
            layer += 1


@in_turn(
    ("encoding", "windows", "built"),
    [
        *((encoding, UNTILED, UNTILED) for encoding in MIXING),
        *(("lrpe_m", windows, windows) for windows in (LARGER, SMALLER)),
        *((encoding, (100, 9, 14, 7), (16, 8, 4, 2)) for encoding in MIXING),  # larger than the grid
    ],
)
def test_a_resampled_model_is_a_model_of_those_windows(encoding, windows, built):
    model, other, x = posmlp(encoding), posmlp(encoding, windows=built), image()
    model.set_input_size(windows=windows)
    assert_windows(model, windows)
    shapes = [{name: value.shape for name, value in made.state_dict().items()} for made in (model, other)]
    assert shapes[0] == shapes[1]
    other.load_state_dict(model.state_dict(), strict=True)
    assert_same(model(x), other(x), 1e-12)


def test_tables_matrices_and_biases_are_resampled_as_maps():
    model = posmlp("lrpe_m")
    before = state_of(model)
    model.set_input_size(windows=LARGER)
    after, old, new = model.state_dict(), Grid(4, 4), Grid(8, 8)
    for stage, layer in ((0, 0), (0, 1), (1, 0)):
        name = f"position.stages.{stage}.encodings.{layer}"
        table = before[f"{name}.second.relative_position_table"].unflatten(1, (7, 7))
        resized = BICUBIC(table, (15, 15)).flatten(1) / 4  # rows keep their sum
        assert torch.equal(after[f"{name}.second.relative_position_table"], resized)
        matrix = before[f"{name}.first.weight"]
        resized = after[f"{name}.first.weight"]
        assert torch.equal(resized, resize_pairs(matrix, old, new))
        bias = f"position.stages.{stage}.biases.{layer}"
        assert torch.equal(after[bias], BICUBIC(before[bias].view(1, 4, 4), (8, 8)).flatten())
    unchanged = [name for name in before if not name.startswith(("position.stages.0", "position.stages.1"))]
    assert [name for name in unchanged if not torch.equal(after[name], before[name])] == []


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
    assert_same(model(x), other(x), 1e-12)


@in_turn("encoding", [*MIXING, "learnable+ggqpe"])
def test_a_folded_model_changes_windows_as_an_unfolded_one_does(encoding):
    model, x = posmlp(encoding), image(64, 96)
    twin = fold(copy.deepcopy(model))
    for made in (model, twin):
        made.set_input_size((64, 96), windows=LARGER)
    assert isinstance(twin.position, FoldedPosition)
    assert_same_state(twin, model.state_dict())
    assert_same(twin(x), model(x), 1e-12)
    unfold(twin)
    assert twin.windows == LARGER and torch.equal(twin(x), model(x))


@in_turn(
    ("change", "message"),
    [
        (lambda model: model.set_input_size(windows=(4, 4, 4)), "`windows` must be a side of at least 1 for each of"),
        (lambda model: model.set_input_size(windows=(8, 0, 4, 2)), r"`windows` must be .* got \[8, 0, 4, 2\]"),
        (lambda model: model.set_input_size(windows=7), "`windows` must be a side"),
        (lambda model: model.set_input_size(80, (8, 8, 8, 4)), "must be a positive multiple .* sizes are 64 and 96"),
        (lambda model: model.set_input_size((64, 80)), "`img_size` must be a positive multiple .* got width 80"),
        (lambda model: posmlp(shift="released", windows=(5, 8, 4, 2)), "`windows` must tile the grid of each stage"),
        (lambda model: posmlp(shift="released")(image(96, 64)), "`windows` must tile"),
        (lambda model: posmlp(embed_dim=(16, 24, 48, 48)), "`embed_dim` must be multiples of the previous"),
        (lambda model: posmlp(embed_dim=(16, 32)), "several `embed_dim` must have a value for each of the 4 stages"),
        (lambda model: fold(model).position(Grid(16, 16)), r"folded for windows of \(\(4, 4\), .* got \(\)"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_changed(change, message):
    model, x = posmlp("lrpe_m"), image()
    before, state = model(x), state_of(model)
    with pytest.raises(ValueError, match=message):
        change(model)
    assert model.img_size == (64, 64) and model.windows == SIZES["windows"]
    assert_same_state(model, state)
    assert_same(model(x), before, 1e-12)


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
            kinds = kind[at].flatten()
            weights = mask(-200.0 * (kinds[:, None] != kinds).double())  # (groups, M, M)
            tokens = y[:, *at].flatten(1, 2).unflatten(-1, (len(weights), -1))
            out[:, *at] = torch.einsum("gij,bjgc->bigc", weights, tokens).flatten(-2).unflatten(1, (h, w))
    return out.roll(move, (1, 2)).flatten(1, 2)


@in_turn(("size", "stage"), [((64, 64), 0), ((32, 64), 1), ((64, 64), 2)])
@torch.no_grad()
def test_released_windows_have_the_mask_of_the_authors_code_also_where_groups_are_extreme(size, stage):
    """A group whose center is far away has logits below -200 for all neighbors, so it takes the opposite border."""
    model = posmlp(spec("ggqpe", bias=False), img_size=size, shift="released", depths=(2, 2, 2, 1))
    grid = model.grid.pyramid(4)[stage]
    encoding = mixing_of(model)[stage].encodings.get_submodule("1")
    encoding.center[0] = torch.tensor([300.0, -400.0])
    encoding.matrix[0] = torch.eye(2)
    position = model.position(model.grid)[2 * stage + 1]
    logits = encoding.logits(grid.within)
    pairs = position.mixing._replace(table=logits, softmax=False).matrix()
    x = torch.randn(2, grid.patches, 2 * model.embed_dims[stage], dtype=torch.float64)
    mixed = mix_tokens(x, position.mixing, None, *model.block_arguments(stage, grid)[1])
    expected = rolled(x, grid, grid.within, lambda mask: (pairs + mask).softmax(-1))
    assert_same(mixed, expected, 1e-10)
    hard = rolled(x, grid, grid.within, lambda mask: (pairs + 1e6 * mask).softmax(-1))
    assert not torch.allclose(hard, expected)


def test_the_released_code_counts_shifted_blocks_through_the_whole_network():
    for shift, expected in (("released", [0, 1, 0, 1, 0, 1]), ("swin", [0, 0, 1, 0, 0, 0])):  # the last is one window
        model = posmlp(shift=shift, depths=(1, 2, 1, 2), windows=(2, 2, 2, 2))
        where = [model.block_arguments(stage, grid) for stage, grid in enumerate(model.grid.pyramid(4))]
        assert [any(windows.shift) for stage in where for (windows,) in stage] == [bool(moves) for moves in expected]
