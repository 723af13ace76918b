"""Contrasts: each answer on scores that plainly deserve it, and equivalence against its formula."""

import pytest
from scipy import stats

from evidence.contrasts import Contrast, adjust

NOISE = [0.1, -0.2, 0.15, 0.0, -0.1, 0.05, 0.2, -0.15]


@pytest.mark.parametrize(
    ("gain", "scale", "answer"),
    [
        (5.0, 1, "larger"),
        (-5.0, 1, "smaller"),
        (0.0, 1, "within the margin"),
        (0.3, 1, "larger, but within the margin"),
        (0.0, 20, "no difference found"),
    ],
)
def test_clear_scores_get_their_answer(gain, scale, answer):
    (contrast,) = adjust([Contrast(tuple(gain + scale * value for value in NOISE), 1.0)])
    assert contrast.answer == answer


def test_p_is_adjusted_for_all_contrasts_of_a_question():
    contrast, other = Contrast(tuple(0.5 + value for value in NOISE), 1.0), Contrast(tuple(NOISE), 1.0)
    alone, *_ = adjust([contrast])
    first, *_ = adjust([contrast, other, other])
    assert alone.adjusted == pytest.approx(stats.ttest_1samp(contrast.values, 0).pvalue)
    assert first.adjusted == pytest.approx(alone.adjusted * 3 * (1 + 1 / 2 + 1 / 3))


def test_equivalence_has_the_larger_p_of_two_one_sided_tests():
    values = [0.9 + value for value in NOISE]
    assert Contrast(tuple(values), 1.0).equivalent == pytest.approx(
        stats.ttest_1samp(values, 1.0, alternative="less").pvalue
    )
