"""Laws of PaPE: its polynomial is the sum of its parabolas, and depends only on displacements."""

import pytest
import torch
import torch.nn.functional as F

import graticule
from graticule import Grid
from graticule.encodings.pape import Pape
from graticule.layers.attention import Attention
from graticule.position.layer import LayerPosition
from tiny import draw, images, tiny

DIM, HEADS, GRID = 12, 3, Grid(3, 5, prefix=2)


def built(**options):
    torch.manual_seed(0)
    encoding = Pape(GRID, DIM, HEADS, DIM // HEADS, **{"parabolas": 4, **options}).double()
    return encoding, torch.randn(2, GRID.tokens, DIM, dtype=torch.float64)


def sum_of_parabolas(encoding, x, grid):
    """Compute the bias pair by pair by the formula."""
    displacement = -grid.offsets().double()  # p_j - p_i
    x = x[:, grid.prefix :]
    if encoding.rotation_invariant:
        t = displacement.norm(dim=-1) * encoding.position_scales[:, None, None]  # (h, N, N)
        bias = -F.softplus(encoding.a(x)).mT[..., None] * t.square()
    else:
        a, b = encoding.ab(x).unflatten(-1, (2, HEADS, -1)).unbind(2)  # (B, N, h, M)
        t = torch.einsum("ijc,hmc->hijm", displacement, encoding.directions.weight.unflatten(0, (HEADS, -1)))
        bias = torch.einsum("bihm,hijm->bhij", -F.softplus(a), t**2) - torch.einsum("bihm,hijm->bhij", b, t)
    return grid.with_prefix_bias(bias / encoding.head_dim**0.5)


@pytest.mark.parametrize("rotation_invariant", [False, True])
def test_the_factors_multiply_to_the_sum_of_parabolas_and_so_do_their_gradients(rotation_invariant):
    encoding, x = built(rotation_invariant=rotation_invariant)
    expected = sum_of_parabolas(encoding, x, GRID)
    factors = encoding(GRID).token_bias(x)
    assert factors.queries.shape == (2, HEADS, GRID.tokens, 6) and factors.keys.shape == (1, 1, GRID.tokens, 6)
    torch.testing.assert_close(factors.table(), expected, rtol=0, atol=1e-12)
    output, wanted = torch.randn_like(expected), list(encoding.parameters())
    grads = [torch.autograd.grad((bias * output).sum(), wanted) for bias in (factors.table(), expected)]
    for given, other in zip(*grads, strict=True):
        torch.testing.assert_close(given, other, rtol=1e-12, atol=1e-10)


def test_attention_with_its_channels_is_attention_with_the_table_of_each_sample():
    encoding, x = built()
    attention = Attention(DIM, HEADS).double()
    table = sum_of_parabolas(encoding, x, GRID)
    expected = attention(x, LayerPosition(bias=lambda q: table))
    torch.testing.assert_close(attention(x, encoding(GRID)), expected, rtol=0, atol=1e-12)
    more = torch.randn(HEADS, GRID.tokens, GRID.tokens, dtype=torch.float64)
    both = attention(x, encoding(GRID)._replace(bias=more))
    torch.testing.assert_close(both, attention(x, LayerPosition(bias=lambda q: table + more)), rtol=0, atol=1e-12)


def test_the_rotation_invariant_form_is_the_same_at_all_patches_at_one_distance_and_never_positive():
    encoding, x = built(rotation_invariant=True)
    bias = encoding(Grid(5, 5)).token_bias(x[:, :1].expand(-1, 25, -1)).table()
    around = bias[:, :, 12, [11, 13, 7, 17]]  # left, right, above and below the center
    torch.testing.assert_close(around, around[..., :1].expand_as(around), rtol=0, atol=1e-12)
    assert bias.max() <= 1e-12


def test_a_part_of_the_tokens_gets_the_rows_of_the_whole():
    encoding, x = built()
    whole = encoding(GRID)
    part = whole.part(4, 9).token_bias(x[:, 4:9]).table()
    torch.testing.assert_close(part, whole.token_bias(x).table()[..., 4:9, :9], rtol=0, atol=1e-12)


def test_a_folded_model_computes_the_same_and_so_does_a_window():
    model = draw(tiny("pape(parabolas=3)")).eval()
    x = images()
    expected = model(x)
    assert torch.equal(graticule.fold(model)(x), expected)
    swin = graticule.create_model(
        "swin_tiny_patch4_window7_224",
        **{"img_size": 32, "embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4},
        encoding="pape(parabolas=3)",
        num_classes=5,
    )
    assert swin(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_it_starts_near_the_papers_strength_and_two_of_them_are_refused():
    torch.manual_seed(0)
    bias = Pape(Grid(3, 3), 192, 3, 64)(Grid(3, 3)).token_bias(torch.randn(1, 9, 192)).table()
    # softplus(0) times 50 parabolas times the mean of w^2, 1 / 6, over the root of 64: about 0.7 |p|^2
    assert -1.5 < bias[0, :, 4, [1, 3, 5, 7]].mean() < -0.4
    one = Pape(GRID, DIM, HEADS, 4)(GRID)
    with pytest.raises(ValueError, match="`token_bias` must be given by one encoding at most, got two"):
        one.merge(one)
    with pytest.raises(ValueError, match="`parabolas` must be at least 1, got 0"):
        Pape(GRID, DIM, HEADS, 4, parabolas=0)
