"""Lists of images of any sizes: each output equals that of the image alone, also in one packed row."""

import pytest
import torch

import graticule
from graticule import Crop
from graticule.position.packed import PackedRow, Segment
from in_turn import in_turn
from tiny import ENCODERS, spec, takes, tiny


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
    torch.testing.assert_close(model(images), alone, rtol=0, atol=1e-6)


SIZES = ((32, 32), (16, 40), (32, 32), (24, 24))
#: Encodings that need the map of an image, as functions of all its tokens.
MAPS = ("peg", "convolutional_projection")


@torch.no_grad()
@in_turn(
    ("encoding", "joining"), [(e, j) for j in ("default", "lape", "queries_keys") for e in ENCODERS if takes(j, e)]
)
def test_a_packed_row_gives_the_outputs_of_the_images_alone(encoding, joining):
    model = tiny(encoding=spec(encoding), joining=joining).double().eval()
    images = [torch.randn(3, *size).double() for size in SIZES]
    if encoding in MAPS:
        with pytest.raises(ValueError, match="must be None in a row of several images: it needs the grid of each"):
            model.forward_packed(images)
        return
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model.forward_packed(images), alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cait_xxs24_224", {"depth_token_only": 1}),
        ("vit_tiny_patch16_224", {"block_layer": "parallel", "qk_norm": True, "global_pool": "map"}),
        ("vit_tiny_patch16_224", {"block_layer": "post_norm", "reg_tokens": 3, "global_pool": "avg"}),
    ],
)
def test_other_attention_and_blocks_take_a_packed_row(name, given):
    model = build(name, **{"embed_dim": 24, "depth": 2, "num_heads": 3, **given}).double().eval()
    images = [torch.randn(3, *size).double() for size in SIZES]
    gradients = []
    for compute in (model.forward_packed, model):
        model.zero_grad()
        compute(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for packed, grouped in zip(*gradients, strict=True):
        torch.testing.assert_close(packed, grouped, rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@in_turn(
    ("encoding", "options"),
    [
        ("learnable + rope", {}),
        ("relative_bias", {}),
        ("shaw", {"reg_tokens": 2}),  # a bias of each image
        ("alibi", {"global_pool": "avg"}),
        ("irpe(on='qk')", {"qk_norm": True}),
    ],
)
def test_one_kernel_of_a_packed_row_gives_the_same_outputs(encoding, options):
    model = build(encoding=encoding, **options).double().eval()
    images = [torch.randn(3, *size).double() for size in SIZES]
    found = model.forward_packed(images, flex=True)
    torch.testing.assert_close(found, model.forward_packed(images), rtol=0, atol=1e-12)


def test_a_row_that_one_kernel_cannot_compute_is_refused():
    images = [torch.randn(3, *size) for size in SIZES]
    for model, message in (
        (build(), "`flex` must be False: it has no backward pass on cpu"),
        (build(encoding="irpe(on='qkv')"), "`flex` must be False: the attention weights are changed after the softmax"),
        (build("cait_xxs24_224", embed_dim=24, depth=2, num_heads=3), "are changed after the softmax; attention is"),
        (build(attn_drop_rate=0.1).train(), "it has no dropout of attention weights"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward_packed(images, flex=True)


@torch.no_grad()
def test_crops_are_packed_too_and_images_of_one_size_are_one_segment():
    model = tiny(encoding="sinusoidal_2d").double().eval()
    images = [torch.randn(3, 32, 32).double() for _ in range(3)]
    crops = [Crop((8, 8), (1, 2, 4, 4)), None, Crop((8, 8), (1, 2, 4, 4))]
    torch.testing.assert_close(model.forward_packed(images, crops), model(images, crops), rtol=0, atol=1e-12)
    rows = []
    model.blocks[0].register_forward_hook(
        lambda block, args, output: rows.append([one.images for one in args[2].segments])
    )
    model.forward_packed(images, crops)
    assert rows == [[2, 1]]


def test_rows_that_cannot_be_packed_are_refused():
    images = [torch.randn(3, *size) for size in SIZES]
    swin = graticule.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(1, 1, 1, 1))
    for model, message in (
        (tiny(drop_path_rate=0.5).train(), "`drop_path_rate` and `patch_drop_rate` must be 0 to train on rows"),
        (tiny(patch_drop_rate=0.5).train(), "`drop_path_rate` and `patch_drop_rate` must be 0 to train on rows"),
        (swin, "`x` must be passed to `forward` in SwinTransformer: its blocks need the whole grid"),
        (build(global_pool="", num_classes=0), "`global_pool` must not be ''"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward_packed(images)


def test_a_row_of_no_images_is_refused():
    position = tiny().position(tiny().grid)[0]
    for call, message in (
        (lambda: tiny().forward_packed([]), "`x` must have at least one image"),
        (lambda: PackedRow.of([]), "`segments` must be at least one, got none"),
        (lambda: Segment(0, 5, position), "`images` and `tokens` of a segment must be at least 1, got 0 and 5"),
        (lambda: Segment(2, 0, position), "must be at least 1, got 2 and 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


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
    torch.testing.assert_close(model(IMAGES, crop=crops), torch.cat(alone), rtol=0, atol=1e-6)


def test_gradients_are_those_of_the_images_alone():
    model = build().eval()
    model(IMAGES).square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.cat([model(image[None]) for image in IMAGES]).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_both_classifiers_of_a_distilled_model_keep_the_order():
    model = build("deit_tiny_distilled_patch16_224")
    model.set_distilled_training(True)
    model.train()
    alone = [model(image[None]) for image in IMAGES]
    for found, expected in zip(model(IMAGES), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)


def test_lists_that_cannot_be_computed_are_refused():
    model, unpooled = build().eval(), build(global_pool="", num_classes=0).eval()
    crop = Crop((8, 8), (0, 0, 4, 4))
    for each, images, crops, message in [
        (model, [], None, "`x` must have at least one image"),
        (model, IMAGES, [crop], "`crop` one entry per image, got 5 images and 1 crops"),
        (model, [IMAGES[0][None]], None, r"`x` must be a list of images of \(channels, height, width\)"),
        (model, [torch.randn(3, 30, 32)], None, "`img_size` must be a positive multiple"),
        (model, IMAGES[0][None], [crop], "`crop` must be one crop for a batch"),
        (unpooled, IMAGES, None, "`global_pool` must not be ''"),
    ]:
        with pytest.raises(ValueError, match=message):
            each(images, crop=crops)
