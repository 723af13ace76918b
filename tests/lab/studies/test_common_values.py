"""A command can change values of train for all runs."""

import dataclasses

from commands import refused
from graticule.lab.commands.compare import read
from graticule.lab.recipes.load import load_recipe

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
