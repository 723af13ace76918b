"""Analyses of models of films and volumes: laws that connect them with those of images, the commands, the refusals."""

import numpy as np
import pytest
import torch

import graticule
import tiny
from graticule import Grid
from graticule.analysis.audit import audit
from graticule.analysis.equivariance import translation_error
from graticule.analysis.probe import PositionSums
from graticule.analysis.share import ShareSums, additive_basis, linear_basis
from graticule.external.view import nearest, repeated
from graticule.testing.subject import Subject

SIZE, GRID = (4, 32, 24), Grid(2, 4, 3)


def film_model(encoding="none", **given):
    """Build a small model of films with random weights, without a class token."""
    size = {"img_size": SIZE, "patch_size": (2, 8, 8), "class_token": False, "global_pool": "avg"}
    return tiny.draw(tiny.tiny(encoding, **{"depth": 2, **size, **given}))


def films(count=6):
    return torch.randn(count, 3, *SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("film", "image"), [((1, 4, 3), (4, 3)), ((4, 1, 3), (4, 3))])
def test_shares_and_probes_of_one_frame_are_those_of_an_image(film, image):
    tokens = torch.randn(9, 12, 5) + torch.linspace(0, 1, 12)[:, None]
    one, other = (ShareSums(Grid(*shape)).add(tokens).shares() for shape in (film, image))
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], rtol=0, atol=1e-9)
    one, other = (PositionSums(Grid(*shape), 5, 3).add(tokens).probe().mean for shape in (film, image))
    constant = film.index(1)
    assert np.isnan(one[constant])
    np.testing.assert_allclose(np.delete(one, constant), other, rtol=0, atol=1e-9)


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
    assert torch.equal(repeated(larger, GRID)[nearest(GRID, larger)], torch.arange(GRID.patches))
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


def test_the_share_of_position_is_zero_without_one_and_above_it_with_a_table():
    none = graticule.position_share(film_model(), films(40))
    assert (none.total.low < 0.02).all()
    model = film_model("factorized")
    with torch.no_grad():
        for table in model.position.parameters():
            table.mul_(10)
    share = graticule.position_share(model, films(40), sizes=[(6, 32, 24)])
    assert (share.total.value > none.total.high).all() and list(share.others) == [(6, 32, 24)]


def test_an_audit_measures_all_that_it_does_of_images():
    model = film_model("learnable + relative_bias")
    larger = torch.randn(6, 3, 6, 32, 24)
    found = audit(model, {SIZE: films(), (6, 32, 24): larger}, labels=torch.arange(6) % 5, timed=False)
    assert found.unavailable == {}
    assert [probe.mean.shape for probe in found.probes] == [(3,)] * 2
    names = [effect.name for effect in found.effects]
    assert names[:3] == ["position zeroed", "position shuffled", "position of 8 x 64 x 48"]
    assert all((effect.mean_change > 0).all() for effect in found.effects)
    assert list(found.sizes) == [(6, 32, 24)] and found.attention is not None and found.translation is not None
    (maps,) = found.maps
    assert maps.correlations.grid.shape == maps.biases.grid.shape == GRID.shape


def test_what_films_do_not_have_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="`images` must be preprocessed images"):
        graticule.debias(film_model(), films(24), "mean")
    with pytest.raises(ValueError, match="`model` must take images, got VisionTransformer, which takes films of 4 x"):
        Subject.of(film_model(), None, None)
