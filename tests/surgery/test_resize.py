"""Resizing stores position and patches for the new size, completely or not at all."""

import copy
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import graticule
from graticule import Grid, fold, resize
from graticule.encodings.forms.mixing import TokenMixing
from graticule.position.folded import FoldedPosition
from graticule.position.position import ENCODINGS
from graticule.position.resampling import build_resampler
from in_turn import in_turn
from tiny import COVER, SIZE, assert_same, draw, holds, images, tiny

PYRAMID = {"img_size": 64, "num_classes": 5, "depths": (2, 2), "embed_dim": 12, "num_heads": (3, 3), "window_size": 4}
_STAGES = {"img_size": 64, "num_classes": 5, "depths": (2, 2), "embed_dim": 12, "groups": (3, 3)}
POSMLP = {**_STAGES, "windows": (4, 4), "mlp_ratios": (2, 2)}
MLP = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_blocks": 2, "num_classes": 5}
#: The encodings of gated MLPs.
MIXING = [name for name, kind in ENCODINGS.items() if issubclass(kind, TokenMixing)]


def positions(model, grid):
    """Return all tensors of the position of a model at a grid."""
    return [v for layer in model.position(grid) for v in layer if isinstance(v, torch.Tensor)]


def built(name, encoding=None, joining="default", **options):
    """Return a small model in float64 with random parameters."""
    torch.manual_seed(0)
    options |= {} if encoding is None else {"encoding": encoding}
    return draw(graticule.create_model(name, joining=joining, **options)).double().eval()


#: Every encoding, in a ViT or in a gated MLP; every joining of a table; the families with windows.
CASES = [
    *[("vit_tiny_patch16_224", encoding, joining, SIZE, (24, 40)) for encoding, joining in COVER],
    ("swin_tiny_patch4_window7_224", None, "default", PYRAMID, (48, 80)),
    ("swin_tiny_patch4_window7_224", "learnable + relative_bias", "lape", PYRAMID, (48, 80)),
    ("posmlp_tiny_224", "lrpe", "default", POSMLP, (48, 80)),
    ("posmlp_tiny_224", "gqpe", "default", POSMLP, (48, 80)),
    *[("gmlp_s16_224", encoding, "default", MLP, (24, 40)) for encoding in MIXING],
    ("mixer_s16_224", None, "default", MLP, (24, 40)),
]


@pytest.fixture(scope="module")
def models():
    """Return the models of all cases; tests change copies."""
    return [built(name, encoding, joining, **options) for name, encoding, joining, options, _ in CASES]


def test_a_resized_model_has_the_outputs_of_the_forward_pass_at_that_size(models):
    for built_once, (*_, size) in zip(models, CASES, strict=True):
        model = copy.deepcopy(built_once)
        x = images(*size, dtype=torch.float64)
        grid = model.grid_at(size)
        before, expected = positions(model, grid), model(x)
        assert resize(model, size) is model
        assert model.img_size == size and model.grid == grid
        if not model.grid.windows:  # windows may be larger on a larger grid
            assert_same(model(x), expected)
            for tensor, value in zip(positions(model, grid), before, strict=True):
                assert_same(tensor, value)


def test_at_its_own_size_a_model_is_unchanged(models):
    for model in models:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        parameters = list(model.parameters())
        assert resize(model, model.img_size) is model
        if model.img_size[0] == model.img_size[1]:
            resize(model, model.img_size[0])
        assert all(parameter is other for parameter, other in zip(model.parameters(), parameters, strict=True))
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_table_of_a_resized_model_is_the_resampled_one():
    model = built("vit_tiny_patch16_224", "learnable", **SIZE)
    table = model.position.encodings[0].pos_embed[0].detach().clone()
    for resampler in ("bicubic", "bilinear(antialias=False)", "area"):
        resized = resize(copy.deepcopy(model), (40, 24), resampler)
        rows = resized.position.encodings[0].pos_embed[0]
        expected = build_resampler(resampler)(table[1:].T.unflatten(1, (4, 4)), (5, 3)).flatten(1).T
        assert torch.equal(rows[0], table[0])  # the class token has no position on the grid
        assert_same(rows[1:], expected)
        assert str(resized.position.encodings[0].resampler) == resampler
    assert str(model.position.encodings[0].resampler) == "bicubic"


def test_a_resampler_that_was_chosen_is_published(tmp_path):
    model = draw(built("vit_tiny_patch16_224", "learnable + relative_bias + peg", **SIZE)).float().eval()
    resize(model, (40, 24), "crop(antialias=False)")  # only for positions
    words = model.created["arguments"]["encoding"]
    assert words == "learnable(resampler='crop(antialias=False)') + relative_bias + peg"
    again = graticule.from_pretrained(graticule.save_pretrained(model, tmp_path / "model"))
    x = torch.randn(1, 3, 64, 48)
    assert torch.equal(again(x), model(x))  # at a size for which both resample
    host = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, embed_dim=24, num_heads=3)
    attached = graticule.attach(host, "learnable")
    resize(attached, 48, "area")
    assert attached.graticule.created["encoding"] == "learnable(resampler='area')"
    mixed = built("gmlp_s16_224", "lrpe_m", img_size=32, patch_size=8, embed_dim=8, num_blocks=1)
    with pytest.raises(ValueError, match="one for tables of displacements and positions, as lrpe_m has both, got geom"):
        resize(mixed, 40, "geometric")
    assert mixed.img_size == (32, 32) and mixed.created["arguments"]["encoding"] == "lrpe_m"
    assert resize(mixed, 40, "area").created["arguments"]["encoding"] == "lrpe_m(resampler='area')"


#: Resampler, intermediate side, and the largest relative change of a table of 14 x 14: of any table, and of one whose
#: waves are at least 7 patches long. docs/sizes.md states them.
ROUND_TRIPS = [
    ("bicubic", 28, 0.77, 0.041),
    ("bicubic", 16, 0.84, 0.033),
    ("bilinear", 28, 0.94, 0.28),
    ("bicubic(antialias=False)", 28, 0.11, 0.029),
    ("bicubic(antialias=False)", 42, 1e-12, 1e-12),
    ("area", 28, 1e-12, 1e-12),
]


def test_up_and_down_again_changes_a_table_by_no_more_than_stated():
    """The relative change is at most the norm of DU x DU - 1, with U and D the matrices of an axis up and down.

    On tables of slow waves, cosines of at least 7 patches per period, it is the norm on their span.
    """
    steps = (torch.arange(14, dtype=torch.float64) + 0.5) * torch.pi / 14
    waves = torch.stack([(order * steps).cos() for order in range(5)], 1)
    waves = waves / waves.norm(dim=0)
    slow = torch.kron(waves, waves)  # orthonormal columns
    model = built("vit_tiny_patch16_224", "learnable", **{**SIZE, "img_size": 112})
    with torch.no_grad():  # half of the channels are slow waves, the others noise
        model.position.encodings[0].pos_embed[0, 1:, :12] = slow @ torch.randn(25, 12, dtype=torch.float64)
    before = model.position.encodings[0].pos_embed[0, 1:].detach()
    for resampler, side, of_any, of_slow in ROUND_TRIPS:
        up, down = (build_resampler(resampler).weights(*pair) for pair in ((14, side), (side, 14)))
        change = torch.kron(down @ up, down @ up) - torch.eye(196, dtype=torch.float64)
        assert torch.linalg.matrix_norm(change, 2) <= of_any and torch.linalg.matrix_norm(change @ slow, 2) <= of_slow
        resized = resize(resize(copy.deepcopy(model), side * 8, resampler), 112)
        after = resized.position.encodings[0].pos_embed[0, 1:]
        assert torch.equal(resized.position.encodings[0].pos_embed[0, 0], model.position.encodings[0].pos_embed[0, 0])
        relative = (after - before).norm(dim=0) / before.norm(dim=0)
        assert (relative[:12] <= of_slow).all() and (relative[12:] <= of_any).all(), resampler


def test_the_page_on_sizes_states_these_changes():
    page = (Path(__file__).parents[2] / "docs" / "sizes.md").read_text(encoding="utf-8")
    for resampler, side, *changes in ROUND_TRIPS:
        stated = " | ".join("0" if change < 1e-9 else f"{change:g}" for change in changes)
        assert f"| `{resampler}` | {side} x {side} | {stated} |" in page


def test_a_model_that_holds_backbones_is_resized_with_all_of_them():
    module = nn.ModuleDict({name: built("vit_tiny_patch16_224", "learnable", **SIZE) for name in ("a", "b")})
    resize(module, (24, 40))
    assert all(module[name].img_size == (24, 40) for name in "ab")


def test_a_stock_model_with_an_attached_position_is_resized_and_detached():
    x = images(24, 40, dtype=torch.float64)
    stock = draw(timm.create_model("vit_tiny_patch16_224", **SIZE)).double().eval()
    ours = draw(tiny("learnable", "lape")).double().eval()
    model = graticule.attach(copy.deepcopy(stock), "learnable", "lape")
    ours.load_state_dict(
        {name: value for name, value in stock.state_dict().items() if name != "pos_embed"}, strict=False
    )
    model.graticule.position.load_state_dict(ours.position.state_dict())
    with torch.no_grad():
        assert_same(resize(model, (24, 40), "bilinear")(x), resize(ours, (24, 40), "bilinear")(x))
    assert model.graticule.grid.shape == (3, 5) and not model.pos_embed.any() and "pos_embed" not in model.state_dict()
    assert torch.equal(graticule.detach(model)(x), resize(stock, (24, 40))(x))


class Undone(nn.Module):
    """Has timm's interface, and raises after half of a change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("index", torch.ones(2))
        self.sizes = [1]

    def set_input_size(self, img_size):
        self.weight, self.index, self.more = nn.Parameter(torch.zeros(3)), torch.zeros(3), nn.Linear(1, 1)
        self.sizes.append(img_size)
        raise RuntimeError("no such size")


def test_a_failed_resize_is_undone(monkeypatch):
    model = Undone()
    weight, index = model.weight, model.index
    with pytest.raises(RuntimeError, match="no such size"):
        resize(model, 8)
    assert model.weight is weight and model.index is index and not hasattr(model, "more") and model.sizes == [1]
    assert list(model.state_dict()) == ["weight", "index"]

    def fails(self, grid):
        self.original.set_grid(grid)
        raise MemoryError

    folded, x = fold(built("vit_tiny_patch16_224", "learnable", "lape", **SIZE)), images(dtype=torch.float64)
    before = folded(x)
    with monkeypatch.context() as patch:
        patch.setattr(FoldedPosition, "set_grid", fails)
        with pytest.raises(MemoryError):
            resize(folded, (24, 40))
    assert torch.equal(folded(x), before) and folded.img_size == (32, 32)
    assert_same(graticule.unfold(folded)(x), before)


# Patch embeddings, on models of this library, timm and transformers

#: A model per library, as a function of its patch size.
HOSTS = {
    "graticule": lambda: draw(tiny(img_size=28, patch_size=7)),
    "timm": lambda: draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": 28, "patch_size": 7})),
    "transformers": lambda: _dinov2(),
}


def _dinov2():
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
    return draw(transformers.Dinov2Model(transformers.Dinov2Config(**small)))


def convolution(model):
    """Return the patch embedding's convolution."""
    return next(module for module in model.modules() if isinstance(module, nn.Conv2d))


def output(model, x):
    with torch.no_grad():
        outputs = model(x)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.last_hidden_state


@pytest.mark.parametrize("library", HOSTS)
def test_a_patch_that_was_enlarged_has_the_same_token(library):
    model = HOSTS[library]().double().eval()
    patches = torch.randn(5, 3, 7, 7, dtype=torch.float64)
    before = convolution(model)(patches)
    assert resize(model, 32, patch_size=8) is model
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
    resize(model, channels=channels)
    torch.testing.assert_close(output(model, gray.expand(-1, channels, -1, -1)), before, rtol=0, atol=1e-10)


def test_the_configuration_of_transformers_is_adapted(tmp_path):
    model = _dinov2().eval()
    layers = {name: value for name, value in model.state_dict().items() if "layer" in name}
    resize(model, 48, patch_size=8, channels=1)
    assert (model.config.image_size, model.config.patch_size, model.config.num_channels) == (48, 8, 1)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in layers.items())
    model.save_pretrained(tmp_path)
    x = torch.randn(1, 1, 48, 48)
    assert torch.equal(output(type(model).from_pretrained(tmp_path), x), output(model, x))


def test_a_resized_model_is_published_with_its_patches(tmp_path):
    model = resize(graticule.convert(_dinov2().eval()), (32, 48), patch_size=8, channels=1)
    model.save_pretrained(tmp_path / "model")
    opened = graticule.from_pretrained(tmp_path / "model")
    assert (opened.patch_size, opened.img_size, opened.in_chans) == ((8, 8), (32, 48), 1)
    x = torch.randn(1, 1, 32, 48)
    assert torch.equal(output(opened, x), output(model, x))


def test_a_debiased_model_of_timm_is_resized_as_the_model():
    model = draw(timm.create_model("vit_tiny_patch16_224", **SIZE)).eval()
    debiased, host = graticule.debias(copy.deepcopy(model), images(batch=9)), resize(model, (48, 64))
    assert resize(debiased, (48, 64)) is debiased
    assert_same(debiased.backbone.state_dict(), host.state_dict())


# A model of images that takes volumes gives a volume of one slice the outputs of the image

VIT, DEIT = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"


def image_model(name=VIT, encoding="learnable", joining="default", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 48, "num_heads": 4, "depth": 2, "num_classes": 5, "patch_size": 4, "img_size": (8, 12)}
    return draw(graticule.create_model(name, encoding=encoding, joining=joining, **sizes, **options)).double().eval()


def repeated(x, depth):
    return x[:, :, None].expand(-1, -1, depth, -1, -1)


VOLUME_CASES = [
    *((VIT, "learnable", joining, {}) for joining in graticule.list_joinings()),
    *((VIT, encoding, "default", {"reg_tokens": 2}) for encoding in ("none", "alibi + learnable", "log_n", "kerple")),
    (DEIT, "learnable(prefix_rows='first')", "lape", {}),
]


@in_turn(("name", "encoding", "joining", "options"), VOLUME_CASES)
@torch.no_grad()
def test_a_volume_of_one_slice_has_the_logits_of_the_image_and_opens_again(name, encoding, joining, options, tmp_path):
    model, x = image_model(name, encoding, joining, **options), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    logits = model(x)
    assert resize(model, (6, 8, 12), patch_size=(2, 4, 4)) is model
    assert model.grid.shape == (3, 2, 3) and model.img_size == (6, 8, 12) and model.patch_size == (2, 4, 4)
    torch.testing.assert_close(model(repeated(x, 2)), logits, rtol=0, atol=1e-12)
    volumes = torch.randn(2, 3, 6, 8, 12, dtype=torch.float64)
    opened = graticule.from_pretrained(model.float().save_pretrained(tmp_path)).double()
    torch.testing.assert_close(opened(volumes), model.double()(volumes), rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_weights_of_a_patch_are_spread_over_its_slices():
    model = image_model(class_token=False, global_pool="avg")
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    flat, logits = model.patch_embed.proj.weight.clone(), model(x)
    resize(model, (6, 8, 12), patch_size=(3, 4, 4))
    solid = model.patch_embed.proj.weight
    torch.testing.assert_close(solid.sum(2), flat, rtol=0, atol=1e-15)
    torch.testing.assert_close(solid, (flat / 3)[:, :, None].expand_as(solid), rtol=0, atol=0)
    torch.testing.assert_close(model(repeated(x, 6)), logits, rtol=0, atol=1e-9)  # equal slices, no other tokens


@torch.no_grad()
def test_size_patch_and_channels_change_together():
    model, gray = image_model(), torch.randn(2, 1, 16, 24, dtype=torch.float64)
    flat = resize(copy.deepcopy(model), (16, 24), patch_size=8, channels=1)
    resize(model, (4, 16, 24), patch_size=(2, 8, 8), channels=1)
    assert model.in_chans == 1 and model.grid == Grid(2, 2, 3, prefix=1)
    torch.testing.assert_close(model(repeated(gray, 2)), flat(gray), rtol=0, atol=1e-9)
    assert resize(model, (8, 8, 24)).grid == Grid(4, 1, 3, prefix=1)  # and as one of volumes


def refused(build, message, size=None, *resampler, **options):
    return build, (size, *resampler), options, message


def _fixed():
    model = graticule.attach(timm.create_model("vit_tiny_patch16_224", **SIZE), remove=())
    model.graticule.dynamic = False
    return model


def _language():
    return graticule.create_language_model("lm_nano", vocab_size=5, context=8, embed_dim=12, depth=1, num_heads=3)


def _swin():
    return graticule.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(3, 6))


OURS, THEIRS = HOSTS["graticule"], HOSTS["timm"]
ROPE, VOLUME = partial(built, "vit_tiny_patch16_224", "rope", **SIZE), (4, 8, 12)
LRPE = partial(built, "posmlp_tiny_224", "lrpe", **POSMLP)
HIERA = partial(timm.create_model, "hiera_tiny_224", img_size=(64, 96))
SAM2 = partial(timm.create_model, "sam2_hiera_tiny", embed_dim=16, stages=(1, 1, 2, 1), global_att_blocks=(3,))
NO_SIZE = "`model` must be of this library or have timm's `set_input_size`, got"
TABLES_OF_TIMM = "`resampler` must be left out with VisionTransformer, whose tables timm resamples"
REFUSED = [
    refused(OURS, "`img_size` must be a positive multiple of the patch size, got height 30", (30, 35)),
    refused(OURS, "`img_size` must be at least 1", 0),
    refused(OURS, "did you mean 'bicubic'", 28, "bicubi"),
    refused(OURS, "resamples something of the model, which has tables of positions, got geometric", 28, "geometric"),
    refused(ROPE, "which has nothing that is resampled, got bicubic", 32, "bicubic"),
    refused(LRPE, "`img_size`", 68, "bicubic"),
    refused(THEIRS, "`img_size` must be a positive multiple of the patch size", 30),
    refused(THEIRS, TABLES_OF_TIMM, 28, "bilinear"),
    refused(_fixed, "attached with a fixed `patch_grid`", 40),
    refused(_language, NO_SIZE, 8),
    refused(lambda: nn.Linear(2, 2), f"{NO_SIZE} Linear", 8),
    refused(OURS, "`img_size`, `patch_size`, `channels` or `resampler` must be given, got none"),
    refused(OURS, "`channels` must be at least 1, got 0", channels=0),
    *(refused(build, "28", patch_size=8) for build in HOSTS.values()),
    refused(HOSTS["transformers"], "multiple of the patch size, got width 33 with a patch of 7", (28, 33)),
    refused(_swin, "`patch_size` must be left out with SwinTransformer, got 8 x 8", patch_size=8),
    refused(HIERA, "`img_size` must be a multiple of the mask units, 32 x 32 pixels, got 80 x 80.", 80),
    refused(HIERA, "`patch_size` must be left out with Hiera", 96, patch_size=8),
    refused(SAM2, "must be a multiple of the windows, 32 x 32 pixels, got 144 x 96", (144, 96)),
    # volumes
    refused(lambda: graticule.create_model("pvt_tiny", img_size=64), "PyramidVision.*no third axis", (4, 64, 64)),
    refused(lambda: graticule.fold(image_model()), "`model` must not be folded", VOLUME),
    refused(image_model, "must be a positive multiple .* got depth 3", (3, 8, 12), patch_size=(2, 4, 4)),
    refused(lambda: nn.Sequential(nn.Linear(2, 2)), "unless `model` is one of our backbones", VOLUME),
    *(refused(partial(image_model, encoding=name), "a volume of one slice", VOLUME) for name in ("rope", "shaw")),
]


@in_turn(("build", "sizes", "options", "message"), REFUSED)
def test_a_refused_size_is_explained_and_leaves_the_model_unchanged(build, sizes, options, message):
    model = build()
    before, modules = dict(model.state_dict()), repr(model)
    values = {name: value.clone() for name, value in before.items()}
    with pytest.raises(ValueError, match=message):
        resize(model, *sizes, **options)
    after = model.state_dict()
    assert after.keys() == before.keys() and repr(model) == modules and holds(model, values)
    assert all(after[name].data_ptr() == value.data_ptr() for name, value in before.items())


@in_turn("size", ["32", 3.5, (1, 2, 3, 4)])
def test_a_size_of_another_type_is_refused(size):
    with pytest.raises(TypeError, match="`img_size` must be"):
        resize(OURS(), size)
