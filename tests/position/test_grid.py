"""Grids: order of tokens, offsets, prefix tokens and resampling."""

import itertools
from dataclasses import replace

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from graticule import Crop, Grid
from graticule.position.resampling import RESAMPLERS, build_resampler
from graticule.position.windows import Windows
from in_turn import in_turn, refusals
from tiny import assert_same


def test_distances_are_euclidean():
    expected = torch.tensor([0.0, 1.0, 2.0, 1.0, 2**0.5, 5**0.5])
    torch.testing.assert_close(Grid(2, 3).distances()[0], expected)


def test_each_stage_of_a_pyramid_has_its_windows_and_those_after_it():
    grid = Grid(8, 12).with_windows([(4, 6), (4, 5), (2, 3)])
    stages = grid.pyramid(3, prefix=1)
    assert [stage.within for stage in stages] == [Grid(4, 6), Grid(4, 5), Grid(2, 3)]
    assert [len(stage.windows) for stage in stages] == [3, 2, 1] and [stage.tokens for stage in stages] == [96, 24, 7]
    assert all(stage.within is stage for stage in Grid(8, 12, prefix=1).pyramid(3))


def test_windows_are_cut_to_the_grid_of_their_stage():
    assert Grid(8, 12, prefix=2).in_windows([10, 4, 3]).windows == ((8, 10), (4, 4), (2, 3))
    assert Grid(5, 9).in_windows([7, 7, 7], pad=True).windows == ((5, 7), (3, 5), (2, 3))
    assert Grid(8, 12, prefix=2).in_windows([(10, 4), (3, 9)]).windows == ((8, 4), (3, 6))
    assert Grid(8, 12, prefix=2).in_windows([4]).prefix == 2
    wrong = [([4, side], "`window_size` must be .* at least 1, .* 2 axes, got") for side in (0, (4,), (4, 0))]
    for sides, message in (*wrong, ([4] * 4, "to be halved 3 times")):
        with pytest.raises(ValueError, match=message):
            Grid(8, 12).in_windows(sides)


def test_grids_of_the_same_tokens_are_equal_whatever_their_windows_are():
    grid = Grid(4, 6, prefix=1)
    assert grid.in_windows([2]) == grid and hash(grid.in_windows([2])) == hash(grid)
    table = torch.randn(25, 3)
    assert grid.resize(table, grid.in_windows([2])) is table


def test_prefix_tokens_come_first_and_get_rows_of_zeros_and_no_bias_as_queries_nor_as_keys():
    grid, tokens, bias = Grid(2, 3, prefix=2), torch.randn(4, 8, 5), torch.randn(3, 6, 6)
    prefix, patches = grid.split(tokens)
    assert torch.equal(prefix, tokens[:, :2]) and torch.equal(patches, tokens[:, 2:])
    assert torch.equal(grid.with_prefix_rows(tokens[0, :6]), torch.cat([torch.zeros(2, 5), tokens[0, :6]]))
    full = grid.with_prefix_bias(bias)
    assert torch.equal(full[:, 2:, 2:], bias) and not full[:, :2].any() and not full[:, :, :2].any()


def test_a_map_has_every_patch_at_its_coordinates():
    grid = Grid(2, 3, prefix=1)
    tokens = torch.randn(4, 7, 5)
    features = grid.to_map(tokens)
    assert features.shape == (4, 5, 2, 3)
    for index, (y, x) in enumerate(grid.coordinates().tolist()):
        assert torch.equal(features[:, :, y, x], tokens[:, 1 + index])


def test_the_grid_of_an_image_is_its_size_in_patches():
    assert Grid.of_image((32, 48), (8, 16), prefix=1) == Grid(4, 3, prefix=1)


test_an_image_that_the_patch_does_not_divide_is_refused_with_the_nearest_sizes = refusals(
    ((30, 32), "`img_size`.*height 30 with a patch of 8.* 24 and 32"),
    ((32, 33), "`img_size`.*width 33 with a patch of 8.* 32 and 40"),
    ((0, 32), "`img_size`.*height 0 with a patch of 8.* 8"),
    call=lambda image: Grid.of_image(image, (8, 8)),
)


def _rounding(table):
    """Return an error bound of float32, which timm uses: a rounding for each of the 4 x 4 entries of a cubic."""
    return 16 * torch.finfo(torch.float32).eps * table.abs().max().item()


@in_turn(("old", "new"), [*(((4, 4), new) for new in ((7, 7), (3, 5), (2, 2), (6, 2))), ((3, 5), (4, 2))])
@in_turn("prefix", [0, 1, 2])
def test_resizing_is_timms_resampling_and_keeps_prefix_rows(old, new, prefix):
    grid = Grid(*old, prefix=prefix)
    table = torch.randn(grid.tokens, 12)
    ours = grid.resize(table, Grid(*new, prefix=prefix))
    reference = resample_abs_pos_embed(table[None], list(new), list(old), num_prefix_tokens=prefix)[0]
    assert ours.shape == (new[0] * new[1] + prefix, 12) and torch.equal(ours[:prefix], table[:prefix])
    assert_same(ours, reference, _rounding(table))


def test_the_gradient_of_a_resized_table_reaches_every_row():
    table = torch.randn(17, 3, requires_grad=True)
    Grid(4, 4, prefix=1).resize(table, Grid(3, 5, prefix=1)).square().sum().backward()
    assert (table.grad.abs().sum(1) > 0).all()


def test_a_grid_of_another_number_of_patches_is_a_square_and_of_a_text_a_row():
    assert Grid(2, 3, prefix=1).infer_grid(6) == Grid(2, 3) and Grid(2, 3).infer_grid(16) == Grid(4, 4)
    assert [Grid(2, 3).infer_grid(patches) for patches in (0, -1, 15)] == [None] * 3
    assert Grid(1, 7).infer_grid(49) == Grid(7, 7) and Grid(1, 7).infer_grid(7) == Grid(1, 7)  # an image of one row
    text = Grid(8)
    assert [text.infer_grid(patches) for patches in (8, 16, 5)] == [Grid(8), Grid(16), Grid(5)]
    assert (
        text.infer_grid(16, (1, 16)) == Grid(16) and Grid(1).infer_grid(16) == Grid(16) and text.infer_grid(0) is None
    )
    assert Grid(2, 3, 4).infer_grid(27) == Grid(3, 3, 3) and Grid(2, 3, 4).infer_grid(24) == Grid(2, 3, 4)
    assert Grid(2, 3, 4).infer_grid(30, (2, 3, 5)) == Grid(2, 3, 5) and Grid(2, 3, 4).infer_grid(30) is None


@in_turn(
    ("shape", "window", "shift"),
    [
        *((shape, (4, 4), (0, 0)) for shape in ((8, 12), (7, 11))),
        *(((8, 12), (4, 4), (2, 2)), ((7, 11), (4, 5), (2, 2)), ((9, 5), (4, 5), (2, 0))),
        *(((4, 2), (2, 2), (1, 1)), ((3, 3), (3, 3), (1, 1)), ((5, 9), (5, 3), (0, 1))),
    ],
)
def test_windows_are_those_of_the_rolled_and_padded_map_cut_at_the_border(shape, window, shift):
    """Two tokens share a window if they do on the rolled map and were neighbors before; each has its index in it."""
    grid, step = Grid(*shape), Grid(*window)
    actual = torch.zeros(*shape, dtype=torch.int64)  # window
    place = torch.full((*shape, 2), -1)
    seen = torch.zeros(shape)
    count = 0
    for strip in Windows(grid, step, shift).tiles():
        for tile in strip:
            seen[tile.rows, tile.columns] += 1
            height, width = tile.part.shape
            for y in range(tile.rows.start, tile.rows.stop):
                for x in range(tile.columns.start, tile.columns.stop):
                    down, across = y - tile.rows.start, x - tile.columns.start
                    actual[y, x] = count + down // height * 100 + across // width
                    place[y, x, 0] = tile.window_rows.start + down % height
                    place[y, x, 1] = tile.window_columns.start + across % width
            count += 10_000
    assert (seen == 1).all()
    moved = grid.coordinates() - torch.tensor(shift)
    cut = moved // torch.tensor(window)
    expected = (cut[:, None] == cut[None]).all(-1)
    assert torch.equal(actual.flatten()[:, None] == actual.flatten()[None], expected)
    assert torch.equal(place.flatten(0, 1), moved % torch.tensor(window))


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
    assert [axis.tolist() for axis in grid.displacements()] == [list(range(1 - side, side)) for side in shape]


def test_maps_halves_and_windows_have_all_axes():
    grid = Grid(2, 4, 6, prefix=1)
    tokens = torch.randn(3, grid.tokens, 5)
    assert grid.to_map(tokens).shape == (3, 5, 2, 4, 6)
    assert torch.equal(grid.from_map(grid.to_map(tokens)), tokens[:, 1:])
    assert torch.equal(Grid(2, 3).from_map(Grid(2, 3).to_map(tokens[:, :6])), tokens[:, :6])
    assert grid.pyramid(2)[1] == Grid(1, 2, 3, prefix=1) and grid.in_windows([3]).within == Grid(2, 3, 3)
    with pytest.raises(ValueError, match="multiples of 4, to be halved 2 times, got 2 x 4 x 6"):
        grid.pyramid(3)


@in_turn("name", [name for name in RESAMPLERS if "positions" in RESAMPLERS[name].takes and name != "crop"])
def test_resampling_is_separable_so_that_an_axis_that_does_not_change_is_a_batch(name):
    resample = build_resampler(name)
    table = torch.randn(7, 3, 4, dtype=torch.float64)
    video = resample(table[None], (7, 5, 6))[0]
    assert_same(video, resample(table, (5, 6)), 1e-12)
    text = resample(table.flatten(0, 1), (9,))
    assert_same(text, resample(table.flatten(0, 1)[:, None], (1, 9))[:, 0], 1e-12)


def test_resizing_commutes_with_permuting_the_axes():
    table = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    resized = Grid(2, 3, 4).resize(table.flatten(0, 2), Grid(4, 2, 6)).unflatten(0, (4, 2, 6))
    other = Grid(4, 2, 3).resize(table.permute(2, 0, 1, 3).flatten(0, 2), Grid(6, 4, 2)).unflatten(0, (6, 4, 2))
    assert_same(other, resized.permute(2, 0, 1, 3), 1e-12)


def test_a_crop_of_a_video_is_the_part_of_its_table():
    full, part = Grid(4, 6, 8), Grid(2, 3, 4, crop=Crop((4, 6, 8), (1, 2, 3, 2, 3, 4)))
    table = torch.randn(full.patches, 5, dtype=torch.float64)
    expected = table.unflatten(0, full.shape)[1:3, 2:5, 3:7].flatten(0, 2)
    assert torch.equal(full.resize(table, part), expected)
    assert torch.equal(part.coordinates(), full.coordinates().unflatten(0, full.shape)[1:3, 2:5, 3:7].flatten(0, 2))
    assert part.order().tolist() == torch.arange(192).view(4, 6, 8)[1:3, 2:5, 3:7].flatten().tolist()
    halves = Grid(2, 2, 4, crop=Crop((4, 6, 8), (0, 0, 0, 4, 4, 8))).pyramid(2)
    assert halves[1].crop == Crop((2, 3, 4), (0, 0, 0, 2, 2, 4))
    between = Grid(2, 3, 4, crop=Crop((4, 6, 8), (0.5, 2, 3, 2, 3, 4)))
    ramp = full.coordinates().double() @ torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    actual = full.resize(ramp[:, None], between)[:, 0]
    torch.testing.assert_close(
        actual.unflatten(0, (2, 12))[1], (between.coordinates() @ torch.tensor([1.0, 10, 100]).double())[12:]
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


test_invalid_grids_are_refused = refusals(
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
    (lambda: Grid.of_image((8, 4), (8, 8)), "`img_size` must be a positive multiple"),
    (lambda: Grid(4, 4).resize(torch.zeros(16, 2), Grid(2, 4, 4)), "`new` must have 2 axes"),
    (
        lambda: Grid(4, 4, prefix=1).resize(torch.zeros(17, 3), Grid(3, 5, prefix=2)),
        r"`new` must have as many prefix tokens as the table \(1\), got 2",
    ),
    (lambda: Grid(2, 4, 4).resize(torch.zeros(32, 2), Grid(4, 4)), "`new` must have 3 axes"),
)
