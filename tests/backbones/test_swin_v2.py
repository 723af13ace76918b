"""Swin V2: equality with timm's at any size, leaking masks, and windows of pretraining."""

import math

import pytest
import torch
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from timm.models.swin_transformer_v2 import WindowAttention

import graticule
from graticule import Grid, LayerPosition, published_state_dict
from graticule.backbones.swin_v2 import CosineWindowAttention
from graticule.position.windows import Windows
from in_turn import refusals
from tiny import assert_same, draw, images

SIZE = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "num_classes": 5}


def coordinates(module):
    """Compute the table of coordinates of timm's module in float64, where it uses float32."""
    sides = []
    for side, trained in zip(module.window_size, module.pretrained_window_size, strict=True):
        t = torch.arange(1 - side, side, dtype=torch.float64) / max((trained or side) - 1, 1) * 8
        sides.append(t.sign() * torch.log2(t.abs() + 1) / math.log2(8))
    return torch.stack(torch.meshgrid(*sides, indexing="ij"), -1)[None]


def exact(reference):
    for module in reference.modules():
        if isinstance(module, WindowAttention):
            module.relative_coords_table.copy_(coordinates(module))
    return reference


@torch.no_grad()
def drawn(model):
    """Draw every tensor, some logit scales beyond their limit, so that masked tokens matter."""
    for name, parameter in draw(model).named_parameters():
        if name.endswith("logit_scale"):
            parameter.add_(4.0)
    return model


def both(**kwargs):
    # its masks are computed in the forward pass, since the stored ones do not fit a padded map before timm 1.0.31
    reference = exact(drawn(TimmSwinV2(**{**SIZE, **kwargs}, strict_img_size=False)).double().eval())
    ours = graticule.create_model("swinv2_tiny_window8_256", **{**SIZE, **kwargs}).double().eval()
    ours.load_state_dict(reference.state_dict())
    return ours, reference


@pytest.mark.parametrize(
    "kwargs",
    [
        *({}, {"img_size": (32, 96)}, {"img_size": (48, 80)}, {"img_size": 32, "window_size": 8}),
        *({"pretrained_window_sizes": (3, 2)}, {"qkv_bias": False, "depths": (1, 3)}),
    ],
    ids=str,
)
@torch.no_grad()
def test_it_is_timms_with_every_weight_drawn(kwargs):
    ours, reference = both(**kwargs)
    x = images(*ours.img_size, dtype=torch.float64)
    assert_same(ours(x), reference(x))
    published = published_state_dict(ours)
    assert published.keys() == reference.state_dict().keys()
    assert all(torch.equal(published[name], value) for name, value in reference.state_dict().items())


@torch.no_grad()
def test_at_another_size_it_is_timms_set_to_it_where_that_keeps_the_coordinates():
    ours, reference = both(pretrained_window_sizes=(4, 4))
    reference.set_input_size(img_size=(96, 64), window_size=6)
    ours.set_input_size((96, 64), window_size=6)
    x = images(96, 64, dtype=torch.float64)
    assert_same(ours(x), exact(reference)(x))


@pytest.mark.parametrize(("mask", "sign"), [(-100.0, -1.0), (None, 1.0)])
@torch.no_grad()
def test_tokens_attend_across_the_border_of_the_image_with_the_released_masks_alone(mask, sign):
    """Tokens are a on the left and -a on the right, q = -k: logits are -100 on the same side, 100 on the other."""
    attention = CosineWindowAttention(2, 1, qkv_bias=False, mask=mask).double()
    identity = torch.eye(2)
    attention.qkv.weight.copy_(torch.cat([identity, -identity, identity]))
    attention.proj.weight.copy_(identity)
    attention.proj.bias.zero_()
    attention.logit_scale.fill_(9.0)  # beyond the limit of ln 100
    grid = Grid(4, 8)
    a = torch.tensor([3.0, 4.0], dtype=torch.float64)
    tokens = a * torch.where(grid.coordinates()[:, 1:] < 4, 1.0, -1.0)
    y = attention(tokens[None], LayerPosition(), Windows(grid, Grid(4, 4), (0, 2)))[0].unflatten(0, grid.shape)
    # a window of columns 6, 7 and, at the opposite border, 0, 1, whose 100 - 100 outweighs -100 of the same side
    torch.testing.assert_close(y[:, :2], (sign * a).expand(4, 2, 2))
    torch.testing.assert_close(y[:, 2:4], (-a).expand(4, 2, 2))  # within a whole window the other side has 100


@torch.no_grad()
def test_a_file_of_timms_weights_is_loaded_and_transferred(tmp_path):
    ours, reference = both()
    torch.save(reference.state_dict(), tmp_path / "weights.pth")
    x = images(64, 64, dtype=torch.float64)
    for load in (graticule.load_checkpoint, graticule.transfer):
        fresh = graticule.create_model("swinv2_tiny_window8_256", **SIZE).double().eval()
        load(fresh, tmp_path / "weights.pth")
        assert torch.equal(fresh(x), ours(x)), load


test_windows_of_a_pretraining_without_a_bias_that_knows_them_are_refused = refusals(
    ({"encoding": "rope", "pretrained_window_sizes": (4, 4)}, "`pretrained_window_sizes` must be left out without the"),
    ({"pretrained_window_sizes": (4,)}, "must have a positive value for each of the 2 stages, got"),
    call=lambda kwargs: graticule.create_model("swinv2_tiny_window8_256", **SIZE, **kwargs),
)
