"""A command can change values of train for all runs."""

import dataclasses

import pytest

from commands import run_command
from graticule.lab.commands.compare import CompareOptions, folder_suffix, words_of
from graticule.lab.commands.options import overridden
from graticule.lab.recipes.load import load_recipe


def test_common_values_are_read_as_train_reads_them():
    texts = ["lr=1e-3", "augmentation.hflip=0.5"]
    values = CompareOptions("digits_quick", [], epochs=3, precision="bf16-mixed", set_=texts).values()
    recipe = load_recipe("digits_quick")
    changed = overridden(recipe, words_of(values), "train digits_quick")
    assert (changed.epochs, changed.precision, changed.lr, changed.augmentation.hflip) == (3, "bf16-mixed", 1e-3, 0.5)
    same = {
        "epochs": recipe.epochs,
        "precision": recipe.precision,
        "lr": recipe.lr,
        "augmentation": recipe.augmentation,
    }
    assert dataclasses.replace(changed, **same) == recipe
    assert folder_suffix(values) == "-epochs-3-precision-bf16-mixed-lr-1e-3-augmentation.hflip-0.5"
    assert folder_suffix(CompareOptions("digits_quick", []).values()) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "digits_quick", "--choices", "joining=lape", "--set", "lrr=1"], "did you mean --lr"),
        (["compare", "digits_quick", "--choices", "joining=lape", "--set", "lr"], "`set` must be like lr=1e-3"),
        (
            ["compare", "digits_quick", "--choices", "joining=lape", "--epochs", "2", "--set", "epochs=3"],
            "`set` must have each value once, got epochs twice",
        ),
    ],
)
def test_an_invalid_value_is_refused_in_one_line_before_any_work(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command(capsys, *arguments)
    assert (
        code == 1 + ("did you mean" in message)
        and message in err
        and err.count("\n") == 1
        and not list(tmp_path.iterdir())
    )


def test_a_value_of_the_wrong_type_is_a_bad_option(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, message in (
        (["--precision", "bf17"], "`precision` must be one of 32-true"),
        (["--set", "lr=x"], "`lr`"),
    ):
        code, _, err = run_command(capsys, "compare", "digits_quick", "--choices", "joining=lape", *options)
        assert code == 2 and message in err
