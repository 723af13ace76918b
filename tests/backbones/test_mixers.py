"""MLP-Mixer, ResMLP and gMLP-Ti: timm's outputs, the authors' names, counts, any size."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import GatedMlp
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock

import graticule
from graticule import published_state_dict
from in_turn import in_turn, refusals
from tiny import assert_same, count, draw, full_size, images, without_memory

SMALL = {"num_blocks": 2, "embed_dim": 16, "img_size": 64, "num_classes": 7}
KINDS = {
    "mixer_s16_224": {},
    "resmlp_12_224": {"mlp_ratio": 4, "block_layer": ResBlock, "norm_layer": Affine},
    "gmlp_ti16_224": {"mlp_ratio": 6, "block_layer": SpatialGatingBlock, "mlp_layer": GatedMlp},
}
NAMES = [
    *(f"mixer_{size}{patch}_224" for size in "sbl" for patch in (32, 16)),
    *("resmlp_12_224", "resmlp_24_224", "resmlp_36_224", "resmlp_big_24_224"),
    *("gmlp_ti16_224", "gmlp_s16_224", "gmlp_b16_224"),
]


def both(name):
    reference = draw(MlpMixer(**SMALL, **KINDS[name])).eval()
    ours = graticule.create_model(name, **SMALL).eval()
    ours.load_state_dict(reference.state_dict())
    return ours, reference


@in_turn("name", KINDS)
@in_turn(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_outputs_are_timms(name, dtype, tolerance):
    ours, reference = (model.to(dtype) for model in both(name))
    x = torch.randn(2, 3, 64, 64, dtype=dtype)
    expected = reference(x)
    assert expected.std() > 1e-3
    assert_same(ours(x) / expected.std(), expected / expected.std(), tolerance)
    features, expected = (model.forward_intermediates(x)[1] for model in (ours, reference))
    for a, b in zip(features, expected, strict=True):
        assert_same(a / b.std(), b / b.std(), tolerance)


def test_full_sizes_have_timms_parameters_and_names():
    for name in NAMES:
        ours = full_size(name)
        with without_memory():
            reference = timm.create_model(name)
        assert count(ours) == count(reference) == graticule.backbones.MODELS[name].parameters, name
        shapes = {key: value.shape for key, value in reference.state_dict().items()}
        assert {key: v.shape for key, v in graticule.published_state_dict(ours).items()} == shapes, name


def test_layer_scales_start_as_in_the_authors_code():
    for name, start in {"resmlp_12_224": 0.1, "resmlp_24_224": 1e-5, "resmlp_36_224": 1e-6}.items():
        block = graticule.create_model(name, num_blocks=1, embed_dim=8, img_size=32, groups=2).blocks[0]
        assert (block.ls1 == start).all() and (block.ls2 == start).all()


def test_weights_of_resmlps_authors_load():
    ours, reference = both("resmlp_12_224")
    renamed = {}
    for name, value in reference.state_dict().items():
        name = name.replace("stem.", "patch_embed.").replace("linear_tokens.", "attn.").replace("mlp_channels.", "mlp.")
        name = name.replace(".ls", ".gamma_")
        renamed[name] = value.flatten() if name.endswith((".alpha", ".beta")) else value
    again = graticule.create_model("resmlp_12_224", **SMALL).eval()
    again.load_state_dict(renamed)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(again(x), ours(x))
    fresh = draw(graticule.create_model("resmlp_12_224", **SMALL)).eval()
    taken = graticule.transfer(fresh, renamed)
    assert torch.equal(fresh(x), ours(x)) and {row.status for row in taken.rows} == {"loaded"}
    assert {row.source for row in taken.rows} == renamed.keys()


@pytest.mark.parametrize(("name", "encoding"), [("mixer_s16_224", "token_mlp"), ("resmlp_12_224", "sgu")])
def test_a_checkpoint_of_another_size_is_resampled_as_set_input_size_does(name, encoding):
    small, large = (graticule.create_model(name, **{**SMALL, "img_size": side}).eval() for side in (64, 96))
    draw(small)
    large.load_state_dict(graticule.published_state_dict(small))
    small.set_input_size(96)
    x = torch.randn(1, 3, 96, 96)
    torch.testing.assert_close(large(x), small(x), rtol=1e-5, atol=1e-6)


test_invalid_arguments_are_refused = refusals(
    ({"name": "mixer_s16_224", "groups": 7}, "`groups` must divide the 512 channels, got 7"),
    ({"name": "mixer_s16_224", "encoding": "learnable"}, "give every layer of Mixer `mixing`"),
    ({"name": "resmlp_12_224", "encoding": "sgu + ggqpe"}, "`mixing` must be given by one encoding at most"),
    ({"name": "mixer_s16_224", "encoding": "sgu(layers=[1])"}, "give every layer of Mixer `mixing`"),
    ({"name": "gfnet_ti_224", "layer_scale": 0.1}, "`layer_scale` must be left out in GFNet"),
    call=lambda kwargs: graticule.create_model(**kwargs),
)


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
    assert_same(model(x), expected, 1e-12)
