"""The pages of results equal the output of their commands from the stored data; answers of contrasts."""

import dataclasses
import re
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats
from test_study import table_of

from evidence.contrasts import Asked, Contrast, Registry, adjust, parse, read_scores
from evidence.gym import GymScore
from evidence.papers import OLDER, link, older_text
from evidence.studies import load, names, write_table

TOP = Path(__file__).parents[3]
DOCS = TOP / "docs"

REGISTRY = Registry(DOCS / "data")


def score_of(side, normalized, task="place", seed=0):
    return GymScore("encoding=peg", task, "plane", seed, 6, side, 0.5, 0.25, normalized, 10, 1.5, 1234, "abc")


def test_every_contrast_names_choices_of_its_study():
    study_of = {name: load(name) for name in names()}
    for row in REGISTRY.rows:
        assert row.terms and row.margin > 0, row
        assert sum(weight for weight, *_ in row.terms) == 0, row
        if row.data in study_of:
            assert {variant for _, _, variant, _ in row.terms} <= set(study_of[row.data].variants), row
            assert {choice for _, choice, _, _ in row.terms} <= set(study_of[row.data].choices), row
        measured = {choice for choice, *_ in REGISTRY.scores(row.data)}
        assert REGISTRY.answers[row].values or not {choice for _, choice, *_ in row.terms} <= measured, row


def test_a_contrast_exists_once_also_with_the_other_sign():
    (row, *_) = REGISTRY.rows
    twin = dataclasses.replace(row, family="which", contrast=" - ".join(reversed(row.contrast.split(" - "))))
    with pytest.raises(ValueError, match="must have a contrast once, with one sign"):
        Registry(DOCS / "data", [row, twin])
    with pytest.raises(ValueError, match="must be a row of"):
        REGISTRY.find(row.data, parse("once, std 1 - nothing"))
    there, back = (REGISTRY.find(row.data, each.terms) for each in (row, twin))
    assert there.values == back.reversed().values and there.adjusted == back.adjusted


def test_declared_looks_multiply_p():
    contrasts = [contrast for _, contrast in REGISTRY.of(data="more_seeds")]
    plain, looked = adjust(contrasts), adjust(contrasts, [1.13, 1.13])
    assert looked[0].adjusted == pytest.approx(1.13 * plain[0].adjusted)


def test_every_table_of_scores_is_of_a_study_or_says_which_commit_and_models_made_it():
    tables = {file.stem.removeprefix("study_") for file in (DOCS / "data").glob("study_*.csv")}
    declared, older = {*names()}, {study.data for study in OLDER}
    assert tables == declared | older and not declared & older
    assert all(re.fullmatch(r"[0-9a-f]{8}", study.commit) and study.measured and study.caveat for study in OLDER)
    assert "| 5 | 2026-11-22 | 2b074f1e |" in older_text("all", REGISTRY)
    assert link("lape_eta", DOCS) == "[rows](#older-studies)"


def test_a_contrast_of_images_of_another_size_has_the_margin_of_other_sizes():
    for row in REGISTRY.rows:
        if any(term[3].startswith(("zoom", "canvas")) for term in row.terms):
            assert row.margin == 3, row


def test_a_contrast_has_the_sign_of_its_claim_and_its_answer_says_so(tmp_path):
    scores = {"a": [70.0, 71.0, 71.0], "b": [90.0, 91.1, 91.0], "c": [70.5, 70.0, 71.9]}
    fallen = table_of({name: [value - 20 for value in values] for name, values in scores.items()}, at="zoom 40")
    write_table(tmp_path / "study_x.csv", pd.concat([table_of(scores), fallen]))
    texts = ("b - a", "a - b", "c - a", "b @ zoom 40 - b - a @ zoom 40 + a")
    asked = [Asked(text, "1", "q?", text, "", "x", "", "trained", text, 2.0, "none", "") for text in texts[1:]]
    registry = Registry(tmp_path, asked)
    contrasts = [registry.find("x", parse(text)) for text in texts]
    assert [contrast.answer for contrast in contrasts[:2]] == ["larger", "smaller"]
    assert contrasts[0].short(2).startswith("+20.03 [") and contrasts[0].short(2).endswith("] +")
    assert contrasts[2].answer == "within the margin" or contrasts[2].answer == "no difference found"
    assert contrasts[3].values == pytest.approx((0.0, 0.0, 0.0))


def test_a_difference_that_is_the_same_in_all_seeds_is_not_tested():
    values = ((75.0, 75.0, 75.0), (75.0,), (75.0, 76.0), (2.777774, 2.77778, 2.777774))
    answers = [contrast.answer for contrast in adjust([Contrast(seeds, 1.0) for seeds in values])]
    alike = "not tested: the same in all seeds"
    assert answers == [alike, "not tested: one seed", "not tested: two seeds", alike]


def test_scores_of_the_gym_are_those_of_its_tasks_at_both_sizes_in_percent(tmp_path):
    scored = [
        *(score_of(6, 0.75), score_of(6, -11.0, "box")),
        *(score_of(9, 0.5), score_of(9, 0.25, "box")),
        *(score_of(9, 0.5, seed=1), score_of(9, float("nan"), "box", seed=1)),
    ]
    pd.DataFrame(scored).to_csv(tmp_path / "gym.csv", index=False, na_rep="nan")
    assert read_scores("gym", tmp_path) == {
        ("encoding=peg", "place", "trained"): {0: 75.0},
        ("encoding=peg", "box", "trained"): {0: -1100.0},
        ("encoding=peg", "place", "9 cells"): {0: 50.0, 1: 50.0},
        ("encoding=peg", "box", "9 cells"): {0: 25.0},
        ("encoding=peg", "mean", "trained"): {0: 37.5},  # a score below chance counts as chance
        ("encoding=peg", "mean", "9 cells"): {0: 37.5},  # of the seed that has both tasks
    }
    assert read_scores("gym", tmp_path / "nowhere") == {}


def test_a_measure_that_is_no_score_of_a_task_is_read_by_its_name(tmp_path):
    reach = table_of({"a": [0.5]}, metric="reach", at="last layer")
    write_table(tmp_path / "study_x.csv", pd.concat([reach, table_of({"a": [9.0]})]))
    assert read_scores("x", tmp_path) == {("a", "", "reach, last layer"): {0: 0.5}, ("a", "", "trained"): {0: 9}}


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
