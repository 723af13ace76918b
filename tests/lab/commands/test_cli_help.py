"""The help of every command."""

import dataclasses
import re
import shlex
from typing import Any

import pytest

from commands import command_options, run_command
from graticule.lab.arguments import help_page, options_of
from graticule.lab.cli import COMMANDS
from graticule.lab.commands.analyze import KINDS
from graticule.lab.commands.evaluate import EvaluateOptions, evaluate_options
from graticule.lab.commands.options import parse
from graticule.lab.recipes.load import RECIPES, list_recipes
from graticule.lab.training.results import Evaluation
from graticule.lab.training.task import list_tasks
from in_turn import in_turn

HELPS = [[name, "--help"] for name in COMMANDS if name != "train"] + [
    *(["analyze", kind, "--help"] for kind in KINDS),
    ["train", "digits_quick", "--help"],
    ["train", "pydoc_quick", "--help"],
    ["train", "scenes_detection", "--help"],
    ["train", "--help"],
    ["--help"],
]


@in_turn("arguments", HELPS)
def test_help_fits_a_screen_of_80_columns_and_begins_with_usage_and_examples(capsys, arguments):
    code, out, err = run_command(capsys, *arguments)
    lines = out.splitlines()
    assert code == 0 and err == "" and max(map(len, lines)) <= 80 and len(lines) <= 42
    assert lines[0].startswith(" ".join(["usage: graticule", *(word for word in arguments[:-1])]))
    if arguments[0] not in ("train", "--help"):
        assert f"{lines[2]} ".startswith(f"  graticule {arguments[0]} "), "no example"


@in_turn("arguments", HELPS[:-2])
def test_help_gives_every_option_one_default_and_no_none(capsys, arguments):
    code, out, _ = run_command(capsys, *arguments[:-1], "--help-all")
    text = " ".join(out.split())  # without line breaks
    assert code == 0 and "None" not in text and "(default: )" not in text and "False" not in text
    for option in re.split(r" (?=--[a-z])", text.partition("[options]")[2])[1:]:
        assert len(re.findall(r"\(default: |\(required\)", option)) <= 1, option


def test_the_help_of_every_recipe_begins_with_what_it_reproduces(capsys):
    for name, about in list_recipes().items():
        module = RECIPES[name].function.__module__  # the example in a docstring registers one, too
        if module.startswith("graticule.lab.recipes.") and not module.endswith(".load"):
            code, out, _ = run_command(capsys, "train", name, "--help")
            text = " ".join(out.splitlines())
            assert code == 0 and text.startswith(f"usage: graticule train {name} [options]  {about}"), name
            of_a_paper = module.rpartition(".")[2] not in ("small", "adapt")
            assert ("  Reproduces: " in text.partition("--output")[0]) is of_a_paper, name
    assert "Reproduces: LaPE (Yu et al., 2023), Tables 1 and 2" in run_command(capsys, "train", "cvt_cifar10", "-h")[1]


@in_turn("name", [name for name in COMMANDS if name != "train"])
def test_the_examples_in_the_help_have_options_that_the_command_has(name):
    lines = help_page(command_options(name), name).splitlines()
    examples = [line.strip() for line in lines if line.startswith(f"  graticule {name}")]
    assert examples, "no example"
    for example in examples:
        parse(command_options(name), name, shlex.split(example.partition(" > ")[0], comments=True)[2:])


def test_rare_options_are_listed_by_help_all_alone(capsys):
    usual, every = (run_command(capsys, "evaluate", option)[1] for option in ("--help", "--help-all"))
    hidden = [f"--{rare.name}" for rare in options_of(command_options("evaluate")) if rare.rare]
    assert hidden and all(name not in usual and name in every for name in hidden)
    assert f"list {len(hidden)} more options" in usual and "more options" not in every


def test_evaluate_has_the_options_of_every_task_and_those_of_plugins(monkeypatch):
    fields = {field.name for task in list_tasks().values() for field in dataclasses.fields(task.evaluation)}
    assert fields <= {field.name for field in dataclasses.fields(EvaluateOptions)}
    own = dataclasses.make_dataclass("Own", [("turn", int, 3)], bases=(Evaluation,))
    monkeypatch.setattr(list_tasks()["language"], "evaluation", own)
    options: Any = evaluate_options()(models=["RUN"], sizes=["8"], turn=5)
    assert (options.turn, options.sizes, options.mode, options.probe) == (5, ["8"], "zoom", None)
    other = dataclasses.make_dataclass("Other", [("mode", int, 3)], bases=(Evaluation,))
    monkeypatch.setattr(list_tasks()["language"], "evaluation", other)
    with pytest.raises(ValueError, match="`evaluation` must not have the option mode, which is another one of"):
        evaluate_options()


def test_help_can_be_asked_for_in_three_ways(capsys):
    pages = {run_command(capsys, *command)[1] for command in (["runs", "-h"], ["runs", "--help"], ["help", "runs"])}
    assert pages == {help_page(command_options("runs"), "runs") + "\n"}


def test_a_value_is_named_by_a_word_for_what_it_is():
    usages = {option.name: option.usage for option in options_of(command_options("evaluate"))}
    assert (usages["models"], usages["sizes"], usages["output"]) == ("MODEL ...", "--sizes SIZE ...", "--output FOLDER")
    assert usages["mode"] == "--mode {zoom,canvas}" and usages["per-class"] == "--per-class"


NAMES = ("digits_quick", "pydoc_quick")


def test_help_shows_the_value_that_a_recipe_sets_and_else_what_the_option_does(capsys):
    helps = [" ".join(run_command(capsys, "train", name, "--help-all")[1].split()) for name in NAMES]
    described = [re.search(r"--clip-grad X largest norm of the gradient (\(.*?\))", text)[1] for text in helps]
    assert described == ["(default: no clipping)", "(default: 1)"]
