"""Translation: equivariant models are recognized, images and videos, and the error of the others is measured."""

import numpy as np
import pytest
import torch
from torch import nn

import graticule
from graticule.analysis.equivariance import COLUMNS, _border, translation_error, whole_patches
from graticule.external.view import nearest
from graticule.position.grid import Grid
from in_turn import in_turn, refusals
from tiny import draw, images, tiny

PYRAMID = {"img_size": 64, "embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 3, 4], "depths": [1, 2, 1, 1]}


def pooled(encoding, **kwargs):
    return draw(tiny(encoding, global_pool="avg", class_token=False, **kwargs)).double().eval()


def doubles(*args, **kwargs):
    return images(*args, dtype=torch.float64, **kwargs)


def test_without_position_every_layer_is_equivariant_and_the_logits_do_not_change():
    result = translation_error(pooled("none"), doubles(48, 40, batch=4), [(1, 0), (2, -3)])
    assert np.all(result.all_patches < 1e-12) and result.logits < 1e-12 and result.flips == 0
    assert np.isnan(result.prefix).all()


def test_outputs_as_unlike_as_those_of_another_image_have_an_error_of_the_root_of_two(monkeypatch):
    model, draw = pooled("none"), torch.Generator().manual_seed(0)
    monkeypatch.setattr(model, "forward_head", lambda features: torch.randn(len(features), 5, generator=draw))
    assert translation_error(model, doubles(batch=512)).logits == pytest.approx(2**0.5, rel=0.05)


def test_with_circular_padding_a_peg_is_exactly_equivariant_and_with_zeros_it_is_not():
    x = doubles(48, 40, batch=3)
    around = translation_error(pooled("peg(places=(-1, 1), padding='circular')"), x)
    zeros = translation_error(pooled("peg(places=(-1, 1))"), x)
    assert np.all(around.all_patches < 1e-12) and around.logits < 1e-12
    assert np.all(zeros.at_border > 1e-3) and zeros.logits > 1e-6


def test_the_effect_of_zero_padding_begins_at_the_border_and_attention_spreads_it():
    result = translation_error(pooled("peg(places=(0,))", img_size=112), doubles(112, 112, batch=3))
    assert result.at_border[0] > 1e-3 and result.inside[0] < 1e-12  # a 3 x 3 kernel reaches one patch inward
    stacked = translation_error(pooled("peg(places=(-1, 0), layers=1)", img_size=112), doubles(112, 112))
    assert stacked.at_border[0] > stacked.inside[0] > 0


class Told(nn.Module):
    """A model of one layer with given features: patches plus a value per position, and the image's mean."""

    num_classes = 0
    coarsest_patch = (1, 1)

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength = strength

    def each_layer(self, x):
        grid = Grid(x.shape[-2], x.shape[-1])
        place = torch.zeros(grid.shape, dtype=x.dtype)
        place[1, 1] = self.strength
        yield (x + place).flatten(2).transpose(1, 2), grid


def test_the_numbers_are_those_of_the_definition():
    torch.manual_seed(3)
    x = torch.randn(5, 1, 3, 4, dtype=torch.float64)
    result = translation_error(Told(2.0), x, [(1, 0)])
    features = x.clone()
    features[:, :, 1, 1] += 2.0
    spread = (features - features.mean()).square().mean()
    # the position with a value differs, and so does the one that its content moved to: (2)^2 each, of 12 patches
    assert result.all_patches[0] == pytest.approx(float((2 * 4.0 / 12 / spread).sqrt()), rel=1e-12)
    assert np.isnan(result.logits) and "no head" in result.heading


def test_tokens_of_the_border_are_those_at_an_edge_before_or_after_the_shift():
    # rows 0 and 5 are at an edge after the shift, row 1 came from one
    border = _border(Grid(6, 6), (1, 0))
    assert border[[0, 1, 5]].all() and border[:, [0, 5]].all() and not border[2:5, 1:5].any()


@pytest.mark.parametrize("name", ["pvt_tiny", "pvt_tiny_peg_gap"])
def test_a_pyramid_is_measured_on_the_grid_of_every_stage(name):
    model = graticule.create_model(name, num_classes=5, **PYRAMID)
    result = translation_error(model, images(64, 96))
    assert [grid.shape for grid in result.grids] == [(16, 24), (8, 12), (8, 12), (4, 6), (2, 3)]
    assert np.isfinite(result.all_patches).all()
    assert np.isfinite(result.prefix).tolist() == [False] * 4 + [name == "pvt_tiny"]


@in_turn(
    ("name", "sizes", "refused", "patch"),
    [
        ("swin_tiny_patch4_window7_224", [(32, 64)], [(36, 32), (32, 40), (34, 34)], 32),
        ("cct_2_3x2_32", [(28, 32)], [(30, 32), (32, 30)], 4),
        # 14 patches of 15 pixels by their number, but the stride of patches is 16 pixels, and the last is padded
        ("cct_7_7x2_224", [(32, 48)], [(210, 224), (224, 210)], 16),
    ],
)
def test_a_size_that_the_model_pads_is_refused_because_no_shift_moves_all_its_patches(name, sizes, refused, patch):
    with torch.device("meta"):
        model = graticule.create_model(name, encoding="none")
    model.to_empty(device="cpu")
    assert model.coarsest_patch == (patch, patch) == (model.feature_info[-1]["reduction"],) * 2
    for size in sizes:
        assert whole_patches(model, size).shape == (size[0] // patch, size[1] // patch)
    for size in refused:
        with pytest.raises(ValueError, match=f"must be a multiple of the coarsest patch .*, {patch} x {patch} pixels"):
            translation_error(model, torch.zeros(2, 3, *size))


def test_the_table_has_a_row_per_layer_and_the_file_all_numbers(tmp_path):
    result = translation_error(tiny("peg"), images())
    header, *rows = result.summary()
    assert header == COLUMNS and [row[0] for row in rows] == ["0", "1", "2"] and rows[0][1] == "4x4"
    with np.load(result.save(tmp_path / "t.npz"), allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["inside"], result.inside)
        assert arrays["shifts"].tolist() == [[1, 0], [0, 1], [1, 1]]


test_unsupported_models_are_refused = refusals(
    ({"images": torch.zeros(1, 3, 32, 32)}, "`images`"),
    ({"images": torch.zeros(2, 3, 30, 32)}, "`img_size`"),
    ({"shifts": [(0, 0)]}, "`shifts`"),
    ({"shifts": [(4, -8)]}, r"\(4, -8\) on a grid of 4 x 4"),
    ({"model": nn.Linear(2, 2)}, "Linear"),
    call=lambda change: translation_error(**{"model": tiny("peg"), "images": images(), **change}),
)


VIDEO_SIZE, VIDEO_GRID = (4, 32, 24), Grid(2, 4, 3)


def video_model(encoding="none"):
    size = {"img_size": VIDEO_SIZE, "patch_size": (2, 8, 8), "class_token": False, "global_pool": "avg"}
    return draw(tiny(encoding, depth=2, **size))


def videos(count=6):
    return torch.randn(count, 3, *VIDEO_SIZE, generator=torch.Generator().manual_seed(1))


def test_a_patch_takes_the_position_of_the_nearest_of_a_larger_video():
    larger = Grid(4, 4, 6)
    places = VIDEO_GRID.coordinates().double(), larger.coordinates().double()[nearest(VIDEO_GRID, larger)]
    assert torch.equal(((places[0] + 0.5) * torch.tensor([2, 1, 2])).floor(), places[1])


def test_without_position_a_video_is_equivariant_along_each_axis_and_a_table_of_time_breaks_that_of_time_alone():
    result = translation_error(video_model(), videos())
    assert result.shifts == ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))
    assert result.all_patches.max() < 1e-5 and result.logits < 1e-5
    model = video_model("factorized")
    with torch.no_grad():
        model.position.encodings[0].pos_embed_y.zero_()
        model.position.encodings[0].pos_embed_x.zero_()
    assert translation_error(model, videos(), [(0, 1, 0), (0, 2, 1)]).all_patches.max() < 1e-5
    assert translation_error(model, videos(), [(1, 0, 0)]).all_patches.min() > 0.05
