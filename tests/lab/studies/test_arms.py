"""An arm of a study has the facts of its built model, and one that is not what it says is refused before training."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_study import SMALL, TINY, rows, study

from commands import run_command
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.arms import Arm, arms_table, measure_arm, read_arms, write_arms
from graticule.lab.studies.plan import check_choices, plan
from graticule.lab.studies.study import load_study, read_table, recipe_hash, write_table
from graticule.lab.studies.study_runs import run_study
from graticule.lab.training.task import build_model
from graticule.registry.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_figures")

LITE = {"model": "vit_lite_2_4_32", "img_size": (32, 32)}
FOUR = ("depth=4",)


TOP = Path(__file__).parents[3]
#: A part of a label of the studies -> the facts that it says, by its numbers.
LABELS = {
    r"\bstd ([\d.]+)": lambda std: {"std": float(std)},
    r"^(\d+) epochs": lambda epochs: {"epochs": int(epochs)},
    r"^windows of (\d) x (\d)": lambda *sides: {"windows": " x ".join(sides)},
    r"([\d,]+) digits": lambda count: {"images": int(count.replace(",", ""))},
    r"(LaPE|LN chain)$": lambda _: {"joining": "lape(decomposition='layer_norm')"},
    r"^(beside), std": lambda _: {"joining": "lape(decomposition='w')"},
    r"^(once)": lambda _: {"joining": "default"},
    r"^PEG.*, (\d) x \d$": lambda side: {"encoding": f"peg(kernel={side})"},
}


def arms_of(choices, expects=None, **fields):
    declared = study(choices=choices, base=TINY | fields, expects=expects or {}, seeds=(0,), tests=())
    return check_choices(declared, plan(declared.recipes(), (0,), "nowhere"))[0]


def arm(choice, variant="", **facts):
    usual = {"model": "vit_nano_patch4_28(num_classes=10)", "encoding": "learnable", "joining": "default"}
    numbers = {"depth": 4, "std": 0.02, "values": 1664, "parameters": 10, "images": 100, "epochs": 10}
    return Arm(choice, variant, **{**usual, **numbers, "grid": "5 x 5", "windows": "", **facts})


def test_facts_are_those_of_the_model_with_the_defaults_of_its_family():
    nano, lite = arms_of(
        {"nano": {"encoding": "learnable", "model_kwargs": FOUR}, "lite": LITE | {"model_kwargs": ()}}
    ).values()
    assert nano.encoding == "learnable(std=0.02, resampler='bicubic', prefix_rows=True, layers=None)"
    assert (nano.grid, nano.depth, nano.images, nano.epochs) == ("7 x 7", 4, 20, 1)
    assert lite.encoding.startswith("learnable(std=0.2,") and lite.grid == "8 x 8"
    assert nano.values == 50 * 64 and nano.std == pytest.approx(0.02, rel=4 / math.sqrt(2 * nano.values))
    assert "depth=4" in nano.model and "global_pool='token'" in nano.model


@pytest.mark.parametrize(
    ("choice", "expects", "message"),
    [
        (LITE | {"encoding": "learnable", "model_kwargs": ()}, {"std": 0.02}, "std 0.02, got 0.2;"),
        (LITE | {"img_size": (28, 28), "model_kwargs": ()}, {"grid": (8, 8)}, "grid 8 x 8, got 7 x 7"),
        (
            {"encoding": "peg(layers=4, convolution='separable')"},
            {"encoding": "peg(layers=4, convolution='depthwise')"},
            r"encoding peg\(.*'depthwise'\), got peg\(convolution='separable', layers=4\);",
        ),
        ({"encoding": "learnable(std=1)", "model_kwargs": ()}, {"std": 1.0}, r"std 1, got 0\.8"),
        ({"encoding": "rope"}, {"std": 0.02}, "std 0.02, got None;"),
        ({"encoding": "peg"}, {"encoding": "peg(kernal=3)"}, r"encoding peg\(kernal=3\), got peg\(kernel=3, .*;"),
        ({}, {"grid": ""}, "grid none, got 7 x 7;"),
        ({"encoding": "peg + learnable"}, {"encoding": "peg"}, r"encoding peg, got peg \+ learnable;"),
        ({"joining": "lape_sharing"}, {"joining": "lape"}, "joining lape, got lape_sharing;"),
        (
            {"joining": "lape"},
            {"joining": "lape(decomposition='w')"},
            r"joining .*'w'\), got lape\(decomposition='layer_norm'\);",
        ),
        ({"model_kwargs": FOUR}, {"depth": 24}, "depth 24, got 4"),
        ({"limit_train": 40}, {"images": 20, "epochs": 2}, "images 20, got 40; epochs 2, got 1"),
        (
            {"global_pool": "avg"},
            {"model": "vit_nano_patch4_28(global_pool='token')"},
            r"model .*, got vit_nano_patch4_28\(global_pool='avg'\);",
        ),
        (
            {"model": "posmlp_nano_32", "img_size": (32, 32), "encoding": "ggqpe", "model_kwargs": ("windows=[4,4]",)},
            {"windows": (8, 8)},
            "windows 8 x 8, got 4 x 4",
        ),
    ],
)
def test_a_planted_error_is_refused_before_training_and_what_is_built_is_not(choice, expects, message):
    with pytest.raises(ValueError, match=rf"`expects` must be what is built: 'a' must have {message}"):
        arms_of({"a": choice, "b": {}}, {"a": expects})
    built = arms_of({"a": choice})["a"]
    facts = {name: getattr(built, name) for name in expects}
    assert arms_of({"a": choice}, {"a": facts})["a"] == built


def test_a_relative_bias_has_the_standard_deviation_of_all_its_layers_with_any_joining():
    for joining in ("default", "lape", "lape(over='heads')"):
        bias = arms_of({"a": {"encoding": "relative_bias", "joining": joining, "model_kwargs": FOUR}})["a"]
        assert bias.values == 4 * 4 * 13 * 13 and bias.std == pytest.approx(0.02, rel=0.06)
    assert arms_of({"a": {"encoding": "relative_bias(std=0)"}}, {"std": 0})["a"].std == 0


def test_a_model_of_a_task_without_position_has_the_facts_that_it_can_have():
    plain = measure_arm(("a", ""), load_recipe("digits_quick"), torch.nn.Linear(2, 3), 5)
    assert (plain.encoding, plain.joining, plain.grid, plain.std, plain.parameters) == ("", "", "", None, 9)
    assert plain.differences({"encoding": "rope", "std": 1.0}) == ["encoding rope, got none", "std 1, got None"]
    assert arms_table([plain])[1] == [("choice",), ("a",)]


def test_an_unknown_arm_or_fact_is_refused_when_a_study_is_declared():
    for expects, message in (
        ({"d": {"std": 1}}, "`expects` must be one of 'a', 'b', 'c', 'x, y'; got 'd'"),
        ({"sdt": 1}, "`expects` must be one of model, .*; got 'sdt'; did you mean 'std'"),
        ({"a": {"sdt": 1}}, "`expects` must be one of model, .*; got 'sdt'"),
        ({"std": "x"}, "`expects` std.*got 'x'"),
        ({"encoding": ("rope",)}, "`expects` encoding.*got"),
        ({"encoding": 3}, "`expects` encoding.*got 3"),
        ({"a": {"encoding": "peg(kernel=[3"}}, "`expects` must be a name, or a name with options"),
    ):
        with pytest.raises(ValueError, match=message):
            study(expects=expects, variants={"x, y": {}})
    both = study(expects={"std": 1, "a": {"std": 2}, "x": {"grid": (5, 5)}}, variants={"x": {}, "y": {}})
    assert (both.expected("a", "x"), both.expected("b", "y")) == ({"std": 2, "grid": (5, 5)}, {"std": 1})


def test_arms_are_recorded_beside_the_table_and_another_model_is_not_mixed_with_them(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr("graticule.lab.studies.study_runs.train_runs", lambda runs, *_, **__: trained.extend(runs))
    table = tmp_path / "study_small.csv"
    wrong = replace(SMALL, expects={"learnable": {"std": 0.5}})
    with pytest.raises(ValueError, match=r"'learnable' must have std 0\.5, got 0\.02;"):
        run_study(wrong, tmp_path, table, progress=False)
    assert trained == [] and list(tmp_path.iterdir()) == []
    one = replace(SMALL, choices={"learnable": {"encoding": "learnable"}})
    for declared, names in ((one, ["learnable"]), (SMALL, ["learnable", "none"])):
        run_study(declared, tmp_path, table, progress=False)
        assert [arm.choice for arm in read_arms(table)] == names
    assert read_arms(table)[1].std is None
    write_arms(table, [replace(arm, std=0.3) for arm in read_arms(table)])
    run_study(one, tmp_path, table, progress=False)  # no score is of the stored one
    assert [arm.std for arm in read_arms(table)] == [pytest.approx(0.02, rel=0.1), 0.3]
    (row,) = rows({"none": [50.0]})
    write_table(table, [replace(row, seed=9, recipe=recipe_hash(SMALL.recipes()["none"]))])
    trained.clear()
    with pytest.raises(ValueError, match=r"of its table, .* 'none', which must have std 0.3, got None; .*move study_"):
        run_study(SMALL, tmp_path, table, progress=False)
    assert trained == []


def test_a_quick_run_is_not_expected_to_have_the_length_of_the_study():
    declared = replace(SMALL, expects={"images": 20, "epochs": 3, "grid": (7, 7)})
    runs = plan(declared.recipes(), (0,), "nowhere")
    assert check_choices(declared, runs, quick=True)
    with pytest.raises(ValueError, match="epochs 3, got 1"):
        check_choices(declared, runs)


def test_a_table_of_arms_has_only_what_differs():
    arms = [arm("a", "x"), arm("a", "y", epochs=20), arm("b", "x", encoding="learnable(std=1.37)", std=0.996)]
    shared, rows = arms_table([*arms, arm("b", "y", encoding="learnable(std=1.37)", std=0.996, epochs=20)])
    numbers = "grid 5 x 5, layers 4, images 100, epochs 10, 20"
    assert shared == f"joining default, model vit_nano_patch4_28, {numbers}"
    assert rows == [("choice", "encoding", "std"), ("a", "learnable", "0.02"), ("b", "learnable(std=1.37)", "1")]
    assert len(arms_table([])[1]) == 1


def test_the_command_prints_the_arms(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    choices, numbers = ["encoding=none", "encoding=learnable"], ["limit_train=20", "limit_test=10", "batch_size=20"]
    values = ["--set", *numbers, "epochs=1", "model_kwargs=depth=1", "--output", "out"]
    code, out, _ = run_command(capsys, "compare", "digits_quick", "--choices", *choices, "--seeds", "0", *values)
    assert code == 0 and "As built; all have joining default, model vit_nano_patch4_28, grid 7 x 7, layers 1" in out
    assert [arm.choice for arm in read_arms(tmp_path / "out" / "comparison.csv")] == [
        "encoding=none",
        "encoding=learnable",
    ]


@pytest.mark.parametrize("file", sorted((TOP / "evidence" / "studies").glob("[!_]*.py")), ids=lambda file: file.stem)
def test_the_arms_of_every_study_are_as_stored_as_it_expects_and_as_its_labels_say(file):
    declared, table = load_study(file), TOP / "docs" / "data" / f"study_{file.stem}.csv"
    stored = {(arm.choice, arm.variant): arm for arm in read_arms(table)}
    assert list(stored) == list(declared.cells.values()), "run: python -m evidence.results"
    for name, recipe in declared.recipes().items():
        arm = stored[cell := declared.cells[name]]
        data = Spec.parse(arm.model).options
        classes = {"num_classes": data["num_classes"], "class_names": ["class"] * data["num_classes"]}
        torch.manual_seed(0)
        today = measure_arm(cell, recipe, build_model(recipe, channels=data["in_chans"], **classes), arm.images)
        said = [
            facts(*match.groups()) for text, facts in LABELS.items() for match in re.finditer(text, ", ".join(cell))
        ]
        for facts in (vars(arm), declared.expected(*cell), *said):
            assert today.differences(facts) == [], f"{name}: the label, expects, or python -m evidence.results"
        assert recipe.limit_train in (None, arm.images), name
    parameters = {(*cell, arm.parameters) for cell, arm in stored.items()}
    assert {(row.choice, row.variant, row.parameters) for row in read_table(table)} <= parameters
