"""Weights by displacement: their matrix, and their mixing by Fourier transforms where they are periodic."""

import torch

from graticule.layers.gating import mix_tokens
from graticule.position.displacement import Displacements
from graticule.position.grid import Grid
from in_turn import in_turn
from tiny import assert_same

GRIDS = [Grid(5, 7), Grid(1, 9), Grid(9, 1), Grid(1, 1), Grid(14, 14), Grid(9), Grid(2, 3, 4)]


def drawn(grid, groups=2, softmax=False, dtype=torch.float64):
    return Displacements(torch.randn(groups, *grid.table, dtype=dtype), softmax)


@in_turn("grid", GRIDS)
@in_turn("softmax", [True, False])
def test_a_weight_is_the_number_of_the_table_for_the_displacement(grid, softmax):
    kernel = drawn(grid, softmax=softmax)
    assert kernel.grid == grid
    middle = torch.tensor([side - 1 for side in grid.shape])
    places = grid.coordinates()
    index = places[None] - places[:, None] + middle  # (N, N, axes)
    chosen = kernel.table[:, *index.unbind(-1)]
    assert torch.equal(chosen, kernel.table.flatten(1)[:, grid.offset_index().T])
    assert_same(kernel.matrix(), chosen.softmax(-1) if softmax else chosen, 1e-14)


@in_turn("grid", [Grid(5, 7), Grid(1, 9), Grid(14, 14)])
@in_turn("softmax", [True, False])
def test_weights_among_the_tokens_of_a_part_are_cut_and_normalized(grid, softmax):
    kernel = drawn(grid, softmax=softmax)
    for part in (Grid(1, 1), Grid((grid.height + 1) // 2, grid.width), Grid(grid.height, (grid.width + 2) // 3), grid):
        for down, across in {(0, 0), (grid.height - part.height, grid.width - part.width)}:
            y, x = grid.coordinates().unbind(-1)
            inside = (y >= down) & (y < down + part.height) & (x >= across) & (x < across + part.width)
            expected = kernel.matrix()[:, inside][:, :, inside]
            expected = expected / expected.sum(-1, keepdim=True) if softmax else expected
            assert_same(kernel.part(part).matrix(), expected, 1e-12)
            assert_same(kernel.with_weights().part(part).weights, expected, 1e-12)


def test_a_part_out_of_reach_of_a_narrow_center_still_has_weights():
    """exp(-2000) underflows: cutting the weights of the whole window would give 0 / 0."""
    offsets = Grid(5, 7).unique_offsets().float() - torch.tensor([4.0, 6.0])
    part = Displacements(-40 * offsets.square().sum(-1)[None], softmax=True).part(Grid(2, 2)).matrix()
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(4, -1)
    assert_same(part[0], expected, 1e-6)


def periodic(kernel):
    """Return the table of a kernel (groups, H, W) that repeats after each side."""
    for axis in range(1, kernel.ndim):
        kernel = torch.cat([kernel, kernel], axis).narrow(axis, 1, 2 * kernel.shape[axis] - 1)
    return Displacements(kernel, False)


@in_turn("grid", GRIDS)
@in_turn("groups", [1, 3])
def test_a_periodic_table_mixes_by_fourier_transforms_as_by_its_matrix(grid, groups):
    kernel = torch.randn(groups, *grid.shape, dtype=torch.float64, requires_grad=True)
    x, gradient = torch.randn(2, 2, grid.patches, 6, dtype=torch.float64)
    x.requires_grad_()
    table = periodic(kernel)
    by_transform, by_matrix = (mix_tokens(x, made) for made in (table, table.with_weights()))
    assert_same(by_transform, by_matrix, 1e-10)
    pairs = (torch.autograd.grad(y, (x, kernel), gradient, retain_graph=True) for y in (by_transform, by_matrix))
    for value, expected in zip(*pairs, strict=True):
        assert_same(value, expected, 1e-10)


@in_turn("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_the_result_alone(dtype):
    table, x = periodic(torch.randn(2, 5, 7, dtype=dtype)), torch.randn(2, 35, 4, dtype=dtype)
    expected = table._replace(table=table.table.float()).mix(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(table.mix(x), expected.to(dtype))


@in_turn("shape", [(0, 12, 4), (2, 12, 0)])
def test_no_samples_or_channels_are_mixed_to_none(shape):
    assert periodic(torch.randn(2, 3, 4)).mix(torch.zeros(shape)).shape == shape
