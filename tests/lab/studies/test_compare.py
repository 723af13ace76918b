"""A comparison draws only conclusions that the numbers support."""

import csv
import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
from pandas import DataFrame

from commands import refused
from graticule.lab.commands.compare import read
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.comparison import compare, recipe_hash, run_hash
from graticule.lab.studies.plan import plan, planned_rows
from graticule.lab.studies.results import Results
from graticule.lab.studies.significance import format_p, holm, paired, paired_test
from graticule.lab.tasks.options import Recipe
from graticule.lab.tasks.parts.image_scores import evaluate
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_data
from image_files import write_folder
from short_runs import short


def small(**kwargs) -> Recipe:
    return short(**{"limit_train": 40, "epochs": 1, "model_kwargs": (), **kwargs})


def test_the_paired_test_is_that_of_the_textbook():
    # differences 1, 2, 3: mean 2, s.d. 1, t = 2 sqrt(3); two-sided p with 2 degrees of freedom is 1 - t / sqrt(t^2 + 2)
    t = 2 * math.sqrt(3)
    test = paired_test([71.0, 73.0, 74.0], [70.0, 71.0, 71.0])
    assert test.p == pytest.approx(1 - t / math.sqrt(t * t + 2), abs=1e-12)
    # one seed or equal differences are no test
    assert paired_test([71.0], [70.0]) is None
    assert paired_test([71.0, 72.0], [70.0, 71.0]) is None


def rows(values, metric="top1", at="trained"):
    """Return one row per choice and seed, as in a table."""
    origin = {"recipe": "x", "date": "2026-01-02", "graticule": "1", "torch": "2", "timm": "3", "machine": "m"}
    about = {"parameters": 10, "seconds": 4.0, **origin, "threads": 1}
    return [
        {"choice": choice, "seed": seed, "metric": metric, "at": at, "value": value, **about}
        for choice, scores in values.items()
        for seed, value in enumerate(scores)
    ]


def results(scores):
    """Return the results of choices with these scores by seed, at one condition or at several."""
    by_condition = scores if "trained" in scores else {"trained": scores}
    table = DataFrame([row for at, by_choice in by_condition.items() for row in rows(by_choice, at=at)])
    return Results(dict.fromkeys(table.choice, Recipe()), table, Path("nowhere"))


def test_two_seeds_and_equal_differences_are_never_a_finding():
    """Both seeds differ by one image of 36, in scores that are rounded to float32."""
    two = results({"table": [63.88889, 72.22222], "lape": [66.666664, 75.0]})
    four = results({"table": [63.88889, 72.22222] * 2, "lape": [66.666664, 75.0] * 2})
    for report, reason in ((two, "fewer than 3 seeds"), (four, "the same difference in all seeds")):
        assert report.tables()["tests"][1][1][3:] == ("+2.78", "-", "-", "-", f"not tested: {reason}")
        assert report.summary()[2][-1] == f"not tested: {reason}"
        assert "beyond chance" not in report.markdown() and "Differences are not tested" in report.markdown()
    near = results({"table": [63.88889, 72.22222] * 2, "lape": [66.666664, 75.0, 66.666664, 75.01]})
    assert near.findings(near.tests())[1][-1] == "a difference beyond chance"


def test_differences_are_tested_in_pairs_over_the_seeds_that_both_have():
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 74.0, 99.0], "c": [70.0, 71.5, 70.5, 0.0]}
    first, second = paired(DataFrame(rows(values)), "a").to_dict("records")
    # differences 1, 2, 3: mean 2, s.d. 1, t = 2 sqrt(3), the 95 % quantile with 2 degrees of freedom 4.3027
    assert (first["choice"], first["at"], first["seeds"], first["difference"]) == ("b", "trained", 3, 2)
    assert (first["low"], first["high"]) == pytest.approx((2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), abs=1e-4)
    assert first["p (Holm)"] == pytest.approx(2 * first["p"]) and first["p"] == pytest.approx(0.0742, abs=1e-4)
    assert second["difference"] == pytest.approx(0) and second["p (Holm)"] == pytest.approx(1)
    assert len(paired(DataFrame(rows({"a": [1.0]})), "a")) == 0
    missing = [*rows({"a": [1.0, 2.0, 4.0, 8.0]}), *rows({"b": [1.5, math.nan, 4.1, 8.0]})]
    (test,) = paired(DataFrame(missing), "a").to_dict("records")
    assert test["seeds"] == 4 and math.isnan(test["difference"]) and math.isnan(test["p (Holm)"])


def test_further_conditions_are_tested_as_a_family_of_their_own():
    trained = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 74.0]}
    comparison = results(
        {"trained": trained, "zoom 28": trained, "zoom 20": {"a": [50.0, 51, 51], "b": [60.0, 60, 63]}}
    )
    title, (_, *tests) = comparison.tables()["differences"]
    assert [(name, difference, p, adjusted) for name, _, _, difference, _, p, adjusted, _ in tests] == [
        ("b, zoom 28", "+2.00", "0.074", "0.074"),
        ("b, zoom 20", "+10.33", "0.007", "0.014"),
    ]
    assert comparison.scores("zoom 20") == {"a": [50.0, 51.0, 51.0], "b": [60.0, 60.0, 63.0]}
    assert "adjusted for 2 tests" in title and title in comparison.markdown()
    assert "differences" not in results(trained).tables()


def test_a_difference_that_is_significant_only_before_the_correction_is_inconclusive():
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 73.0], "c": [70.0, 71.5, 70.5]}
    text = (report := results(values)).markdown()
    finding = "not significant after correction for 2 tests"
    assert report.findings(report.tests())[1][4:] == ("+0.23 to +3.10", "0.038", "0.075", finding)
    assert "if one excludes zero and the adjusted p is 0.05 or more, the result is inconclusive." in text
    assert "if one excludes zero" not in results({name: values[name] for name in "ac"}).markdown()


def test_a_p_below_five_percent_is_not_rounded_up_to_it():
    texts = {0.04951: "0.0495", 0.04996: "0.04996", 0.05: "0.050", 0.0504: "0.050", 0.0493: "0.049"}
    assert {p: format_p(p) for p in texts} == texts


def test_the_text_has_the_origin_of_its_numbers_and_their_decimals():
    report = results({"a": [3.0, 4.0, 5.0], "b": [0.1, 0.2, 0.3]})
    text = report.markdown(["a.png"])
    assert "6 runs, 2026-01-02, 4.0 s per run, m, 1 thread; torch 2, timm 3." in text
    assert "![top-1 (%) after the last epoch](a.png)" in text
    assert "| a | 3 | 10 | 4.00 ± 1.00 |" in text and "| b | a | 3 | -3.80 | -6.04 to -1.56 |" in text


def test_holms_method_by_hand():
    # sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, which must not fall
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([0.03]) == [0.03] and len(holm([])) == 0
    missing = [math.nan, 0.02, math.nan, 0.01]  # are not counted
    assert holm(missing) == pytest.approx([math.nan, 0.02, math.nan, 0.02], nan_ok=True)


def test_among_many_comparisons_one_is_called_a_difference_only_beyond_the_chance_of_any():
    scores = {"first": [70.0, 71.0, 71.0], "real": [90.0, 91.1, 91.0], "lucky": [71.0, 73.0, 73.0]}
    few = results({name: scores[name] for name in ("first", "lucky")})
    assert few.findings(few.tests())[1][-3:] == ("0.038", "0.038", "a difference beyond chance")
    many = {"first": scores["first"]} | {f"{name} {i}": scores[name] for i in range(3) for name in ("real", "lucky")}
    rows = results(many).findings(results(many).tests())
    assert rows[1][-3:] == ("< 0.001", "< 0.001", "a difference beyond chance")
    assert rows[2][-3:] == ("0.038", "0.113", "not significant after correction for 6 tests")


def test_choices_and_seeds_are_refused_before_any_work(tmp_path):
    cases = [
        ({"good": small(), "bad": small(encoding="sinusoidal_1d", joining="unshared")}, [0], "unshared"),
        ({"default": small()}, [1, 1], "`seeds` must not be empty and differ"),
        ({"a(b)": small(), "a[b]": small()}, [0], "must have different letters and digits"),
    ]
    for choices, seeds, message in cases:
        with pytest.raises(ValueError, match=message):
            compare(choices, seeds, tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
    train(small(lr=0.5), tmp_path / "default" / "seed-0", progress=False)
    with pytest.raises(ValueError, match="whose recipe differs"):
        compare({"default": small()}, [0], tmp_path, progress=False)


def test_a_run_of_other_data_is_not_taken_for_ours(tmp_path):
    roots = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", per_class=4)
    fixed = {"dataset": "image_folder", "img_size": (8, 8), "batch_size": 2, "limit_train": None, "limit_test": None}
    recipe, other = (small(**fixed, data_root=root) for root in roots)
    compare({"a": recipe}, [0], tmp_path / "runs", progress=False)
    for seeds in ([0], [0, 1]):
        with pytest.raises(
            ValueError, match=rf"`data_root` must be of .*{roots[0]}, got {roots[1]}: train has 8 examples, and had 6"
        ):
            compare({"a": other}, seeds, tmp_path / "runs", progress=False, replace=True)
    for resume in (True, False):
        with pytest.raises((ValueError, FileExistsError), match=r"`data_root` must be of|must not contain a run"):
            train(other, tmp_path / "runs" / "a" / "seed-0", resume=resume, progress=False)
    again = compare({"a": recipe}, [0, 1], tmp_path / "runs", progress=False, replace=True)
    assert len(again.scores()["a"]) == 2


CHOICES = {"joining=default": small(), "encoding=learnable(std=1.0)": small(encoding="learnable(std=1.0)")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train two choices with two seeds; returns them and their folder."""
    folder = tmp_path_factory.mktemp("compare")
    return compare(CHOICES, [0, 1], folder, progress=False, command="graticule compare x"), folder


@pytest.fixture
def folder(trained, tmp_path):
    """Return a copy of the folder of a comparison."""
    return shutil.copytree(trained[1], tmp_path / "copy")


def test_the_score_of_a_comparison_is_that_of_the_last_epoch(trained):
    comparison, folder = trained
    run = Run.open(folder / "joining=default" / "seed-0")
    assert comparison.scores()["joining=default"][0] == run.result()["last_top1"]
    assert comparison.scores()["joining=default"][0] % 5 == 0  # no 37.79999923706055
    assert (folder / "comparison.md").read_text().count("| choice |") == 2  # means, tests


def test_the_json_file_has_the_recipes_to_repeat_a_comparison(trained):
    comparison, folder = trained
    record = json.loads((folder / "comparison.json").read_text())
    assert (record["command"], record["seeds"], record["top1"]) == ("graticule compare x", [0, 1], comparison.scores())
    assert record["choices"] == {
        "joining=default": {"encoding": None},
        list(CHOICES)[1]: {"encoding": "learnable(std=1.0)"},
    }
    for name, differing in record["choices"].items():
        assert Recipe.from_dict({**record["recipe"], **differing}) == CHOICES[name]
    assert record["versions"]["torch"] and record["machine"]["threads"] and record["date"].startswith("20")


def test_the_csv_has_a_row_per_run_and_the_figure_is_written_for_pages_and_for_papers(trained):
    comparison, folder = trained
    with (folder / "comparison.csv").open(newline="") as file:
        stored = list(csv.DictReader(file))
    assert [(row["choice"], row["seed"]) for row in stored] == [(name, seed) for seed in "01" for name in CHOICES]
    assert [float(row["value"]) for row in stored] == [
        scores[seed] for seed in (0, 1) for scores in comparison.scores().values()
    ]
    hashes = {name: run_hash(recipe, build_data(recipe).fingerprint()) for name, recipe in CHOICES.items()}
    assert all(row["recipe"] == hashes[row["choice"]] and row["timm"] and row["date"] > "2026" for row in stored)
    kinds = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    assert all((folder / f"comparison.{kind}").read_bytes().startswith(start) for kind, start in kinds.items())


def test_the_hash_of_a_recipe_depends_only_on_values_that_change_the_result():
    recipe = small()
    assert recipe_hash(recipe) == recipe_hash(dataclasses.replace(recipe, seed=5, workers=1, checkpoint_steps=7))
    assert recipe_hash(recipe) != recipe_hash(dataclasses.replace(recipe, lr=1.0))
    assert recipe_hash(recipe) == recipe_hash(type(recipe).from_dict(recipe.to_dict()))


def test_fewer_choices_or_seeds_do_not_replace_a_comparison_unless_asked(folder):
    before = (folder / "comparison.json").read_bytes()
    fewer = {"joining=default": CHOICES["joining=default"]}
    with pytest.raises(ValueError, match=r"which also has encoding=learnable\(std=1.0\), seed 1; .*--replace"):
        compare(fewer, [0], folder, progress=False)
    assert (folder / "comparison.json").read_bytes() == before
    compare(fewer, [0], folder, progress=False, replace=True)
    assert json.loads((folder / "comparison.json").read_text())["seeds"] == [0]


def test_the_plan_tells_the_state_of_each_run(folder):
    runs = plan(CHOICES, [0, 1], folder)
    shutil.rmtree(runs[0].folder)
    (runs[1].folder / "result.json").unlink()
    assert [row[-1] for row in planned_rows(runs)[1:]] == ["new", "started", "finished", "finished"]


@pytest.mark.usefixtures("quick_figures")
def test_every_run_is_scored_at_every_size_with_its_last_weights(tmp_path):
    choices = {"learnable": small(), "peg": small(encoding="peg", global_pool="avg")}
    comparison = compare(choices, [0, 1], tmp_path, progress=False, sizes=[(28, 28), (20, 36)])
    assert (
        comparison.conditions() == ["trained", "zoom 28", "zoom 20x36"] and (tmp_path / "comparison_zoom.png").is_file()
    )
    for name, runs in comparison.runs.items():
        assert comparison.scores("zoom 28")[name] == pytest.approx(comparison.scores()[name], abs=1e-4)
        (score,) = evaluate(runs[1].model(checkpoint="last"), runs[1].data(), [(20, 36)], progress=False)
        assert comparison.scores("zoom 20x36")[name][1] == score.top1
    with pytest.raises(ValueError, match="`img_size`"):
        compare(choices, [0], tmp_path / "other", progress=False, sizes=[(30, 28)])
    assert not (tmp_path / "other").exists()


CALL = ["digits_quick", "--choices", "joining=lape"]
CHANGES = {"--epochs": 3, "--precision": "bf16-mixed", "--lr": 1e-3, "--augmentation.hflip": 0.5}


def test_values_for_all_runs_are_options_of_train():
    options = read([*CALL, *(word for name, value in CHANGES.items() for word in (name, str(value)))])
    recipe = load_recipe("digits_quick")
    augmentation = dataclasses.replace(recipe.augmentation, hflip=0.5)
    changed = dataclasses.replace(recipe, epochs=3, precision="bf16-mixed", lr=1e-3, augmentation=augmentation)
    assert options.recipe == changed
    assert options.recipes == {"joining=lape": dataclasses.replace(changed, joining="lape")}
    assert options.folder_name == "compare-digits_quick-augmentation.hflip-0.5-epochs-3-lr-0.001-precision-bf16-mixed"
    assert read(CALL).folder_name == "compare-digits_quick"


def test_an_invalid_value_is_refused_in_one_line_before_any_work(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, message in {
        "--lrr 1": "did you mean --lr",
        "--lr": "`--lr` must have 1 value, as in --lr X.",
        "--lr x": "`lr` must be a number, got 'x'.",
        "--epochs 2 --epochs 3": "`--epochs` must be given once",
        "--precision bf17": "`precision` must be one of 32-true",
        "--seed 3": "`seed` must be left out of graticule compare, which has --seeds",
    }.items():
        assert message in refused(capsys, "compare", *CALL, *options.split()) and not list(tmp_path.iterdir())
