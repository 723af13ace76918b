"""Patch embeddings are resampled for other patches and channels, on models of this library, timm and transformers."""

import pytest
import timm
import torch
import torch.nn.functional as F

import graticule
from tiny import SIZE, draw

#: A model per library, as a function of its patch size.
HOSTS = {
    "graticule": lambda: draw(
        graticule.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": 28, "patch_size": 7})
    ),
    "timm": lambda: draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": 28, "patch_size": 7})),
    "transformers": lambda: _dinov2(),
}


def _dinov2(**given):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
    return draw(transformers.Dinov2Model(transformers.Dinov2Config(**{**small, **given})))


def convolution(model):
    """Return the patch embedding's convolution."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.Conv2d))


def output(model, x):
    with torch.no_grad():
        found = model(x)
    return found if isinstance(found, torch.Tensor) else found.last_hidden_state


@pytest.mark.parametrize("library", HOSTS)
def test_a_patch_that_was_enlarged_has_the_same_token(library):
    model = HOSTS[library]().double().eval()
    patches = torch.randn(5, 3, 7, 7, dtype=torch.float64)
    before = convolution(model)(patches)
    assert graticule.resize(model, 32, patch_size=8) is model
    assert convolution(model).kernel_size == (8, 8)
    # timm computes the resizing of a patch with antialias, in float32
    larger = F.interpolate(patches, (8, 8), mode="bicubic", antialias=True)
    torch.testing.assert_close(convolution(model)(larger), before, rtol=0, atol=1e-4)
    assert output(model, torch.randn(2, 3, 32, 32, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("library", HOSTS)
@pytest.mark.parametrize("channels", [1, 6])
def test_images_whose_channels_are_equal_have_the_same_tokens(library, channels):
    model = HOSTS[library]().double().eval()
    gray = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    before = output(model, gray.expand(-1, 3, -1, -1))
    graticule.resize(model, channels=channels)
    torch.testing.assert_close(output(model, gray.expand(-1, channels, -1, -1)), before, rtol=0, atol=1e-10)


def test_the_configuration_of_transformers_is_adapted(tmp_path):
    model = _dinov2().eval()
    kept = {name: value for name, value in model.state_dict().items() if "layer" in name}
    graticule.resize(model, 48, patch_size=8, channels=1)
    assert (model.config.image_size, model.config.patch_size, model.config.num_channels) == (48, 8, 1)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())
    model.save_pretrained(tmp_path)
    x = torch.randn(1, 1, 48, 48)
    assert torch.equal(output(type(model).from_pretrained(tmp_path), x), output(model, x))


def test_a_resized_model_is_published_with_its_patches(tmp_path):
    model = graticule.resize(graticule.convert(_dinov2().eval()), (32, 48), patch_size=8, channels=1)
    model.save_pretrained(tmp_path / "model")
    opened = graticule.from_pretrained(tmp_path / "model")
    assert (opened.patch_size, opened.img_size, opened.in_chans) == ((8, 8), (32, 48), 1)
    x = torch.randn(1, 1, 32, 48)
    assert torch.equal(output(opened, x), output(model, x))


#: Model, arguments, part of the error.
REFUSED = [
    ("graticule", {}, "`img_size`, `patch_size`, `channels`, `windows` or `resampler` must be given, got none"),
    ("graticule", {"channels": 0}, "`channels` must be at least 1, got 0"),
    ("graticule", {"patch_size": 8}, "28"),
    ("timm", {"patch_size": 8}, "28"),
    ("timm", {"windows": 4}, "`windows` must be left out with VisionTransformer, got 4"),
    ("timm", {"resampler": "bilinear"}, "`resampler` must be left out with VisionTransformer"),
    ("transformers", {"patch_size": 8}, "28"),
    ("transformers", {"img_size": (28, 35)}, "must have square images to be a Dinov2Model"),
]


def test_wrong_sizes_are_refused_and_change_nothing():
    for library, given, message in REFUSED:
        model = HOSTS[library]()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError) as refusal:
            graticule.resize(model, **given)
        assert message in str(refusal.value), given
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    swin = graticule.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(3, 6))
    with pytest.raises(ValueError, match="`patch_size` must be left out with SwinTransformer, got 8 x 8"):
        graticule.resize(swin, patch_size=8)
