"""Pyramids and mixers of timm are converted to ours and back, with equal outputs and equal bits."""

import math

import pytest
import timm
import torch
from timm.layers import GatedMlp
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock
from timm.models.swin_transformer_v2 import WindowAttention
from timm_models import assert_same_bits

import graticule
from graticule import published_state_dict
from tiny import draw_double, images

SWIN = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
TWINS = {"embed_dims": (16, 24), "num_heads": (2, 3), "mlp_ratios": (2, 2), "depths": (3, 2), "sr_ratios": (2, 1)}
CONVIT = {"img_size": 32, "patch_size": 8, "embed_dim": 8}
#: timm's name -> arguments of a small model, if it supports them.
NAMES = {
    "swin_tiny_patch4_window7_224": SWIN,
    "swin_small_patch4_window7_224": {**SWIN, "img_size": (32, 96), "window_size": 8},
    "swin_s3_tiny_224": {**SWIN, "window_size": (4, 2)},
    "swinv2_tiny_window8_256": SWIN,
    "swinv2_base_window12to16_192to256": {**SWIN, "img_size": (64, 32), "pretrained_window_sizes": (3, 2)},
    "convit_tiny": {**CONVIT, "num_heads": 3, "depth": 4, "local_up_to_layer": 2},
    "twins_pcpvt_small": {"img_size": (64, 32), **TWINS},
    "twins_svt_small": {"img_size": (32, 64), "wss": (3, 3), **TWINS},
    "mixer": {"img_size": (64, 96)},
    "resmlp": {"img_size": 32, "mlp_ratio": 4, "block_layer": ResBlock, "norm_layer": Affine},
    "gmlp": {"img_size": (32, 48), "mlp_ratio": 6, "block_layer": SpatialGatingBlock, "mlp_layer": GatedMlp},
}
MIXERS = ("mixer", "resmlp", "gmlp")


@torch.no_grad()
def timms(name, **kwargs):
    """Build timm's model with every tensor drawn, in float64 and evaluation mode."""
    if name in MIXERS:  # by name, they have all channels
        return draw_double(MlpMixer(patch_size=16, num_blocks=2, embed_dim=16, num_classes=5, **NAMES[name], **kwargs))
    return exact(draw_double(timm.create_model(name, num_classes=5, **NAMES[name], **kwargs)))


def exact(model):
    """Compute the coordinates of Swin V2's biases in float64, where timm uses float32."""
    for module in model.modules():
        if isinstance(module, WindowAttention):
            sides = []
            for side, trained in zip(module.window_size, module.pretrained_window_size, strict=True):
                t = torch.arange(1 - side, side, dtype=torch.float64) / max((trained or side) - 1, 1) * 8
                sides.append(t.sign() * torch.log2(t.abs() + 1) / math.log2(8))
            module.relative_coords_table.copy_(torch.stack(torch.meshgrid(*sides, indexing="ij"), -1)[None])
    return model


def assert_same(outputs, expected):
    assert expected.isfinite().all() and expected.std() > 1e-3
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_outputs_and_bits_of_the_way_back_equal_timm(name):
    original = timms(name)
    ours = graticule.convert(original)
    x = images(*ours.img_size, dtype=torch.float64)
    assert_same(ours(x), original(x))
    back = graticule.to_timm(ours)
    assert_same_bits(back, original)
    assert torch.equal(back(x), original(x))
    assert published_state_dict(ours).keys() == original.state_dict().keys()


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # of timm's resampling
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
@torch.no_grad()
def test_a_swin_that_timm_set_to_another_size_is_converted_as_it_is(name):
    """24 x 16 patches have windows of 6 x 4, which are not square."""
    original = timms(name)
    original.set_input_size(img_size=(96, 64), window_size=(6, 4))
    exact(original)
    ours = graticule.convert(original)
    assert ours.windows[0] == (6, 4)
    x = images(96, 64, dtype=torch.float64)
    assert_same(ours(x), original(x))
    assert torch.equal(graticule.to_timm(ours)(x), original(x))


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
@torch.no_grad()
def test_a_converted_swin_at_another_size_is_timms_set_to_it(name):
    original = timms(name)
    ours = graticule.convert(original)
    original.set_input_size(img_size=(96, 64), window_size=(4, 4))
    ours.set_input_size((96, 64))
    x = images(96, 64, dtype=torch.float64)
    assert_same(ours(x), original(x))
    assert_same(exact(graticule.to_timm(ours))(x), original(x))


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # of timm's resampling
@pytest.mark.parametrize(("size", "window"), [((64, 64), (7, 7)), ((96, 64), (6, 5)), ((64, 64), (2, 2))])
@torch.no_grad()
def test_other_windows_of_a_converted_swin_are_those_of_timm(size, window):
    original = timms("swin_tiny_patch4_window7_224")
    ours = graticule.convert(original)
    original.set_input_size(img_size=size, window_size=window)
    ours.set_input_size(size, window_size=(window,) * len(ours.depths))
    x = images(*size, dtype=torch.float64)
    assert ours.windows[0] == original.layers[0].blocks[0].window_size
    torch.testing.assert_close(ours(x), original(x), rtol=0, atol=1e-5)  # timm resamples in float32


@pytest.mark.filterwarnings("ignore:Using a non-tuple")  # of timm's own resampling of a bias table
@torch.no_grad()
def test_windows_that_were_changed_go_back_and_are_those_that_timm_scales_later():
    ours = graticule.convert(timms("swin_tiny_patch4_window7_224"))
    x = images(*ours.img_size, dtype=torch.float64)
    ours.set_input_size(window_size=2)
    back = graticule.to_timm(ours)
    assert_same(back(x), ours(x))
    ours.set_input_size((96, 64))
    back = graticule.to_timm(ours)
    if hasattr(back, "_ref_window_sizes"):  # from timm 1.0.31 on
        back.set_input_size(img_size=(192, 128))
        assert [stage.blocks[0].window_size for stage in back.layers] == [(2 * h, 2 * w) for h, w in ours.windows]
