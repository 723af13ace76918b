"""Gating units: mixing of one half, and its combination with the other."""

import pytest
import torch
from torch import nn

from graticule.layers.gating import GatingUnit, mix_tokens
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.windows import Windows
from in_turn import refusals
from tiny import assert_same


def naive(x, weights, bias):
    y = torch.zeros_like(x)
    size = x.shape[-1] // len(weights)
    for g, w in enumerate(weights):
        for i in range(x.shape[1]):
            for j in range(x.shape[1]):
                y[:, i, g * size : (g + 1) * size] += w[i, j] * x[:, j, g * size : (g + 1) * size]
            y[:, i, g * size : (g + 1) * size] += bias[i]
    return y


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_group_of_channels_is_mixed_by_weights_of_its_own(groups):
    x, weights = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(groups, 6, 6, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    assert_same(mix_tokens(x, weights, bias), naive(x, weights, bias), 1e-12)


@pytest.mark.parametrize("windows", [None, Windows(Grid(3, 5), Grid(2, 2), (1, 1))])
def test_an_empty_batch_is_mixed_to_an_empty_batch(windows):
    tokens = 15 if windows is None else 4
    mixed = mix_tokens(torch.rand(0, 15, 6), torch.rand(2, tokens, tokens), torch.rand(tokens), windows)
    assert mixed.shape == (0, 15, 6)


@pytest.mark.parametrize("norm", [None, nn.LayerNorm])
def test_the_halves_come_together_as_figure_3_draws_them(norm):
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    position = LayerPosition(
        mixing=torch.randn(2, 6, 6, dtype=torch.float64), spatial_bias=torch.randn(6, dtype=torch.float64)
    )

    def mixed(v):
        return mix_tokens(v if norm is None else nn.functional.layer_norm(v, v.shape[-1:]), *position[-2:])

    u, v = x[..., :4], x[..., 4:]
    expected = {
        "gate": u * mixed(v),
        "add": u + mixed(v),
        "concat": torch.cat([u, mixed(v)], -1),
        "nonsplit": x * mixed(x),
    }
    for combine, output in expected.items():
        unit = GatingUnit(8, norm, combine).double()
        assert_same(unit(x, position), output, 1e-12)
        assert unit.out_dim == output.shape[-1]


test_invalid_arguments_are_refused = refusals(
    (lambda: GatingUnit(7), "`dim` must be even"),
    (lambda: GatingUnit(8, None, "mul"), "`combine`"),
    (lambda: GatingUnit(8)(torch.zeros(1, 4, 8), LayerPosition()), "mixing encoding"),
)
