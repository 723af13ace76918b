"""Removal of position: planted positions are found and removed by each method, and certificates say what is lost."""

import copy
import importlib
import json

import numpy as np
import pytest
import timm
import torch
from torch import nn

import graticule
import tiny
from graticule.analysis.audit import audit
from graticule.analysis.certificate import _copies, _matched, certify
from graticule.analysis.debias import METHODS
from graticule.analysis.probe import labels_of
from graticule.analysis.share import position_share
from graticule.external import Eraser, Subtraction
from graticule.external.traced_model import TracedModel, view_of
from graticule.position.grid import Grid
from in_turn import refusals
from tiny import assert_same

GRID, DIM = Grid(4, 6), 24
debias_module = importlib.import_module("graticule.analysis.debias")  # the function has its name


class Planted(nn.Module):
    """Features are patches by an orthogonal map, and a known table of positions in the first channels of a basis."""

    def __init__(self, functions=(), amplitude=2.0):
        super().__init__()
        self.img_size, self.num_prefix_tokens = (8, 12), 0
        self.patch_embed = nn.Conv2d(6, DIM, 2, 2, bias=False)
        nn.init.orthogonal_(self.patch_embed.weight.data.view(DIM, -1), generator=torch.Generator().manual_seed(0))
        basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1)))[0]
        self.directions = basis[:, : len(functions)]
        row, column = labels_of(GRID).float().unbind(1)
        values = [function(row, column) for function in functions]
        table = sum((v[:, None] * d for v, d in zip(values, self.directions.T, strict=True)), torch.zeros(24, DIM))
        self.table = nn.Parameter(amplitude * table, requires_grad=False)
        self.blocks = nn.ModuleList([nn.Identity()])
        self.dropout = nn.Dropout(0.5)

    def forward_features(self, images):
        return self.dropout(self.blocks[0](self.patch_embed(images).flatten(2).mT + self.table))

    forward = forward_features


ROW_AND_COLUMN = (lambda row, column: row, lambda row, column: column**2 - 0.4)
PRODUCT = (*ROW_AND_COLUMN, lambda row, column: 2 * row * column)


def draw_images(count=60, seed=0):
    return torch.randn(count, 6, 8, 12, generator=torch.Generator().manual_seed(seed))


def between(a, b):
    """Return the largest angle between two subspaces, in degrees."""
    first, second = torch.linalg.qr(a.double())[0], torch.linalg.qr(b.double())[0]
    return float(torch.linalg.svdvals(first.T @ second).clamp(max=1).min().acos().rad2deg())


@pytest.mark.parametrize("method", METHODS)
def test_planted_positions_are_removed(method):
    model = Planted(ROW_AND_COLUMN).eval()
    debiased = graticule.debias(model, draw_images(), method)
    report = debiased.certificate
    before, after = report.share
    assert before.low > 0.05 and after.high < before.low and not report.nothing
    assert report.place[0].low > report.place[1].high and abs(report.place[1].value - report.place_chance) < 0.05
    assert report.match[1].low > 5 * report.match_chance
    removal = debiased.removals["features"]
    if isinstance(removal, Subtraction):
        # what remains is the error of 3 + 5 functions of 24 positions, estimated from 40 images
        assert after.low < 8 / 24 / 40 < after.high and report.content is None and "content" not in str(report)
    else:
        assert after.low < 0 < after.high
        assert report.components == 2 and between(removal.read, model.directions) < (20 if method == "leace" else 5)
        assert report.content.value == pytest.approx(1 - 2 / DIM, abs=0.02)


def test_matches_follow_content_or_the_place():
    """A model that knows content alone finds all shifted patches, one that knows the place alone finds none."""
    images, grid = draw_images(4), GRID
    copies, place = _copies(images, grid)[0]
    near = torch.cdist(place, grid.coordinates().double()) < 0.75
    model = Planted().eval()
    assert (_matched(model(copies), model(images), near) == 1).all()
    model = Planted(PRODUCT, amplitude=100.0).eval()
    assert (_matched(model(copies), model(images), near) < 0.1).all()


def test_blank_without_images_finds_the_planted_subspace():
    model = Planted(PRODUCT).eval()
    debiased = graticule.debias(model, method="blank")
    assert debiased.certificate is None and between(debiased.removals["features"].read, model.directions) < 5
    assert 3 <= certify(debiased, draw_images(12)).components <= 6


class OfUnitLength(Planted):
    def forward_features(self, images):
        return nn.functional.normalize(super().forward_features(images), dim=-1)

    forward = forward_features


@torch.no_grad()
def test_on_one_black_image_blank_removes_the_subspace_of_insid3(monkeypatch):
    """INSID3: left singular vectors of the centered features of unit length, (D, H W), of one black image."""
    model, black = OfUnitLength(PRODUCT).eval(), -2.0 * torch.ones(1, 6, 8, 12)
    monkeypatch.setattr(debias_module, "_content_free", lambda *options: black)
    ours = graticule.debias(model, method="blank", components=3)
    features = model(black)[0].T
    basis = torch.linalg.svd(features - features.mean(1, keepdim=True), full_matrices=False)[0][:, :3]
    assert between(ours.removals["features"].read, basis) < 0.1
    images = draw_images(5)
    projected = model(images) - model(images) @ basis @ basis.T
    difference = ours(images) - projected  # ours keeps the mean in the directions, the same for all patches
    assert_same(difference, difference[:1, :1].expand_as(difference), 1e-5)
    assert_same(difference[0, 0], basis @ basis.T @ features.mean(1), 1e-5)


def test_rows_and_columns_leave_their_product_and_a_rank_removes_it():
    model = Planted(PRODUCT).eval()
    rows = graticule.debias(model, draw_images(), "rows_columns").certificate
    mean = graticule.debias(model, draw_images(), "mean").certificate
    assert rows.components == 0 and mean.components == 1
    product = 16 * float((labels_of(GRID).prod(1)).var(correction=0))
    assert rows.share[1].low < product / (product + 24) < rows.share[1].high and rows.share[1].low > 0
    assert mean.share[1].low < 0.01 and mean.share[1].high < rows.share[1].low


@pytest.mark.parametrize("method", METHODS)
def test_where_there_is_no_position_there_is_nothing_to_remove(method):
    model, images = Planted().eval(), draw_images(12)
    debiased = graticule.debias(model, images, method)
    assert debiased.certificate.nothing and "nothing to remove" in str(debiased.certificate)
    assert torch.equal(debiased(images), model(images)) and debiased.certificate.match_change.value == 0


def test_an_eraser_of_position_leaves_no_linear_trace_where_it_was_fitted():
    """LEACE: the removed directions have the same mean at every position (of the smoothed effect)."""
    model, images = Planted(ROW_AND_COLUMN).eval(), draw_images(30)
    debiased = graticule.debias(model, images, "leace", components=8)
    fitted = images[torch.arange(30) % 3 < 2]
    rows = debiased(fitted).mean(0).unflatten(0, GRID.shape).mean(1)
    before = model(fitted).mean(0).unflatten(0, GRID.shape).mean(1)
    assert (rows - rows.mean(0)).norm() < 1e-4 * (before - before.mean(0)).norm()


def test_audit_of_the_debiased_model_equals_its_certificate():
    model, images = _learnable(), tiny.images(32, 40, batch=18)
    others = images[2::3]
    debiased = graticule.debias(model, images)
    before, after = position_share(model, others), position_share(debiased, others)
    for certified, share in zip(debiased.certificate.share, (before, after), strict=True):
        np.testing.assert_allclose([limits[-1] for limits in share.total], certified, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(before.total.value[:-1], after.total.value[:-1])  # the layers are unchanged
    result = audit(debiased, {(32, 40): others}, timed=False)
    np.testing.assert_allclose(result.share.total.value, after.total.value)
    assert result.effects[0].same is not None and result.effects[0].change[-1].mean() > 0


def _learnable(**kwargs):
    model = tiny.draw(tiny.tiny("learnable", img_size=(32, 40), **kwargs))
    for parameter in model.position.parameters():
        parameter.data *= 10
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("method", ["mean", "leace"])
def test_debiased_models_are_saved_opened_and_folded(method, tmp_path):
    model, images = _learnable(), tiny.images(32, 40, batch=12)
    debiased = graticule.debias(model, images, method, layers=[1])
    wide = tiny.images(48, 40, batch=2)
    expected, other = debiased.forward_features(images[:2]), debiased.forward_features(wide)
    assert not torch.allclose(expected, model.forward_features(images[:2]), atol=1e-2)
    debiased.save_pretrained(tmp_path / "saved")
    opened = graticule.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(opened.forward_features(images[:2]), expected)
    torch.testing.assert_close(opened.forward_features(wide), other)
    torch.testing.assert_close(opened.layer_tokens(images[:2])[0], debiased.layer_tokens(images[:2])[0])
    torch.testing.assert_close(graticule.fold(opened).forward_features(images[:2]), expected)


@torch.no_grad()
@pytest.mark.parametrize("method", [pytest.param("mean", marks=pytest.mark.slow), "leace"])
def test_debiased_models_are_compiled_and_exported(method):
    images = tiny.images(32, 40, batch=12)
    debiased = graticule.debias(_learnable(), images, method, layers=[1])
    logits = debiased(images[:2])
    torch.testing.assert_close(torch.compile(debiased, backend="eager")(images[:2]), logits)
    program = torch.export.export(debiased, (images[:2],)).module()
    torch.testing.assert_close(program(images[:2]), logits)


@pytest.mark.slow
@torch.no_grad()
def test_a_program_for_any_size_resamples_the_table(tmp_path):
    debiased = graticule.debias(_learnable(), tiny.images(32, 40, batch=12))
    wide = tiny.images(48, 40, batch=1)
    exported = graticule.export(debiased, tmp_path / "model.pt2", dynamic=("sides",))
    (logits,) = torch.export.load(exported.path).module()(wide)
    torch.testing.assert_close(logits, debiased(wide), rtol=1e-4, atol=1e-5)


def test_layers_are_debiased_too():
    model, images = _learnable(), tiny.images(32, 40, batch=12)
    debiased = graticule.debias(model, images, layers=[0, 2])
    cleaned = debiased.layer_tokens(images)
    original = model.forward_intermediates(images, [0, 2], output_fmt="NLC", intermediates_only=True)
    for layer, (after, before) in zip((0, 2), zip(cleaned, original, strict=True), strict=True):
        table = debiased.removals[str(layer)].table.flatten(0, 1)
        torch.testing.assert_close(before - after, table.expand_as(before), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto"])
def test_models_of_timm_keep_their_prefix_tokens_and_the_layout_of_their_features(name):
    kwargs = {
        "vit_tiny_patch16_224": {"img_size": (32, 40), "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 3},
        "swin_tiny_patch4_window7_224": {
            **{"img_size": (32, 48), "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)}
        },
        "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16)},
    }[name]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **kwargs).eval()
    images = tiny.images(*{"v": (32, 40), "s": (32, 48), "c": (64, 96)}[name[0]], batch=12)
    debiased = graticule.debias(model, images, "mean", components=1, img_size=tuple(images.shape[-2:]))
    before, after = model.forward_features(images), debiased.forward_features(images)
    table = debiased.removals["features"].table
    if "vit" in name:
        torch.testing.assert_close(after[:, 0], before[:, 0])
        after, before = after[:, 1:], before[:, 1:]
        table = table.flatten(0, 1)
    elif "convnext" in name:
        table = table.movedim(-1, 0)
    torch.testing.assert_close(before - after, table.expand_as(before), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(debiased(images), model.forward_head(debiased.forward_features(images)))
    with pytest.raises(ValueError, match=r"debias graticule.convert\(model\) instead"):
        debiased.save_pretrained("nowhere")


def test_models_of_transformers_are_debiased():
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    options = {"image_size": 56, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    model = Dinov2Model(Dinov2Config(**options)).eval()
    model.embeddings.position_embeddings.data.normal_()
    images = tiny.images(56, 84, batch=12)
    debiased = graticule.debias(model, images)
    before, after = model(images).last_hidden_state, debiased(images)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    table = debiased.removals["features"].table.flatten(0, 1)
    torch.testing.assert_close(before[:, 1:] - after[:, 1:], table.expand(12, -1, -1), rtol=1e-3, atol=1e-5)
    assert debiased.certificate.share[1].high < debiased.certificate.share[0].low


def test_logits_of_a_changed_view_are_of_features_without_what_is_removed():
    torch.manual_seed(0)
    options = {"img_size": 64, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 5}
    host = tiny.draw(timm.create_model("vit_tiny_patch16_224", **options)).eval()
    host.register_forward_hook(lambda *_: None)  # with which it is not converted
    images = tiny.images(64, 64, batch=12)
    debiased = graticule.debias(host, images)
    changed = copy.deepcopy(debiased)
    torch.nn.init.zeros_(changed.backbone.pos_embed)
    view = view_of(debiased)
    assert isinstance(view, TracedModel)
    tiny.assert_same(view.run(images).logits, debiased(images), atol=1e-6)
    tiny.assert_same(view.without_position().run(images).logits, changed(images), atol=1e-6)
    assert not torch.allclose(changed(images), debiased(images), atol=1e-2)


def test_labels_of_images_and_of_patches_are_scored_by_neighbors():
    """Images of the two classes have opposite contents; patches have the label of their column."""
    model, images = Planted(ROW_AND_COLUMN, amplitude=0.2).eval(), draw_images(24)
    classes = torch.arange(24) // 3 % 2
    content = 3 * torch.randn(1, 6, 2, 2, generator=torch.Generator().manual_seed(5)).tile(1, 1, 4, 6)
    images += content * (2 * classes - 1)[:, None, None, None]
    report = graticule.debias(model, images, labels=classes).certificate
    assert report.labels[0].value > 0.9 and report.labels[1].value > 0.9
    columns = (torch.arange(24) % 6 > 2).long().expand(24, -1).clone()
    columns[:, 0] = -1
    strong = Planted((*ROW_AND_COLUMN[:1], lambda row, column: 3 * column), amplitude=4.0).eval()
    report = graticule.debias(strong, draw_images(24), labels=columns).certificate
    assert report.labels[0].value > 0.9 and report.labels[1].value < 0.7
    record = json.loads(report.to_json())
    assert record["labels"][0]["value"] == report.labels[0].value and record["method"] == "mean"


test_invalid_arguments_of_debias_are_refused = refusals(
    ({"images": draw_images(1).repeat(12, 1, 1, 1)}, "must differ"),
    ({"images": draw_images(8)}, "at least 9"),
    ({"images": draw_images(12)[..., :7]}, "img_size"),
    ({"method": "mean"}, "only 'blank' works without"),
    ({"method": "leace"}, "must be given for 'leace'"),
    ({"method": "blank", "labels": torch.zeros(3)}, "`labels` must be left out"),
    ({"images": draw_images(12), "method": "rows_columns", "components": 2}, "`components` must be left out"),
    ({"images": draw_images(12), "method": "leace", "components": 0}, "`components` must be at least 1"),
    ({"images": draw_images(12), "labels": torch.zeros(3)}, "one entry per image, 12"),
    ({"images": draw_images(12), "labels": torch.zeros(12, 5)}, "one per patch"),
    ({"images": draw_images(12), "layers": [3]}, "`layers` must be from 0 to 0"),
    ({"images": draw_images(12), "layers": [0]}, "no `forward_intermediates`"),
    ({"images": draw_images(12), "method": "pca"}, "`method` must be"),
    call=lambda kwargs: graticule.debias(Planted(ROW_AND_COLUMN).eval(), **kwargs),
    error=(ValueError, TypeError),
)


def test_an_eraser_of_orthonormal_directions_is_a_projection():
    basis = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    mean, x = torch.arange(6.0, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    eraser = Eraser(mean, basis, basis)
    torch.testing.assert_close((eraser(x) - mean) @ basis, torch.zeros(3, 2, dtype=torch.float64))
    torch.testing.assert_close(eraser(eraser(x)), eraser(x))


def quantized():
    model = nn.Module()
    model.inside = type("Linear", (nn.Module,), {"__module__": "torch.ao.nn.quantized.dynamic"})()
    return model


test_models_that_cannot_be_debiased_are_refused = refusals(
    (quantized, "must have weights in floating point, got a quantized one"),
    (lambda: graticule.debias(Planted().eval(), draw_images(12)), "use model.backbone"),
    call=lambda model: graticule.debias(model(), draw_images(12)),
)
test_images_of_a_size_that_the_model_refuses_are_refused = refusals(
    (tiny.images(48, 48, batch=9), "`images` must have a size that the model takes, got 48 x 48"),
    call=lambda images: graticule.debias(timm.create_model("vit_tiny_patch16_224", **tiny.SIZE), images),
)
