"""A model of images that is resized to volumes gives a volume of one slice the outputs of the image."""

import copy

import pytest
import torch

import graticule
from graticule import Grid, resize
from in_turn import in_turn
from tiny import draw

VIT, DEIT = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"


def built(name=VIT, encoding="learnable", joining="default", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 48, "num_heads": 4, "depth": 2, "num_classes": 5, "patch_size": 4, "img_size": (8, 12)}
    return draw(graticule.create_model(name, encoding=encoding, joining=joining, **sizes, **options)).double().eval()


def repeated(images, depth):
    return images[:, :, None].expand(-1, -1, depth, -1, -1)


CASES = [
    *((VIT, "learnable", joining, {}) for joining in graticule.list_joinings()),
    *((VIT, encoding, "default", {"reg_tokens": 2}) for encoding in ("none", "alibi + learnable", "log_n", "kerple")),
    (DEIT, "learnable(prefix_rows='first')", "lape", {}),
]


@in_turn(("name", "encoding", "joining", "options"), CASES)
@torch.no_grad()
def test_a_volume_of_one_slice_has_the_logits_of_the_image_and_opens_again(name, encoding, joining, options, tmp_path):
    model, images = built(name, encoding, joining, **options), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    logits = model(images)
    assert resize(model, (6, 8, 12), patch_size=(2, 4, 4)) is model
    assert model.grid.shape == (3, 2, 3) and model.img_size == (6, 8, 12) and model.patch_size == (2, 4, 4)
    torch.testing.assert_close(model(repeated(images, 2)), logits, rtol=0, atol=1e-12)
    volumes = torch.randn(2, 3, 6, 8, 12, dtype=torch.float64)
    opened = graticule.from_pretrained(model.save_pretrained(tmp_path)).double()
    torch.testing.assert_close(opened(volumes), model.float().double()(volumes), rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_weights_of_a_patch_are_spread_over_its_slices():
    model = built(class_token=False, global_pool="avg")
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    flat, logits = model.patch_embed.proj.weight.clone(), model(images)
    resize(model, (6, 8, 12), patch_size=(3, 4, 4))
    solid = model.patch_embed.proj.weight
    torch.testing.assert_close(solid.sum(2), flat, rtol=0, atol=1e-15)
    torch.testing.assert_close(solid, (flat / 3)[:, :, None].expand_as(solid), rtol=0, atol=0)
    torch.testing.assert_close(model(repeated(images, 6)), logits, rtol=0, atol=1e-9)  # equal slices, no other tokens


@torch.no_grad()
def test_size_patch_and_channels_change_together():
    model, gray = built(), torch.randn(2, 1, 16, 24, dtype=torch.float64)
    flat = resize(copy.deepcopy(model), (16, 24), patch_size=8, channels=1)
    resize(model, (4, 16, 24), patch_size=(2, 8, 8), channels=1)
    assert model.in_chans == 1 and model.grid == Grid(2, 2, 3, prefix=1)
    torch.testing.assert_close(model(repeated(gray, 2)), flat(gray), rtol=0, atol=1e-9)
    assert resize(model, (8, 8, 24)).grid == Grid(4, 1, 3, prefix=1)  # and as one of volumes


@in_turn(
    ("build", "size", "options", "message"),
    [
        (lambda: graticule.create_model("pvt_tiny", img_size=64), (4, 64, 64), {}, "PyramidVision.*no third axis"),
        (lambda: graticule.fold(built()), (4, 8, 12), {}, "`model` must not be folded"),
        (built, (3, 8, 12), {"patch_size": (2, 4, 4)}, "`img_size` must be a positive multiple .* got depth 3"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), (4, 8, 12), {}, "unless `model` is one of our backbones"),
        *(
            (lambda name=name: built(encoding=name), (4, 8, 12), {}, "a volume of one slice")
            for name in ("rope", "shaw")
        ),
    ],
)
def test_what_cannot_take_volumes_is_refused_with_the_reason_and_is_unchanged(build, size, options, message):
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        resize(model, size, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
