"""Output of commands: to a closed pipe, and for invalid options."""

import io
import os
import sys

import pytest

from commands import refused
from graticule.lab.cli import main
from graticule.lab.commands.analyze import MixingOptions
from graticule.lab.commands.compare import parse_choices
from graticule.lab.commands.options import overridden, parse
from graticule.lab.recipes.load import load_recipe
from in_turn import in_turn


def broken_pipe(buffered: bool) -> io.TextIOWrapper:
    """Return a stdout whose reading end is closed."""
    read, write = os.pipe()
    os.close(read)
    return io.TextIOWrapper(open(write, "wb", -1 if buffered else 0), write_through=not buffered)


@in_turn("buffered", [True, False])
@in_turn(
    "arguments",
    [["--help"], ["--version"], ["models", "vit_nano*"], ["runs", "."], ["train", "--help"]],
)
def test_a_closed_pipe_is_no_error(capsys, monkeypatch, tmp_path, arguments, buffered):
    monkeypatch.chdir(tmp_path)
    with broken_pipe(buffered) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(arguments) == 141
    assert capsys.readouterr().err == ""


def test_a_stdout_that_was_closed_is_no_error(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["models", "vit_nano*"]) == 0
    assert capsys.readouterr().err == ""


def test_another_pipe_that_breaks_is_an_error(capsys, monkeypatch):
    def broken(arguments):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr("graticule.lab.commands.models.run", broken)
    assert main(["models"]) == 1
    assert capsys.readouterr().err == "graticule: error: of a worker\n"


def test_the_traceback_of_an_error_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("GRATICULE_DEBUG", "1")
    with pytest.raises(ValueError, match="`patterns`"):
        main(["models", "zzz*"])


@in_turn(
    ("arguments", "message"),
    [
        (
            "evaluate --sizes 28 56 RUN",
            ") must be given before --sizes, which takes every value up to the next option; see graticule evaluate",
        ),
        ("evaluate --sizes RUN", "must be given before --sizes"),
        ("analyze translation --shifts 1x0 RUN", "must be given before --shifts"),
        ("compare --choices joining=lape digits_quick", "`RECIPE` (name of a recipe, or a Python file) must be given"),
        ("compare --choices joining=lape --seeds 0 1", "must be given before --choices and --seeds"),
        ("runs --sort name --sort age", "`--sort` must be given once, got it twice"),
        ("train digits_quick --encoding rope --encoding peg", "`--encoding` must be given once, got it twice"),
        ("compare digits_quick --choices lr=1 --mode canvas", "`mode` must be left out without sizes, since it has no"),
        ("train digits_quick --resume RUN", "without a recipe; call graticule train --resume RUN --option ..."),
        ("train --epochs 3 --resume=RUN", "`--resume` must come first, without a recipe; call graticule train"),
        ("train --img-size 28 28 digits_quick", "`RECIPE` must come first: graticule train RECIPE --option ..."),
    ],
)
def test_an_option_that_swallowed_the_target_is_named(capsys, arguments, message):
    assert message in refused(capsys, *arguments.split())


def test_numbers_end_at_a_word_and_sizes_are_written_in_three_ways():
    parsed = parse(MixingOptions, "analyze mixing", ["--layers", "0", "3", "RUN", "--img-size", "28", "32"])
    assert (parsed.layers, parsed.models, parsed.img_size) == ([0, 3], ["RUN"], (28, 32))
    for text in ("64 64", "64x64", "64"):
        changed = overridden(load_recipe("digits_quick"), ["--img-size", *text.split()], "train digits_quick")
        assert changed.img_size == (64, 64)
        choices = parse_choices(load_recipe("digits_quick"), [f"img_size={text},encoding=rope"], "train digits_quick")
        assert [choice.img_size for choice in choices.values()] == [(64, 64)]


def test_none_resets_a_value_of_a_recipe(tmp_path):
    def resolved(*arguments: str):
        return overridden(load_recipe("pydoc_quick"), list(arguments), "train pydoc_quick")

    assert (resolved().clip_grad, resolved("--clip-grad", "None").clip_grad) == (1.0, None)
    assert resolved("--clip-grad", "2").clip_grad == 2.0
    assert resolved("--encoding", "shaw").encoding == "shaw" and resolved("--encoding", "None").encoding is None
    words = ["--dataset", "image_folder", "--data-root", str(tmp_path)]
    assert overridden(load_recipe("digits_quick"), words, "train digits_quick").data_root == tmp_path
