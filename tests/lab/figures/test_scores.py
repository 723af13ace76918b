"""Plots of scores: the given values are drawn, gaps stay gaps, labels are unchanged, and legends hide nothing."""

import math

import numpy as np
import pytest

from graticule.lab.figures.save import png
from graticule.lab.figures.scores import convergence_plot, resolution_plot, score_plot
from graticule.lab.training.results import Metric
from graticule.lab.training.task import list_tasks
from in_turn import in_turn
from tiny import render


def line(*values, deviation=None):
    return [(epoch, value, deviation) for epoch, value in enumerate(values, start=1)]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_line_goes_through_its_points_and_is_named():
    figure = render(convergence_plot({"default": line(10, 40, 60), "lape": line(20, 50)}, title="DeiT-Ti"))
    (ax,) = figure.axes
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 10], [2, 40], [3, 60]])
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), [[1, 20], [2, 50]])
    assert legend(figure) == ["default", "lape"] and not ax.collections
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("epoch", "top-1 on validation (%)", "DeiT-Ti")


METRICS = [task.recipe_class.metric for task in list_tasks().values()]
METRICS.append(Metric("cost", "cost $x^$", "$", highest=False))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_any_metric_is_drawn_with_its_label_and_unit(metric):
    (ax,) = render(convergence_plot({"a": line(3, 2)}, metric)).axes
    assert ax.get_ylabel() == f"{metric.label} on validation" + (f" ({metric.unit})" if metric.unit else "")
    render(score_plot({"a": [1.0]}, metric.title))


@pytest.mark.parametrize(
    ("column", "label"), [("val_bpb", "bits per byte on validation"), ("lr", "learning rate"), ("val_top5", "val_top5")]
)
def test_a_column_without_a_metric_is_drawn_under_its_name(column, label):
    assert render(convergence_plot({"a": line(3, 2)}, column)).axes[0].get_ylabel() == label


def test_a_deviation_is_a_band_either_side():
    (ax,) = render(convergence_plot({"a": line(10, 40, deviation=5), "b": line(10, 40)})).axes
    (band,) = ax.collections
    extent = band.get_paths()[0].get_extents()
    assert (extent.x0, extent.y0, extent.x1, extent.y1) == (1, 5, 2, 45)


@pytest.mark.parametrize(("missing", "deviation"), [(math.nan, None), (-math.inf, 1.0)])
def test_a_value_that_is_not_finite_is_a_gap(missing, deviation):
    (ax,) = render(convergence_plot({"a": line(1, 2, missing, 4, 5, deviation=deviation)}, "train_loss")).axes
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [1, 2, math.nan, 4, 5])
    bands = [path for collection in ax.collections for path in collection.get_paths()]
    assert [(band.get_extents().x0, band.get_extents().x1) for band in bands] == ([(1, 2), (4, 5)] if deviation else [])
    assert np.isfinite(ax.get_ylim()).all()


def test_labels_are_drawn_as_they_are():
    names = ["_hidden", "$x^$", "a $ b $ c", "50% \\alpha {", "mm3", "x" * 90]
    assert png(figure := convergence_plot({name: line(1, 2) for name in names}))
    assert [text.strip() for text in legend(figure)] == names


def test_a_long_legend_leaves_the_axes_their_room():
    few, many = (render(convergence_plot({f"run {i} " + "x" * 50: line(1, 2) for i in range(n)})) for n in (2, 28))
    heights = [figure.axes[0].get_position().height * figure.get_size_inches()[1] for figure in (few, many)]
    assert heights[1] > 0.8 * heights[0]
    lines = many.axes[0].lines
    looks = [(drawn.get_color(), drawn.get_linestyle(), drawn.get_marker()) for drawn in lines]
    assert len(set(looks)) == 28


# Means with a band, sizes of images, scores of all seeds


def test_resolutions_are_in_order_with_means_bars_and_the_training_size():
    scores = {"default": {(32, 32): [70.0, 72.0], (28, 28): [80.0, 80.0]}}
    ax = render(resolution_plot(scores, trained_at=28)).axes[0]
    points, _, (bars,) = ax.containers[0]
    np.testing.assert_allclose(points.get_xydata(), [[28, 80], [32, 71]])
    np.testing.assert_allclose(np.ptp([s[:, 1] for s in bars.get_segments()], axis=1), [0, 2 * 2**0.5])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["28", "32"]
    (ax,) = render(resolution_plot({"default": {(32, 32): [70.0, 72.0]}}, trained_at=28)).axes
    assert ax.get_xlim()[1] > 32.1  # the last marker is whole
    assert any(list(line.get_xdata()) == [28, 28] for line in ax.lines)
    resolution_plot(scores, trained_at=(28, 28))


def test_no_line_leads_from_a_square_to_another_size():
    scores = {"default": {(32, 32): [70.0], (20, 32): [60.0], (28, 28): [80.0], (40, 20): [50.0]}}
    (ax,) = render(resolution_plot(scores, trained_at=28)).axes
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["20 × 32", "28", "40 × 20", "32"]
    line = ax.lines[0]
    assert line.get_linestyle() == "None" and line.get_ydata().tolist() == [60, 80, 50, 70]


def test_a_dotted_line_continues_the_mean_of_the_first_choice():
    (ax,) = render(score_plot({"a": [1.0, 3.0], "b": [2.0]}, "top-1")).axes
    (line,) = [line for line in ax.lines if line.get_linestyle() not in ("None", "-")]
    assert set(line.get_xdata()) == {2.0} and "dotted line: mean of the first choice" in ax.get_xlabel()


def test_the_seeds_of_a_choice_lie_below_its_mean_and_are_counted():
    (ax,) = render(score_plot({"a": [1.0, 3.0], "b": [2.0, 4.0, 6.0]}, "top-1")).axes
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in dots] == [[1.0, 3.0], [2.0, 4.0, 6.0]]
    assert [set(line.get_ydata()) for line in dots] == [{0.24}, {1.24}] and "dots: 2–3 seeds" in ax.get_xlabel()


@in_turn(
    ("plot", "arguments", "message"),
    [
        (convergence_plot, ({},), "`lines` must be 1 to 28"),
        (convergence_plot, ({str(i): line(1) for i in range(29)},), "got 29"),
        (convergence_plot, ({"a": line(1), "b": []},), "got none for 'b'"),
        (resolution_plot, ({"a": {(28, 28): []}}, 28), "a value for every size"),
    ],
)
def test_figures_without_all_values_are_refused(plot, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot(*arguments)
