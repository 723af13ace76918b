"""Fourier features, factorized tables and an MLP of coordinates: formulas, parity, other grids, noise in training."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.models.naflexvit import NaFlexEmbeds

import graticule
from graticule.encodings.coordinate_mlp import CoordinateMlp, Fourier
from graticule.encodings.factorized import Factorized
from graticule.position.grid import Grid
from in_turn import in_turn, refusals
from tiny import assert_same


@pytest.fixture(autouse=True)
def _float64_and_seed():
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.mark.parametrize("coordinates", ["separate", "max", "patches"])
def test_fourier_features_are_the_formula_of_the_paper(coordinates):
    grid = Grid(3, 5, prefix=2)
    encoding = Fourier(grid, dim=6, frequencies=4, hidden=7, coordinates=coordinates)
    y, x = torch.meshgrid(torch.arange(3.0), torch.arange(5.0), indexing="ij")
    if coordinates != "patches":
        y, x = (2 * y + 1) / (3 if coordinates == "separate" else 5) - 1, (2 * x + 1) / 5 - 1
    projected = torch.stack([y, x], -1).flatten(0, 1) @ encoding.directions.T
    features = torch.cat([projected.cos(), projected.sin()], -1) / math.sqrt(8)
    first, _, last = encoding.mlp
    hidden = F.gelu(features @ first.weight.T + first.bias)
    expected = F.pad(hidden @ last.weight.T + last.bias, (0, 0, 2, 0))
    assert_same(encoding(grid), expected, 1e-12)


def test_angles_of_fourier_features_are_not_rounded():
    rounded = Fourier(Grid(32, 32), dim=8).to(torch.bfloat16).features(Grid(32, 32))
    assert rounded.dtype == torch.float32 and len(rounded.unique(dim=0)) == 32 * 32  # no two patches collapse into one


def test_random_directions_are_kept_and_not_learned():
    first, second = (Fourier(Grid(3, 4), 8, frequencies=3, learned=False) for _ in range(2))
    assert not first.directions.requires_grad and not torch.equal(first.directions, second.directions)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.directions, second.directions)


def test_the_mlp_of_coordinates_by_hand():
    grid = Grid(2, 2, prefix=1)
    encoding = CoordinateMlp(grid, dim=1, hidden=1).eval()
    with torch.no_grad():
        encoding.mlp[0].weight.copy_(torch.tensor([[2.0, 4.0]]))  # y, x in {-1/2, 1/2}
        encoding.mlp[0].bias.fill_(10.0)
        encoding.mlp[2].weight.fill_(1.0)
        encoding.mlp[2].bias.fill_(-10.0)
    gelu = F.gelu(torch.tensor([7.0, 11.0, 9.0, 13.0])) - 10
    assert_same(encoding(grid)[:, 0], torch.cat([torch.zeros(1), gelu]), 1e-12)


def drawn(grid=None, count=200, **kwargs):
    """Return the coordinates of the patches in evaluation, and `count` draws of them in training."""
    grid = grid or Grid(4, 6)
    encoding = CoordinateMlp(grid, dim=4, **kwargs)
    return encoding.coordinates(grid), torch.stack([encoding.augmented(grid) for _ in range(count)])


def test_a_global_shift_moves_all_patches_alike_within_its_range():
    places, coordinates = drawn(shift=0.5, local_shift=None, rescale=None)
    moved = coordinates - places
    assert_same(moved, moved[:, :1].expand_as(moved), 1e-12)
    assert 0.45 < moved.abs().max() <= 0.5
    assert (moved[:, 0, 0] - moved[:, 0, 1]).abs().max() > 0.5  # independent per axis


def test_a_local_shift_moves_each_patch_within_its_cell():
    places, coordinates = drawn(shift=None, local_shift=0.5, rescale=None)
    moved = (coordinates - places) * torch.tensor([4, 6]) / 2  # in patches
    assert 0.49 < moved.abs().max() <= 0.5 and moved.std(0).min() > 0.2
    assert (moved[:, 0] - moved[:, 1]).abs().max() > 0.5  # independent per patch


def test_a_global_scale_multiplies_all_coordinates_by_one_number_within_its_range():
    places, moved = drawn(shift=None, local_shift=None, rescale=1.4)
    factor = moved / places
    assert_same(factor, factor[:, :1, :1].expand_as(factor), 1e-9)
    logs = factor[:, 0, 0].log()
    assert 0.95 * math.log(1.4) < logs.max() <= math.log(1.4) + 1e-6 and logs.min() >= -math.log(1.4) - 1e-6
    assert abs(logs.mean()) < 0.06  # uniform in the logarithm


def test_coordinates_are_augmented_in_training_alone():
    model = graticule.create_model("vit_nano_patch4_28", encoding="coordinates")
    grid = model.grid
    for training in (True, False):
        first, second = (model.train(training).position(grid)[0].added_to_stream for _ in range(2))
        assert torch.equal(first, second) != training
    plain = graticule.create_model(
        "vit_nano_patch4_28", encoding="coordinates(shift=None, local_shift=None, rescale=None)"
    )
    plain.load_state_dict(model.state_dict())
    for training in (True, False):
        assert torch.equal(plain.train(training).position(grid)[0].added_to_stream, first)


@pytest.mark.parametrize("encoding", ["fourier", "coordinates"])
def test_a_larger_grid_over_the_same_image_has_the_same_rows_at_the_same_coordinates(encoding):
    """Patch (i, j) of a grid has the same center as patch (3 i + 1, 3 j + 1) of a grid of three times the sides."""
    position = graticule.build_position(Grid(3, 5), dim=8, depth=1, num_heads=2, encoding=encoding).eval()
    small, large = (position(Grid(*shape))[0].added_to_stream.unflatten(0, shape) for shape in ((3, 5), (9, 15)))
    assert_same(large[1::3, 1::3], small, 1e-12)


@in_turn("aspect", [False, True])
@in_turn("new", [(4, 4), (6, 9), (3, 2), (5, 4)])
def test_factorized_tables_are_timms_naflex(aspect, new):
    reference = NaFlexEmbeds(
        patch_size=4, embed_dim=6, pos_embed="factorized", pos_embed_grid_size=(4, 4), pos_embed_ar_preserving=aspect
    )
    resampler = "crop(mode='bilinear', antialias=False)" if aspect else "bilinear(antialias=False)"
    ours = Factorized(Grid(4, 4), 6, resampler=resampler)
    ours.load_state_dict({name: value for name, value in reference.state_dict().items() if "pos_embed" in name})
    zeros = torch.zeros(1, new[0] * new[1], 6)
    reference._apply_factorized_pos_embed(zeros, list(new))
    # timm resamples in float32
    assert_same(ours(Grid(*new)), zeros[0].detach(), 1e-6)
    tables = [table.float().double() for table in (ours.pos_embed_y, ours.pos_embed_x)]
    longer = [max(new)] * 2 if aspect else new
    y, x = (
        F.interpolate(table.mT, size=size, mode="linear").mT[0, :side]
        for table, size, side in zip(tables, longer, new, strict=True)
    )
    with torch.no_grad():
        for parameter, table in zip((ours.pos_embed_y, ours.pos_embed_x), tables, strict=True):
            parameter.copy_(table)
    assert_same(ours(Grid(*new)), (y[:, None] + x).flatten(0, 1), 1e-12)


def test_factorized_tables_are_sums_or_products_of_rows_and_columns():
    for product in (False, True):
        encoding = Factorized(Grid(2, 3, prefix=1), 4, product=product)
        y, x = encoding.pos_embed_y[0], encoding.pos_embed_x[0]
        table = encoding(Grid(2, 3, prefix=1))
        assert not table[0].any()
        for i in range(2):
            for j in range(3):
                assert torch.equal(table[1 + 3 * i + j], y[i] * x[j] if product else y[i] + x[j])


GRID = Grid(2, 2)
test_what_is_out_of_range_is_named = refusals(
    (lambda: Fourier(GRID, 8, frequencies=0), "`frequencies` must be at least 1"),
    (lambda: Fourier(GRID, 8, std=0.0), "`std` must be"),
    (lambda: Fourier(GRID, 8, coordinates="pixels"), "`coordinates` must be"),
    (lambda: CoordinateMlp(GRID, 8, hidden=0), "`hidden` must be at least 1, got 0"),
    (lambda: CoordinateMlp(GRID, 8, local_shift=-1.0), "`local_shift` must be"),
    (lambda: CoordinateMlp(GRID, 8, shift=-1.0), "`shift` must be at least 0"),
    (lambda: CoordinateMlp(GRID, 8, rescale=0.5), "`rescale` must be at least 1"),
    (lambda: Factorized(GRID, 8, resampler="geometric"), "`resampler` must be one for tables of positions"),
)
