"""Lengths and positions double along their axes, and every training length is marked."""

import numpy as np
import pytest

from graticule.lab.figures.scores import length_plot

SCORES = {"learnable": {256: [3.0, 3.2], 128: [2.5, 2.5]}, "rope_1d": {128: [2.6], 512: [2.4]}}
PLACES = {"learnable": {1: [5.0, 5.2], 2: [4.0, 4.0], 256: [3.5, 3.7]}, "rope_1d": {1: [5.1], 512: [2.2]}}


def drawn(figure):
    figure.draw_without_rendering()
    return figure


def test_both_panels_have_the_means_and_bars_of_every_label_in_order():
    left, right = drawn(length_plot(SCORES, PLACES, trained_at=128, title="pydoc")).axes
    points, _, (bars,) = left.containers[0]
    np.testing.assert_allclose(points.get_xydata(), [[128, 2.5], [256, 3.1]])
    np.testing.assert_allclose(np.ptp([s[:, 1] for s in bars.get_segments()], axis=1), [0, 0.2 * 2**0.5], atol=1e-12)
    np.testing.assert_allclose(right.containers[0][0].get_xydata(), [[1, 5.1], [2, 4.0], [256, 3.6]])
    labels = [text.get_text() for text in left.figure.legends[0].get_texts()]
    assert labels == ["learnable", "rope_1d", "length of training"]
    assert left.get_xscale() == right.get_xscale() == "log" and left.figure.get_suptitle() == "pydoc"
    assert len(left.figure.legends) == 1


def test_ticks_are_at_the_lengths_and_at_doubling_places():
    left, right = drawn(length_plot(SCORES, PLACES, trained_at=64)).axes
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["64", "128", "256", "512"]
    assert [tick.get_text() for tick in right.get_xticklabels()] == [str(1 << power) for power in range(10)]
    assert not left.xaxis.get_minorticklocs().size and not right.xaxis.get_minorticklocs().size


@pytest.mark.parametrize(("trained_at", "marked"), [(128, {128}), ([128, 256, 128], {128, 256})])
def test_every_length_of_training_is_marked_once_in_both_panels(trained_at, marked):
    for ax in drawn(length_plot(SCORES, PLACES, trained_at)).axes:
        lines = [
            line.get_xdata() for line in ax.lines if len(set(line.get_xdata())) == 1 and len(line.get_xdata()) == 2
        ]
        assert sorted(line[0] for line in lines) == sorted(marked)


def test_one_length_and_one_place_are_drawn():
    left, right = drawn(length_plot({"a": {1: [8.0]}}, {"a": {1: [8.0]}}, 1)).axes
    assert right.get_title() == "by position in windows of 1"
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["1"]


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="`scores` must hold at least one line"):
        length_plot({}, PLACES, 128)
    with pytest.raises(ValueError, match="`places` must have a value everywhere, got none for some of 'a'"):
        length_plot(SCORES, {"a": {1: []}}, 128)
    with pytest.raises(ValueError, match="`scores` must have a value everywhere, got none for some of 'a'"):
        length_plot({"a": {}}, PLACES, 128)


def test_a_long_legend_takes_nothing_from_the_axes():
    few, many = ({f"encoding={n},joining=lape_sharing": {64: [1.0], 128: [2.0]} for n in range(k)} for k in (2, 17))
    sizes = []
    for scores in (few, many):
        figure = length_plot(scores, scores, 128)
        figure.draw_without_rendering()  # a layout that does not fit warns here
        sizes.append(figure.axes[0].get_window_extent().height)
        legend, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_tightbbox()
        assert legend.y1 <= axes.y0 + 1
    assert sizes[1] > 0.9 * sizes[0]
