"""A study resumes where it stopped, and its table, tests and text are made from its rows."""

import csv
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from commands import run_command
from graticule.lab.recipes.load import RECIPES, load_recipe
from graticule.lab.studies.results import Results, planned_tests
from graticule.lab.studies.significance import format_p, paired_test
from graticule.lab.studies.study import (
    Endpoint,
    Study,
    StudyRow,
    list_studies,
    load_study,
    read_table,
    recipe_hash,
    run_hash,
    write_table,
)
from graticule.lab.studies.study_runs import _at_conditions, run_study
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import lock_folder
from graticule.lab.training.task import build_data, build_model
from graticule.registry import plugins
from graticule.registry.checks import known_name
from image_files import write_folder

STUDIES = Path(__file__).parents[3] / "evidence" / "studies"

pytestmark = pytest.mark.usefixtures("quick_figures")

TINY = {
    "model_kwargs": ("depth=1", "embed_dim=8", "num_heads=1"),
    "limit_train": 20,
    "limit_test": 10,
    "batch_size": 20,
    "epochs": 1,
    "warmup_epochs": 0,
    "accelerator": "cpu",
}
SMALL = Study(
    question="Does it run?",
    recipe="digits_quick",
    choices={"none": {"encoding": "none"}, "learnable": {"encoding": "learnable"}},
    base=TINY,
    variants={"": {}},
    seeds=(0, 1),
    sizes=((28, 28), (32, 36)),
    modes=("canvas",),
    endpoint=Endpoint(metric="top1", at="canvas 32x36", minus="trained"),
    seconds=1,
)
FILE = f"""
from graticule.lab.studies import Study

def study():
    return Study(
        question="Does it run from a file?",
        recipe="digits_quick",
        choices={{"none": {{"encoding": "none"}}, "learnable": {{"encoding": "learnable"}}}},
        base={TINY!r},
        seeds=(0,),
        seconds=2,
    )
"""


def rows(values, variant="", metric="top1", at="trained"):
    """Return one row per choice and seed, as in a table."""
    origin = {"recipe": "x", "date": "2026-01-02", "graticule": "1", "torch": "2", "timm": "3", "machine": "m"}
    return [
        StudyRow(choice, variant, seed, metric, at, value, parameters=10, seconds=4.0, threads=1, **origin)
        for choice, scores in values.items()
        for seed, value in enumerate(scores)
    ]


def study(**kwargs):
    return Study(
        **{"question": "Is b better?", "recipe": "digits_quick", "choices": {"a": {}, "b": {}, "c": {}}, "seconds": 60}
        | kwargs
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Run a study; returns it, its folder and its table."""
    folder = tmp_path_factory.mktemp("study")
    table = folder / "study_small.csv"
    run_study(SMALL, folder, table, progress=False)
    return folder, table


def test_the_table_has_a_row_for_every_score_of_every_run_and_says_where_it_is_from(done):
    table = read_table(done[1])
    places = [("top1", "trained"), *((m, f"canvas {at}") for at in ("28", "32x36") for m in ("top1", "loss"))]
    expected = [(name, seed, *place) for seed in (0, 1) for name in ("none", "learnable") for place in places]
    assert [(row.choice, row.seed, row.metric, row.at) for row in table] == expected
    recipes = SMALL.recipes()
    for row in table:
        assert row.recipe == run_hash(recipes[row.choice], build_data(recipes[row.choice]).fingerprint())
        assert row.torch and row.timm and row.date > "2026"
        if row.at == "canvas 28":  # nothing changes at the training size
            here = next(r for r in table if r.cell == row.cell and r.at == "trained")
            assert row.metric == "loss" or row.value == here.value


def test_crops_are_measured_at_conditions_up_to_that_of_the_training(done):
    sizes = ((28, 28), (20, 20), (32, 36))
    crops = dataclasses.replace(SMALL, sizes=sizes, modes=("crop",), endpoint=Endpoint(at="crop 20"))
    run = Run.open(done[0] / "none" / "seed-0")
    scores = [(metric, at, value) for metric, at, value in _at_conditions(crops, run) if metric == "top1"]
    assert [at for _, at, _ in scores] == ["crop 28", "crop 20"]
    assert scores[0][2] == run.result()["last_top1"]


def test_rows_in_the_table_are_not_trained_again_and_trained_runs_are_measured(done, tmp_path, monkeypatch):
    folder = shutil.copytree(done[0], tmp_path / "copy")
    table = folder / "study_small.csv"
    before = read_table(table)
    monkeypatch.setattr("graticule.lab.studies.study_runs.train_runs", lambda runs, *_, **__: trained.extend(runs))
    trained = []
    run_study(SMALL, folder, table, progress=False)
    assert trained == [] and read_table(table) == before
    write_table(table, [row for row in before if row.cell != ("learnable", "", 1)])
    run_study(SMALL, folder, table, progress=False)
    assert [(run.choice, run.recipe.seed) for run in trained] == [("learnable", 1)]
    assert sorted(map(str, read_table(table))) == sorted(map(str, before))


def test_rows_added_by_another_process_meanwhile_are_not_added_again(done, tmp_path, monkeypatch):
    folder = shutil.copytree(done[0], tmp_path / "copy")
    table = folder / "study_small.csv"
    before = read_table(table)
    first = [row for row in before if row.seed == 0]
    write_table(table, [])
    monkeypatch.setattr("graticule.lab.studies.study_runs.train_runs", lambda *_, **__: write_table(table, first))
    run_study(dataclasses.replace(SMALL, seeds=(0,)), folder, table, progress=False)
    assert read_table(table) == first
    with lock_folder(folder):
        monkeypatch.setattr("graticule.lab.studies.study_runs._PATIENCE", 0.01)
        with pytest.raises(OSError, match="copy is in use by another process"):
            run_study(SMALL, folder, table, progress=False)


def test_scores_of_another_recipe_are_not_mixed_with_new_ones(done, tmp_path):
    table = shutil.copy(done[1], tmp_path / "study_small.csv")
    other = dataclasses.replace(SMALL, base={**TINY, "lr": 0.5})
    with pytest.raises(ValueError, match=r"`study` must have the recipes of its table, got another one for 'none'"):
        run_study(other, tmp_path, table, progress=False)


def test_scores_of_other_data_are_not_mixed_with_new_ones(tmp_path):
    """In one table, and in one folder of runs; a table without hashes of data is taken as it is."""
    first, other = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", ("cat", "dog", "emu"))
    base = {**TINY, "dataset": "image_folder", "img_size": (8, 8), "batch_size": 2, "epochs": 1}
    single = dataclasses.replace(SMALL, base=base, sizes=(), endpoint=Endpoint(), seeds=(0,))
    both, table = dataclasses.replace(single, seeds=(0, 1)), tmp_path / "study_small.csv"
    run_study(single, tmp_path / "runs", table, data_root=first, progress=False)
    for folder in ("runs", "elsewhere"):
        with pytest.raises(ValueError, match=r"`data_root` must be of the data of the table, .*-[0-9a-f]{12}, not"):
            run_study(both, tmp_path / folder, table, data_root=other, progress=False)
    with pytest.raises(
        ValueError, match=rf"`data_root` must be of .*none.seed-0' was trained on, {first}, got {other}"
    ):
        run_study(single, tmp_path / "runs", tmp_path / "new.csv", data_root=other, progress=False)
    (first / "val" / "cat" / "0.JPEG").unlink()  # of the same folder, changed meanwhile
    with pytest.raises(ValueError, match="`data_root` must be of the data of the table"):
        run_study(both, tmp_path / "runs", table, data_root=first, progress=False)
    old = [dataclasses.replace(row, recipe=row.recipe.partition("-")[0]) for row in read_table(table)]
    write_table(table, old)
    run_study(single, tmp_path / "runs", table, data_root=other, progress=False)
    assert read_table(table) == old


def test_the_hash_of_a_recipe_depends_only_on_values_that_change_the_result():
    recipe = load_recipe("digits_quick")
    assert recipe_hash(recipe) == recipe_hash(dataclasses.replace(recipe, seed=5, workers=1, checkpoint_steps=7))
    assert recipe_hash(recipe) != recipe_hash(dataclasses.replace(recipe, lr=1.0))
    assert recipe_hash(recipe) == recipe_hash(type(recipe).from_dict(recipe.to_dict()))


def test_differences_are_tested_in_pairs_over_the_seeds_that_both_have():
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 74.0, 99.0], "c": [70.0, 71.5, 70.5, 0.0]}
    first, second = Results("x", study(), rows(values)).tests()
    # differences 1, 2, 3: mean 2, s.d. 1, t = 2 sqrt(3), the 95 % quantile with 2 degrees of freedom 4.3027
    assert (first.choice, first.reference, len(first.differences)) == ("b", "a", 3)
    assert first.test.difference == pytest.approx(2)
    assert (first.test.low, first.test.high) == pytest.approx((2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), abs=1e-4)
    assert first.adjusted == pytest.approx(2 * first.test.p) and first.test.p == pytest.approx(0.0742, abs=1e-4)
    assert second.test.difference == pytest.approx(0) and second.adjusted == pytest.approx(1)


def test_findings_distinguish_differences_within_error_and_beyond_chance():
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 74.0], "c": [90.0, 91.1, 91.0]}
    report = Results("x", study(), rows(values))
    assert [row[-1] for row in report.findings()[1:]] == ["no difference found", "a difference beyond chance"]
    assert report.markdown().count("no difference found") == 1


def test_a_difference_that_is_significant_only_before_the_correction_is_inconclusive():
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 73.0], "c": [70.0, 71.5, 70.5]}
    text = (report := Results("x", study(), rows(values))).markdown()
    assert report.findings()[1][4:] == ("+0.23 to +3.10", "0.038", "0.075", finding := report.findings()[1][-1])
    assert finding == "not significant after correction for 2 tests"
    assert "if one excludes zero and the adjusted p is 0.05 or more, the result is inconclusive." in text
    assert "if one excludes zero" not in Results("x", study(tests=(("c", "a"),)), rows(values)).markdown()


def test_a_p_below_five_percent_is_not_rounded_up_to_it():
    texts = {0.04951: "0.0495", 0.04996: "0.04996", 0.05: "0.050", 0.0504: "0.050", 0.0493: "0.049"}
    assert {p: format_p(p) for p in texts} == texts


def test_an_interim_report_also_adjusts_for_the_planned_tests():
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 73.0], "c": [90.0, 91.1, 91.0]}
    plan = study(variants={"10 epochs": {}, "40 epochs": {}}, seeds=(0, 1, 2), tests=(("b", "a"),))
    text = Results("x", plan, rows(values, "10 epochs")).markdown()
    # p = 0.038 alone, and 0.076 among two tests
    assert "This is an interim result: 9 of 18 planned runs are missing" in text
    assert "p (Holm) is adjusted for 1 of 2 planned tests." in text
    assert "Adjusted for all 2, these would not be beyond chance: b, 10 epochs against a." in text
    strong = dataclasses.replace(plan, tests=(("c", "a"),))
    assert "would not be beyond chance" not in Results("x", strong, rows(values, "10 epochs")).markdown()
    seeds = dataclasses.replace(strong, variants={"10 epochs": {}}, seeds=(0, 1, 2, 3, 4))
    text = Results("x", seeds, rows(values, "10 epochs")).markdown()
    assert "6 of 15 planned runs are missing, and findings may change when they are added." in text
    complete = dataclasses.replace(seeds, seeds=(0, 1, 2))
    text = Results("x", complete, rows(values, "10 epochs")).markdown()
    assert "interim" not in text and "fixed before" not in text  # which no program can know
    left_out = dataclasses.replace(plan, without=(("b", "40 epochs"),))
    assert planned_tests(left_out) == 1


def test_means_and_differences_have_the_decimals_of_the_study():
    values = {"a": [0.03, 0.04, 0.05], "b": [0.001, 0.002, 0.003]}
    report = Results("x", study(decimals=3, tests=(("b", "a"),)), rows(values))
    assert report.means()[1][-1] == "0.040 ± 0.010"
    assert report.findings()[1][3:5] == ("-0.038", "-0.060 to -0.016")


def test_every_variant_is_a_group_of_the_figure_and_a_mean_of_fewer_seeds_has_their_number():
    both = study(variants={"10 epochs": {}, "40 epochs": {}})
    table = [*rows({"a": [70.0, 71.0, 72.0], "b": [71.0]}, "10 epochs"), *rows({"a": [75.0, 77.0]}, "40 epochs")]
    report = Results("x", both, table)
    assert report.means()[1] == ("a", "3", "10", "71.00 ± 1.00", "76.00 ± 1.41 (n = 2)")
    assert list(report.scores()) == ["a, 10 epochs", "b, 10 epochs", "a, 40 epochs"]
    texts = [text.get_text() for text in report.figures()[""].axes[0].texts]
    assert texts == ["10 epochs", "40 epochs"]


def test_a_peg_after_the_last_layer_has_no_effect_as_its_study_says():
    recipes = load_study(STUDIES / "cpvt_forms.py").recipes()
    without_effect = {}
    for name in ("PEG at 0", "PEG at 3", "PEG at 0 to 3"):
        model = build_model(recipes[name], num_classes=10).eval()
        model(torch.rand(1, 1, *model.img_size)).sum().backward()
        gradients = {key: p.grad.abs().max().item() for key, p in model.position.named_parameters() if "weight" in key}
        without_effect[name] = [value == 0 for value in gradients.values()]
    assert without_effect == {"PEG at 0": [False], "PEG at 3": [True], "PEG at 0 to 3": [False, False, False, True]}


def test_an_endpoint_may_be_the_difference_of_two_scores_of_a_run():
    small, large = (
        rows({"a": [90.0, 80.0], "b": [90.0, 90.0]}),
        rows({"a": [50.0, 45.0], "b": [70.0, 80.0]}, at="zoom 40"),
    )
    plan = study(sizes=((40, 40),), endpoint=Endpoint(at="zoom 40", minus="trained"))
    report = Results("x", plan, [*small, *large])
    assert report.endpoint == "top-1 at zoom 40 minus that after the last epoch (points)"
    assert report.endpoints() == {("a", ""): {0: -40.0, 1: -35.0}, ("b", ""): {0: -20.0, 1: -10.0}}
    assert report.means()[0] == ("choice", "seeds", "parameters", "trained", "zoom 40")
    assert report.means()[1] == ("a", "2", "10", "85.00 ± 7.07", "47.50 ± 3.54")


def test_a_variant_is_a_column_and_its_tests_are_of_one_family():
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 74.0]}
    both = study(variants={"10 epochs": {}, "40 epochs": {}}, tests=(("b", "a"),))
    first = Results("x", both, rows(values, "10 epochs"))
    assert first.means()[0][3:] == ("10 epochs",) and first.means()[1][3:] == ("70.67 ± 0.58",)
    assert first.tests()[0].adjusted == first.tests()[0].test.p  # no test without runs
    report = Results("x", both, [*rows(values, "10 epochs"), *rows(values, "40 epochs")])
    assert report.tests()[0].adjusted == pytest.approx(2 * first.tests()[0].test.p)


def test_rows_of_a_choice_with_an_earlier_name_are_no_results(tmp_path):
    table = write_table(tmp_path / "study_x.csv", rows({"a": [70.0, 71.0], "earlier": [70.0, 71.0]}))
    report = Results.of_table("x", study(choices={"a": {}, "b": {}}, seeds=(0, 1)), table)
    assert report.provenance().startswith("2 of 4 runs") and "2 of 4 planned runs are missing" in report.interim()


def test_a_choice_may_be_left_out_of_a_variant_that_cannot_have_it():
    partial = study(variants={"vit": {}, "pvt": {}}, without=(("c", "pvt"),), seeds=(0, 1, 2))
    assert ("c", "pvt") not in partial.cells.values() and len(partial.cells) == len(partial.recipes()) == 5
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 72.0], "c": [72.0, 72.0, 72.0]}
    table = [*rows(values, "vit"), *rows({name: values[name] for name in "ab"}, "pvt")]
    report = Results("x", partial, table)
    assert [(tested.choice, tested.variant) for tested in report.tests() if tested.test] == [
        ("b", "vit"),
        ("c", "vit"),
        ("b", "pvt"),
    ]
    assert len(report.findings()) == 4 and "15 runs" in report.provenance()
    assert report.means()[3][-1] == ""


def test_the_text_has_the_origin_of_its_numbers_or_says_that_nothing_was_run(done, tmp_path):
    assert Results("x", study(), []).markdown().endswith("Not run. It takes about 15 min 0 s on one core.")
    text = Results("x", study(seeds=(0, 1)), rows({"a": [70.0, 71.0], "b": [71.0, 73.0]})).markdown(["a.png"])
    assert "4 of 6 runs, 2026-01-02, 4.0 s per run, m, 1 thread; torch 2, timm 3." in text
    assert "![top-1 (%) after the last epoch](a.png)" in text
    written = Results.of_table("study_small", SMALL, done[1], done[0]).write(tmp_path)
    kinds = ("png", "pdf", "svg")
    figures = [f"study_small{suffix}.{kind}" for suffix in ("", "_canvas") for kind in kinds]
    assert [path.name for path in written] == [*figures, "study_small.md"]
    assert all(path.is_file() for path in written) and "(study_small_canvas.png)" in written[-1].read_text()


def test_the_plan_has_the_power_of_every_test_from_its_table_or_from_the_expected_deviation():
    small = dataclasses.replace(SMALL, endpoint=Endpoint())
    study = dataclasses.replace(small, margin=2.0, deviation=3.0)
    header, *planned = Results("small", study, []).power()
    assert header[1:4] == ("s.d.", "margin", "seeds") and {row[1] for row in planned} == {"3.00"}
    known = rows({name: [1.0, 2.0, 6.0] if name == "none" else [0.0, 0.0, 0.0] for name in study.choices})
    _, *planned = Results("small", study, known).power()
    assert any(row[1] == "2.65" for row in planned)  # of the differences 1, 2 and 6
    _, *unknown = Results("small", small, []).power()
    assert {row[4] for row in unknown} == {"-"}


def test_every_declared_study_is_loaded_by_its_file_alone_and_can_be_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != STUDIES.parents[1]])
    for name in [name for name in sys.modules if name.partition(".")[0] == "evidence"]:
        monkeypatch.delitem(sys.modules, name)
    questions = list_studies(STUDIES)
    assert len(questions) == len(list(STUDIES.glob("[!_]*.py"))) >= 10
    for name, question in questions.items():
        declared = load_study(name)
        assert question.endswith("?") and declared.tested, name
        recipes = declared.recipes()
        assert len({recipe_hash(recipe) for recipe in recipes.values()}) == len(recipes), (
            f"{name}: two choices are equal"
        )
        assert declared.seconds, name


def test_invalid_studies_and_tables_are_refused(tmp_path):
    wrong = [
        (lambda: study(seeds=(1, 1)), "`choices`, `variants` and `seeds` must not be empty, and seeds must differ"),
        (lambda: study(tests=(("b", "d"),)), "`tests` must be one of a, b, c; got 'd'"),
        (lambda: study(without=(("d", ""),)), "`without` must be one of a, b, c; got 'd'"),
        (lambda: study(without=(("a", "pvt"),)), "`without` must be one of .*; got 'pvt'"),
        (lambda: study(seconds=0), "`seconds` must be the time of a run, more than 0, got 0"),
        (lambda: study(choices=["a", "b"]), "`choices` must be a valid dictionary"),
        (lambda: study(sizes=(28, 40)), r"`sizes\[0\]` must be a sequence, got 28"),
        (lambda: study(modes=("zom",)), r"`modes\[0\]` must be 'zoom', 'canvas' or 'crop', got 'zom'"),
        (lambda: study(tests=(("b", "a", "c"),)), r"`tests\[0\]` .*at most 2 items"),
        (lambda: study(endpoint=Endpoint(at="zoom 40")), "`endpoint` must be one of trained; got 'zoom 40'"),
        (
            lambda: study(sizes=((28, 28), (32, 36)), endpoint=Endpoint(at="trained", minus="zoom 32")),
            "`endpoint` must be one of trained, zoom 28, zoom 32x36; got 'zoom 32'",
        ),
        (lambda: study(endpoint=Endpoint(metric="top5")).recipes(), "`endpoint` must be one of top1; got 'top5'"),
        (lambda: study(base={"epoch": 3}).recipes(), "`base` must be one of .*; got 'epoch'; did you mean 'epochs'"),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=message):
            make()
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"bad.csv must have the columns choice"):
        read_table(tmp_path / "bad.csv")
    write_table(tmp_path / "bad.csv", rows({"a": [1.0]}))
    (tmp_path / "bad.csv").write_text((tmp_path / "bad.csv").read_text().replace(",10,", ",many,"))
    with pytest.raises(ValueError, match=r"bad.csv is damaged: line 2: .*'many'"):
        read_table(tmp_path / "bad.csv")


def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path):
    file = tmp_path / "mine.py"
    wrong = {
        "def study()\n    return 1\n": r"the study .*mine.py cannot be imported: expected ':' in line 1\.",
        "\nimport no_such_module\n": r"the study .*mine.py cannot be imported: .*no_such_module', in line 2\.",
        "def study():\n    return 1 / 0\n": r"study\(\) of .*mine.py cannot be called: ZeroDivisionError: .* line 2\.",
        "STUDY = 1\n": r"mine.py must have a function `study\(\)` that returns a graticule.lab.studies.Study\.",
    }
    for text, message in wrong.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_study(str(file))


def test_a_file_of_a_study_is_imported_elsewhere_only_if_it_registers_something(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(plugins, "_registered", dict(plugins._registered))
    file, registers = tmp_path / "study_alone.py", tmp_path / "study_with_recipe.py"
    file.write_text(FILE)
    recipe = "@graticule.register_recipe('of_this_file', about='nothing')\ndef recipe():\n    pass\n"
    registers.write_text(f"{FILE}\nimport graticule\n\n{recipe}")
    for _ in range(2):
        assert load_study(str(file)).question == load_study(str(registers)).question == "Does it run from a file?"
        assert plugins.loaded_plugins() == [str(registers.resolve())]
    RECIPES.pop("of_this_file")


def test_a_name_with_a_comma_is_quoted_among_the_known_ones():
    with pytest.raises(ValueError, match="`choices` must be one of 'default', 'default, std 1'; got 'std 1'"):
        known_name("choices", "std 1", ("default", "default, std 1"))


def test_the_command_runs_a_file_writes_its_results_and_rebuilds_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    code, out, _ = run_command(capsys, "study", "mine.py", "--list", "--json")
    assert code == 0 and len(json.loads(out)["runs"]) == 3  # and their sum
    code, out, _ = run_command(capsys, "study", "mine.py", "--list")
    assert code == 0 and "2 runs to train, 0 in runs/study-mine/study_mine.csv" in out
    assert [line.split()[-2:] for line in out.splitlines() if line.startswith(("learnable", "all"))] == [
        ["2.0", "s"],
        ["4.0", "s"],
    ]
    code, out, err = run_command(capsys, "study", "mine.py", "--choices", "none")
    assert code == 0, err
    assert "Does it run from a file?" in out and "\nnone " in out
    folder = tmp_path / "runs" / "study-mine"
    for name in ("study_mine.csv", "study_mine.md", "study_mine.png", "report.html"):
        assert (folder / name).is_file()
    code, out, _ = run_command(capsys, "study", "mine.py", "--list")
    assert code == 0 and "1 runs to train, 1 in" in out and "learnable" in out
    before = (folder / "study_mine.md").read_bytes()
    (folder / "study_mine.md").unlink()
    code, _, _ = run_command(capsys, "study", "mine.py", "--choices", "none")
    assert code == 0 and (folder / "study_mine.md").read_bytes() == before
    code, out, _ = run_command(capsys, "study", "mine.py", "--json", "--choices", "none")
    printed = json.loads(out)
    assert code == 0 and printed["means"][0]["choice"] == "none"
    assert printed["interim"].startswith("This is an interim result: 1 of 2 planned runs are missing")
    with (folder / "study_mine.csv").open(newline="") as file:
        assert [row["choice"] for row in csv.DictReader(file)] == ["none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["amplitud"], "`study` must be a Python file with a function `study()`, got 'amplitud', which is not one"),
        (["."], "`study` must be a folder with studies (NAME.py), got '.', which has none"),
        (["mine.py"], "got 'mine.py', which does not exist"),
        (
            [str(STUDIES / "lape_epochs.py"), "--choices", "std 2"],
            "`choices` must be one of 'learnable', 'learnable, std 0.88', 'learnable, LaPE'",
        ),
        ([str(STUDIES / "lape_epochs.py"), "--quick", "--table", "a.csv"], "`table` must be left out with --quick"),
        ([str(STUDIES / "lape_epochs.py"), "--on", "nowhere"], "`on` must be here"),
        ([str(STUDIES / "lape_epochs.py"), "--on", "locl:2", "--list"], "`on` must be here"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command(capsys, "study", *arguments)
    assert code == 1 and err.startswith("graticule: error: ") and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_studies_are_listed_by_name_and_question(capsys):
    code, out, _ = run_command(capsys, "study", str(STUDIES))
    assert code == 0 and "camvid.py " in out.splitlines()[0] and "lape_place_deit.py" in out
    code, out, _ = run_command(capsys, "study", str(STUDIES), "--json")
    assert code == 0 and json.loads(out) == list_studies(STUDIES)


def test_an_interaction_is_the_test_of_a_difference_of_differences():
    values = {"a": [70.0, 71.0, 71.0], "b": [71.0, 73.0, 74.0], "c": [70.0, 71.5, 70.5, 9.0], "d": [75.0, 76.0, 71.0]}
    four = study(
        choices={key: {} for key in "abcd"}, tests=(("b", "a"),), interactions=(("d", "c", "b", "a"),), seeds=(0, 1, 2)
    )
    simple, interaction = Results("x", four, rows(values)).tests()
    assert (interaction.choice, interaction.reference, len(interaction.differences)) == ("(d) - (c)", "(b) - (a)", 3)
    # (5, 4.5, 0.5) less (1, 2, 3)
    assert interaction.test == paired_test([4.0, 2.5, -2.5], [0.0, 0.0, 0.0])
    assert simple.test == paired_test([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="`interactions` must be one of a, b, c; got 'e'"):
        study(interactions=(("a", "b", "c", "e"),))
