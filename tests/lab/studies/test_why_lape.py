"""Contrasts of LaPE's factorial: each answer on scores that plainly deserve it, and equivalence against its formula."""

import pytest
from scipy import stats

from evidence.lape_place import study
from evidence.why_lape import CONTRASTS, MARGINS, contrasts

NOISE = [0.1, -0.2, 0.15, 0.0, -0.1, 0.05, 0.2, -0.15]


def scores_with(choice, gain):
    """Return equal scores but for noise, with `gain` for a choice at every size."""
    found = {}
    for index, name in enumerate(study().choices):
        for at in MARGINS:
            turned = NOISE[index % 8 :] + NOISE[: index % 8]
            found[name, at] = [90 + (gain if name == choice else 0) + value for value in turned]
    return found


@pytest.mark.parametrize(("gain", "answer"), [(5.0, "larger"), (-5.0, "smaller"), (0.0, "within the margin")])
def test_a_clear_gain_of_the_raw_table_is_found_in_the_contrast_of_place_at_every_size(gain, answer):
    found = contrasts(scores_with("beside, std 1", gain))
    assert len(found) == len(CONTRASTS) * len(MARGINS)
    assert {one.answer for one in found if one.name == "place"} == {answer}
    assert {one.answer for one in found if one.name == "chain"} == {"within the margin"}


def test_noise_larger_than_the_margin_is_undecided():
    scores = scores_with("", 0.0)
    scores["beside, LN chain", "trained"] = [90 + 20 * value for value in NOISE]
    assert [one.answer for one in contrasts(scores) if (one.name, one.at) == ("norm", "trained")] == ["undecided"]


def test_equivalence_has_the_larger_p_of_two_one_sided_tests():
    scores = scores_with("beside, std 1", 0.9)
    (one,) = (one for one in contrasts(scores) if (one.name, one.at) == ("place", "trained"))
    pairs = zip(scores["beside, std 1", "trained"], scores["once, std 1", "trained"], strict=True)
    differences = [a - b for a, b in pairs]
    expected = stats.ttest_1samp(differences, 1.0, alternative="less").pvalue
    assert one.equivalent == pytest.approx(expected)


def test_every_choice_of_a_contrast_is_one_of_the_study():
    assert {name for choice, reference, _ in CONTRASTS.values() for name in (choice, reference)} <= set(study().choices)
