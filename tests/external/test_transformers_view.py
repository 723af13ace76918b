"""Models of transformers as they are, without conversion: their position is found, removed, shuffled and checked."""

import copy
import json

import pytest
import torch
import transformers
from transformers_models import MERGED, SAM, SMALL, VIDEO, WINDOWS, build, whole_float64

import graticule
import tiny
from evidence.models_page import OTHERS, TRANSFORMERS, configured
from graticule.analysis.audit import audit
from graticule.external.images import image_size
from graticule.external.open_view import ResampledTables, StructureView, view_of
from graticule.external.structure import find_structure
from graticule.external.transformers_folder import class_of
from graticule.external.view import permutation
from graticule.lab.pages.explorer_maps import explorer_maps
from graticule.lab.studies.resamplers import try_resamplers
from graticule.testing.models import inspect_model

#: Models whose only position information is that of their tokens: class, configuration.
PLAIN = [
    *[(name, SMALL) for name in ("ViTModel", "Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel")],
    *[(name, SMALL) for name in ("CLIPVisionModel", "SiglipVisionModel", "ViTMAEModel", "IJepaModel")],
    ("BeitModel", {**SMALL, "use_relative_position_bias": True, "use_absolute_position_embeddings": True}),
    ("PixtralVisionModel", SMALL),
    ("SamVisionModel", {**SAM, "window_size": 0}),
    (
        "Siglip2VisionModel",
        {**{name: value for name, value in SMALL.items() if name != "image_size"}, "num_patches": 16},
    ),
    ("Qwen3VLVisionModel", {**MERGED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
]
#: Models of films, of 4 frames in patches of 2, and Qwen2-VL's encoder, which has no size of its own.
FILMS = [
    ("VideoMAEModel", VIDEO),
    ("VivitModel", {**VIDEO, "tubelet_size": [2, 8, 8]}),
    ("VJEPA2Model", {**SMALL, "crop_size": 32, "frames_per_clip": 4, "mlp_ratio": 2.0}),
]
SLOW = ["export", "caches", "autocast", "transposition", "crop", "sizes"]
HIERA = {"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2]}
#: Names of the tensors of models with windows that give them position, and their value without it.
WINDOWED = [
    ("SwinModel", WINDOWS, ("relative_position_bias_table",)),
    ("Swinv2Model", WINDOWS, ("continuous_position_bias_mlp.2.weight",)),
    ("SamVisionModel", {**SAM, "window_size": 2}, ("pos_embed", "rel_pos_h", "rel_pos_w")),
    ("HieraModel", HIERA, ("position_embeddings",)),
]


@pytest.fixture(scope="module")
def plain():
    """Return the models with random weights in float64, and images."""
    torch.manual_seed(0)
    with whole_float64():
        made = {name: tiny.draw(build(name, config)) for name, config in PLAIN}
    torch.nn.init.normal_(made["ViTMAEModel"].embeddings.position_embeddings)  # it is not trained
    return made


def shuffled(images, order, side=8):
    """Put patch order[i] of images (B, C, H, W) at position i."""
    cut = images.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)[:, order]
    return cut.unflatten(1, (images.shape[2] // side, -1)).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


def test_shuffling_positions_is_shuffling_patches_and_none_are_left_without(plain):
    images, order = torch.randn(2, 3, 32, 32, dtype=torch.float64), permutation(16, 3)
    for name, model in plain.items():
        view = StructureView(model)
        assert [grid.shape for grid in view.grids((32, 32))] == [(4, 4)] * 2 and not view.unknown_parameters, name
        (x, grid), (before, _) = view.shuffled(3).run(images).layers[-1], view.run(images).layers[-1]
        (y, _) = view.run(shuffled(images, order.argsort())).layers[-1]
        torch.testing.assert_close(grid.split(x)[1], grid.split(y)[1][:, order], rtol=1e-6, atol=1e-8)
        assert not torch.allclose(x, before, rtol=1e-3), name
        without = view.without_position()
        (a, _), (b, _) = (without.run(one).layers[-1] for one in (images, shuffled(images, order)))
        torch.testing.assert_close(grid.split(a)[1][:, order], grid.split(b)[1], rtol=1e-6, atol=1e-8)
        assert view.attention(images)[1].weights.sum(-1) == pytest.approx(1)


def test_zeroing_position_is_zeroing_its_parameters():
    for name, config, names in WINDOWED:
        torch.manual_seed(0)
        model = tiny.draw(build(name, config)).double()
        bare = build(name, config).double()
        bare.load_state_dict(model.state_dict())
        with torch.no_grad():
            for own, value in bare.named_parameters():
                if own.endswith(names):
                    value.zero_()
        view = StructureView(model)
        images = torch.randn(2, 3, *view.img_size, dtype=torch.float64)
        (x, _), (y, _) = view.without_position().run(images).layers[-1], StructureView(bare).run(images).layers[-1]
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(x, view.run(images).layers[-1][0])
        features = [
            one.features(images, one.run(images).layers) for one in (view.without_position(), StructureView(bare))
        ]
        torch.testing.assert_close(*features, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(view.shuffled(1).run(images).layers[-1][0], view.run(images).layers[-1][0])
        assert sum(view.position_parameters.values()) >= sum(
            value.numel() for own, value in model.named_parameters() if own.endswith(names)
        )


def test_tokens_in_the_order_of_windows_are_put_row_by_row():
    torch.manual_seed(0)
    model = tiny.draw(build("HieraModel", HIERA)).double()
    found = find_structure(model)
    assert [grid.shape for grid in found.grids] == [(16, 16), (8, 8), (4, 4), (2, 2)] and None not in found.orders[:2]
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    other = images.clone()
    other[:, :, 16:24, 40:] += 1  # rows 4 and 5, columns 10 to 15 of patches of 4 x 4 pixels
    before, after = (StructureView(model).run(one).layers[0][0] for one in (images, other))
    changed = (after - before).norm(dim=-1).view(2, 16, 16)
    assert changed[:, 4:6, 10:].min() > 10 * changed[:, 12:].max()
    view = StructureView(model)
    kept = view.run(images, lambda layer, x, grid: x).layers[-1][0]
    torch.testing.assert_close(kept, view.run(images).layers[-1][0], rtol=0, atol=0)
    assert "correlation" in {one.kind for one in explorer_maps(view, images[:1]).maps}


def test_a_table_that_is_not_square_and_is_read_as_a_square_is_found():
    found = {one.check: one for one in inspect_model(build("ViTModel", {**SMALL, "image_size": (24, 96)}), skip=SLOW)}
    assert found["axes"].outcome == "failed" and "resampled for 15 x 15 patches must run row" in found["axes"].detail


def test_other_sizes_are_asked_for_by_the_models_own_interpolation(plain):
    images = torch.randn(2, 3, 48, 32, dtype=torch.float64)
    view = StructureView(plain["ViTModel"]).sized((48, 32))
    expected = plain["ViTModel"](images, interpolate_pos_encoding=True).last_hidden_state
    (x, grid) = view.run(images).layers[-1]
    assert grid.shape == (6, 4) and torch.equal(plain["ViTModel"].layernorm(x), expected)
    larger = StructureView(plain["DINOv3ViTModel"]).placed_at((64, 64)).run(images[:, :, :32])
    assert not torch.allclose(
        larger.layers[-1][0], StructureView(plain["DINOv3ViTModel"]).run(images[:, :, :32]).layers[-1][0]
    )


@pytest.mark.parametrize("name", ["DINOv3ViTModel", "PixtralVisionModel", "SamVisionModel", "Qwen3VLVisionModel"])
def test_a_model_is_audited_and_explored_as_it_is(plain, name):
    model = plain[name]
    handle = model.register_forward_hook(lambda *_: None)  # which a conversion would lose
    try:
        images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
        found = audit(model, {(32, 32): images}, timed=False)
        assert {one.name for one in found.effects} >= {"position zeroed", "position shuffled"}
        assert found.attention is not None and len(found.probes) == 2 and not found.unknown
        kinds = {one.kind for one in explorer_maps(view_of(model), images[:1]).maps}
        assert {"attention", "without"} <= kinds and kinds & {"correlation", "rotary"}
    finally:
        handle.remove()


def test_models_pass_the_checks_of_position_code():
    for name, laws in (
        ("DINOv3ViTModel", {"axes", "pair layout", "prefix", "batch"}),
        ("PixtralVisionModel", {"axes", "pair layout", "batch"}),
        ("Dinov2WithRegistersModel", {"axes", "prefix", "batch"}),
    ):
        found = {one.check: one.outcome for one in inspect_model(build(name, SMALL), skip=["export", "caches"])}
        assert "failed" not in found.values() and laws <= {law for law, how in found.items() if how == "passed"}, found


#: The nineteen classes that were tried when nothing of them worked without conversion.
LOADED = [*(name for name, _ in PLAIN if name != "Qwen3VLVisionModel"), *(name for name, _ in FILMS)]
LOADED += ["SwinModel", "Swinv2Model", "HieraModel", "Qwen2VisionTransformerPretrainedModel"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_each_class_is_audited_explored_and_checked_as_it_is(name):
    torch.manual_seed(0)
    model = tiny.draw(build(name, configured(name))).double()
    model.register_forward_hook(lambda *_: None)  # which a conversion would lose
    size = image_size(model)
    images = torch.randn(5, 3, *size, dtype=torch.float64)
    effects = {one.name for one in audit(model, {size: images}, size, timed=False).effects}
    assert effects >= {"position zeroed", "position shuffled"}
    kinds = {one.kind for one in explorer_maps(view_of(model, size), images[:1]).maps}
    assert kinds & {"correlation", "rotary", "bias"}
    found = inspect_model(model, img_size=size, skip=["export"])
    # the lengths of its queries change in Meta's code, too
    assert {one.check for one in found if one.outcome == "failed"} == ({"pair layout"} if "VJEPA2" in name else set())
    assert {"batch", "caches"} <= {one.check for one in found if one.outcome == "passed"}


@pytest.mark.parametrize(("name", "config"), [*FILMS[:2], pytest.param(*FILMS[2], marks=pytest.mark.slow)])
def test_a_model_of_films_is_a_model_of_strips_of_frames(name, config):
    torch.manual_seed(0)
    model, order = tiny.draw(build(name, config)), permutation(32, 3)
    view = view_of(model)
    strip = torch.randn(2, 3, 64, 32)
    film = strip.unflatten(2, (2, 32)).transpose(1, 2).repeat_interleave(2, 1)
    (x, grid), expected = view.run(strip).layers[-1], model(film).last_hidden_state
    norm = getattr(getattr(model, "encoder", model), "layernorm", None) or getattr(model, "layernorm", None)
    assert view.img_size == (64, 32) and grid.shape == (8, 4)
    torch.testing.assert_close(x if norm is None else norm(x), expected)
    moved = view.shuffled(3).run(strip).layers[-1][0]
    other = view.run(shuffled(strip, order.argsort())).layers[-1][0]
    torch.testing.assert_close(grid.split(moved)[1], grid.split(other)[1][:, order], rtol=1e-3, atol=1e-4)
    found = audit(model, {(64, 32): torch.randn(5, 3, 64, 32)}, timed=False)
    assert {one.name for one in found.effects} >= {
        "position zeroed",
        "position shuffled",
    } and found.attention is not None
    assert {"attention", "without"} <= {one.kind for one in explorer_maps(view, strip[:1]).maps}
    laws = {one.check: one.outcome for one in inspect_model(model, skip=["export", "caches"])}
    wrong = {"pair layout"} if name == "VJEPA2Model" else set()  # its pairs of channels have two angles
    assert laws["batch"] == "passed" and {law for law, how in laws.items() if how == "failed"} == wrong


def test_an_attached_position_is_saved_beside_the_model_and_opened_again(tmp_path):
    images = torch.randn(2, 3, 32, 32)
    for name, joining in (
        ("ViTForImageClassification", "lape"),
        ("Dinov2Model", "default"),
        ("CLIPVisionModel", "lape"),
    ):
        torch.manual_seed(0)
        host = tiny.draw(build(name, SMALL))
        model = graticule.attach(copy.deepcopy(host), "learnable + peg", joining)
        tiny.draw(model.graticule)
        folder = graticule.save_pretrained(model, tmp_path / name)
        again = graticule.from_pretrained(folder)
        assert type(again) is type(model) and again.graticule.created == model.graticule.created
        with torch.no_grad():
            (found, expected), plain = (one(images)[0] for one in (again, model)), host(images)[0]
            assert torch.equal(found, expected) and not torch.allclose(found, plain)
            assert torch.equal(type(host).from_pretrained(folder).eval()(images)[0], plain)  # without ours
    with pytest.raises(ValueError, match="`host` must be left out with a model of transformers"):
        graticule.save_pretrained(model, tmp_path, host="timm:vit_tiny_patch16_224")
    config = json.loads((folder / "config.json").read_text())
    for change, said in (({"model": "AutoModel"}, "AutoModel; code of a"), ({"encoding": "learnabel"}, "did you mean")):
        (folder / "config.json").write_text(json.dumps({**config, "graticule": {**config["graticule"], **change}}))
        with pytest.raises(ValueError, match=said):
            graticule.from_pretrained(folder)


@pytest.mark.parametrize(("name", "config"), FILMS)
def test_a_position_of_films_is_attached_saved_and_removed(name, config, tmp_path):
    """One of three axes; it starts without effect, or as the table of Vivit, which it replaces."""
    torch.manual_seed(0)
    host = tiny.draw(build(name, config))
    encoder = {"skip_predictor": True} if name == "VJEPA2Model" else {}
    film = torch.randn(2, 4, 3, 32, 32)
    with torch.no_grad():
        plain = host(film, **encoder)[0]
        for encoding, joining, remove in (("learnable", "default", None), ("peg", "default", ())):
            model = graticule.attach(copy.deepcopy(host), encoding, joining, remove=remove)
            assert model.graticule.grid.shape == (2, 4, 4)
            torch.testing.assert_close(model(film, **encoder)[0], plain, rtol=0, atol=1e-5)
            tiny.draw(model.graticule)
            again = graticule.from_pretrained(graticule.save_pretrained(model, tmp_path / name / encoding))
            found, expected = again(film, **encoder)[0], model(film, **encoder)[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
            assert not torch.allclose(found, plain, atol=1e-3)
            assert torch.equal(graticule.detach(model)(film, **encoder)[0], plain)


@pytest.mark.parametrize("name", ["PixioModel", "JanusVisionModel", "HieraModel"])
def test_resamplers_are_compared_with_the_own_one_of_a_model_that_does_not_convert(name):
    torch.manual_seed(0)
    model = tiny.draw(build(name, configured(name)))
    for parameter in (one for key, one in model.named_parameters() if "position" in key):
        torch.nn.init.normal_(parameter, std=5.0)
    own = find_structure(model).img_size
    large = (2 * own[0], 2 * own[1])
    images = {size: list(torch.randn(3, 3, *size)) for size in (own, large)}
    found = try_resamplers(ResampledTables(StructureView(model)), images, own, progress=False).similarity
    mine = found.pop("its own")[large]
    torch.testing.assert_close(found["bicubic(antialias=False)"][large], mine, rtol=0, atol=1e-6)  # as in its code
    assert max(abs(a - b) for a, b in zip(found["bilinear"][large], mine, strict=True)) > 1e-5
    with pytest.raises(ValueError, match="`model` must add a table to its tokens, got Sapiens2Model"):
        ResampledTables(StructureView(build("Sapiens2Model", configured("Sapiens2Model"))))


def test_grids_of_pooled_stages_and_a_class_token_of_the_last_one_are_found():
    for name, expected in (
        ("PvtModel", [((32, 32), 0), ((16, 16), 0), ((8, 8), 0), ((4, 4), 1), ((4, 4), 1)]),
        ("Sam2HieraDetModel", [((16, 16), 0), ((8, 8), 0), ((8, 8), 0), ((4, 4), 0), ((4, 4), 0), ((2, 2), 0)]),
    ):
        found = find_structure(build(name, configured(name)).float())
        assert [(grid.shape, grid.prefix) for grid in found.grids] == expected
    patches = build("GlmImageVisionModel", configured("GlmImageVisionModel")).float()
    (x, grid) = view_of(patches).run(torch.randn(2, 3, 64, 96)).layers[-1]
    assert grid.shape == (8, 12) and x.shape == (2, 96, 32)


#: Fields of configurations that name layers, of another attention than the others or with further outputs.
NAMED_LAYERS = (
    *("global_attn_indexes", "global_attention_blocks", "fullatt_block_indexes", "window_block_indices"),
    *("deepstack_visual_indexes", "intermediate_layers_indices"),
)


def test_the_models_of_the_page_have_the_kinds_of_layers_of_those_that_are_released():
    for name in {*TRANSFORMERS, *OTHERS}:
        kind = class_of(transformers, name).config_class
        own, small = kind(), kind(**configured(name))
        layers = getattr(small, "num_hidden_layers", None) or getattr(small, "depth", 0)
        layers = sum(getattr(small, "blocks_per_stage", ())) or layers
        for field in NAMED_LAYERS:
            if getattr(own, field, None) or (name, field) == ("VitDetModel", "window_block_indices"):
                assert 0 < len(getattr(small, field)) < layers > max(getattr(small, field)), (name, field)
        window = getattr(small, "window_size", 0)
        if isinstance(window, int) and window and name != "Swin2SRModel":  # which is not built
            pixels = window if "fullatt_block_indexes" in configured(name) else window * small.patch_size
            assert pixels < (getattr(small, "image_size", None) or 64), name
    assert configured("DINOv3ViTModel")["num_register_tokens"] == 4
    heads = class_of(transformers, "Sapiens2Model").config_class(**configured("Sapiens2Model"))
    assert len(set(heads.num_key_value_heads_per_layer)) == 2
