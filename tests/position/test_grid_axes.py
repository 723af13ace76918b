"""Grids of any number of axes: texts, films and volumes."""

import itertools
from dataclasses import replace

import pytest
import torch

from graticule import Crop, Grid
from graticule.position.resampling import RESAMPLERS, build_resampler
from in_turn import in_turn

SHAPES = [(5,), (3, 4), (2, 3, 4), (2, 3, 1, 2)]


def places(shape):
    return list(itertools.product(*map(range, shape)))


@in_turn("shape", SHAPES)
def test_coordinates_have_the_last_axis_fastest(shape):
    grid = Grid(*shape, prefix=2)
    assert grid.coordinates().tolist() == [list(place) for place in places(shape)]
    assert grid.order().tolist() == list(range(grid.patches)) and grid.tokens == 2 + grid.patches
    assert places(shape)[grid.center] == tuple(side // 2 for side in shape)


@in_turn("shape", SHAPES)
def test_offsets_and_their_rows_in_a_table_are_those_of_each_pair(shape):
    grid = Grid(*shape)
    offsets, index = grid.offsets(), grid.offset_index()
    table = list(itertools.product(*(range(1 - side, side) for side in shape)))
    for i, p in enumerate(places(shape)):
        for j, q in enumerate(places(shape)):
            expected = tuple(a - b for a, b in zip(p, q, strict=True))
            assert tuple(offsets[i, j].tolist()) == expected == table[index[i, j]]
    assert [each.tolist() for each in grid.displacements()] == [list(range(1 - side, side)) for side in shape]


def test_maps_halves_and_windows_have_all_axes():
    grid = Grid(2, 4, 6, prefix=1)
    tokens = torch.randn(3, grid.tokens, 5)
    assert grid.to_map(tokens).shape == (3, 5, 2, 4, 6)
    assert torch.equal(grid.from_map(grid.to_map(tokens)), tokens[:, 1:])
    assert grid.pyramid(2)[1] == Grid(1, 2, 3, prefix=1)
    assert grid.in_windows([3]).within == Grid(2, 3, 3)
    with pytest.raises(ValueError, match="multiples of 4, to be halved 2 times, got 2 x 4 x 6"):
        grid.pyramid(3)


@in_turn("name", [name for name in RESAMPLERS if "positions" in RESAMPLERS[name].takes and name != "crop"])
def test_resampling_is_separable_so_that_an_axis_that_does_not_change_is_a_batch(name):
    resample = build_resampler(name)
    table = torch.randn(7, 3, 4, dtype=torch.float64)
    film = resample(table[None], (7, 5, 6))[0]
    torch.testing.assert_close(film, resample(table, (5, 6)), rtol=0, atol=1e-12)
    text = resample(table.flatten(0, 1), (9,))
    torch.testing.assert_close(text, resample(table.flatten(0, 1)[:, None], (1, 9))[:, 0], rtol=0, atol=1e-12)


def test_resizing_commutes_with_permuting_the_axes():
    table = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    resized = Grid(2, 3, 4).resize(table.flatten(0, 2), Grid(4, 2, 6)).unflatten(0, (4, 2, 6))
    other = Grid(4, 2, 3).resize(table.permute(2, 0, 1, 3).flatten(0, 2), Grid(6, 4, 2)).unflatten(0, (6, 4, 2))
    torch.testing.assert_close(other, resized.permute(2, 0, 1, 3), rtol=0, atol=1e-12)


def test_a_crop_of_a_film_is_the_part_of_its_table():
    whole, part = Grid(4, 6, 8), Grid(2, 3, 4, crop=Crop((4, 6, 8), (1, 2, 3, 2, 3, 4)))
    table = torch.randn(whole.patches, 5, dtype=torch.float64)
    expected = table.unflatten(0, whole.shape)[1:3, 2:5, 3:7].flatten(0, 2)
    assert torch.equal(whole.resize(table, part), expected)
    assert torch.equal(part.coordinates(), whole.coordinates().unflatten(0, whole.shape)[1:3, 2:5, 3:7].flatten(0, 2))
    assert part.order().tolist() == torch.arange(192).view(4, 6, 8)[1:3, 2:5, 3:7].flatten().tolist()
    halves = Grid(2, 2, 4, crop=Crop((4, 6, 8), (0, 0, 0, 4, 4, 8))).pyramid(2)
    assert halves[1].crop == Crop((2, 3, 4), (0, 0, 0, 2, 2, 4))
    between = Grid(2, 3, 4, crop=Crop((4, 6, 8), (0.5, 2, 3, 2, 3, 4)))
    ramp = whole.coordinates().double() @ torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    found = whole.resize(ramp[:, None], between)[:, 0]
    torch.testing.assert_close(
        found.unflatten(0, (2, 12))[1], (between.coordinates() @ torch.tensor([1.0, 10, 100]).double())[12:]
    )


def test_spacing_is_the_unit_of_coordinates_and_offsets_and_not_of_order():
    grid, plain = Grid(2, 3, 4, spacing=(5, 1, 0.5)), Grid(2, 3, 4)
    unit = torch.tensor([5, 1, 0.5], dtype=torch.float64)
    assert torch.equal(grid.coordinates(), plain.coordinates() * unit)
    assert torch.equal(grid.offsets(), plain.offsets() * unit)
    assert torch.equal(grid.order(), plain.order()) and torch.equal(grid.offset_index(), plain.offset_index())
    assert torch.equal(grid.displacements()[2], torch.arange(-3, 4) * 0.5)
    assert grid.extent == (10, 3, 2.0) and grid != plain and grid == replace(plain, spacing=[5, 1, 0.5])
    assert Grid(2, 4, spacing=(3, 1)).pyramid(2)[1].spacing == (6, 2)
    crop = grid.cropped(Crop((4, 6, 8), (1, 2, 3, 2, 3, 4)))
    assert torch.equal(crop.coordinates(), (plain.coordinates() + torch.tensor([1, 2, 3])) * unit)


@in_turn(
    ("build", "message"),
    [
        (lambda: Grid(), "`shape` must have at least one axis"),
        (lambda: Grid(2, 0, 3), "`shape` must be at least 1, got 0"),
        (lambda: Grid(2, 3, prefix=-1), "`prefix` must be at least 0, got -1"),
        (lambda: Grid(2, 3, spacing=(1, 0)), "`spacing` must be a positive number for each of 2 axes"),
        (lambda: Grid(2, 3, spacing=(1, 2, 3)), "`spacing` must be a positive number for each of 2 axes"),
        (lambda: Grid(2, 3, spacing=(1, float("nan"))), "`spacing` must be a positive number"),
        (lambda: Grid(2, 3, crop=Crop((4, 4, 4), (0, 0, 0, 1, 2, 3))), "`crop` must have 2 axes, .* got 3"),
        (lambda: Crop((4, 4, 4), (0, 0, 1, 1)), "`box` must have a start and a size for each axis"),
        (lambda: Grid.of_image((8, 32, 32), (16, 16)), "`patch_size` must have 3 axes"),
        (lambda: Grid.of_image((9, 32, 32), (2, 16, 16)), "`img_size` must be .* got depth 9 with a patch of 2"),
        (lambda: Grid(4, 4).resize(torch.zeros(16, 2), Grid(2, 4, 4)), "`new` must have 2 axes"),
        (lambda: Grid(2, 4, 4).resize(torch.zeros(32, 2), Grid(4, 4)), "`new` must have 3 axes"),
    ],
)
def test_invalid_grids_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
