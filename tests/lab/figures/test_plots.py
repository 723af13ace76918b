"""Figures show everything once and on one scale."""

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from graticule.analysis.similarity import Correlations
from graticule.lab.figures.layers import locality_plot
from graticule.lab.figures.position_sheets import correlation_sheet
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.scores import curves, resolution_plot, score_plot
from graticule.lab.figures.style import line_style
from graticule.position.grid import Grid


def correlations(layers=6, grid=Grid(3, 5), silent=0, initial=True):  # noqa: B008 (a constant)
    draw = np.random.default_rng(0)
    similarity = np.stack([np.clip(draw.normal(size=(15, 15)), -0.5, 1) for _ in range(layers)])
    similarity[layers - silent :] = np.nan
    sources = ("inner",) * (layers - silent) + (None,) * silent
    return Correlations(grid, similarity, sources, np.eye(15) if initial else None)


def drawn(figure):
    figure.draw_without_rendering()  # a layout that does not fit warns here
    return figure


@pytest.mark.parametrize(("layers", "initial", "columns"), [(6, True, 7), (12, True, 7), (12, False, 6), (2, True, 3)])
def test_a_sheet_has_two_panels_a_layer_and_two_for_the_table(layers, initial, columns):
    figure = drawn(correlation_sheet(correlations(layers, initial=initial), "a model"))
    panels = layers + initial
    assert len(figure.axes) == 2 * panels + 1  # plus the color bar
    assert len({round(ax.get_position().x0, 4) for ax in figure.axes[:-1]}) == columns
    names = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert names == ["table w"] * initial + [f"layer {i}" for i in range(layers)]
    assert figure.axes[-1].get_ylabel() == "cosine similarity"


@pytest.mark.parametrize("limits", [None, (-0.5, 1.0)])
def test_all_sheets_have_one_color_scale(limits):
    figure = correlation_sheet(correlations(), "a model", *([limits] if limits else []))
    ranges = {image.get_clim() for ax in figure.axes[:-1] for image in ax.images}
    assert ranges == {limits or (-1.0, 1.0)}
    assert figure.axes[-1].get_ylim() == ranges.pop()


def test_a_sheet_shows_the_row_of_the_centre_token_and_marks_it():
    found = correlations()
    pairs, center = correlation_sheet(found, "a model").axes[2:4]
    np.testing.assert_array_equal(pairs.images[0].get_array(), found.similarity[0])
    np.testing.assert_array_equal(center.images[0].get_array(), found.center_maps[0])
    assert center.lines[0].get_xydata().tolist() == [[2, 1]]  # x, y of a grid of 3 rows and 5 columns
    assert center.get_xlabel() == f"locality {found.locality[0]:.2f}"


@pytest.mark.parametrize("silent", [2, 6])
def test_a_layer_without_position_is_an_empty_panel_that_says_so(silent):
    figure = drawn(correlation_sheet(correlations(silent=silent, initial=False), "a model"))
    said = [[text.get_text() for text in ax.texts] for ax in figure.axes[:-1]]
    assert said == [[]] * 2 * (6 - silent) + [["no position"]] * 2 * silent
    assert [len(ax.images) for ax in figure.axes[:-1]] == [1] * 2 * (6 - silent) + [0] * 2 * silent


def test_a_sheet_takes_a_grid_of_one_column():
    figure = drawn(correlation_sheet(correlations(grid=Grid(15, 1)), "a model"))
    assert {ax.images[0].get_array().shape for ax in figure.axes[:-1]} == {(15, 15), (15, 1)}


def test_no_text_of_a_sheet_lies_over_another():
    figure = drawn(correlation_sheet(correlations(12), "deit_tiny_patch16_224, sinusoidal_1d, joining lape"))
    texts = [t for ax in figure.axes for t in (ax.title, ax.xaxis.label, ax.yaxis.label)] + figure.texts
    boxes = [t.get_window_extent() for t in texts if t.get_text()]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_a_sheet_of_a_text_has_the_row_of_the_centre_token_as_a_line():
    text = correlations(2, grid=Grid(1, 15))
    figure = drawn(correlation_sheet(text, "a text"))
    lines = [ax.lines[0] for ax in figure.axes[1:-1:2]]
    assert len(lines) == 3 and not any(ax.images for ax in figure.axes[1:-1:2])
    for line, image in zip(lines, [np.eye(15), *text.similarity], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), image[7])
    assert "in tokens under the map" in figure.texts[-2].get_text()
    assert drawn(locality_plot({"a": text})).axes[0].get_ylabel() == "locality (tokens)"


def test_locality_has_a_line_a_model_and_the_uniform_distance():
    figure = drawn(locality_plot({"default": correlations(), "lape": correlations(12, silent=2)}))
    ax = figure.axes[0]
    assert [line.get_label() for line in ax.lines] == ["default", "lape", "uniform, 3 × 5"]
    assert ax.lines[2].get_ydata()[0] == correlations().uniform_distance
    assert len(figure.legends) == 1


def test_curves_have_a_band_where_there_is_a_deviation():
    figure = drawn(curves({"a": [(0, 1.0, 0.5), (1, 2.0, 0.5)], "b": [(0, 1.0, None)]}, "epoch", "loss", "Training"))
    ax = figure.axes[0]
    assert len(ax.lines) == 2 and len(ax.collections) == 1
    extent = ax.collections[0].get_paths()[0].get_extents()
    assert (extent.y0, extent.y1) == (0.5, 2.5)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("epoch", "loss", "Training")


def test_resolutions_are_in_order_with_means_bars_and_the_training_size():
    scores = {"default": {(32, 32): [70.0, 72.0], (28, 28): [80.0, 80.0]}}
    ax = drawn(resolution_plot(scores, trained_at=28)).axes[0]
    points, _, (bars,) = ax.containers[0]
    np.testing.assert_allclose(points.get_xydata(), [[28, 80], [32, 71]])
    np.testing.assert_allclose(np.ptp([s[:, 1] for s in bars.get_segments()], axis=1), [0, 2 * 2**0.5])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["28", "32"]
    assert any(list(line.get_xdata()) == [28, 28] for line in ax.lines)
    resolution_plot(scores, trained_at=(28, 28))


def test_no_line_leads_from_a_square_to_another_size():
    scores = {"default": {(32, 32): [70.0], (20, 32): [60.0], (28, 28): [80.0], (40, 20): [50.0]}}
    squares, others = drawn(resolution_plot(scores, trained_at=28)).axes
    assert [tick.get_text() for tick in squares.get_xticklabels()] == ["28", "32"]
    assert [tick.get_text() for tick in others.get_xticklabels()] == ["20 × 32", "40 × 20"]
    (line,) = others.lines
    assert line.get_linestyle() == "None" and line.get_ydata().tolist() == [60, 50]
    assert squares.get_ylim() == others.get_ylim()
    (alone,) = drawn(resolution_plot({"a": {(20, 32): [60.0]}}, trained_at=(20, 32))).axes
    assert [tick.get_text() for tick in alone.get_xticklabels()] == ["20 × 32"]


def test_a_legend_shows_bars_only_where_there_are_some():
    one, several = (resolution_plot({"a": {(28, 28): values}}, 28) for values in ([80.0], [80.0, 82.0]))
    assert not one.axes[0].containers and len(several.axes[0].containers) == 1
    seeds = [score_plot({"a": values, "b": values}, "top-1").axes[0].get_xlabel() for values in ([1.0], [1.0, 2.0])]
    assert "one seed each" in seeds[0] and "one s.d." in seeds[1]


def test_a_dotted_line_continues_the_first_mean_of_each_group_alone():
    scores = {"a": [1.0, 3.0], "b": [2.0], "c": [5.0, 7.0], "d": [4.0]}

    def dotted(figure):
        lines = [line for line in drawn(figure).axes[0].lines if line.get_linestyle() not in ("None", "-")]
        return [(line.get_xdata()[0], *line.get_ydata()) for line in lines]

    assert dotted(score_plot(scores, "top-1")) == [(2.0, -0.5, 3.5)]
    grouped = score_plot(scores, "top-1", groups=[2, 2])
    assert dotted(grouped) == [(2.0, -0.5, 1.5), (6.0, 1.5, 3.5)]
    assert "dotted line: mean of the first choice of a group" in grouped.axes[0].get_xlabel()
    assert "of a group" not in score_plot(scores, "top-1").axes[0].get_xlabel()
    with pytest.raises(ValueError, match=r"`groups` must be numbers of labels with the sum 4, got \[2, 1\]"):
        score_plot(scores, "top-1", groups=[2, 1])


def test_lines_differ_in_grey_as_in_colour():
    looks = [line_style(i) for i in range(28)]
    assert len({(s["marker"], s["linestyle"]) for s in looks}) == 28
    assert len({to_rgba(s["color"]) for s in looks[:7]}) == 7


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="at least one line"):
        locality_plot({})
    with pytest.raises(ValueError, match="a value for every size"):
        resolution_plot({"a": {(28, 28): []}}, 28)


def test_a_figure_is_written_whole_into_a_new_folder(tmp_path):
    path = save_figure(curves({"a": [(0, 1.0, None)]}, "x", "y", "t"), tmp_path / "new" / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]


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
            save_figure(curves({"a": [(0, 1.0, None)]}, "x", "y"), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_names_are_drawn_as_they_are_and_ticks_as_matplotlib_writes_them(tmp_path):
    names = ["$$", "$x^$", "\x1b[31mred", "\udcff", "a\nb"]
    figure = curves({name: [(1, 50.0, None), (2, 60.0, None)] for name in names}, "epoch", "top-1 (%)", "$$ \x1b")
    figure.axes[0].set_yscale("log")
    assert save_figure(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert figure.axes[0].get_title() == "$$ \\x1b"
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["$$", "$x^$", "\\x1b[31mred", "\\udcff", "a\nb"]
    assert figure.axes[0].get_yticklabels(which="both")[0].get_parse_math()
