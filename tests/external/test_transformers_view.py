"""Models of transformers as they are, without conversion: their position is found, removed, shuffled and checked."""

import copy
import json

import pytest
import torch
from transformers_models import SAM, SMALL, WINDOWS, build, whole_float64

import graticule
import tiny
from evidence.models_page import configured
from graticule.analysis.audit import audit
from graticule.external.images import image_size
from graticule.external.structure import find_structure
from graticule.external.traced_model import TracedModel, view_of
from graticule.external.view import permutation
from graticule.lab.pages.explorer_maps import explorer_maps
from graticule.testing.models import inspect_model

#: Models whose only position information is in their tokens: class, configuration.
PLAIN = [
    *[(name, SMALL) for name in ("ViTModel", "Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel")],
    *[(name, SMALL) for name in ("CLIPVisionModel", "SiglipVisionModel", "ViTMAEModel", "IJepaModel")],
    ("BeitModel", {**SMALL, "use_relative_position_bias": True, "use_absolute_position_embeddings": True}),
    ("SamVisionModel", {**SAM, "window_size": 0}),
    (
        "Siglip2VisionModel",
        {**{name: value for name, value in SMALL.items() if name != "image_size"}, "num_patches": 16},
    ),
]
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


def test_shuffling_positions_is_shuffling_patches_and_none_are_left_without(plain):
    images, order = torch.randn(2, 3, 32, 32, dtype=torch.float64), permutation(16, 3)
    for name, model in plain.items():
        view = TracedModel(model)
        assert [grid.shape for grid in view.grids((32, 32))] == [(4, 4)] * 2 and not view.unknown_parameters, name
        (x, grid), (before, _) = view.shuffled(3).run(images).layers[-1], view.run(images).layers[-1]
        (y, _) = view.run(tiny.shuffle_patches(images, order.argsort())).layers[-1]
        torch.testing.assert_close(grid.split(x)[1], grid.split(y)[1][:, order], rtol=1e-6, atol=1e-8)
        assert not torch.allclose(x, before, rtol=1e-3), name
        without = view.without_position()
        (a, _), (b, _) = (without.run(x).layers[-1] for x in (images, tiny.shuffle_patches(images, order)))
        torch.testing.assert_close(grid.split(a)[1][:, order], grid.split(b)[1], rtol=1e-6, atol=1e-8)
        assert view.attention(images)[1].weights.sum(-1) == pytest.approx(1)


def test_zeroing_position_is_zeroing_its_parameters():
    for name, config, names in WINDOWED:
        torch.manual_seed(0)
        model = tiny.draw(build(name, config)).double()
        bare = build(name, config).double()
        bare.load_state_dict(model.state_dict())
        with torch.no_grad():
            for parameter_name, value in bare.named_parameters():
                if parameter_name.endswith(names):
                    value.zero_()
        view = TracedModel(model)
        images = torch.randn(2, 3, *view.img_size, dtype=torch.float64)
        (x, _), (y, _) = view.without_position().run(images).layers[-1], TracedModel(bare).run(images).layers[-1]
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(x, view.run(images).layers[-1][0])
        features = [
            changed.features(images, changed.run(images).layers)
            for changed in (view.without_position(), TracedModel(bare))
        ]
        torch.testing.assert_close(*features, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(view.shuffled(1).run(images).layers[-1][0], view.run(images).layers[-1][0])
        assert sum(view.position_parameters.values()) >= sum(
            value.numel() for parameter_name, value in model.named_parameters() if parameter_name.endswith(names)
        )


def test_tokens_in_the_order_of_windows_are_put_row_by_row():
    torch.manual_seed(0)
    model = tiny.draw(build("HieraModel", HIERA)).double()
    structure = find_structure(model)
    assert [grid.shape for grid in structure.grids] == [
        (16, 16),
        (8, 8),
        (4, 4),
        (2, 2),
    ] and None not in structure.orders[:2]
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    other = images.clone()
    other[:, :, 16:24, 40:] += 1  # rows 4 and 5, columns 10 to 15 of patches of 4 x 4 pixels
    before, after = (TracedModel(model).run(x).layers[0][0] for x in (images, other))
    changed = (after - before).norm(dim=-1).view(2, 16, 16)
    assert changed[:, 4:6, 10:].min() > 10 * changed[:, 12:].max()
    view = TracedModel(model)
    unchanged = view.run(images, lambda layer, x, grid: x).layers[-1][0]
    torch.testing.assert_close(unchanged, view.run(images).layers[-1][0], rtol=0, atol=0)
    assert "correlation" in {maps.kind for maps in explorer_maps(view, images[:1]).maps}


def test_a_model_that_takes_all_images_as_one_row_is_audited():
    config = {**SMALL, "hidden_act": "silu", "image_size": 32}
    result = audit(build("PixtralVisionModel", config), {(32, 32): torch.randn(9, 3, 32, 32)}, (32, 32), timed=False)
    assert "position zeroed" in {effect.name for effect in result.effects}


#: Classes that were tried when nothing of them worked without conversion.
LOADED = [name for name, _ in PLAIN] + ["SwinModel", "Swinv2Model", "HieraModel"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_each_class_is_audited_explored_and_checked_as_it_is(name):
    torch.manual_seed(0)
    model = tiny.draw(build(name, configured(name))).double()
    model.register_forward_hook(lambda *_: None)  # which a conversion would lose
    size = image_size(model)
    images = torch.randn(5, 3, *size, dtype=torch.float64)
    effects = {finding.name for finding in audit(model, {size: images}, size, timed=False).effects}
    assert effects >= {"position zeroed", "position shuffled"}
    kinds = {finding.kind for finding in explorer_maps(view_of(model, size), images[:1]).maps}
    assert kinds & {"correlation", "rotary", "bias"}
    findings = inspect_model(model, img_size=size, skip=["export"])
    assert not [finding.check for finding in findings if finding.outcome == "failed"]
    assert {"batch", "caches"} <= {finding.check for finding in findings if finding.outcome == "passed"}


def test_an_attached_position_is_saved_beside_the_model_and_opened_again(tmp_path):
    images = torch.randn(2, 3, 32, 32)
    names = ("ViTForImageClassification", "Dinov2Model", "CLIPVisionModel")
    for name, joining in zip(names, ("lape", "default", "lape"), strict=True):
        torch.manual_seed(0)
        host = tiny.draw(build(name, SMALL))
        model = graticule.attach(copy.deepcopy(host), "learnable + peg", joining)
        tiny.draw(model.graticule)
        folder = graticule.save_pretrained(model, tmp_path / name)
        again = graticule.from_pretrained(folder)
        assert type(again) is type(model) and again.graticule.created == model.graticule.created
        with torch.no_grad():
            (features, expected), plain = (opened(images)[0] for opened in (again, model)), host(images)[0]
            assert torch.equal(features, expected) and not torch.allclose(features, plain)
            assert torch.equal(type(host).from_pretrained(folder).eval()(images)[0], plain)  # without ours
    with pytest.raises(ValueError, match="`host` must be left out with a model of transformers"):
        graticule.save_pretrained(model, tmp_path, host="timm:vit_tiny_patch16_224")
    config = json.loads((folder / "config.json").read_text())
    wrong = {"model": "AutoModel"}, {"encoding": "learnabel"}
    for change, message in zip(wrong, ("AutoModel; code of a", "did you mean"), strict=True):
        (folder / "config.json").write_text(json.dumps({**config, "graticule": {**config["graticule"], **change}}))
        with pytest.raises(ValueError, match=message):
            graticule.from_pretrained(folder)


def test_grids_of_pooled_stages_and_a_class_token_of_the_last_one_are_found():
    for name, expected in (
        ("PvtModel", [((32, 32), 0), ((16, 16), 0), ((8, 8), 0), ((4, 4), 1), ((4, 4), 1)]),
        ("Sam2HieraDetModel", [((16, 16), 0), ((8, 8), 0), ((8, 8), 0), ((4, 4), 0), ((4, 4), 0), ((2, 2), 0)]),
    ):
        structure = find_structure(build(name, configured(name)).float())
        assert [(grid.shape, grid.prefix) for grid in structure.grids] == expected


def test_a_table_that_is_not_square_and_is_read_as_a_square_is_found():
    findings = {
        finding.check: finding
        for finding in inspect_model(build("ViTModel", {**SMALL, "image_size": (24, 96)}), skip=["export", "caches"])
    }
    axes = findings["axes"]
    assert axes.outcome == "failed" and "resampled for 15 x 15 patches must run row" in axes.detail
