"""`graticule gym` on the command line, and its page."""

import contextlib
from pathlib import Path

import pytest

from evidence.gym_page import kept_profile, page_text
from graticule.lab.cli import main
from graticule.lab.gym.base import TASKS
from graticule.lab.gym.profile import read_profile
from in_turn import in_turn

pytestmark = pytest.mark.usefixtures("quick_figures")

DOCS = Path(__file__).parents[3] / "docs"


def test_a_gym_prints_a_table_per_size_and_the_names_of_its_files(tmp_path, capsys):
    options = ["--seeds", "0", "--steps", "1", "--batch-size", "2", "--test", "4", "--output", str(tmp_path)]
    assert (
        main(["gym", "--choices", "encoding=none", "encoding=peg", "--tasks", "border", "--sizes", "8", *options]) == 0
    )
    out, err = capsys.readouterr()
    assert "1 of 2: border, encoding=none, seed 0: " in err and "2 of 2" in err
    assert "6 x 6 cells, as in training" in out and "8 x 8 cells, trained on 6 x 6" in out
    assert "\npeg " in out and f"wrote {tmp_path}/gym.csv, " in out
    # a single choice by its options
    assert main(["gym", "--encoding", "sandwich", "--tasks", "border", *options]) == 0
    assert read_profile(tmp_path / "gym.csv").choices == ["encoding=sandwich", "encoding=none", "encoding=peg"]


def test_the_list_names_every_task(capsys):
    assert main(["gym", "--list"]) == 0
    out = capsys.readouterr().out
    assert (
        all(f"{name}: " in out for name in TASKS) and "absolute position (absolute), on plane, torus, chance 1/9" in out
    )


@in_turn(
    ("arguments", "message"),
    [
        (["--choices", "encoding=pge"], "did you mean 'peg'"),
        (["--choices", "encodng=peg"], "unknown option"),
        (["--choices", "encoding"], "`choices` must be like encoding=learnable"),
        (["--choices", "encoding=peg", "--tasks", "plaice"], "did you mean 'place'"),
        (["--choices", "encoding=peg", "--sizes", "3"], "`sizes` must be at least 6, got 3."),
        (["--choices", "encoding=peg", "--stps", "3"], "did you mean --steps"),
        (["--choices", "encoding=peg", "--on", "locl:2"], "`on` must be here, local:N"),
        (["--choices", "encoding=peg", "--lr", "-1"], "`lr` must be greater than 0"),
    ],
)
def test_an_invalid_argument_is_refused_in_one_line(arguments, message, tmp_path, capsys):
    wrong_option = message in ("unknown option", "did you mean --steps")
    assert main(["gym", *arguments, "--output", str(tmp_path / "new")]) == 1 + wrong_option
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_help_says_what_a_task_needs(capsys):
    with contextlib.suppress(SystemExit):
        main(["gym", "--help"])
    assert "one kind of position information" in " ".join(capsys.readouterr().out.split())


def test_the_page_is_rebuilt_from_the_kept_scores():
    text = (DOCS / "results" / "gym.md").read_text(encoding="utf-8")
    assert page_text(text, kept_profile(DOCS), kept_profile(DOCS, "gym_place")) == text
