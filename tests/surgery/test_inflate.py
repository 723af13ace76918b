"""A model of images that is resized to films gives a film of one repeated image the outputs of the image."""

import copy
import json

import pytest
import torch

import graticule
from graticule import Grid, resize
from graticule.encodings.forms.mixing import TokenMixing
from graticule.position.position import ENCODINGS
from in_turn import in_turn
from tiny import ENCODERS, draw

ATTENTION = {"embed_dim": 48, "num_heads": 4, "depth": 2}
MIXING = {"embed_dim": 24, "groups": 2, "num_blocks": 2}
MIXERS = [name for name, kind in ENCODINGS.items() if issubclass(kind, TokenMixing)]
VIT, DEIT, CPVT = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "cpvt_tiny_gap_patch16_224"
CASES = [
    *((VIT, encoding, "default", {}) for encoding in ENCODERS),
    *((VIT, "learnable", joining, {}) for joining in graticule.list_joinings()),
    *((VIT, "relative_bias(prefix_rows=True)", joining, {"reg_tokens": 2}) for joining in ("default", "lape")),
    (VIT, "irpe(on='qkv') + learnable", "lape", {}),  # functions of queries, keys and weights
    (VIT, "alibi(distance='squared') + rope_mixed", "default", {"global_pool": "map"}),  # a bias in factors
    (VIT, "peg(acts_on='queries_keys', places=[-1])", "default", {"class_token": False, "global_pool": "seq"}),
    (DEIT, "shaw + learnable", "queries_keys", {}),
    (CPVT, "peg(places=[-1, 0], layers=2)", "default", {}),
    *(("gmlp_ti16_224", encoding, "default", {}) for encoding in MIXERS),
    ("mixer_s16_224", "token_mlp", "default", {}),
    ("resmlp_12_224", "sgu", "default", {}),
]


def built(name=VIT, encoding="learnable", joining="default", img_size=(8, 12), **options):
    torch.manual_seed(0)
    sizes = ATTENTION if name in (VIT, DEIT, CPVT) else MIXING
    given = {**sizes, "num_classes": 5, "patch_size": 4, "img_size": img_size, **options}
    return draw(graticule.create_model(name, encoding=encoding, joining=joining, **given)).double().eval()


def repeated(images, frames):
    return images[:, :, None].expand(-1, -1, frames, -1, -1)


@in_turn(("name", "encoding", "joining", "options"), CASES)
@torch.no_grad()
def test_a_film_of_one_repeated_image_has_the_logits_of_the_image(name, encoding, joining, options):
    model, images = built(name, encoding, joining, **options), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    logits = model(images)
    assert resize(model, (6, 8, 12), patch_size=(2, 4, 4)) is model
    assert model.grid.shape == (3, 2, 3) and model.img_size == (6, 8, 12) and model.patch_size == (2, 4, 4)
    torch.testing.assert_close(model(repeated(images, 6)), logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(repeated(images, 10)), logits, rtol=1e-9, atol=1e-9)  # more frames
    other = torch.cat([repeated(images, 4), repeated(images.flip(-1), 2)], 2)
    assert not torch.allclose(model(other), logits)


SWIN = {"depths": (2, 2), "embed_dim": 12, "num_heads": (1, 2), "window_size": 4}
OF_FRAMES = [
    *(
        ("swin_tiny_patch4_window7_224", encoding, joining, {"img_size": (32, 44), **SWIN})
        for encoding, joining in (
            ("relative_bias", "default"),
            ("learnable + relative_bias", "lape"),
            ("shaw + peg", "default"),
            ("rope + log_n", "default"),
            ("learnable", "shared"),
        )
    ),
    ("swin_tiny_patch4_window7_224", "relative_bias", "lape", {"img_size": (24, 40), **SWIN, "shift": "microsoft"}),
]


@in_turn(("name", "encoding", "joining", "options"), OF_FRAMES)
@torch.no_grad()
def test_a_film_of_as_many_frames_has_the_logits_of_the_image_and_opens_again(
    name, encoding, joining, options, tmp_path
):
    torch.manual_seed(0)
    given = {"num_classes": 5, "patch_size": 4, "img_size": (8, 12), **options}
    model = draw(graticule.create_model(name, encoding=encoding, joining=joining, **given)).double().eval()
    height, width = model.img_size
    images = torch.randn(2, 3, height, width, dtype=torch.float64)
    logits = model(images)
    resize(model, (12, height, width), patch_size=(2, 4, 4))
    assert model.grid.shape == (6, height // 4, width // 4)
    torch.testing.assert_close(model(repeated(images, 12)), logits, rtol=0, atol=1e-12)
    other = torch.cat([repeated(images, 8), repeated(images.flip(-1), 4)], 2)
    assert not torch.allclose(model(other), logits)
    opened = graticule.from_pretrained(model.save_pretrained(tmp_path)).double()
    torch.testing.assert_close(opened(other), model.float().double()(other), rtol=0, atol=1e-12)
    assert any(line.startswith("window_size: ((3, ") for line in model.certificate.new)


@in_turn("frames", ["mean", "middle"])
@torch.no_grad()
def test_the_weights_of_a_patch_are_spread_or_in_the_middle(frames):
    model, images = built(), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    flat, logits = model.patch_embed.proj.weight.clone(), model(images)
    resize(model, (6, 8, 12), patch_size=(3, 4, 4), frames=frames)
    solid = model.patch_embed.proj.weight
    torch.testing.assert_close(solid.sum(2), flat, rtol=0, atol=1e-15)
    assert torch.equal(solid[:, :, 0], solid[:, :, 1]) == (frames == "mean")
    assert solid[:, :, 0].any() == (frames == "mean") and solid[:, :, 1].any()
    torch.testing.assert_close(model(repeated(images, 6)), logits, rtol=0, atol=1e-9)


@torch.no_grad()
def test_size_patch_and_channels_change_together():
    model, gray = built(), torch.randn(2, 1, 16, 24, dtype=torch.float64)
    flat = resize(copy.deepcopy(model), (16, 24), patch_size=8, channels=1)
    resize(model, (4, 16, 24), patch_size=(2, 8, 8), channels=1)
    assert model.in_chans == 1 and model.grid == Grid(2, 2, 3, prefix=1)
    torch.testing.assert_close(model(repeated(gray, 4)), flat(gray), rtol=0, atol=1e-9)
    resize(model, (8, 8, 24))  # and a model of films is resized as one of images
    assert model.grid == Grid(4, 1, 3, prefix=1)
    torch.testing.assert_close(
        model(repeated(gray[:, :, :8], 8)), resize(flat, (8, 24))(gray[:, :, :8]), rtol=0, atol=1e-9
    )


def test_time_is_learned_and_then_the_order_of_the_frames_matters():
    model = resize(built(encoding="rope", joining="default"), (3, 8, 12)).train()
    films = torch.randn(2, 3, 3, 8, 12, dtype=torch.float64)
    assert torch.allclose(model(films), model(films.flip(2)))  # a set of frames
    model(films).square().sum().backward()
    table = model.position.time.encodings[0].pos_embed
    assert table.grad.abs().sum(-1).all()
    table.data.normal_()
    assert not torch.allclose(model(films), model(films.flip(2)))


@torch.no_grad()
def test_the_certificate_and_the_words_say_what_is_new_and_the_folder_opens(tmp_path):
    model = resize(built(encoding="learnable + rope(base=50.0)", joining="lape"), (4, 8, 12), patch_size=(2, 4, 4))
    words = model.created["arguments"]
    assert words["encoding"] == "per_frame(of='learnable + rope(base=50.0)', joined='lape')"
    assert words["joining"] == "default" and words["img_size"] == (4, 8, 12)
    assert model.certificate.new[0] == "position.time.encodings.0.pos_embed: zeros"
    assert "in equal parts in each frame of 2" in str(model.certificate)
    assert model.certificate.summary().startswith("all is kept; new: position.time")
    model.position.time.encodings[0].pos_embed.normal_()
    folder, films = model.save_pretrained(tmp_path / "film"), torch.randn(2, 3, 4, 8, 12, dtype=torch.float64)
    assert json.loads((folder / "config.json").read_text())["graticule"]["encoding"] == words["encoding"]
    opened = graticule.from_pretrained(folder).double()
    torch.testing.assert_close(opened(films), model.float().double()(films), rtol=0, atol=1e-12)
    torch.testing.assert_close(graticule.fold(opened)(films), model(films), rtol=0, atol=1e-12)


@in_turn(
    ("build", "size", "options", "message"),
    [
        (
            lambda: graticule.create_model("pvt_tiny", img_size=64),
            (4, 64, 64),
            {},
            "with PyramidVisionTransformer.*no third axis",
        ),
        (lambda: graticule.fold(built()), (4, 8, 12), {}, "`model` must not be folded"),
        (lambda: built(global_pool="avg", pool_include_prefix=True), (4, 8, 12), {}, "must not pool prefix tokens"),
        (built, (3, 8, 12), {"patch_size": (2, 4, 4)}, "`img_size` must be a positive multiple .* got depth 3"),
        (built, (8, 12), {"frames": "mean"}, "`frames` must be left out"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), (4, 8, 12), {}, "unless `model` is one of our backbones"),
    ],
)
def test_what_cannot_take_films_is_refused_with_the_reason_and_is_unchanged(build, size, options, message):
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        resize(model, size, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
