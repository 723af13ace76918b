"""The pages of results equal the output of their commands from the stored data."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from graticule.lab.gym.profile import Profile, Row, write_profile
from graticule.lab.studies.report import StudyReport
from graticule.lab.studies.study import Study, load_study, read_table, write_table

TOP = Path(__file__).parents[3]
DOCS = TOP / "docs"
STUDIES = TOP / "evidence" / "studies"
sys.path.append(str(TOP / "benchmarks"))

import claims  # noqa: E402 - a script of benchmarks
import extrapolation  # noqa: E402
from claims_of_papers import CLAIMS, Claim, change, difference, gain  # noqa: E402
from test_study import rows  # noqa: E402 - a neighbor


def score_of(choice, side, normalized, seed=0):
    return Row(choice, "place", "plane", seed, 6, side, 0.5, 0.25, normalized, 10, 1.5, 1234, "abc")


@pytest.mark.parametrize("name", [file.stem for file in sorted(STUDIES.glob("[!_]*.py"))])
def test_the_results_of_every_study_are_made_of_its_table(name):
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    (shown,) = re.findall(f"<!-- study {name}: begin -->\n\n(.*?)\n\n<!-- study {name}: end -->", page, flags=re.DOTALL)
    report = StudyReport(name, load_study(STUDIES / f"{name}.py"), read_table(DOCS / "data" / f"study_{name}.csv"))
    figure = f"figures/study_{name}.png" if report.figure_scores() else None
    assert shown == report.markdown(figure), "run: graticule study evidence/studies --report --docs docs"
    assert figure is None or (DOCS / figure).is_file()


def test_the_page_of_claims_is_made_of_the_kept_data():
    assert (DOCS / "claims.md").read_text(encoding="utf-8") == claims.page(CLAIMS) + "\n", (
        "run: python benchmarks/claims.py"
    )


def test_the_page_on_more_tokens_is_made_of_its_scores():
    shown = (DOCS / "extrapolation.md").read_text(encoding="utf-8")
    assert shown == extrapolation.page(extrapolation.read()), "run: python benchmarks/extrapolation.py --report"


def test_every_claim_names_choices_of_its_study_and_files_that_exist():
    known = {file.stem for file in STUDIES.glob("[!_]*.py")}
    for claim in CLAIMS:
        where = f"{claim.paper}, {claim.where}: {claim.text}"
        assert bool(claim.data) != bool(claim.verdict), where
        assert claim.command or claim.verdict in ("exact", "cannot be tested here"), where
        if claim.verdict == "exact":
            file, _, function = claim.test.partition("::")
            assert f"\ndef {function}(" in (TOP / file).read_text(encoding="utf-8") and function, where
        if claim.data in known:
            study = load_study(STUDIES / f"{claim.data}.py")
            assert claim.variant in study.variants, where
            assert {choice for _, choice, _ in (*claim.contrast, *claim.shrinks)} <= set(study.choices), where


def test_a_claim_gets_its_verdict_from_the_contrast_of_its_scores(tmp_path):
    scores = {"a": [70.0, 71.0, 71.0], "b": [90.0, 91.1, 91.0], "c": [70.5, 70.0, 71.9]}
    fallen = rows({name: [value - 20 for value in values] for name, values in scores.items()}, at="zoom 40")
    write_table(tmp_path / "study_x.csv", [*rows(scores), *fallen])
    asked = [
        Claim("P", "1", "b is better", data="x", contrast=difference("b", "a")),
        Claim("P", "2", "a is better", data="x", contrast=difference("a", "b")),
        Claim("P", "3", "c is better", data="x", contrast=difference("c", "a")),
        Claim("P", "4", "c is equal", data="x", contrast=difference("c", "a"), equal=True),
        Claim("P", "5", "b is equal", data="x", contrast=difference("b", "a"), equal=True),
        Claim("P", "6", "b falls less", data="x", contrast=gain("b", "a", "zoom 40")),
        Claim("P", "7", "b gains", data="x", contrast=change("b", "zoom 60")),
        Claim("P", "8", "it costs less", test="a machine", verdict="cannot be tested here"),
    ]
    found = claims.rows_of(asked, {"x": claims.scores_of("x", tmp_path)})[1:]
    assert [row[4] for row in found] == [
        "supported at this size",
        "the opposite at this size",
        "not seen: no difference within error",
        "no difference within error",
        "not so at this size",
        "no test: the same difference in all seeds",
        "not run",
        "cannot be tested here",
    ]
    assert found[0][3].startswith("+20.03 (") and found[0][3].endswith("3 seeds, p < 0.001")
    assert found[0][2] == "b (trained) - a (trained)"
    page = claims.page(asked, tmp_path)
    assert "8 claims: 1 supported at this size; 1 the opposite at this size; " in page and "| P, 8 |" in page


def test_a_claim_whose_interval_excludes_zero_is_not_said_to_agree_with_no_difference(tmp_path):
    scores = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 73.0], "c": [71.0, 73.0, 74.0]}
    write_table(tmp_path / "study_x.csv", rows(scores))
    asked = [
        Claim("P", "1", "b is better", data="x", contrast=difference("b", "a")),
        Claim("P", "2", "a is better", data="x", contrast=difference("a", "b")),
        Claim("P", "3", "b is equal", data="x", contrast=difference("b", "a"), equal=True),
        Claim("P", "4", "c is better", data="x", contrast=difference("c", "a")),
    ]
    found = claims.rows_of(asked, {"x": claims.scores_of("x", tmp_path)})[1:]
    # b - a = 1, 2, 2: p = 0.038, and 0.151 times 4; c - a = 1, 2, 3: p = 0.074
    assert [row[3].partition(" (")[0] + row[4] for row in found] == [
        "+1.67not seen: not significant after correction for 4 tests",
        "-1.67not seen: the opposite, not significant after correction for 4 tests",
        "+1.67undecided: a difference, not significant after correction for 4 tests",
        "+2.00not seen: no difference within error",
    ]
    page = claims.page(asked, tmp_path)
    assert "4 claims: 1 not seen: not significant; " in page
    # 0.05 / 4, two-sided, of t with 2 and 4 degrees of freedom
    assert (
        "must be below 0.01250 before" in page and "8.9 standard errors from zero with 3 seeds, and 4.3 with 5" in page
    )
    assert claims.correction(0) == "No claim is tested yet."


def test_a_gap_shrinks_whichever_choice_is_better(tmp_path):
    # a - b is -5, -6, -6.5, and with the joining +1, +0.5, -1: the gap is smaller, and its sign has changed
    scores = {"a": [90.0, 89.0, 88.5], "b": [95.0] * 3, "a, j": [96.0, 95.5, 94.0], "b, j": [95.0] * 3}
    write_table(tmp_path / "study_x.csv", rows(scores))
    gap = {"contrast": difference("a", "b"), "shrinks": difference("a, j", "b, j")}
    shrinks = Claim("P", "1", "j reduces the gap", data="x", **gap)
    table = claims.scores_of("x", tmp_path)
    assert claims.contrasts(shrinks, table) == [4.0, 5.5, 5.5]
    row = claims.rows_of([shrinks], {"x": table})[1]
    assert row[2] == "abs(a (trained) - b (trained)) - abs(a, j (trained) - b, j (trained))"
    assert row[3].startswith("+5.00 (") and row[4] == "supported at this size"


def test_a_claim_has_the_decimals_of_its_study(tmp_path):
    values = {"sinusoidal 1-D": [0.03, 0.04, 0.05], "sinusoidal 1-D, LaPE": [0.001, 0.002, 0.003]}
    kept = rows(values, "DeiT", metric="two-dimensionality", at="last layer")
    write_table(tmp_path / "study_correlations.csv", kept)
    (asked,) = [one for one in CLAIMS if one.variant == "DeiT" and "two-dimensional" in one.text]
    row = claims.rows_of([asked], {"correlations": claims.scores_of("correlations", tmp_path)})[1]
    assert row[3].startswith("-0.038 (-0.060 to -0.016), 3 seeds")


def test_scores_of_the_extrapolation_benchmark_are_those_of_the_plain_encodings(tmp_path):
    (tmp_path / "extrapolation.csv").write_text(
        "choice,variant,mode,height,width,seed,top1,loss,date,torch,machine\n"
        "peg,plain,canvas,20,20,0,90.0,1,d,t,m\n"
        "peg,plain,zoom,40,40,0,80.0,1,d,t,m\n"
        "peg,plain + log_n,zoom,40,40,0,85.0,1,d,t,m\n"
    )
    assert claims.scores_of("extrapolation", tmp_path) == {
        ("peg", "", "trained"): {0: 90.0},
        ("peg", "", "zoom 40"): {0: 80.0},
    }


def test_the_studies_of_the_guide_can_be_planned():
    text = (DOCS / "studies.md").read_text(encoding="utf-8")
    planned = []
    for block in re.findall(r"```python study\n(.*?)```", text, flags=re.DOTALL):
        names: dict = {}
        exec(compile(block, "docs/studies.md", "exec"), names)
        planned.append(names["study"]())
    assert [len(one.recipes()) * len(one.seeds) for one in planned] == [12, 10]
    fields = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(fields))) == sorted(one.name for one in dataclasses.fields(Study))


def test_scores_of_the_gym_are_those_of_its_tasks_at_both_sizes_in_percent(tmp_path):
    kept = [
        score_of("encoding=peg", 6, 0.75),
        score_of("encoding=peg", 9, 0.5),
        score_of("encoding=peg", 9, float("nan"), seed=1),
    ]
    write_profile(tmp_path / "gym.csv", Profile(tuple(kept)))
    assert claims.scores_of("gym", tmp_path) == {
        ("encoding=peg", "place", "trained"): {0: 75.0},
        ("encoding=peg", "place", "9 cells"): {0: 50.0},
    }
    assert claims.scores_of("gym", tmp_path / "nowhere") == {}


def test_a_measure_that_is_no_score_of_a_task_is_read_by_its_name(tmp_path):
    write_table(
        tmp_path / "study_x.csv", [*rows({"a": [0.5]}, metric="locality", at="last layer"), *rows({"a": [9.0]})]
    )
    assert claims.scores_of("x", tmp_path) == {
        ("a", "", "locality, last layer"): {0: 0.5},
        ("a", "", "trained"): {0: 9},
    }
