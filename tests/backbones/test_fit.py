"""Sides that are no multiples of the patch: what is over is left out or padded, as in the libraries of the models."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import get_notrace_functions, get_notrace_modules
from torchvision.models.feature_extraction import create_feature_extractor
from transformers import SiglipVisionConfig, SiglipVisionModel

import graticule
from in_turn import case, in_turn

SIDES = (75, 101)
FAMILIES = {
    "deit_tiny_patch16_224": {"encoding": "learnable + rope", "embed_dim": 24, "num_heads": 3, "depth": 1},
    "convit_tiny": {"embed_dim": 24, "num_heads": 3, "depth": 2, "encoding": "learnable + gpsa(layers=1)"},
    "mixer_s16_224": {"embed_dim": 16, "num_blocks": 1, "groups": 2},
    "pvt_tiny": {
        "embed_dims": (8, 16),
        "depths": (1, 1),
        "num_heads": (1, 2),
        "mlp_ratios": (2, 2),
        "sr_ratios": (2, 1),
    },
}


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def siglip(side=62):
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    return perturbed(SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=side, patch_size=14)))


def fitted(images, patch, fit):
    """Cut or pad images by hand."""
    rest = [side % step for side, step in zip(images.shape[-2:], patch, strict=True)]
    if fit == "floor":
        return images[..., : images.shape[-2] - rest[0], : images.shape[-1] - rest[1]]
    bottom, right = (step - over for step, over in zip(patch, rest, strict=True))
    return F.pad(images, (0, right, 0, bottom))


@in_turn(("name", "fit"), [(name, fit) for name in FAMILIES for fit in ("floor", "pad")])
def test_images_of_any_size_are_cut_or_padded_and_the_choice_is_saved(tmp_path, name, fit):
    model = graticule.create_model(name, img_size=SIDES, num_classes=3, fit=fit, **FAMILIES[name]).eval()
    images, other = torch.randn(2, 3, *SIDES), torch.randn(1, 3, 81, 67)
    patch = model.coarsest_patch
    assert torch.equal(model(images), model(fitted(images, patch, fit)))
    assert torch.equal(model(other), model(fitted(other, patch, fit)))
    maps = model.forward_intermediates(other, intermediates_only=True)
    assert maps[-1].shape[-2:] == model.position_grids(model.grid_of(other))[-1].shape
    model.save_pretrained(tmp_path / fit / name)
    opened = graticule.load(tmp_path / fit / name).eval()
    assert opened.fit == fit and opened.img_size == SIDES
    assert torch.equal(opened(images), model(images))


def test_a_model_that_drops_the_rest_is_traced_and_exported(tmp_path):
    model = graticule.create_model(
        "deit_tiny_patch16_224", img_size=SIDES, fit="floor", **FAMILIES["deit_tiny_patch16_224"]
    )
    images = torch.randn(1, 3, *SIDES)
    tracer = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}
    traced = create_feature_extractor(
        model.eval(), {"head": "logits"}, tracer_kwargs={**tracer, "param_shapes_constant": True}
    )
    assert torch.equal(traced(images)["logits"], model(images))
    exported = graticule.export(model, tmp_path / "model.onnx")
    assert exported.compared[0].size == SIDES and exported.error < 1e-4


def test_converted_models_do_with_the_rest_what_their_sources_do():
    images, other = torch.randn(2, 3, 62, 62), torch.randn(1, 3, *SIDES)
    small = {"num_classes": 0, "embed_dim": 48, "num_heads": 3, "depth": 1}
    with case("transformers' SigLIP"):
        theirs = siglip()
        ours = graticule.convert(theirs)
        torch.testing.assert_close(ours(images), theirs(images).pooler_output)
        want = theirs(other, interpolate_pos_encoding=True).pooler_output
        torch.testing.assert_close(ours(other), want)
        torch.testing.assert_close(graticule.resize(ours, SIDES)(other), want)
        assert torch.equal(graticule.to_transformers(graticule.convert(theirs))(images)[0], theirs(images)[0])
        torch.testing.assert_close(graticule.resize(copy.deepcopy(theirs), SIDES)(other).pooler_output, want)
    with case("timm's SigLIP"):
        theirs = perturbed(timm.create_model("vit_so400m_patch14_siglip_384", img_size=62, **small))
        ours = graticule.convert(theirs)
        torch.testing.assert_close(ours(images), theirs(images))
        assert torch.equal(graticule.to_timm(ours)(images), theirs(images))
        debiased = graticule.debias(theirs, torch.randn(12, 3, 62, 62))
        assert debiased.grid_of(images).shape == (4, 4)
        reference = copy.deepcopy(theirs)
        reference.set_input_size(SIDES)
        assert torch.equal(graticule.resize(theirs, SIDES)(other), reference(other))
    with case("timm's dynamic_img_pad"):
        sizes = {"img_size": 64, "dynamic_img_size": True, "dynamic_img_pad": True}
        theirs = perturbed(timm.create_model("vit_tiny_patch16_224", **sizes, **small))
        ours = graticule.convert(theirs)
        assert ours.fit == "pad"
        torch.testing.assert_close(ours(other), theirs(other))
        assert torch.equal(graticule.to_timm(ours)(other), theirs(other))


def test_other_sizes_are_refused_by_default_with_the_option():
    for name, arguments, message in [
        (
            "deit_tiny_patch16_224",
            {"img_size": 100},
            "sizes are 96 and 112. A backbone with `fit` 'floor'",
        ),
        (
            "deit_tiny_patch16_224",
            {"img_size": 10, "fit": "floor"},
            "got height 10 with a patch of 16; the nearest",
        ),
        ("deit_tiny_patch16_224", {"fit": "crop"}, "`fit` must be one of exact, floor, pad; got 'crop'"),
        ("swin_tiny_patch4_window7_224", {"fit": "pad"}, "`fit` must be 'exact' in SwinTransformer, which pads"),
        ("t2t_vit_7", {"fit": "floor"}, "`fit` must be left out where tokens are not made by one layer"),
    ]:
        with pytest.raises(ValueError) as refusal:
            graticule.create_model(name, **arguments)
        assert message in str(refusal.value), (name, arguments)
