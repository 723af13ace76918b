"""Laws of the rotary encodings: angles, dependence of logits on the displacement, and layers that use them."""

import math

import pytest
import torch
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingMixed, apply_rot_embed_cat

import graticule
from graticule import Grid
from graticule.encodings.forms.rotary import Scaling
from graticule.encodings.rope import Frequencies, Rope
from graticule.encodings.rope_directions import MixedRope
from in_turn import in_turn
from tiny import DEPTH, draw, images, spec, tiny

GRIDS = [Grid(4, 4), Grid(3, 5), Grid(1, 6), Grid(7, 2, prefix=1), Grid(3, 4, prefix=2)]
BUILT, OTHER = Grid(3, 5, prefix=1), Grid(6, 4, prefix=1)
HEADS, HEAD_DIM = 3, 8

both = pytest.mark.parametrize("name", ["axial", "mixed"])
grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


def rotary(name, grid=BUILT, **kwargs):
    """Return an encoding in float64; a mixed one has two layers with drawn frequencies."""
    if name == "axial":
        return Rope(grid, HEAD_DIM, **kwargs).double()
    encoding = MixedRope(grid, 2, HEADS, HEAD_DIM, **kwargs).double()
    torch.nn.init.normal_(encoding.freqs, std=0.7)
    return encoding


def tables(name, encoding, grid):
    """Return the table of every layer, each (heads, N, 2d)."""
    found = encoding(grid).detach()
    return [found.expand(HEADS, -1, -1)] if name == "axial" else list(found)


def axial_angle(y, x, pair, head_dim=HEAD_DIM, temperature=100.0):
    """Compute the angle of a pair of channels by the formula: a quarter of the channels rotates with y, then x."""
    quarter = head_dim // 4
    return (y if pair < quarter else x) * temperature ** (-4 * (pair % quarter) / head_dim)


def mixed_angle(freqs, layer, head, y, x, pair):
    return x * freqs[0, layer, head, pair].item() + y * freqs[1, layer, head, pair].item()


def naive_row(angles):
    """Return sines, then cosines, each for both channels of a pair."""
    twice = [angle for angle in angles for _ in range(2)]
    return [math.sin(angle) for angle in twice] + [math.cos(angle) for angle in twice]


def naive_axial(grid, head_dim=HEAD_DIM, temperature=100.0, step=(1.0, 1.0)):
    rows = [naive_row([0.0] * (head_dim // 2))] * grid.prefix
    for y in range(grid.height):
        for x in range(grid.width):
            place = y * step[0], x * step[1]
            rows.append(naive_row([axial_angle(*place, pair, head_dim, temperature) for pair in range(head_dim // 2)]))
    return torch.tensor(rows, dtype=torch.float64)


def logits_of(table, q, k):
    """Return the logits of one query and one key per head, (heads, d), at all positions, (heads, N, N)."""
    tokens = table.shape[1]
    turned = [apply_rot_embed_cat(t[:, None].expand(-1, tokens, -1), table) for t in (q, k)]
    return turned[0] @ turned[1].transpose(-2, -1)


def assert_depends_on_the_displacement_alone(logits, grid):
    """Check that logits of patches, (heads, H * W, H * W), are a non-constant function of the displacement."""
    found = {}
    for displacement, value in zip(grid.offsets().flatten(0, 1).tolist(), logits.flatten(1).T, strict=True):
        torch.testing.assert_close(value, found.setdefault(tuple(displacement), value), rtol=0, atol=1e-10)
    assert len(found) == (2 * grid.height - 1) * (2 * grid.width - 1)
    values = torch.stack(list(found.values()))
    assert (values.std(0) > 0.1).all()


# The table, by the formula and against timm's


@grids
@in_turn(("head_dim", "temperature"), [(8, 100.0), (12, 10.0), (4, 100.0)])
def test_the_axial_table_is_the_formula_in_float64(grid, head_dim, temperature):
    table = Rope(grid, head_dim, Frequencies(temperature)).double()(grid)
    by_hand = naive_axial(grid, head_dim, temperature)
    assert table.shape == (grid.tokens, 2 * head_dim)
    torch.testing.assert_close(table, by_hand, rtol=0, atol=1e-14)


@grids
@in_turn("head_dim", [4, 8, 32])
def test_the_axial_table_is_timms(grid, head_dim):
    theirs = RotaryEmbeddingCat(head_dim, temperature=100.0, in_pixels=False, feat_shape=[*grid.shape]).get_embed()
    ours = Rope(grid, head_dim)(grid)[grid.prefix :]
    assert ours.dtype == theirs.dtype == torch.float32
    # an angle of timm, below 8, is rounded a few times to 2^-22
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-20)


@grids
def test_the_mixed_table_is_timms_with_the_same_frequencies(grid):
    theirs = RotaryEmbeddingMixed(HEADS * HEAD_DIM, 2, HEADS, temperature=10.0, feat_shape=[*grid.shape])
    ours = MixedRope(grid, 2, HEADS, HEAD_DIM)
    ours.load_state_dict(theirs.state_dict())
    found = ours(grid)
    assert found.shape == (2, HEADS, grid.tokens, 2 * HEAD_DIM)
    torch.testing.assert_close(found[:, :, grid.prefix :], theirs.get_embed(), rtol=0, atol=2**-20)


@grids
def test_the_mixed_table_is_the_formula_in_float64(grid):
    encoding = rotary("mixed", grid)
    found = encoding(grid)
    for layer in range(2):
        for head in range(HEADS):
            for patch, (y, x) in enumerate(grid.coordinates().tolist()):
                angles = [mixed_angle(encoding.freqs, layer, head, y, x, pair) for pair in range(HEAD_DIM // 2)]
                row = torch.tensor(naive_row(angles), dtype=torch.float64)
                torch.testing.assert_close(found[layer, head, grid.prefix + patch], row, rtol=0, atol=1e-13)


# Rotated queries and keys


@both
@grids
def test_the_logits_depend_on_the_displacement_alone(name, grid):
    encoding = rotary(name, grid)
    q, k = torch.randn(2, HEADS, HEAD_DIM, dtype=torch.float64)
    for table in tables(name, encoding, grid):
        logits = logits_of(table, q, k)
        assert_depends_on_the_displacement_alone(logits[:, grid.prefix :, grid.prefix :], grid)


@both
def test_the_logits_depend_on_the_displacement_alone_at_another_grid_and_when_it_is_set(name):
    encoding = rotary(name)
    q, k = torch.randn(2, HEADS, HEAD_DIM, dtype=torch.float64)
    asked = [logits_of(table, q, k) for table in tables(name, encoding, OTHER)]
    encoding.set_grid(OTHER)
    for before, table in zip(asked, tables(name, encoding, OTHER), strict=True):
        logits = logits_of(table, q, k)
        assert_depends_on_the_displacement_alone(logits[:, 1:, 1:], OTHER)
        assert torch.equal(before, logits)


@both
def test_one_displacement_has_one_logit_whatever_the_grid(name):
    encoding = rotary(name)
    q, k = torch.randn(2, HEADS, HEAD_DIM, dtype=torch.float64)
    for small, large in zip(tables(name, encoding, BUILT), tables(name, encoding, Grid(5, 9, prefix=1)), strict=True):
        there = logits_of(large, q, k)[:, 1:, 1:].unflatten(1, (5, 9)).unflatten(3, (5, 9))
        here = logits_of(small, q, k)[:, 1:, 1:].unflatten(1, (3, 5)).unflatten(3, (3, 5))
        torch.testing.assert_close(there[:, 2:, 4:, 2:, 4:], here, rtol=0, atol=1e-10)


def test_a_logit_is_a_product_of_complex_numbers_rotated_by_the_displacement():
    """RoFormer, Eq. 12 per axis: Re sum_k q_k conj(k_k) exp(i theta_k(p_i - p_j))."""
    q, k = torch.randn(2, 1, HEAD_DIM, dtype=torch.float64)
    grid = Grid(3, 4)
    logits = logits_of(rotary("axial", grid)(grid)[None], q, k)[0]
    complex_q, complex_k = (torch.view_as_complex(t[0].unflatten(0, (-1, 2)).contiguous()).tolist() for t in (q, k))
    for i, (yi, xi) in enumerate(grid.coordinates().tolist()):
        for j, (yj, xj) in enumerate(grid.coordinates().tolist()):
            turns = [axial_angle(yi - yj, xi - xj, pair) for pair in range(HEAD_DIM // 2)]
            parts = [
                (a * b.conjugate() * complex(math.cos(t), math.sin(t))).real
                for a, b, t in zip(complex_q, complex_k, turns, strict=True)
            ]
            assert logits[i, j].item() == pytest.approx(sum(parts), abs=1e-10)


@both
@pytest.mark.parametrize("prefix", [1, 3])
def test_prefix_tokens_are_not_rotated(name, prefix):
    grid = Grid(2, 3, prefix=prefix)
    x = torch.randn(HEADS, grid.tokens, HEAD_DIM, dtype=torch.float64)
    for table in tables(name, rotary(name, grid), grid):
        turned = apply_rot_embed_cat(x, table)
        assert torch.equal(turned[:, :prefix], x[:, :prefix])
        assert (turned[:, prefix + 1 :] != x[:, prefix + 1 :]).any(-1).all()  # the patch at (0, 0) has an angle of 0
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-12)


# Another grid


@both
def test_the_angles_per_patch_stay_as_they_are_at_another_grid(name):
    encoding = rotary(name)
    small = encoding(Grid(2, 3)).unflatten(-2, (2, 3))
    large = encoding(Grid(5, 7)).unflatten(-2, (5, 7))
    torch.testing.assert_close(large[..., :2, :3, :], small, rtol=0, atol=0)


def test_interpolation_keeps_the_angles_of_the_whole_grid():
    encoding = rotary("axial", Grid(3, 5), scaling=Scaling("interpolation"))
    plain = rotary("axial", Grid(3, 5))
    large = Grid(6, 20)
    assert torch.equal(encoding(Grid(3, 5)), plain(Grid(3, 5)))
    torch.testing.assert_close(encoding(large), naive_axial(large, step=(3 / 6, 5 / 20)), rtol=0, atol=1e-14)
    every_other = encoding(large).unflatten(0, (6, 20))[::2, ::4].flatten(0, 1)
    torch.testing.assert_close(every_other, plain(Grid(3, 5)), rtol=0, atol=1e-14)


def test_interpolation_is_from_the_grid_that_it_was_made_with_however_often_one_is_set():
    encoding = rotary("axial", Grid(3, 5), scaling=Scaling("interpolation"))
    for grid in (Grid(6, 10), Grid(2, 2), Grid(9, 5)):
        encoding.set_grid(grid)
        assert encoding.grid == grid
        step = (3 / grid.height, 5 / grid.width)
        torch.testing.assert_close(encoding(grid), naive_axial(grid, step=step), rtol=0, atol=1e-14)
    torch.testing.assert_close(encoding(Grid(3, 5)), naive_axial(Grid(3, 5)), rtol=0, atol=1e-14)


def test_interpolated_logits_depend_on_the_displacement_alone():
    encoding = rotary("axial", Grid(3, 5), scaling=Scaling("interpolation"))
    q, k = torch.randn(2, 1, HEAD_DIM, dtype=torch.float64)
    assert_depends_on_the_displacement_alone(logits_of(encoding(OTHER)[None], q, k)[:, 1:, 1:], OTHER)


# Refusals


@both
@in_turn("head_dim", [6, 2, 9, 0])
def test_a_head_that_is_no_multiple_of_four_is_refused(name, head_dim):
    with pytest.raises(
        ValueError, match=rf"`head_dim` must be a multiple of 4.*got {head_dim};.*embed_dim / num_heads"
    ):
        Rope(BUILT, head_dim) if name == "axial" else MixedRope(BUILT, 1, 2, head_dim)


@in_turn("encoding", ["rope", "rope_mixed"])
def test_a_model_whose_heads_are_no_multiple_of_four_is_refused(encoding):
    with pytest.raises(ValueError, match=r"`head_dim` must be a multiple of 4.*got 6; it is embed_dim / num_heads"):
        tiny(encoding, embed_dim=18)


# Precision


def test_a_double_model_has_tables_that_are_exact_in_float64():
    model = tiny("rope").double()
    table = model.position(model.grid)[0].rotary.table
    assert table.dtype == torch.float64
    torch.testing.assert_close(table, naive_axial(model.grid), rtol=0, atol=1e-14)
    torch.testing.assert_close(model.position(OTHER)[0].rotary.table, naive_axial(OTHER), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", ["rope", "rope_mixed"])
def test_a_model_of_low_precision_keeps_tables_of_float32(encoding, dtype):
    model = tiny(encoding).to(dtype)
    for grid in (model.grid, OTHER):
        for given in model.position(grid):
            assert given.rotary.table.dtype == torch.float32
            ones = given.rotary.table[..., :HEAD_DIM] ** 2 + given.rotary.table[..., HEAD_DIM:] ** 2
            torch.testing.assert_close(ones, torch.ones_like(ones), rtol=0, atol=2**-20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_does_not_round_the_axial_table(dtype):
    encoding = Rope(BUILT, HEAD_DIM)
    before = encoding(BUILT).clone()
    assert torch.equal(encoding.to(dtype)(BUILT), before)
    encoding.set_grid(OTHER)
    assert torch.equal(encoding(OTHER), Rope(OTHER, HEAD_DIM)(OTHER))
    torch.testing.assert_close(encoding.double()(OTHER), naive_axial(OTHER), rtol=0, atol=1e-14)


# Copies and state


def test_the_state_of_an_axial_encoding_is_empty_and_that_of_a_mixed_one_its_frequencies():
    assert not rotary("axial").state_dict() and not list(rotary("axial").parameters())
    assert rotary("mixed").state_dict().keys() == {"freqs"}
    assert not [name for name in tiny("rope").state_dict() if name.startswith("position")]
    model = tiny("rope_mixed")
    assert [name for name in model.state_dict() if name.startswith("position")] == ["position.encoding.freqs"]
    assert model.position.encoding.freqs.shape == (2, DEPTH, HEADS, HEAD_DIM // 2)


def test_the_frequencies_have_timms_name():
    model, other = tiny("rope_mixed"), tiny("rope_mixed")
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("position")}
    other.load_state_dict({**state, "rope.freqs": model.position.encoding.freqs})
    assert torch.equal(other.position.encoding.freqs, model.position.encoding.freqs)


# In a model


def test_a_gradient_reaches_every_frequency_of_every_layer_and_head():
    model = draw(tiny("rope_mixed")).double()
    model(images(dtype=torch.float64)).square().sum().backward()
    assert (model.position.encoding.freqs.grad != 0).all()


def test_every_layer_has_the_one_axial_table_and_a_mixed_one_its_own():
    axial, mixed = (tiny(encoding) for encoding in ("rope", "rope_mixed"))
    told = axial.position(axial.grid)
    assert len(told) == DEPTH and all(given.rotary.table is told[0].rotary.table for given in told)
    told = mixed.position(mixed.grid)
    assert len({given.rotary.table.double().sum().item() for given in told}) == DEPTH
    assert all(given.rotary.table.shape == (HEADS, 17, 2 * HEAD_DIM) for given in told)


@pytest.mark.parametrize("encoding", ["rope", "rope_mixed"])
def test_joined_layers_are_the_first_ones_and_the_others_get_nothing(encoding):
    model = tiny(encoding, joining=spec("default", layers=2))
    told = model.position(model.grid)
    assert [given.rotary is not None for given in told] == [True, True, False]
    assert all(value is None for value in told[2])
    if encoding == "rope_mixed":
        assert model.position.encoding.freqs.shape[1] == 2


def test_two_rotary_encodings_are_refused():
    with pytest.raises(ValueError, match="`rotary` must be given by one encoding at most"):
        tiny("rope+rope_mixed")


def swin(encoding, **kwargs):
    """Return a Swin with two stages of 8 x 8 and 4 x 4 patches in windows of 4, with heads of 8 channels."""
    small = {"img_size": 32, "embed_dim": 24, "depths": (2, 1), "num_heads": (3, 6), "window_size": 4, "num_classes": 5}
    return graticule.create_model("swin_tiny_patch4_window7_224", encoding=encoding, **{**small, **kwargs})


@in_turn("encoding", ["rope", "rope_mixed"])
@in_turn("size", [(32, 32), (64, 48), (32, 96)])
def test_windows_have_the_table_of_a_window_whatever_the_image(encoding, size):
    model = draw(swin(encoding)).double().eval()
    told = model.position(model.grid_at(size))
    assert [given.rotary.table.shape[-2:] for given in told] == [(16, 16)] * 3
    for there, here in zip(told, model.position(model.grid), strict=True):
        assert torch.equal(there.rotary.table, here.rotary.table)
    if encoding == "rope":
        torch.testing.assert_close(told[0].rotary.table, naive_axial(Grid(4, 4)), rtol=0, atol=1e-14)
    assert model(images(*size, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("encoding", ["rope", "rope_mixed"])
def test_another_window_is_that_of_all_tables(encoding):
    model = swin(encoding)
    model.set_input_size((64, 48), window_size=6)
    told = model.position(model.grid)
    assert [given.rotary.table.shape[-2] for given in told] == [36, 36, 36]
    built = swin(encoding, img_size=(64, 48), window_size=6).double()
    built.load_state_dict(model.state_dict())
    model = model.double().eval()
    x = images(64, 48, dtype=torch.float64)
    torch.testing.assert_close(model(x), built.eval()(x), rtol=0, atol=1e-12)


def test_a_window_that_is_larger_than_the_grid_is_cut_to_it():
    model = swin("rope", window_size=7)
    assert [given.rotary.table.shape[0] for given in model.position(model.grid)] == [49, 49, 16]


def test_windows_are_one_graph_with_the_same_numbers():
    model = draw(swin("rope_mixed")).double().eval()
    x = images(24, 40, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)


# Initialization of the mixed encoding


@pytest.mark.parametrize(("head_dim", "temperature"), [(8, 10.0), (16, 100.0)])
def test_frequencies_start_with_the_published_speeds_in_two_directions_at_a_right_angle(head_dim, temperature):
    freqs = MixedRope(BUILT, 4, HEADS, head_dim, temperature).freqs.detach().double()
    quarter = head_dim // 4
    speeds = torch.tensor([temperature ** (-4 * k / head_dim) for k in range(quarter)], dtype=torch.float64)
    torch.testing.assert_close(freqs.norm(dim=0), speeds.repeat(2).expand(4, HEADS, -1), rtol=1e-6, atol=0)
    directions = freqs / freqs.norm(dim=0)
    first, second = directions.split(quarter, -1)
    torch.testing.assert_close(first, first[..., :1].expand_as(first), rtol=0, atol=1e-6)
    torch.testing.assert_close(second[0], -first[1], rtol=0, atol=1e-6)  # (c, s) by a quarter turn is (-s, c)
    torch.testing.assert_close(second[1], first[0], rtol=0, atol=1e-6)


def test_every_head_of_every_layer_starts_with_directions_of_its_own():
    encoding = MixedRope(BUILT, 4, HEADS, HEAD_DIM)
    angle = torch.atan2(encoding.freqs[1, ..., 0], encoding.freqs[0, ..., 0]).detach().flatten()
    assert len(set(angle.tolist())) == 4 * HEADS
    assert angle.min() < 0 < angle.max()  # of the whole circle
    before = encoding.freqs.detach().clone()
    encoding.reset_parameters()
    assert not torch.isclose(encoding.freqs.detach(), before).all(-1).any()
