"""The share of position: exact cases, no bias, the coverage of its intervals, and models."""

import math

import numpy as np
import pytest
import timm
import torch
from torch import nn

import graticule
import tiny
from graticule.analysis.share import (
    ShareSums,
    additive_basis,
    linear_basis,
    mean_estimate,
    proportion_estimate,
    spatial_decay,
)
from graticule.position.grid import Grid
from graticule.system.tables import plain
from in_turn import refusals

GRID = Grid(3, 4)


def shares(tokens, grid=GRID):
    return ShareSums(grid).add(tokens).shares()


def planted(images, table, noise=1.0, seed=0):
    """Return tokens that are a table and content without position, (images, H * W, D)."""
    drawn = torch.randn(images, *table.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return table + noise * drawn


@pytest.mark.parametrize("grid", [GRID, Grid(1, 5), Grid(2, 2), Grid(2, 4, 3)])
def test_bases_are_orthonormal_and_hold_functions_of_each_axis_but_no_product(grid):
    axes = Grid(*grid.shape).coordinates().double().unbind(1)
    sides = [side for side in grid.shape if side > 1]
    powers = sum(axis**power for power, axis in enumerate(axes, start=2))
    for basis, size, functions in (
        (linear_basis(grid), len(sides), axes),
        (additive_basis(grid), sum(sides) - len(sides), [powers]),
    ):
        assert basis.shape == (grid.patches, size)
        torch.testing.assert_close(basis.T @ basis, torch.eye(size, dtype=torch.float64))
        assert basis.sum(0).abs().max() < 1e-12
        for function in functions:
            centered = function - function.mean()
            torch.testing.assert_close(basis @ (basis.T @ centered), centered)
    product = math.prod(axis - axis.mean() for axis in axes)
    assert (additive_basis(grid).T @ product).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("of", "linear", "additive"),
    [
        (lambda row, column: row - 2 * column, 1, 1),
        (lambda row, column: (row - 1) ** 2, 0, 1),
        (lambda row, column: (row - 1) * (column - 1.5), 0, 0),
    ],
)
def test_parts_of_the_share_are_those_of_the_function_of_the_place(of, linear, additive):
    """Image i is the constant i plus the table, so total is |T|^2 / (|T|^2 + variance of i)."""
    row, column = Grid(3, 4).coordinates().double().unbind(1)
    table = of(row, column)[:, None] * torch.tensor([1.0, -2.0], dtype=torch.float64)
    offsets = torch.arange(5, dtype=torch.float64)[:, None, None].expand(-1, 1, 2)
    result = shares(table + offsets)
    of_table = float((table - table.mean(0)).square().sum(1).mean())
    of_images = 2 * float(torch.arange(5.0).var())
    total = of_table / (of_table + of_images)
    assert result["total"][0] == pytest.approx(total, abs=1e-12)
    assert result["linear"][0] == pytest.approx(linear * total, abs=1e-12)
    assert result["additive"][0] == pytest.approx(additive * total, abs=1e-12)
    assert result["rest"][0] == pytest.approx((1 - linear) * total, abs=1e-12)


@pytest.mark.parametrize("amplitude", [*(pytest.param(a, marks=pytest.mark.slow) for a in (0.0, 0.3)), 2.0])
def test_shares_have_no_bias_and_intervals_hold_the_truth_in_95_percent(amplitude):
    """300 draws of 8 images, within 3 standard errors; with little or no position the jackknife is too wide."""
    table = amplitude * torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    between = float((table - table.mean(0)).square().sum(1).mean())
    truth = between / (between + 5)
    result = np.array([shares(planted(8, table, seed=seed))["total"] for seed in range(300)])
    assert abs(result[:, 0].mean() - truth) < 3 * result[:, 0].std() / 300**0.5 + 1e-3 * truth
    covered = ((result[:, 1] <= truth) & (truth <= result[:, 2])).mean()
    error = (0.95 * 0.05 / 300) ** 0.5
    assert covered > 0.95 - 3 * error and (covered < 0.95 + 3 * error or amplitude < 1)


def test_decay_is_one_where_similarity_falls_linearly_with_distance():
    def on_a_line(near, far):
        gram = torch.tensor([[1, near, far], [near, 1, near], [far, near, 1]], dtype=torch.float64)
        return torch.linalg.cholesky(gram)[None]

    assert float(spatial_decay(on_a_line(0.5, 0.2), Grid(1, 3))) == pytest.approx(1)
    assert float(spatial_decay(on_a_line(0.2, 0.5), Grid(1, 3))) == pytest.approx(-1)
    assert spatial_decay(torch.ones(1, 12, 2), GRID).isnan().all()  # nothing varies
    wide = torch.rand(2, 900, 3, generator=torch.Generator().manual_seed(0))
    assert spatial_decay(wide, Grid(30, 30)).abs().max() < 0.1  # only some of its patches are used


def test_a_model_without_position_has_none_and_a_table_is_found_in_every_layer():
    images = tiny.images(40, 48, batch=24)
    none = graticule.position_share(tiny.draw(tiny.tiny("none", class_token=False, global_pool="avg")), images)
    assert (none.total.low < 0).all() and (none.total.high < 0.02).all() and (none.total.high > 0).all()
    model = tiny.draw(tiny.tiny("learnable"))
    for parameter in model.position.parameters():
        parameter.data *= 10
    table = graticule.position_share(model, images)
    assert table.names == ["0", "1", "2", "features"] and (table.total.low > 0.05).all()
    np.testing.assert_allclose(table.rest.value, table.total.value - table.linear.value, atol=1e-12)
    assert (table.additive.value > table.linear.value).all() and (table.additive.value < table.total.value).all()


def test_shares_of_a_model_of_timm_and_of_transformers_are_those_of_ours():
    kwargs = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    stock = tiny.draw(timm.create_model("vit_tiny_patch16_224", **kwargs))
    ours = graticule.create_model("vit_tiny_patch16_224", **kwargs)
    ours.load_state_dict(stock.state_dict())
    images = tiny.images(batch=5)
    a, b = (graticule.position_share(model, images) for model in (ours, stock))
    assert a.names == b.names == ["0", "1", "features"]
    np.testing.assert_allclose(a.total.value, b.total.value, rtol=1e-4)
    np.testing.assert_allclose(a.decay.value, b.decay.value, rtol=1e-4)

    class Wrapped(nn.Module):
        """Returns an output as models of transformers do."""

        def __init__(self):
            super().__init__()
            self.blocks, self.img_size, self.num_prefix_tokens = stock.blocks, (32, 32), 1

        def forward(self, images):
            return type("Output", (), {"last_hidden_state": stock.forward_features(images)})()

    np.testing.assert_allclose(graticule.position_share(Wrapped(), images).total.value, b.total.value, rtol=1e-6)


def test_other_sizes_are_those_of_resized_images():
    model, images = tiny.draw(tiny.tiny("learnable")), tiny.images(batch=4)
    result = graticule.position_share(model, images, [(32, 32), (48, 40)], batch_size=3)
    assert list(result.others) == [(48, 40)]
    resized = nn.functional.interpolate(images, (48, 40), mode="bilinear", antialias=True)
    alone = graticule.position_share(model, resized)
    np.testing.assert_allclose(result.others[48, 40].total.value, alone.total.value, rtol=1e-5)
    record = plain(result)
    assert record["others"]["(48, 40)"]["img_size"] == [48, 40] and len(result.summary()) == 5
    assert record["total"]["low"] == result.total.low.tolist()


def test_the_interval_of_an_accuracy_stays_within_0_and_100():
    # Wilson for 35 of 36, z = 1.959964: (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    right = np.arange(36) > 0
    z, n, p = 1.959964, 36, 35 / 36
    center, reach = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    expected = (p, (center - reach) / (1 + z * z / n), (center + reach) / (1 + z * z / n))
    assert proportion_estimate(right) == pytest.approx(expected, abs=1e-6) and expected[2] < 1
    shares = proportion_estimate(np.array([1.0, 1.0, 0.5]))  # shares of patches have Student's interval, cut at 1
    assert shares.high == 1 and shares.low == pytest.approx(mean_estimate(np.array([1.0, 1.0, 0.5])).low)


def test_repeated_images_are_left_out_with_a_warning():
    model = tiny.build("ViT, DeiT").eval()
    two = tiny.images(batch=2)
    expected = graticule.position_share(model, two)
    with pytest.warns(UserWarning, match=r"^2 of the 6 images differ; the others are left out\.$"):
        share = graticule.position_share(model, two[[0, 1, 0, 0, 1, 1]])
    assert share.images == 2 and share.summary() == expected.summary()


def test_repeated_images_are_left_out_of_an_audit_and_a_removal_with_their_labels():
    model = tiny.build("ViT, DeiT").eval()
    images, labels = tiny.images(batch=12), torch.arange(12) % 3
    again = [*range(12), 0, 0, 5]
    for measure in (
        lambda x, y: graticule.audit(model, x, labels=y, timed=False).record(),
        lambda x, y: graticule.debias(model, x, "rows_columns", labels=y).certificate.to_json(),
    ):
        expected = measure(images, labels)
        with pytest.warns(UserWarning, match=r"^12 of the 15 images differ; the others are left out\.$"):
            assert measure(images[again], labels[again]) == expected
    with (
        pytest.warns(UserWarning, match="^2 of the 12 images differ"),
        pytest.raises(ValueError, match=r"`images` must be .* with B at least 9"),
    ):
        graticule.debias(model, images[[0, 1] * 6])


test_images_that_cannot_be_measured_are_refused = refusals(
    (torch.randn(2, 3, 32, 32) * 1e20, "`images` must be normalized, got values for which"),
    (torch.randn(2, 3, 32, 32).to_sparse(), "`images` must be a dense tensor with values, got one that is sparse"),
    (torch.empty(2, 3, 32, 32, device="meta"), "`images` must be a dense tensor with values, .* without values"),
    (
        torch.nested.nested_tensor([torch.randn(3, 32, 32)] * 2, layout=torch.jagged),
        "`images` must be a dense tensor .* is nested",
    ),
    call=lambda wrong: graticule.position_share(tiny.build("ViT, DeiT").eval(), wrong),
)
