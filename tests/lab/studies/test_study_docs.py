"""The pages of results equal the output of their commands from the stored data."""

import dataclasses
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from evidence import claims, why_lape
from evidence.claims import Asked
from evidence.contrasts import differences, family, pooled, read_scores
from graticule.lab.gym.profile import Profile, ProfileRow, write_profile
from graticule.lab.studies.study import Study, load_study, write_table
from graticule.lab.studies.tables import read_records
from graticule.lab.training.task import build_model

TOP = Path(__file__).parents[3]
DOCS = TOP / "docs"
STUDIES = TOP / "evidence" / "studies"
sys.path.append(str(TOP / "benchmarks"))

import extrapolation  # noqa: E402 - a script of benchmarks
from test_study import rows  # noqa: E402 - a neighbor

ASKED = {name: read_records(TOP / "evidence" / f"{name}.csv", Asked) for name in ("questions", "which")}


def score_of(choice, side, normalized, seed=0):
    return ProfileRow(choice, "place", "plane", seed, 6, side, 0.5, 0.25, normalized, 10, 1.5, 1234, "abc")


@pytest.mark.parametrize("module", [claims, why_lape])
def test_the_pages_of_answers_are_made_of_the_kept_data(module):
    for page, text in module.page_texts(DOCS).items():
        assert page.read_text(encoding="utf-8") == text, f"run: python -m {module.__name__}"


def test_the_page_on_more_tokens_is_made_of_its_scores():
    page = (DOCS / "extrapolation.md").read_text(encoding="utf-8")
    assert page == extrapolation.page(extrapolation.read()), "run: python benchmarks/extrapolation.py --report"


def test_every_contrast_names_choices_of_its_study():
    scores = cache(lambda name: read_scores(name, DOCS / "data"))
    known = {file.stem for file in STUDIES.glob("[!_]*.py")}
    for question in (row for asked in ASKED.values() for row in asked):
        where = f"{question.data}: {question.contrast}"
        assert question.terms() and question.margin > 0, where
        assert sum(weight for weight, *_ in question.terms()) == 0, where
        if question.data in known:
            study = load_study(STUDIES / f"{question.data}.py")
            assert {variant for _, _, variant, _ in question.terms()} <= set(study.variants), where
            assert {choice for _, choice, _, _ in question.terms()} <= set(study.choices), where
        assert differences(question.terms(), scores(question.data)) or not scores(question.data), where


def test_the_page_of_claims_has_at_most_ten_questions_a_paper_and_forty_rows_each_with_its_control():
    asked = ASKED["questions"]
    assert len(asked) <= 40 and all(row.control and row.question.endswith("?") for row in asked)
    assert max(Counter(paper for paper, _ in {(row.paper, row.question) for row in asked}).values()) <= 10


def test_a_contrast_of_images_of_another_size_has_the_margin_of_other_sizes():
    for question in (row for asked in ASKED.values() for row in asked):
        if any(term[3].startswith(("zoom", "canvas")) for term in question.terms()):
            assert question.margin == 3, question


@pytest.mark.parametrize("name", why_lape.STUDIES)
def test_a_table_has_the_standard_deviation_that_its_study_names(name):
    for choice, recipe in why_lape.load(name).recipes().items():
        if named := re.match(r"once, std ([\d.]+)", str(choice)):
            model = build_model(recipe, num_classes=10, channels=1)
            assert model.position.encodings[0].pos_embed.std().item() == pytest.approx(float(named[1]), rel=0.1), choice


def test_a_contrast_has_the_sign_of_its_claim_and_its_answer_says_so(tmp_path):
    scores = {"a": [70.0, 71.0, 71.0], "b": [90.0, 91.1, 91.0], "c": [70.5, 70.0, 71.9]}
    fallen = rows({name: [value - 20 for value in values] for name, values in scores.items()}, at="zoom 40")
    write_table(tmp_path / "study_x.csv", [*rows(scores), *fallen])
    texts = ("b - a", "a - b", "c - a", "b @ zoom 40 - b - a @ zoom 40 + a")
    asked = [Asked("P", "1", "q?", text, "x", "", text, 2.0, "none") for text in texts]
    contrasts = claims.answers(asked, tmp_path, lambda question: question.label)
    assert [claims.answer_of(question) for question in contrasts[:2]] == ["larger", "opposite"]
    assert contrasts[0].cells()[0].startswith("+20.03 [") and contrasts[0].cells()[1] == "3"
    assert contrasts[2].answer == "within the margin" or contrasts[2].answer.startswith("undecided (")
    assert contrasts[3].values == pytest.approx((0.0, 0.0, 0.0))


def test_a_difference_that_is_the_same_in_all_seeds_is_not_called_undecided():
    (alike, alone) = family([("a", [75.0, 75.0, 75.0], 1.0), ("b", [75.0], 1.0)])
    assert (alike.answer, alone.answer) == ("not tested: the same in all seeds", "undecided: one seed")


def test_the_random_effects_model_of_equal_data_sets_is_their_mean():
    sets = family(
        [(name, [1.0 + shift, 2.0 + shift, 3.0 + shift], 1.0) for name, shift in zip("abc", (0, 3, 6), strict=True)]
    )
    mean, low, high = pooled(sets)
    # equal variances, so the weights are equal; the error is that of the three means 2, 5 and 8
    assert mean == pytest.approx(5.0)
    assert high - mean == pytest.approx(mean - low) == pytest.approx(4.302653 * 3 / 3**0.5, rel=1e-5)


def test_scores_of_the_extrapolation_benchmark_are_those_of_the_plain_encodings(tmp_path):
    (tmp_path / "extrapolation.csv").write_text(
        "choice,variant,mode,height,width,seed,top1,loss,date,torch,machine\n"
        "peg,plain,canvas,20,20,0,90.0,1,d,t,m\n"
        "peg,plain,zoom,40,40,0,80.0,1,d,t,m\n"
        "peg,plain + log_n,zoom,40,40,0,85.0,1,d,t,m\n"
    )
    assert read_scores("extrapolation", tmp_path) == {
        ("peg", "", "trained"): {0: 90.0},
        ("peg", "", "zoom 40"): {0: 80.0},
    }


def test_the_studies_of_the_guide_can_be_planned():
    text = (DOCS / "compare.md").read_text(encoding="utf-8")
    planned = []
    for block in re.findall(r"```python study\n(.*?)```", text, flags=re.DOTALL):
        names: dict = {}
        exec(compile(block, "docs/compare.md", "exec"), names)
        planned.append(names["study"]())
    assert [len(study.recipes()) * len(study.seeds) for study in planned] == [12, 10]
    fields = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(fields))) == sorted(study.name for study in dataclasses.fields(Study))


def test_scores_of_the_gym_are_those_of_its_tasks_at_both_sizes_in_percent(tmp_path):
    scored = [
        score_of("encoding=peg", 6, 0.75),
        score_of("encoding=peg", 9, 0.5),
        score_of("encoding=peg", 9, float("nan"), seed=1),
    ]
    write_profile(tmp_path / "gym.csv", Profile(tuple(scored)))
    assert read_scores("gym", tmp_path) == {
        ("encoding=peg", "place", "trained"): {0: 75.0},
        ("encoding=peg", "place", "9 cells"): {0: 50.0},
        ("encoding=peg", "mean", "trained"): {0: 75.0},  # over all tasks
        ("encoding=peg", "mean", "9 cells"): {0: 50.0},
    }
    assert read_scores("gym", tmp_path / "nowhere") == {}


def test_a_measure_that_is_no_score_of_a_task_is_read_by_its_name(tmp_path):
    write_table(tmp_path / "study_x.csv", [*rows({"a": [0.5]}, metric="reach", at="last layer"), *rows({"a": [9.0]})])
    assert read_scores("x", tmp_path) == {("a", "", "reach, last layer"): {0: 0.5}, ("a", "", "trained"): {0: 9}}
