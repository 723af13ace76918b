"""Laws of the absolute encodings, and parity with the tables of two references."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graticule import Grid
from graticule.encodings.learnable import Learnable
from graticule.encodings.sinusoidal import Sinusoidal1d, Sinusoidal2d
from in_turn import refusals
from tiny import assert_same

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"


def table_of(encoding):
    """Compute the formula in float64, not rounded to the dtype of the module."""
    return encoding.formula(encoding.grid)


def test_sinusoidal_1d_by_hand():
    table = table_of(Sinusoidal1d(Grid(1, 3), 4, temperature=100.0))
    places = torch.arange(3, dtype=torch.float64)
    by_hand = torch.stack([places.sin(), places.cos(), (places / 10).sin(), (places / 10).cos()], -1)
    assert_same(table, by_hand, 1e-15)


@pytest.mark.parametrize("kind", [Sinusoidal1d, Sinusoidal2d])
def test_a_larger_grid_starts_with_the_table_of_a_smaller_one(kind):
    """A formula is not resampled: the same position has the same row, whatever the grid of construction."""
    long, short = Grid(1, 9, prefix=1), Grid(1, 4, prefix=1)
    assert torch.equal(kind(short, 8)(long)[:5], kind(long, 8)(short))


SPREAD = r"`spread` must be positive, and the grid must have two patches or more, got"
test_a_dim_that_the_formula_cannot_fill_and_a_spread_that_no_factor_gives_are_refused = refusals(
    (lambda: Sinusoidal1d(Grid(3, 5), 5), "`dim` must be a multiple of 2 .*got 5"),
    (lambda: Sinusoidal2d(Grid(3, 5), 6), "`dim` must be a multiple of 4 .*got 6"),
    (lambda: Learnable(Grid(3, 5), 0), "`dim` must be at least 1, got 0"),
    (lambda: Sinusoidal2d(Grid(3, 5), 16, spread=0.0), SPREAD),
    (lambda: Sinusoidal2d(Grid(3, 5), 16, spread=-1.0), SPREAD),
    (lambda: Sinusoidal2d(Grid(1, 1, prefix=1), 16, spread=1.0), SPREAD),
)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("lape_sin1d_basic", Sinusoidal1d),
        ("lape_sin1d_lape", Sinusoidal1d),
        ("lape_sin2d_share", Sinusoidal2d),
        ("lape_sin2d_lape", Sinusoidal2d),
    ],
)
def test_the_table_is_that_of_lapes_code_but_for_its_float32_angles(case, kind):
    grid = Grid(4, 4, prefix=1)
    reference = load_file(GOLDEN / f"{case}.safetensors")["weight.pos_embed"].double().reshape(17, 24)
    ours = table_of(kind(grid, 24))
    # The largest difference is 2.3e-7 in one dimension, and 2.9e-8 in two, which is the rounding of the stored values.
    # Their angle, up to 16 radians, is a float32: half a unit in the last place of 8..16 is 2^-21 = 4.8e-7; one more
    # rounding, of a sine, is 2^-25. 1e-6 leaves a factor of two for the rounded frequency.
    assert_same(ours, reference, 1e-6)


@pytest.mark.parametrize("shape_dim", [(14, 14, 192), (3, 5, 24), (4, 4, 16)])
def test_timms_two_dimensional_table_has_the_same_channels_in_another_order(shape_dim):
    height, width, dim = shape_dim
    name = f"grid_{height}x{width}_dim_{dim}"
    reference = load_file(GOLDEN / "sincos2d_timm_float64.safetensors")[name]
    ours = table_of(Sinusoidal2d(Grid(height, width), dim))
    # timm: the sines of y, the sines of x, then the cosines; ours: x then y, sine and cosine interleaved
    y, x = reference.unflatten(-1, (2, 2, dim // 4)).unbind(2)  # (N, sine or cosine, D/4) each
    reordered = torch.stack([x, y], 1).transpose(-2, -1).flatten(1)
    assert_same(ours, reordered, 1e-12)


@pytest.mark.parametrize("make", [Sinusoidal1d, Sinusoidal2d])
def test_spread_is_the_deviation_of_patches_from_their_mean_and_one_factor_on_every_grid(make):
    grid, other = Grid(3, 5, prefix=1), Grid(6, 4, prefix=1)
    plain, scaled = make(grid, 16), make(grid, 16, spread=0.7)
    rows = scaled(grid)[1:].double()
    torch.testing.assert_close((rows - rows.mean(0)).square().mean().sqrt().item(), 0.7, rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled(grid), plain(grid) * scaled.factor)
    torch.testing.assert_close(scaled(other), plain(other) * scaled.factor)
    with torch.device("meta"):
        assert make(grid, 16, spread=0.7).factor == scaled.factor
