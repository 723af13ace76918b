"""Convergence curves: the given values are drawn, gaps stay gaps, and labels are unchanged."""

import math

import numpy as np
import pytest

from graticule.lab.figures.save import save_figure
from graticule.lab.figures.scores import convergence_plot, score_plot
from graticule.lab.training.results import Metric
from graticule.lab.training.task import list_tasks
from in_turn import in_turn


def line(*values, deviation=None):
    return [(epoch, value, deviation) for epoch, value in enumerate(values, start=1)]


def drawn(figure):
    figure.draw_without_rendering()  # a layout that does not fit, or a glyph that does not exist, warns here
    return figure


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_line_goes_through_its_points_and_is_named():
    figure = drawn(convergence_plot({"default": line(10, 40, 60), "lape": line(20, 50)}, title="DeiT-Ti"))
    (ax,) = figure.axes
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 10], [2, 40], [3, 60]])
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), [[1, 20], [2, 50]])
    assert legend(figure) == ["default", "lape"] and not ax.collections
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("epoch", "top-1 on validation (%)", "DeiT-Ti")


METRICS = [task.recipe_class.metric for task in list_tasks().values()]


@pytest.mark.parametrize("metric", [*METRICS, Metric("cost", "cost $x^$", "$", highest=False)], ids=lambda one: one.key)
def test_any_metric_is_drawn_with_its_label_and_unit(metric):
    (ax,) = drawn(convergence_plot({"a": line(3, 2)}, metric)).axes
    assert ax.get_ylabel() == f"{metric.label} on validation" + (f" ({metric.unit})" if metric.unit else "")
    drawn(score_plot({"a": [1.0]}, metric.title))


@pytest.mark.parametrize(
    ("column", "label"), [("val_bpb", "bits per byte on validation"), ("lr", "learning rate"), ("val_top5", "val_top5")]
)
def test_a_column_without_a_metric_is_drawn_under_its_name(column, label):
    assert drawn(convergence_plot({"a": line(3, 2)}, column)).axes[0].get_ylabel() == label


def test_epochs_are_whole_numbers_on_the_axis():
    for values in ((10.0,), (10.0, 20.0), (10.0, 20.0, 30.0)):
        (ax,) = drawn(convergence_plot({"a": line(*values)})).axes
        assert all(tick == int(tick) for tick in ax.get_xticks())


def test_a_deviation_is_a_band_either_side():
    (ax,) = drawn(convergence_plot({"a": line(10, 40, deviation=5), "b": line(10, 40)})).axes
    (band,) = ax.collections
    extent = band.get_paths()[0].get_extents()
    assert (extent.x0, extent.y0, extent.x1, extent.y1) == (1, 5, 2, 45)


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("deviation", [None, 1.0])
def test_a_value_that_is_not_finite_is_a_gap(missing, deviation):
    (ax,) = drawn(convergence_plot({"a": line(1, 2, missing, 4, 5, deviation=deviation)}, "train_loss")).axes
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [1, 2, math.nan, 4, 5])
    bands = [path for collection in ax.collections for path in collection.get_paths()]
    assert [(band.get_extents().x0, band.get_extents().x1) for band in bands] == ([(1, 2), (4, 5)] if deviation else [])
    assert np.isfinite(ax.get_ylim()).all()


def test_a_point_between_two_gaps_of_a_long_line_is_a_dot():
    values = [float(epoch) for epoch in range(40)]
    values[10] = values[12] = math.nan
    (ax,) = drawn(convergence_plot({"a": line(*values)})).axes
    assert ax.lines[0].get_marker() == "None"  # a chain of markers hides a long line
    assert ax.lines[1].get_xydata().tolist() == [[12, 11]] and len(ax.lines) == 2


def test_a_run_that_has_no_number_at_all_is_in_the_legend():
    assert legend(drawn(convergence_plot({"a": line(math.nan, math.nan), "b": line(1, 2)}, "val_loss"))) == ["a", "b"]
    drawn(convergence_plot({"a": line(math.nan)}, "val_loss"))


@pytest.mark.parametrize(
    ("seconds", "unit", "size"), [(599, "s", 1), (600, "min", 60), (3 * 3600 - 1, "min", 60), (90_000, "h", 3600)]
)
def test_seconds_are_told_in_a_unit_that_suits_them(seconds, unit, size):
    (ax,) = drawn(convergence_plot({"a": [(60, 1, None), (seconds, 2, None)]}, "lr", "seconds")).axes
    assert ax.get_xlabel() == f"time of training ({unit})" and ax.get_ylabel() == "learning rate"
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [60 / size, seconds / size])


def test_labels_are_drawn_as_they_are():
    names = ["_hidden", "$x^$", "a $ b $ c", "50% \\alpha {", "mm3", "x" * 90]
    figure = drawn(convergence_plot({name: line(1, 2) for name in names}))
    assert legend(figure) == names and [line.get_label() for line in figure.axes[0].lines] == names
    assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())


def test_a_long_legend_leaves_the_axes_their_room():
    few, many = (drawn(convergence_plot({f"run {i} " + "x" * 50: line(1, 2) for i in range(n)})) for n in (2, 28))
    heights = [figure.axes[0].get_position().height * figure.get_size_inches()[1] for figure in (few, many)]
    assert heights[1] > 0.8 * heights[0]
    looks = [(one.get_color(), one.get_linestyle(), one.get_marker()) for one in many.axes[0].lines]
    assert len(set(looks)) == 28


@in_turn(
    ("arguments", "said"),
    [
        (({},), "`lines` must be 1 to 28"),
        (({str(i): line(1) for i in range(29)},), "got 29"),
        (({"a": line(1), "b": []},), "got none for 'b'"),
        (({"a": line(1)}, "lr", "steps"), "`against` must be epoch or seconds, got 'steps'"),
    ],
)
def test_invalid_drawings_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        convergence_plot(*arguments)


def test_it_is_written_as_a_picture(tmp_path):
    path = save_figure(convergence_plot({"a": line(1, 2)}), tmp_path / "new" / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")
