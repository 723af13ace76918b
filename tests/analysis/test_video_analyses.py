"""Analyses of models of videos and volumes: laws that connect them with those of images, the commands, the refusals."""

import torch

import tiny
from graticule import Grid
from graticule.analysis.equivariance import translation_error
from graticule.external.view import nearest

SIZE, GRID = (4, 32, 24), Grid(2, 4, 3)


def video_model(encoding="none"):
    size = {"img_size": SIZE, "patch_size": (2, 8, 8), "class_token": False, "global_pool": "avg"}
    return tiny.draw(tiny.tiny(encoding, depth=2, **size))


def videos(count=6):
    return torch.randn(count, 3, *SIZE, generator=torch.Generator().manual_seed(1))


def test_a_patch_takes_the_position_of_the_nearest_of_a_larger_video():
    larger = Grid(4, 4, 6)
    places = GRID.coordinates().double(), larger.coordinates().double()[nearest(GRID, larger)]
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
