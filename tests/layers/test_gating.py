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
