"""Shapes, dtypes and grids of encodings alone; graticule.testing has the contract of an encoding in a model."""

import pytest
import torch

from graticule import Grid
from graticule.encodings.alibi import Alibi, Kerple
from graticule.encodings.bucketed import BucketedBias
from graticule.encodings.fire import Fire
from graticule.encodings.forms.bias import NormalizedBias
from graticule.encodings.learnable import Learnable
from graticule.encodings.relative_bias import RelativeBias
from graticule.encodings.sandwich import Sandwich
from graticule.encodings.sinusoidal import Sinusoidal1d, Sinusoidal2d
from in_turn import in_turn

BUILT, OTHER = Grid(3, 5, prefix=1), Grid(4, 2, prefix=1)
DIM, HEADS = 12, 3

ENCODINGS = {
    "learnable": lambda grid: Learnable(grid, DIM),
    "sinusoidal_1d": lambda grid: Sinusoidal1d(grid, DIM),
    "sinusoidal_2d": lambda grid: Sinusoidal2d(grid, DIM),
    "relative_bias": lambda grid: RelativeBias(grid, HEADS),
    "normalized_bias": lambda grid: NormalizedBias(RelativeBias(grid, HEADS)),
    "bucketed_bias": lambda grid: BucketedBias(grid, HEADS),
    "alibi": lambda grid: Alibi(grid, HEADS),
    "alibi, learned": lambda grid: Alibi(grid, HEADS, slopes="learned"),
    "kerple": lambda grid: Kerple(grid, HEADS),
    "fire": lambda grid: Fire(grid, HEADS),
    "sandwich": lambda grid: Sandwich(grid, HEADS, channels=8),
}
ABSOLUTE = ("learnable", "sinusoidal_1d", "sinusoidal_2d")

every = in_turn("name", ENCODINGS)


def drawn(name, grid=BUILT):
    encoding = ENCODINGS[name](grid)
    with torch.no_grad():
        for parameter in encoding.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return encoding


def documented_shape(name, grid):
    return (grid.tokens, DIM) if name in ABSOLUTE else (HEADS, grid.tokens, grid.tokens)


@every
@pytest.mark.parametrize("grid", [BUILT, OTHER, Grid(3, 5, prefix=2), Grid(1, 7)])
def test_the_shape_is_the_documented_one_where_it_was_built(name, grid):
    assert ENCODINGS[name](grid)(grid).shape == documented_shape(name, grid)


@pytest.mark.parametrize("name", ["sinusoidal_1d", "sinusoidal_2d"])
def test_a_formula_gives_for_another_grid_what_an_encoding_built_for_it_gives(name):
    assert torch.equal(ENCODINGS[name](BUILT)(OTHER), ENCODINGS[name](OTHER)(OTHER))


@every
@pytest.mark.parametrize("grid", [BUILT, OTHER])
def test_bfloat16_stays_bfloat16_and_agrees_with_float32(name, grid):
    encoding = drawn(name)
    exact = encoding(grid)
    rounded = encoding.bfloat16()(grid)
    assert exact.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    # bfloat16 has 8 bits; a norm divides by a standard deviation of about one, and its scale is below 4
    torch.testing.assert_close(rounded.float(), exact, rtol=2**-6, atol=2**-4)


@every
def test_setting_a_grid_leaves_the_parameters_of_an_encoding_built_for_it(name):
    encoding, built = drawn(name), ENCODINGS[name](OTHER)
    encoding.set_grid(OTHER)
    shapes = {key: value.shape for key, value in encoding.state_dict().items()}
    assert shapes == {key: value.shape for key, value in built.state_dict().items()}
    built.load_state_dict(encoding.state_dict())
    assert torch.equal(built(OTHER), encoding(OTHER))


@every
def test_setting_the_grid_that_is_set_changes_nothing(name):
    encoding = drawn(name).double()
    before = encoding(BUILT).detach().clone()
    encoding.set_grid(BUILT)
    torch.testing.assert_close(encoding(BUILT), before, rtol=0, atol=1e-12)


@every
@pytest.mark.parametrize("trained", [True, False])
def test_setting_a_grid_keeps_what_is_trained_and_what_is_frozen(name, trained):
    encoding = drawn(name).requires_grad_(trained)
    encoding.set_grid(OTHER)
    assert {parameter.requires_grad for parameter in encoding.parameters()} <= {trained}


@every
def test_setting_a_grid_keeps_the_dtype(name):
    encoding = drawn(name).double()
    encoding.set_grid(OTHER)
    assert {parameter.dtype for parameter in encoding.parameters()} <= {torch.float64}
    assert encoding(OTHER).dtype == torch.float64


@every
def test_the_description_names_the_grid(name):
    assert "(3, 5" in repr(ENCODINGS[name](BUILT))
