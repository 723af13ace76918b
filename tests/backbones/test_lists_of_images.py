"""Lists of images of any sizes: each output equals that of the image alone."""

import pytest
import torch

import graticule
from graticule import Crop
from tiny import assert_same


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


def test_lists_that_cannot_be_computed_are_refused():
    model, unpooled = build().eval(), build(global_pool="", num_classes=0).eval()
    crop = Crop((8, 8), (0, 0, 4, 4))
    for refusing, images, crops, message in [
        (model, [], None, "`x` must have at least one image"),
        (model, IMAGES, [crop], "`crop` one entry per image, got 5 images and 1 crops"),
        (model, [IMAGES[0][None]], None, r"`x` must be a list of images of \(channels, height, width\)"),
        (model, [torch.randn(3, 30, 32)], None, "`img_size` must be a positive multiple"),
        (model, IMAGES[0][None], [crop], "`crop` must be one crop for a batch"),
        (unpooled, IMAGES, None, "`global_pool` must not be ''"),
    ]:
        with pytest.raises(ValueError, match=message):
            refusing(images, crop=crops)
