"""The card of a choice: intervals, ranks among other choices, and the command that makes it of a plugin."""

import math
import re
from pathlib import Path

import pytest
from scipy import stats

from graticule.lab.cli import main
from graticule.lab.gym.base import TASKS
from graticule.lab.gym.profile import Profile, ProfileRow, interval, rank_intervals, read_profile, write_profile

PLUGIN = Path(__file__).parents[3] / "docs" / "my_methods.py"


def table(scores, sides=(6, 9), tasks=("place", "box")):
    """Return a profile: choice -> the scores of its seeds, the same for every task and size."""
    return Profile(
        tuple(
            ProfileRow(f"encoding={name}", task, "plane", seed, 6, side, score, 0.0, score, 10, 1.0, 100, "abc")
            for name, of_seeds in scores.items()
            for seed, score in enumerate(of_seeds)
            for task in tasks
            for side in sides
        )
    )


def test_the_interval_is_that_of_a_t_test_and_has_no_ends_for_one_seed():
    low, high = stats.ttest_1samp([10.0, 12.0, 17.0], 0).confidence_interval(0.95)
    assert interval([10.0, 12.0, 17.0]) == pytest.approx((13.0, low, high))
    assert interval([7.0, 7.0]) == (7.0, 7.0, 7.0)
    assert interval([7.0])[0] == 7.0 and all(math.isnan(end) for end in interval([7.0])[1:])


def test_the_mean_over_tasks_counts_scores_below_chance_as_chance_and_needs_all_tasks():
    rows = list(table({"a": [0.5, 0.5]}).rows)
    rows = [row for row in rows if (row.task, row.seed) != ("box", 1)]
    rows = [row if row.task == "place" else ProfileRow(**{**vars(row), "normalized": -11.0}) for row in rows]
    assert Profile(tuple(rows)).overall(6) == {"encoding=a": [25.0]}


def test_the_interval_of_a_rank_has_the_choices_that_a_test_cannot_tell_apart():
    near = [0.50, 0.52, 0.51, 0.53, 0.49]
    noise = [0.51, 0.50, 0.53, 0.51, 0.49]
    low, high = [0.9 * score - 0.3 for score in near], [0.9 * score + 0.4 for score in noise]
    assert rank_intervals([low, near, noise, high]) == [(4, 4, 4), (2, 2, 3), (3, 2, 3), (1, 1, 1)]


def test_ranks_of_one_seed_can_be_any():
    assert rank_intervals([[0.1], [0.9]]) == [(2, 1, 2), (1, 1, 2)]


def test_equal_choices_share_a_rank():
    assert rank_intervals([[0.1, 0.2], [0.1, 0.2], [0.05, 0.1]]) == [(1, 1, 3), (1, 1, 3), (3, 1, 3)]


def test_choices_whose_scores_differ_by_the_same_in_all_seeds_are_not_told_apart():
    assert rank_intervals([[0.1, 0.2, 0.3], [0.2, 0.3, 0.4]]) == [(2, 1, 2), (1, 1, 2)]


def test_the_table_of_ranks_has_a_row_per_choice_with_intervals_at_every_size():
    header, first, second = table({"a": [0.1, 0.21, 0.3], "b": [0.8, 0.9, 1.0]}).ranks()
    assert header == ("choice", "parameters", "6 x 6 cells", "rank", "9 x 9 cells", "rank")
    assert first == ("`b`", "100", "90.0 [65.2, 114.8]", "1 [1, 1]", "90.0 [65.2, 114.8]", "1 [1, 1]")
    assert second[0] == "`a`"


def test_choices_without_some_scores_are_no_part_of_a_table():
    full = table({"a": [0.1, 0.2], "b": [0.3, 0.4]})
    cut = Profile(tuple(row for row in full.rows if (row.choice, row.seed, row.side) != ("encoding=b", 1, 9)))
    assert cut.complete(["place", "box"], [0, 1], [6, 9]).choices == ["encoding=a"]
    assert cut.complete(["box"], [0], [9]).choices == ["encoding=a", "encoding=b"]
    with pytest.raises(
        ValueError, match="`table` must have a choice with scores of place, box for seeds 0, 2 and 6, 9"
    ):
        cut.complete(["place", "box"], [0, 2], [6, 9])


@pytest.mark.usefixtures("my_methods")
def test_a_plugin_gets_a_card_with_its_row_among_the_choices_of_a_table(tmp_path, capsys):
    others = table({"low": [-0.9], "perfect": [1.0]}, tasks=list(TASKS))
    write_profile(tmp_path / "others.csv", others)
    folder = tmp_path / "card"
    command = ["gym", "--card", str(PLUGIN), "--choices", "encoding=distance", "--table", str(tmp_path / "others.csv")]
    assert main([*command, "--quick", "--output", str(folder)]) == 0, capsys.readouterr().err
    assert read_profile(folder / "gym.csv").choices == ["encoding=distance"]
    text = (folder / "card.md").read_text()
    assert text.startswith("# distance\n") and "Ranks are among 3 choices" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| `distance` |")]
    assert row.count("2 [1, 3]") == 2  # one seed decides nothing
    assert all(f"\n| {task} |" in text for task in list(TASKS))
    assert "my_methods.py has the SHA-256" in text and "not a result" in text
    assert "](gym.png)" in text and (folder / "gym.png").is_file()


@pytest.mark.usefixtures("my_methods")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--card", str(PLUGIN)],
            "`card` must be a plugin that registers one encoding.*random_fourier, encoding=distance",
        ),
        (["--card", str(PLUGIN), "--seeds", "7"], "`card` must be given without other values of seeds"),
        (["--card", str(PLUGIN), "--lr", "0.1"], "`card` must be given without other values of recipe"),
        (["--table", "gym.csv"], "`table` must be given with `card`"),
        (["--card", "nothing.py"], "got 'nothing.py', which does not exist"),
        (
            ["--card", str(PLUGIN), "--choices", "encoding=distance", "--table", "nothing.csv"],
            "`table` must be gym.csv of a gym, got 'nothing.csv', which does not exist",
        ),
    ],
)
def test_a_card_of_other_values_is_refused(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["gym", *arguments]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()
