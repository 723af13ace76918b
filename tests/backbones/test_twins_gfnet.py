"""Twins-SVT equals timm's with its weights; GFNet equals the formula of its paper."""

import pytest
import torch
import torch.nn.functional as F
from timm.models.twins import Twins

import graticule
from graticule import published_state_dict
from graticule.testing.methods import check_backbone
from tiny import draw, images

SVT = {"embed_dims": (16, 24), "num_heads": (2, 3), "mlp_ratios": (2, 2), "depths": (3, 2), "sr_ratios": (2, 1)}


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (40, 56)])
@torch.no_grad()
def test_twins_svt_is_timms_with_every_weight_drawn(size):
    theirs = draw(Twins(img_size=size, num_classes=5, wss=(3, 3), **SVT)).double().eval()
    ours = graticule.create_model("twins_svt_small", img_size=size, num_classes=5, window_size=3, **SVT)
    ours.double().eval().load_state_dict(theirs.state_dict())
    x = images(*size, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-10)
    published = published_state_dict(ours)
    assert published.keys() == theirs.state_dict().keys()
    assert all(torch.equal(published[name], value) for name, value in theirs.state_dict().items())


def test_twins_svt_keeps_the_contract_with_windows_that_do_not_tile_and_has_no_class_token():
    check_backbone("twins_svt_small", img_size=(64, 96), window_size=3, **SVT, compiled=False)
    with pytest.raises(ValueError, match="`global_pool` must be one of '', 'avg'"):
        graticule.create_model("twins_svt_small", **SVT, global_pool="token")
    for window in (1, 2**16):
        with pytest.raises(ValueError, match=f"`window_size` must be from 2 to 4096 patches, got {window}"):
            graticule.create_model("twins_svt_small", **SVT, window_size=window)


@torch.no_grad()
def test_gfnet_multiplies_the_frequencies_of_the_normalized_tokens_with_one_residual_connection():
    model = graticule.create_model("gfnet_ti_224", img_size=(24, 40), patch_size=8, embed_dim=6, num_blocks=2)
    draw(model.double().eval())
    state = published_state_dict(model)
    x = images(24, 40, dtype=torch.float64)
    t = F.conv2d(x, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], 8).flatten(2).mT
    t = t + state["pos_embed"]

    def norm(y, name):
        return F.layer_norm(y, (6,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def linear(y, name):
        return F.linear(y, state[f"{name}.weight"], state[f"{name}.bias"])

    for block in ("blocks.0", "blocks.1"):
        frequencies = torch.fft.rfft2(norm(t, f"{block}.norm1").unflatten(1, (3, 5)), dim=(1, 2), norm="ortho")
        filtered = frequencies * torch.view_as_complex(state[f"{block}.filter.complex_weight"])
        y = torch.fft.irfft2(filtered, s=(3, 5), dim=(1, 2), norm="ortho").flatten(1, 2)
        t = t + linear(F.gelu(linear(norm(y, f"{block}.norm2"), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    expected = linear(norm(t, "norm").mean(1), "head")
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def test_gfnet_refuses_a_layer_scale():
    sizes = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 8, "num_blocks": 2}
    with pytest.raises(ValueError, match="`layer_scale` must be left out in GFNet"):
        graticule.create_model("gfnet_ti_224", **sizes, layer_scale=0.1)
