"""Figures show everything once and on one scale."""

import dataclasses

import numpy as np
import pytest

from graticule.analysis.position_maps import BiasMaps
from graticule.analysis.similarity import Correlations
from graticule.lab.figures.position_sheets import bias_map_sheet, center_sheet, correlation_sheet
from graticule.lab.figures.save import DPI, save_figure
from graticule.lab.figures.scores import convergence_plot
from graticule.position.grid import Grid
from tiny import render


def correlations(layers=6, grid=Grid(3, 5), silent=0, initial=True):  # noqa: B008 (a constant)
    draw = np.random.default_rng(0)
    similarity = np.stack([np.clip(draw.normal(size=(15, 15)), -0.5, 1) for _ in range(layers)])
    similarity[layers - silent :] = np.nan
    sources = ("after_norm",) * (layers - silent) + (None,) * silent
    return Correlations(grid, similarity, sources, np.eye(15) if initial else None)


@pytest.mark.parametrize(("layers", "initial", "columns"), [(6, True, 4), (12, True, 4), (12, False, 4), (2, True, 3)])
def test_a_sheet_has_two_panels_a_layer_and_two_for_the_table(layers, initial, columns):
    figure = render(correlation_sheet(correlations(layers, initial=initial), "a model"))
    panels = layers + initial
    assert len(figure.axes) == 2 * panels + 1  # plus the color bar
    assert len({round(ax.get_position().x0, 4) for ax in figure.axes[:-1]}) == columns
    names = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert names == ["table w"] * initial + [f"layer {i}" for i in range(layers)]
    assert figure.axes[-1].get_ylabel() == "cosine similarity"


def test_a_sheet_shows_the_row_of_the_centre_token_and_marks_it():
    maps = correlations()
    pairs, center = correlation_sheet(maps, "a model").axes[2:4]
    np.testing.assert_array_equal(pairs.images[0].get_array(), maps.similarity[0])
    np.testing.assert_array_equal(center.images[0].get_array(), maps.center_maps[0])
    assert center.lines[0].get_xydata().tolist() == [[2, 1]]  # x, y of a grid of 3 rows and 5 columns
    assert center.get_xlabel() == f"reach {maps.reach[0]:.2f}"


@pytest.mark.parametrize("silent", [2, 6])
def test_a_layer_without_position_is_an_empty_panel_that_says_so(silent):
    figure = render(correlation_sheet(correlations(silent=silent, initial=False), "a model"))
    texts = [[text.get_text() for text in ax.texts] for ax in figure.axes[:-1]]
    assert texts == [[]] * 2 * (6 - silent) + [["no position"]] * 2 * silent
    assert [len(ax.images) for ax in figure.axes[:-1]] == [1] * 2 * (6 - silent) + [0] * 2 * silent


def test_no_text_of_a_sheet_lies_over_another():
    figure = render(correlation_sheet(correlations(12), "deit_tiny_patch16_224, sinusoidal_1d, joining lape"))
    texts = [t for ax in figure.axes for t in (ax.title, ax.xaxis.label, ax.yaxis.label)] + figure.texts
    boxes = [t.get_window_extent() for t in texts if t.get_text()]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_a_sheet_of_a_text_has_the_row_of_the_centre_token_as_a_line():
    text = correlations(2, grid=Grid(1, 15))
    figure = render(correlation_sheet(text, "a text"))
    lines = [ax.lines[0] for ax in figure.axes[1:-1:2]]
    assert len(lines) == 3 and not any(ax.images for ax in figure.axes[1:-1:2])
    for line, image in zip(lines, [np.eye(15), *text.similarity], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), image[7])
    assert "in tokens under the map" in figure.texts[-2].get_text()


def test_a_sheet_of_several_models_has_a_row_each_with_the_map_of_the_center_token_in_every_layer():
    models = {"default": correlations(4), "lape": correlations(4, silent=1)}
    figure = render(center_sheet(models, "two models"))
    panels = np.array(figure.axes[:-1]).reshape(2, 4)
    assert [ax.get_title() for ax in panels[0]] == [f"layer {i}" for i in range(4)]
    assert [row[0].get_ylabel() for row in panels] == list(models)
    for row, maps in zip(panels, models.values(), strict=True):
        for layer, ax in enumerate(row[:3]):
            np.testing.assert_array_equal(ax.images[0].get_array(), maps.center_maps[layer])
            assert ax.get_xlabel() == f"reach {maps.reach[layer]:.2f}" and ax.images[0].get_clim() == (-1, 1)
    assert not panels[1, 3].images and panels[1, 3].texts[0].get_text() == "no position"
    with pytest.raises(ValueError, match="one shape"):
        center_sheet({"a": correlations(4), "b": correlations(3)})
    with pytest.raises(ValueError, match="one shape"):
        center_sheet({"a text": correlations(2, grid=Grid(1, 15))})


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF-"), ("SVG", b"<?xml")])
def test_the_suffix_says_the_format_and_the_same_figure_gives_the_same_bytes(tmp_path, suffix, start):
    once, again = (
        save_figure(correlation_sheet(correlations(2), "a model"), tmp_path / f"{name}.{suffix}").read_bytes()
        for name in ("a", "b")
    )
    assert once.startswith(start) and once == again
    if suffix == "pdf":
        assert b"/Type3" not in once  # fonts that publishers do not accept


def test_another_suffix_is_refused_before_anything_is_written(tmp_path):
    for name in ("a.jpg", "a", "a.png.txt"):
        with pytest.raises(ValueError, match=r"`path` must end with \.png, \.pdf or \.svg"):
            save_figure(convergence_plot({"a": [(0, 1.0, None)]}), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_names_are_drawn_as_they_are_and_ticks_as_matplotlib_writes_them(tmp_path):
    names = ["$$", "$x^$", "\x1b[31mred", "\udcff", "a\nb"]
    figure = convergence_plot({name: [(1, 50.0, None), (2, 60.0, None)] for name in names}, title="$$ \x1b")
    figure.axes[0].set_yscale("log")
    assert save_figure(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert figure.axes[0].get_title() == "$$ \\x1b"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["$$", "$x^$", "\\x1b[31mred", "\\udcff", "a\nb"]
    assert figure.axes[0].get_yticklabels(which="both")[0].get_parse_math()


@pytest.mark.parametrize("untrained", [None, 40.0])  # of two lengths of the verdict
@pytest.mark.parametrize(("layers", "grid"), [(1, Grid(3, 5)), (2, Grid(15, 1)), (7, Grid(1, 15))])
def test_titles_and_notes_are_within_the_figure(tmp_path, layers, grid, untrained):
    maps = correlations(layers, grid)
    if untrained is not None:
        maps = dataclasses.replace(maps, untrained=np.full(39, untrained / 100))
    figures = [correlation_sheet(maps, title) for title in ("a model", 12 * "a long name ")]
    bias = np.random.default_rng(0).normal(size=(layers, 1, 15, 15))
    figures.append(
        bias_map_sheet(BiasMaps(grid, tuple((layer,) for layer in range(layers)), bias), 12 * "a long name ")
    )
    for figure in figures:
        save_figure(figure, tmp_path / "sheet.png")
        figure.set_dpi(DPI)  # at fewer dots, letters are rounded to wider ones
        figure.draw_without_rendering()
        bottom = min(ax.get_tightbbox().y0 for ax in figure.axes)
        for text in figure.texts:
            box, (width, height) = text.get_window_extent(), figure.bbox.size
            assert 0 <= box.x0 <= box.x1 <= width and 0 <= box.y0 <= box.y1 <= height, text.get_text()
            assert box.y1 < bottom or box.y0 > height / 2, "a note covers a panel"
