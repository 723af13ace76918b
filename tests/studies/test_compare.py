"""A comparison says what the numbers bear, and no more."""

import math

import pytest
import torch

from graticule.metric import TOP1
from graticule.studies import Comparison, compare
from graticule.studies.significance import holm, paired_p
from graticule.tasks import Recipe, Run, build_model, train


def small(**kwargs) -> Recipe:
    return Recipe(limit_train=40, limit_test=20, batch_size=20, epochs=1, accelerator="cpu", **kwargs)


def test_the_paired_test_is_that_of_the_textbook():
    # differences 1, 2, 3: mean 2, s.d. 1, t = 2 sqrt(3); two-sided p with 2 degrees of freedom is 1 - t / sqrt(t^2 + 2)
    t = 2 * math.sqrt(3)
    assert paired_p([71.0, 73.0, 74.0], [70.0, 71.0, 71.0]) == pytest.approx(1 - t / math.sqrt(t * t + 2), abs=1e-12)


def test_one_seed_or_equal_differences_are_no_test():
    assert paired_p([71.0], [70.0]) is None
    assert paired_p([71.0, 72.0], [70.0, 71.0]) is None


def comparison(first: list[float], second: list[float]) -> Comparison:
    scores = {"first": first, "second": second}
    return Comparison(tuple(range(len(first))), scores, {"first": 10, "second": 1000}, {}, TOP1)


def test_the_table_has_mean_deviation_difference_and_p():
    rows = comparison([70.0, 71.0, 71.0], [71.0, 73.0, 74.0]).rows()
    assert rows[0] == ("first", "10", "3", "70.67", "0.58", "-", "-", "-")
    assert rows[1] == ("second", "1,000", "3", "72.67", "1.53", "+2.00", "0.074", "0.074")


def test_holms_method_by_hand():
    # sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, which must not fall
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03] and holm([]) == []
    assert holm([None, 0.02, None, 0.01]) == [None, 0.02, None, 0.02]  # where there was no test none is counted


def test_among_many_comparisons_one_is_called_a_difference_only_beyond_the_chance_of_any():
    first = [70.0, 71.0, 71.0]
    scores = {"first": first, "real": [90.0, 91.1, 91.0], "lucky": [71.0, 73.0, 73.0]}
    few = Comparison((0, 1, 2), {name: scores[name] for name in ("first", "lucky")}, dict.fromkeys(scores, 1), {}, TOP1)
    assert few.rows()[1][-2:] == ("0.038", "0.038") and "beyond chance" in few.verdict()[0]
    assert few.verdict()[-1].endswith("for 1 comparison.")
    many = {"first": first} | {f"{name} {i}": scores[name] for i in range(3) for name in ("real", "lucky")}
    found = Comparison((0, 1, 2), many, dict.fromkeys(many, 1), {}, TOP1)
    assert found.rows()[1][-2:] == ("< 0.001", "< 0.001") and "beyond chance" in found.verdict()[0]
    assert found.rows()[2][-2:] == ("0.038", "0.113") and "no difference within error" in found.verdict()[1]
    assert found.verdict()[-1].endswith("for 6 comparisons.")


def test_a_difference_that_chance_explains_is_called_none():
    assert "no difference within error" in comparison([70.0, 71.0, 71.0], [71.0, 73.0, 74.0]).verdict()[0]
    assert "beyond chance" in comparison([70.0, 71.0, 71.0], [75.0, 76.1, 76.0]).verdict()[0]
    assert "too few seeds" in comparison([70.0], [75.0]).verdict()[0]


def test_default_and_lape_start_from_the_same_weights_with_the_same_seed():
    models = []
    for joining in ("default", "lape"):
        torch.manual_seed(3)
        models.append(build_model(small(joining=joining), 10, 1))
    default, lape = (dict(model.named_parameters()) for model in models)
    assert default.keys() < lape.keys()
    assert all(torch.equal(default[name], lape[name]) for name in default)


def test_a_choice_that_cannot_be_built_stops_all_before_any_work(tmp_path):
    choices = {"good": small(), "bad": small(encoding="sinusoidal_1d", joining="unshared")}
    with pytest.raises(ValueError, match="unshared"):
        compare(choices, [0], tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_run_that_another_recipe_made_is_not_taken_for_ours(tmp_path):
    train(small(lr=0.5), tmp_path / "default" / "seed-0", progress=False)
    with pytest.raises(ValueError, match="another recipe"):
        compare({"default": small()}, [0], tmp_path, progress=False)


def test_seeds_must_differ(tmp_path):
    with pytest.raises(ValueError, match="seeds"):
        compare({"default": small()}, [1, 1], tmp_path, progress=False)


def test_the_score_of_a_comparison_is_that_of_the_last_epoch(tmp_path):
    found = compare({"default": small()}, [0], tmp_path, progress=False)
    run = Run.open(tmp_path / "default" / "seed-0")
    assert found.scores["default"] == [run.result()["last_top1"]]
    assert (tmp_path / "comparison.md").read_text().startswith("| choice |")
