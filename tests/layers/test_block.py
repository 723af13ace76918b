"""The pre-norm block: residual connections, norms and the use of position."""

from functools import partial

import pytest
import torch
from timm.models.vision_transformer import Block as TimmBlock
from torch import nn

from graticule import LayerPosition
from graticule.layers.block import Block

N, D, HEADS = 7, 24, 3


@pytest.fixture
def block():
    module = Block(D, HEADS, norm_layer=partial(nn.LayerNorm, eps=1e-6)).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


@pytest.fixture
def x():
    return torch.randn(2, N, D, dtype=torch.float64)


def test_without_position_it_is_timms_block(block, x):
    theirs = TimmBlock(D, HEADS, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6)).double().eval()
    theirs.load_state_dict(block.state_dict(), strict=True)
    torch.testing.assert_close(block(x), theirs(x), rtol=0, atol=1e-12)


def test_inner_is_added_between_the_norm_and_attention(block, x):
    inner = torch.randn(N, D, dtype=torch.float64)
    middle = x + block.attn(block.norm1(x) + inner)
    by_hand = middle + block.mlp(block.norm2(middle))
    torch.testing.assert_close(block(x, LayerPosition(after_norm=inner)), by_hand, rtol=0, atol=1e-12)


def test_a_constant_inner_is_a_shift_of_the_norm(block, x):
    shift = torch.randn(D, dtype=torch.float64)
    added = block(x, LayerPosition(after_norm=shift.expand(N, D)))
    with torch.no_grad():
        block.norm1.bias.add_(shift)
    torch.testing.assert_close(block(x), added, rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_a_hook_keeps_of_the_norm_is_not_changed(block, x):
    """Also without gradients, by a hook of all modules or of one inside the norm."""
    kept = []
    expected, position = block.norm1(x), LayerPosition(after_norm=torch.ones(N, D, dtype=torch.float64))
    with nn.modules.module.register_module_forward_hook(lambda _, args, y: kept.append(y)):
        block(x, position)
    block.norm1 = nn.Sequential(block.norm1)
    with block.norm1[0].register_forward_hook(lambda _, args, y: kept.append(y)):
        block(x, position)
    assert torch.equal(kept[0], expected) and torch.equal(kept[-1], expected)


def test_bias_and_rotation_go_to_attention(block, x):
    position = LayerPosition(bias=torch.randn(HEADS, N, N, dtype=torch.float64))
    middle = x + block.attn(block.norm1(x), position)
    torch.testing.assert_close(block(x, position), middle + block.mlp(block.norm2(middle)), rtol=0, atol=1e-12)


def test_pre_is_left_to_the_backbone(block, x):
    assert torch.equal(block(x, LayerPosition(added_to_stream=torch.randn(N, D))), block(x))


def test_a_dropped_path_leaves_the_shortcut(x):
    block = Block(D, HEADS, drop_path=0.999999).double().train()
    assert torch.equal(block(x), x)
    assert not torch.equal(block.eval()(x), x)
