"""Lists of images of any sizes, and some of the patches of an image: as each image, or all patches, alone."""

import re

import pytest
import timm
import torch

import graticule
from graticule import Crop
from in_turn import refusals
from tiny import DIM, assert_same, images, spec, tiny


def build(name="vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "num_classes": 5, **({} if name.startswith("posmlp") else {"patch_size": 8})}
    small = {"embed_dim": 24, "depth": 2, "num_heads": 3} if name.startswith(("vit", "deit")) else {}
    return graticule.create_model(name, **{**sizes, **small, **kwargs})


IMAGES = [torch.randn(3, *size) for size in ((32, 32), (16, 40), (32, 32), (24, 24), (16, 40))]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_tiny_patch16_224", {"encoding": "learnable + rope"}),
        ("vit_tiny_patch16_224", {"encoding": "peg + relative_bias"}),
        ("gmlp_s16_224", {"embed_dim": 16, "num_blocks": 2}),
        ("posmlp_nano_32", {"in_chans": 3}),
    ],
)
def test_each_output_is_that_of_the_image_alone_in_the_order_given(name, kwargs):
    model = build(name, **kwargs)
    images = IMAGES if name != "posmlp_nano_32" else [torch.randn(3, 32, 32), torch.randn(3, 64, 32)]
    model.eval()
    alone = torch.cat([model(image[None]) for image in images])
    assert_same(model(images), alone, 1e-6)


@torch.no_grad()
def test_images_of_a_size_are_computed_in_one_forward_pass():
    model = build().eval()
    seen = []
    model.patch_embed.register_forward_hook(lambda module, args, output: seen.append(tuple(args[0].shape)))
    model(IMAGES)
    assert seen == [(2, 3, 32, 32), (2, 3, 16, 40), (1, 3, 24, 24)]


@torch.no_grad()
def test_each_image_of_a_list_may_be_a_crop():
    model = build(encoding="sinusoidal_2d").eval()
    crops = [Crop((8, 8), (1, 2, 4, 4)), None, Crop((8, 8), (0, 0, 4, 4)), None, None]
    alone = [model(image[None], crop=crop) for image, crop in zip(IMAGES, crops, strict=True)]
    assert_same(model(IMAGES, crop=crops), torch.cat(alone), 1e-6)


def test_both_classifiers_of_a_distilled_model_keep_the_order():
    model = build("deit_tiny_distilled_patch16_224")
    model.set_distilled_training(True)
    model.train()
    alone = [model(image[None]) for image in IMAGES]
    for actual, expected in zip(model(IMAGES), zip(*alone, strict=True), strict=True):
        assert_same(actual, torch.cat(expected), 1e-5)


CROP = Crop((8, 8), (0, 0, 4, 4))
test_lists_that_cannot_be_computed_are_refused = refusals(
    (lambda: build()([]), "`x` must have at least one image"),
    (lambda: build()(IMAGES, crop=[CROP]), "`crop` one entry per image, got 5 images and 1 crops"),
    (lambda: build()([IMAGES[0][None]]), r"`x` must be a list of images of \(channels, height, width\)"),
    (lambda: build()([torch.randn(3, 30, 32)]), "`img_size` must be a positive multiple"),
    (lambda: build()(IMAGES[0][None], crop=[CROP]), "`crop` must be one crop for a batch"),
    (lambda: build(global_pool="", num_classes=0)(IMAGES), "`global_pool` must not be ''"),
)


#: Encodings of each kind of field: added tokens, beside each layer, bias, rotation, terms of queries.
FIELDS = [("learnable", "default"), ("learnable", "lape"), ("relative_bias", "default"), ("rope", "default")]
FIELDS += [("shaw", "default"), ("alibi", "default"), ("learnable", "queries_keys"), ("fire", "default")]


@pytest.mark.parametrize(("encoding", "joining"), FIELDS, ids=" ".join)
def test_other_patches_of_each_image_give_the_same_as_each_image_alone(encoding, joining):
    model = tiny(encoding=spec(encoding), joining=joining).double().eval()
    x = images().double()
    keep = torch.stack([torch.randperm(16)[:5] for _ in x])
    together = model.forward_features(x, keep=keep)
    assert together.shape == (len(x), 6, DIM)  # with the class token
    alone = torch.cat([model.forward_features(image[None], keep=index) for image, index in zip(x, keep, strict=True)])
    assert_same(together, alone, 1e-12)


def test_patches_that_are_left_out_have_no_influence():
    model = tiny(encoding="rope").double().eval()
    x, keep = images().double().requires_grad_(), torch.tensor([1, 2, 7])
    model(x, keep=keep).sum().backward()
    seen = x.grad.abs().sum((0, 1)).unflatten(0, (4, 8)).unflatten(2, (4, 8)).sum((1, 3)).flatten() > 0
    assert torch.equal(seen.nonzero().flatten(), keep)


def test_a_crop_of_a_larger_image_can_be_reduced_too():
    model = tiny(encoding="sinusoidal_2d").double().eval()
    x, crop = images().double(), graticule.Crop((9, 11), (2, 3, 4, 4))
    assert_same(model(x, crop, torch.arange(16)), model(x, crop), 1e-12)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_rope_224"])
def test_patch_dropout_equals_timm(name):
    size = {"img_size": 56} if "14" in name else {"img_size": 64}
    reference = timm.create_model(name, **size, depth=2, patch_drop_rate=0.5, num_classes=5).double().train()
    ours = graticule.convert(reference).train()
    x = torch.randn(3, 3, *size.values(), *size.values(), dtype=torch.float64)
    outputs = []
    for model in (reference, ours):
        torch.manual_seed(7)
        outputs.append(model(x))
        model.eval()
        outputs.append(model(x))
        model.train()
    assert_same(outputs[2], outputs[0], 1e-9)
    assert_same(outputs[3], outputs[1], 1e-9)
    assert not torch.allclose(outputs[0], outputs[1])
    back = graticule.to_timm(ours)
    assert all(torch.equal(value, reference.state_dict()[key]) for key, value in back.state_dict().items())


def test_wrong_subsets_and_whole_grids_are_refused():
    model, x = tiny(), images()
    peg = tiny(encoding="peg + learnable")
    swin = graticule.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(1, 1, 1, 1))
    for call, message in (
        (lambda: model(x, keep=torch.tensor([0, 16])), "`keep` must be indices of 16 patches, from 0, got 0 to 16."),
        (lambda: model(x, keep=torch.tensor([-1, 3])), "got -1 to 3"),
        (lambda: model(x, keep=torch.zeros(0, dtype=torch.long)), "`keep` must have at least one patch, got none"),
        (lambda: model(x, keep=torch.tensor([3, 3])), "each token at most once"),
        (lambda: model(x, keep=torch.zeros(5, 1, dtype=torch.long)), f"a row for each of the {len(x)} images, got 5."),
        (lambda: model(x, keep=torch.tensor([0.5])), "int64"),
        (lambda: model(list(x), keep=torch.tensor([0])), "`keep` must be None for a list of images"),
        (lambda: peg(x, keep=torch.tensor([0])), "`map_after` must be None for a subset of the tokens"),
        (lambda: swin(torch.randn(1, 3, 56, 56), keep=torch.tensor([0])), "its blocks need the whole grid"),
        (lambda: tiny(patch_drop_rate=1.5), "`patch_drop_rate` must be"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
