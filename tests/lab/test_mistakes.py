"""Common mistakes of a user of Python, each with an error that says what to do, or none where it is unambiguous."""

import contextlib
import copy

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import graticule
import tiny
from graticule.lab.recipes.load import load_recipe

MODEL = tiny.tiny("learnable").eval()
PILLOW = Image.new("RGB", (32, 32))
PIXELS = torch.zeros(12, 3, 32, 32, dtype=torch.uint8)
FUNCTIONS = {
    "position_share": graticule.position_share,
    "debias": graticule.debias,
    "audit": graticule.audit,
    "change_position": lambda model, images: graticule.change_position(model, "shaw", "default", images),
    "audit by size": lambda model, images: graticule.audit(model, {(32, 32): images}),
    "a model": lambda model, images: model(images),
}
MISTAKES = {
    "did you mean epochs": lambda: graticule.Recipe(epoch=2),
    "did you mean context": lambda: graticule.TextRecipe(contexts=2),
    "begins with timm: or hf:": lambda: graticule.load("deit_tiny_patch16_224"),
    "convert.timm.create_model.'vit_base_patch14_dinov2'": lambda: graticule.create_model("vit_base_patch14_dinov2"),
    "convert.timm.create_model.'vit_tiny_r_s16": lambda: graticule.create_model("timm:vit_tiny_r_s16_p8_224"),
    "load.'hf:facebook/dinov2-small'": lambda: graticule.create_model("facebook/dinov2-small"),
    "load.'hf:facebook/dinov2-base'": lambda: graticule.create_model("hf:facebook/dinov2-base"),
    "load.'./weights.safetensors'": lambda: graticule.create_model("./weights.safetensors"),
    "if its class converts": lambda: graticule.create_model("resnet50"),
    "12 of .height, width. .32, 32., got .12, 3, 48, 48.": lambda: graticule.audit(
        MODEL, {(32, 32): torch.rand(12, 3, 48, 48)}
    ),
    "12 of .height, width. .48, 48., got .5": lambda: graticule.audit(
        MODEL, {(32, 32): torch.rand(12, 3, 32, 32), (48, 48): torch.rand(5, 3, 48, 48)}
    ),
    "`labels` must be 8 classes": lambda: graticule.audit(MODEL, torch.rand(8, 3, 32, 32), labels=torch.arange(3)),
    "B at least 9, got torch.float32 .8, 3": lambda: graticule.debias(MODEL, torch.rand(8, 3, 32, 32)),
    "must differ": lambda: graticule.position_share(MODEL, torch.zeros(4, 3, 32, 32)),
    "must be finite": lambda: graticule.position_share(MODEL, torch.full((2, 3, 32, 32), torch.nan)),
    "be .B, C, height, width., got": lambda: graticule.audit(MODEL, torch.rand(3, 32, 32)),
    "must contain images of the model's size": lambda: graticule.audit(MODEL, {(48, 48): torch.rand(8, 3, 48, 48)}),
    "must be one that CoaT runs on": lambda: graticule.position_share(
        timm.create_model("coat_tiny", img_size=64), torch.rand(2, 3, 64, 64), [(96, 96)]
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_images_that_are_no_tensor_are_refused_with_the_way_to_make_one(name):
    for images in (PILLOW, [PILLOW] * 12, np.zeros((12, 32, 32, 3))):
        with pytest.raises((TypeError, ValueError), match=r"timm.data.create_transform\(.*torch.stack"):
            FUNCTIONS[name](MODEL, images)
    with pytest.raises(ValueError, match="uint8"):
        FUNCTIONS[name](MODEL, PIXELS)


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_names_its_cure(text):
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        MISTAKES[text]()


def test_what_is_unambiguous_is_accepted():
    assert graticule.Recipe(img_size=64).img_size == (64, 64)
    images = torch.rand(8, 3, 32, 32)
    assert graticule.position_share(MODEL, images, [[48, 48]]).others.keys() == {(48, 48)}
    half = graticule.debias(copy.deepcopy(MODEL).half(), torch.rand(12, 3, 32, 32).half())
    assert half.certificate.images == 4
    named, bare = (graticule.audit(MODEL, given, timed=False) for given in ({(32, 32): images}, images))
    np.testing.assert_array_equal(named.share.total.value, bare.share.total.value)
    words = graticule.create_model("deit_tiny_patch16_224", depth=1, joining="default(layers=None)")
    assert str(words.position.joining) == str(graticule.create_model("deit_tiny_patch16_224", depth=1).position.joining)
    resized = timm.create_model("levit_128s").eval()
    assert graticule.position_share(resized, torch.rand(2, 3, 224, 224), [(256, 256)]).others.keys() == {(256, 256)}


def test_training_without_progress_prints_nothing(tmp_path, capfd):
    with contextlib.suppress(FileExistsError):
        graticule.train(load_recipe("digits_quick").quick(), tmp_path / "run", progress=False)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
