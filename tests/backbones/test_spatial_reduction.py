"""Attention with keys on a coarser grid, compared with the formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graticule import Grid, LayerPosition
from graticule.backbones.pvt import SpatialReductionAttention
from graticule.layers.attention import Attention
from in_turn import in_turn
from tiny import assert_same

B, D, HEADS = 2, 24, 3
HEAD = D // HEADS
NOWHERE = LayerPosition()
CASES = [(1, Grid(3, 5)), (2, Grid(4, 6)), (4, Grid(4, 12)), (4, Grid(8, 4))]
cases = pytest.mark.parametrize(("reduction", "grid"), CASES)


def attention(reduction, **kwargs):
    module = SpatialReductionAttention(D, HEADS, reduction=reduction, **kwargs).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def tokens(grid):
    return torch.randn(B, grid.tokens, D, dtype=torch.float64)


def keys_of(module, x, grid):
    """Compute the inputs of keys and values, (B, M, D): the strided convolution as a product, then the norm."""
    if module.reduction == 1:
        return x
    r = module.reduction
    image = x[:, grid.prefix :].transpose(1, 2).reshape(B, D, *grid.shape)
    cells = F.unfold(image, r, stride=r).transpose(1, 2)  # (B, M, D * r * r)
    y = cells @ module.sr.weight.flatten(1).T + module.sr.bias
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return y * module.norm.weight + module.norm.bias


def naive(module, x, grid):
    """Compute softmax(q k^T / sqrt(d)) v head by head; also returns the weights, (B, h, N, M)."""
    q = x @ module.q.weight.T + module.q.bias
    k, v = (keys_of(module, x, grid) @ module.kv.weight.T + module.kv.bias).split(D, -1)
    mixed, weights = [], []
    for head in range(HEADS):
        at = slice(head * HEAD, (head + 1) * HEAD)
        logits = (q[..., at] @ k[..., at].transpose(1, 2)) / HEAD**0.5
        weights.append(logits.exp() / logits.exp().sum(-1, keepdim=True))
        mixed.append(weights[-1] @ v[..., at])
    return torch.cat(mixed, -1) @ module.proj.weight.T + module.proj.bias, torch.stack(weights, 1)


@cases
def test_attention_to_a_coarser_grid_is_its_formula(reduction, grid):
    module, x = attention(reduction), tokens(grid)
    y, weights = naive(module, x, grid)
    assert y.shape == (B, grid.tokens, D) and weights.shape == (B, HEADS, grid.tokens, grid.patches // reduction**2)
    assert_same(module(x, NOWHERE, grid), y)
    assert_same(module.weights(x, NOWHERE, grid), weights)


@pytest.mark.parametrize("reduction", [1, 2])
def test_every_token_asks_and_prefix_tokens_are_asked_without_reduction_alone(reduction):
    grid = Grid(4, 6, prefix=2)
    module, x = attention(reduction), tokens(grid)
    y = module(x, NOWHERE, grid)
    assert y.shape == (B, 26, D)
    assert_same(y, naive(module, x, grid)[0])
    other = x.clone()
    other[:, :2] += 1
    changed = (module(other, NOWHERE, grid) - y).abs().amax((0, 2)) > 1e-9
    assert changed[:2].all()
    assert changed[2:].all() if reduction == 1 else not changed[2:].any()


def test_without_reduction_it_is_plain_attention():
    grid = Grid(3, 5, prefix=1)
    module, x = attention(1), tokens(grid)
    plain = Attention(D, HEADS).double().eval()
    with torch.no_grad():
        plain.qkv.weight.copy_(torch.cat([module.q.weight, module.kv.weight]))
        plain.qkv.bias.copy_(torch.cat([module.q.bias, module.kv.bias]))
        plain.proj.load_state_dict(module.proj.state_dict())
    assert_same(module(x, NOWHERE, grid), plain(x))
    assert_same(module.weights(x, NOWHERE, grid), plain.weights(x))


@in_turn("grid", [Grid(3, 8), Grid(8, 3)])
@in_turn("method", ["forward", "weights"])
def test_a_grid_smaller_than_the_reduction_is_refused_with_its_sides(grid, method):
    message = f"`img_size` must give this stage at least 4 patches per side.* got {grid.height} x {grid.width}"
    with pytest.raises(ValueError, match=message):
        getattr(attention(4), method)(tokens(grid), NOWHERE, grid)
