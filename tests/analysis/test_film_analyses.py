"""Analyses of models of films and volumes: laws that connect them with those of images, the commands, the refusals."""

import pytest
import torch

import tiny
from graticule import Grid
from graticule.analysis.equivariance import translation_error
from graticule.analysis.share import additive_basis, linear_basis
from graticule.external.view import nearest

SIZE, GRID = (4, 32, 24), Grid(2, 4, 3)


def film_model(encoding="none", **given):
    """Build a small model of films with random weights, without a class token."""
    size = {"img_size": SIZE, "patch_size": (2, 8, 8), "class_token": False, "global_pool": "avg"}
    return tiny.draw(tiny.tiny(encoding, **{"depth": 2, **size, **given}))


def films(count=6):
    return torch.randn(count, 3, *SIZE, generator=torch.Generator().manual_seed(1))


def test_bases_of_three_axes_are_orthonormal_and_a_sum_of_functions_of_each_axis_is_additive():
    additive, linear = additive_basis(GRID), linear_basis(GRID)
    assert additive.shape == (24, 1 + 3 + 2) and linear.shape == (24, 3)
    for basis in (additive, linear):
        torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=basis.dtype))
    t, y, x = GRID.coordinates().double().unbind(-1)
    given = t.exp() + y.square() - 3 * (x == 1)
    centered = given - given.mean()
    torch.testing.assert_close(additive @ (additive.T @ centered), centered)
    product = (t - t.mean()) * (y - y.mean())
    assert (additive.T @ product).abs().max() < 1e-12


def test_a_patch_takes_the_position_of_the_nearest_of_a_larger_film():
    larger = Grid(4, 4, 6)
    found = GRID.coordinates().double(), larger.coordinates().double()[nearest(GRID, larger)]
    assert torch.equal(((found[0] + 0.5) * torch.tensor([2, 1, 2])).floor(), found[1])
    with pytest.raises(ValueError, match="is smaller than"):
        nearest(GRID, Grid(1, 8, 8))


def test_without_position_a_film_is_equivariant_along_each_axis_and_a_table_of_time_breaks_that_of_time_alone():
    found = translation_error(film_model(), films())
    assert found.shifts == ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))
    assert found.all_patches.max() < 1e-5 and found.logits < 1e-5
    model = film_model("factorized")
    with torch.no_grad():
        model.position.encodings[0].pos_embed_y.zero_()
        model.position.encodings[0].pos_embed_x.zero_()
    assert translation_error(model, films(), [(0, 1, 0), (0, 2, 1)]).all_patches.max() < 1e-5
    assert translation_error(model, films(), [(1, 0, 0)]).all_patches.min() > 0.05
