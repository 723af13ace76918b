"""Rotary frequencies on grids larger than in training: interpolation, NTK and YaRN on two axes."""

import math

import pytest
import torch

import graticule
from graticule import Grid
from graticule.encodings.forms.scaling import METHODS, Scaling
from graticule.encodings.mrope import Mrope
from graticule.encodings.pope import Pope
from graticule.encodings.rope import Frequencies, Rope, Rope1d
from graticule.encodings.rope_directions import GoldenGateRope, MixedRope
from in_turn import in_turn
from tiny import assert_same, draw, images, tiny

BUILT, LARGE = Grid(4, 6, prefix=1), Grid(8, 18, prefix=1)
HEAD_DIM, BASE = 16, 100.0
KINDS = ("interpolation", "ntk", "yarn")
EVERY = tuple(METHODS)

BUILD = {
    "rope": lambda scaling, grid=BUILT: Rope(grid, HEAD_DIM, Frequencies(BASE), scaling=scaling),
    "rope_1d": lambda scaling, grid=BUILT: Rope1d(grid, HEAD_DIM, scaling=scaling),
    "mrope": lambda scaling, grid=BUILT: Mrope(grid, HEAD_DIM, scaling=scaling),
    "pope": lambda scaling, grid=BUILT: Pope(grid, 2, 2, HEAD_DIM, scaling=scaling),
}


def bands(encoding, grid):
    """Return the frequencies of (rows, columns) at a grid, in radians per patch, read from the angles."""
    angles = encoding.angles(grid).unflatten(0, grid.shape)
    return angles[1, 0, : HEAD_DIM // 4].tolist(), angles[0, 1, HEAD_DIM // 4 :].tolist()


def formula(kind, s, length, k, n=HEAD_DIM // 4):
    """Compute the scaled frequency by the formulas of the papers, for one axis."""
    omega = BASE ** (-k / n)
    if kind == "interpolation":
        return omega / s
    if kind == "ntk":
        return (BASE * s ** (n / (n - 1))) ** (-k / n)
    turns = length * omega / (2 * math.pi)
    share = min(max((turns - 0.25) / (1 - 0.25), 0), 1)
    return (1 - share) * omega / s + share * omega


@pytest.mark.parametrize("kind", KINDS)
def test_every_axis_is_scaled_by_its_own_ratio_and_the_formula(kind):
    encoding = BUILD["rope"](Scaling(kind, ramp=(0.25, 1.0) if kind == "yarn" else None))
    for grid in (LARGE, Grid(4, 18, prefix=1), Grid(12, 6, prefix=1)):
        for actual, axis in zip(bands(encoding, grid), (0, 1), strict=True):
            s = grid.shape[axis] / BUILT.shape[axis]
            expected = [formula(kind, s, BUILT.shape[axis], k) for k in range(HEAD_DIM // 4)]
            assert actual == pytest.approx(expected, rel=1e-12)


def test_ntk_keeps_the_highest_frequency_and_interpolates_the_lowest():
    for name, build in BUILD.items():
        plain, scaled = build(Scaling()), build(Scaling("ntk"))
        grid = Grid(8, 12, prefix=1)  # twice as long on both axes
        s = 4 if name == "rope_1d" else 2
        first, second = (encoding.scaled(grid) for encoding in (plain, scaled))
        lengths, after = first.norm(dim=-1), second.norm(dim=-1)
        moving = lengths > 0
        ratio = after[moving] / lengths[moving]
        assert ratio[lengths[moving].argmax()].item() == pytest.approx(1, rel=1e-12), name
        assert ratio[lengths[moving].argmin()].item() == pytest.approx(1 / s, rel=1e-12), name


@in_turn("kind", EVERY)
@in_turn("name", BUILD)
def test_at_the_reference_grid_nothing_changes(name, kind):
    plain = BUILD[name](Scaling()).double()
    for scaled, grid in ((BUILD[name](Scaling(kind)), BUILT), (BUILD[name](Scaling(kind, reference=(8, 18))), LARGE)):
        assert torch.equal(scaled.double()(grid), plain(grid))
        assert scaled.query_scale(grid) is None


@pytest.mark.parametrize("kind", EVERY[1:])
def test_a_smaller_grid_is_not_scaled(kind):
    plain, scaled = (BUILD["rope"](scaling).double() for scaling in (Scaling(), Scaling(kind)))
    small = Grid(2, 5, prefix=1)
    assert torch.equal(scaled(small), plain(small)) and scaled.query_scale(small) is None
    interpolated = BUILD["rope"](Scaling("interpolation"))
    assert bands(interpolated, small)[0] == pytest.approx([2 * f for f in bands(plain, small)[0]])


@pytest.mark.parametrize("kind", EVERY)
def test_the_reference_stays_that_of_training_however_often_a_grid_is_set(kind):
    encoding, other = BUILD["rope"](Scaling(kind)).double(), BUILD["rope"](Scaling(kind)).double()
    encoding.set_grid(Grid(9, 9, prefix=1))
    encoding.set_grid(LARGE)
    assert torch.equal(encoding(LARGE), other(LARGE)) and torch.equal(encoding(BUILT), other(BUILT))


def test_the_temperature_of_yarn_is_that_of_the_paper_for_the_ratio_of_tokens():
    for build, ratio in ((BUILD["rope"], 6), (BUILD["rope_1d"], 6)):
        scale = build(Scaling("yarn")).double().query_scale(LARGE)
        assert scale.shape == (LARGE.tokens,) and scale.dtype == torch.float64
        torch.testing.assert_close(scale, torch.full_like(scale, (0.1 * math.log(ratio) + 1) ** 2))
    for kind in set(EVERY) - {"yarn"}:
        assert BUILD["rope"](Scaling(kind)).query_scale(LARGE) is None


def test_learned_directions_are_interpolated():
    plain, scaled = MixedRope(BUILT, 2, 2, HEAD_DIM), MixedRope(BUILT, 2, 2, HEAD_DIM, scaling=Scaling("interpolation"))
    scaled.load_state_dict({**scaled.state_dict(), **plain.state_dict()})
    large = Grid(8, 12, prefix=1)
    every_other = scaled(large)[:, :, 1:].unflatten(2, (8, 12))[:, :, ::2, ::2].flatten(2, 3)
    assert_same(every_other, plain(BUILT)[:, :, 1:], 1e-5)


def test_golden_gate_directions_are_scaled_in_patches():
    encoding = GoldenGateRope(BUILT, 2, 8, coordinates=Rope(BUILT, 8).coordinates, scaling=Scaling("ntk"))
    lengths = encoding.scaled(Grid(8, 12)).norm(dim=-1)
    torch.testing.assert_close(lengths[:, [0, -1]], torch.tensor([[0.1, 20.0]] * 2, dtype=torch.float64))


def test_one_frequency_has_no_order_for_ntk():
    with pytest.raises(ValueError, match="`scaling` must not be 'ntk' with one frequency"):
        Rope(BUILT, 4, scaling=Scaling("ntk"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_scales_at_another_size_folded_or_set(kind):
    model = draw(tiny(f"rope(scaling='{kind}')")).double().eval()
    plain = tiny("rope").double().eval()
    plain.load_state_dict(dict(model.named_parameters()))
    same, large = images(dtype=torch.float64), images(64, 72, dtype=torch.float64)
    assert torch.equal(model(same), plain(same))
    before = model(large)
    assert (before - plain(large)).abs().max() > 1e-3
    assert_same(graticule.fold(model, (64, 72))(large), before, 1e-12)
    graticule.unfold(model).set_input_size((64, 72))
    assert_same(model(large), before, 1e-12)
