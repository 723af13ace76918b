"""Laws of the relative bias, plain and normalized."""

import pytest
import torch
import torch.nn.functional as F

from graticule import Grid
from graticule.encodings.build import build_position
from graticule.encodings.forms.bias import BiasPosition, NormalizedBias
from graticule.encodings.mlp_bias import ContinuousBias
from graticule.encodings.relative_bias import RelativeBias

GRID, OTHER = Grid(3, 5, prefix=1), Grid(4, 2, prefix=1)


@pytest.mark.parametrize("grid", [GRID, Grid(4, 4, prefix=2), Grid(1, 6)])
def test_the_bias_depends_only_on_the_offset_and_on_nothing_less(grid):
    bias = RelativeBias(grid, 2).patch_bias(grid).detach()
    offsets = grid.offsets().flatten(0, 1)
    found = {}
    for offset, value in zip(offsets.tolist(), bias.flatten(1).T, strict=True):
        assert torch.equal(found.setdefault(tuple(offset), value), value)
    assert len(found) == (2 * grid.height - 1) * (2 * grid.width - 1)
    assert len({tuple(value.tolist()) for value in found.values()}) == len(found)


def test_lapes_norm_leaves_a_bias_that_starts_at_zero_at_zero():
    """As in LaPE's released code; another start is noise of a spread of 1 after the norm."""
    for std, spread in ((0, 0), (0.02, 1)):
        encoding = f"relative_bias(std={std})"
        position = build_position(Grid(4, 5, prefix=1), dim=8, depth=2, num_heads=2, encoding=encoding, joining="lape")
        for layer in position(Grid(4, 5, prefix=1)):
            bias = layer.bias[:, 1:, 1:]
            assert float(bias.detach().std()) == pytest.approx(spread, abs=0.05)
            bias.square().sum().backward()
        assert all(values.grad.isfinite().all() for values in position.parameters())


TABLES = ["learnable", "relative_bias", "factorized", "lrpe", "glrpe", "sgu", "global_filter"]


@pytest.mark.parametrize("encoding", TABLES)
def test_a_table_of_std_zero_starts_at_zero(encoding):
    position = build_position(Grid(4, 5), dim=8, depth=2, num_heads=2, encoding=f"{encoding}(std=0)")
    tables = {name: values for name, values in position.named_parameters() if "biases" not in name}
    assert tables and not any(values.any() for values in tables.values())


def test_random_features_without_a_spread_are_refused():
    with pytest.raises(ValueError, match="`std` must be positive, as features of no direction are constant, got 0"):
        build_position(Grid(4, 5), dim=8, depth=2, num_heads=2, encoding="fourier(std=0)")


def test_the_bias_of_a_row_of_three_by_hand():
    encoding = RelativeBias(Grid(1, 3, prefix=1), 1)
    with torch.no_grad():
        encoding.relative_position_bias_table.copy_(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])[:, None])
    by_hand = [[0, 0, 0, 0], [0, 0, -1, -2], [0, 1, 0, -1], [0, 2, 1, 0]]  # position of the query minus that of the key
    assert encoding(Grid(1, 3, prefix=1))[0].tolist() == by_hand


def test_the_rows_of_the_table_run_through_dy_then_dx():
    grid = Grid(2, 3)
    encoding = RelativeBias(grid, 1)
    with torch.no_grad():
        encoding.relative_position_bias_table.copy_(torch.arange(15.0)[:, None])
    dy, dx = grid.offsets().unbind(-1)
    assert torch.equal(encoding(grid)[0].detach(), ((dy + 1) * 5 + dx + 2).float())


def test_heads_have_biases_of_their_own():
    bias = RelativeBias(GRID, 3)(GRID)
    assert not torch.equal(bias[0], bias[1])
    assert RelativeBias(GRID, 2)(GRID).shape[0] == 2


def test_at_another_grid_the_bias_still_depends_only_on_the_offset():
    bias = RelativeBias(GRID, 2).patch_bias(OTHER).detach()
    found = {}
    for offset, value in zip(OTHER.offsets().flatten(0, 1).tolist(), bias.flatten(1).T, strict=True):
        assert torch.equal(found.setdefault(tuple(offset), value), value)


@pytest.mark.parametrize("new", [Grid(6, 6), Grid(2, 4)])
def test_an_even_table_stays_even_at_another_grid(new):
    """Resampling keeps the zero offset in the middle, so b(p - q) = b(q - p) is preserved."""
    encoding = RelativeBias(Grid(3, 5), 1).double()
    with torch.no_grad():
        table = encoding.relative_position_bias_table
        table.copy_(table + table.flip(0))
    bias = encoding(new)[0]
    torch.testing.assert_close(bias, bias.T, rtol=0, atol=1e-12)


def test_a_constant_table_stays_constant_at_another_grid():
    encoding = RelativeBias(Grid(3, 5), 1).double()
    torch.nn.init.constant_(encoding.relative_position_bias_table, 0.3)
    bias = encoding(Grid(6, 4))[0]
    torch.testing.assert_close(bias, torch.full_like(bias, 0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", [GRID, OTHER])
def test_the_normalised_bias_has_zero_mean_and_unit_variance_over_the_keys(grid):
    encoding = NormalizedBias(RelativeBias(GRID, 3)).double()
    plain = encoding.bias.patch_bias(grid)
    rows = encoding(grid)[:, 1:, 1:]
    torch.testing.assert_close(rows.mean(-1), torch.zeros_like(rows[..., 0]), rtol=0, atol=1e-12)
    # unit but for eps: variances of about 0.02^2 are not far above 1e-5
    variance = plain.var(-1, correction=0)
    torch.testing.assert_close(rows.var(-1, correction=0), variance / (variance + 1e-5), rtol=0, atol=1e-12)


def test_the_normalised_bias_is_unit_where_the_bias_is_large():
    encoding = NormalizedBias(RelativeBias(GRID, 3)).double()
    torch.nn.init.normal_(encoding.bias.relative_position_bias_table, std=100.0)
    rows = encoding(GRID)[:, 1:, 1:]
    torch.testing.assert_close(rows.var(-1, correction=0), torch.ones_like(rows[..., 0]), rtol=0, atol=1e-6)


def test_the_normalised_bias_scales_and_shifts_each_key():
    encoding = NormalizedBias(RelativeBias(GRID, 3)).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    plain = encoding.bias.patch_bias(GRID)
    by_hand = F.layer_norm(plain, (15,), eps=1e-5) * encoding.norm.weight + encoding.norm.bias
    torch.testing.assert_close(encoding(GRID)[:, 1:, 1:], by_hand, rtol=0, atol=1e-12)


def test_the_normalised_bias_does_not_see_a_constant_added_to_the_bias():
    encoding = NormalizedBias(RelativeBias(GRID, 3)).double()
    before = encoding(GRID).detach().clone()
    with torch.no_grad():
        encoding.bias.relative_position_bias_table.add_(3.0)
    torch.testing.assert_close(encoding(GRID), before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("eps", [1e-5, 1e-1])
def test_two_epsilons_give_two_normalised_biases(eps):
    bias = RelativeBias(GRID, 3)
    by_hand = F.layer_norm(bias.patch_bias(GRID), (15,), eps=eps)
    torch.testing.assert_close(NormalizedBias(bias, eps)(GRID)[:, 1:, 1:], by_hand)


def test_only_the_norm_of_a_bias_is_resampled_and_not_other_vectors_of_a_checkpoint():
    """The hidden layer of a continuous bias has a vector of 256 numbers, which is also that of a grid of 16 x 16."""
    position = BiasPosition([NormalizedBias(ContinuousBias(Grid(4, 4), 2, hidden=256))], 1)
    hidden = torch.randn(256)
    assert position.fit("encodings.0.bias.cpb_mlp.0.bias", hidden) is hidden
    assert position.fit("encodings.0.norm.weight", hidden).shape == (16,)
