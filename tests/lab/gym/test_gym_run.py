"""A gym stores finished trainings, and writes a profile of the measurements."""

import csv
import dataclasses
import json
import math
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool

import pytest

import graticule.lab.gym.run as module
from evidence.gym_page import page_text
from graticule.lab.gym.base import task_rows
from graticule.lab.gym.profile import Profile, ProfileRow, choice_labels, heat_map, read_profile
from graticule.lab.gym.recipe import GymRecipe
from graticule.lab.gym.run import gym
from graticule.lab.studies.execution import ATTEMPTS
from graticule.lab.studies.tables import between, csv_of_records

pytestmark = pytest.mark.usefixtures("quick_figures")

FEW = GymRecipe(steps=2, batch_size=4, test=8)
CHOICES = {name: dataclasses.replace(FEW, encoding=name) for name in ("none", "peg")}


def row(choice="a", task="place", seed=0, side=6, normalized=0.5):
    return ProfileRow(choice, task, "plane", seed, 6, side, 0.5, 0.25, normalized, 10, 1.5, 1234, "abc")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run a gym of two choices, two tasks, one seed and two sizes."""
    folder = tmp_path_factory.mktemp("gym")
    profile = gym(
        CHOICES, folder, tasks=["place", "shift"], seeds=[0], sides=[7], progress=False, command="the command"
    )
    return folder, profile


def test_every_choice_is_scored_on_every_task_at_every_size(finished):
    folder, profile = finished
    assert profile.choices == ["none", "peg"] and profile.tasks == ["place", "shift"] and profile.sides == [6, 7]
    with (folder / "gym.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(score["task"], score["choice"], score["side"]) for score in rows] == [
        (task, choice, side) for task in ("place", "shift") for choice in ("none", "peg") for side in ("6", "7")
    ]
    record = json.loads((folder / "gym.json").read_text())
    assert record["command"] == "the command" and record["recipes"]["peg"]["encoding"] == "peg"
    assert record["versions"]["torch"]
    assert (folder / "gym.png").stat().st_size > 1000
    assert "7 x 7 cells, trained on 6 x 6" in (folder / "gym.md").read_text()
    for score in read_profile(folder / "gym.csv").rows:
        assert score.normalized == pytest.approx((score.score - score.chance) / (1 - score.chance), abs=1e-5)


def test_finished_trainings_are_not_repeated(finished, monkeypatch):
    folder, profile = finished
    before = (folder / "gym.csv").read_text()

    def fail(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "train", fail)
    again = gym(CHOICES, folder, tasks=["place", "shift"], seeds=[0], sides=[7], progress=False)
    part = gym({"peg": CHOICES["peg"]}, folder, tasks=["shift"], seeds=[0], progress=False)
    assert again == profile and before == (folder / "gym.csv").read_text()
    assert part.choices == ["peg"] and part.tasks == ["shift"]


class Carried(Executor):
    """Calls immediately, after raising the errors in `script`."""

    def __init__(self, *script):
        self.script, self.calls = list(script), []

    def submit(self, fn, *args):
        future = Future()
        self.calls.append(args[0])
        future.set_exception(self.script.pop(0)) if self.script else future.set_result(fn(*args))
        return future


def test_a_gym_in_other_processes_has_the_same_scores_even_if_some_die(finished, tmp_path):
    executor = Carried(BrokenProcessPool("died"), OSError("away"))
    gym(CHOICES, tmp_path, tasks=["place", "shift"], seeds=[0], sides=[7], progress=False, executor=executor)
    here, there = (
        [dataclasses.replace(row, seconds=0.0) for row in read_profile(folder / "gym.csv").rows]
        for folder in (finished[0], tmp_path)
    )
    assert here == there and len(executor.calls) == 4 + 2


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("graticule.lab.studies.execution._PAUSE", 0.0)


def test_errors_of_an_executor_are_raised_and_dead_processes_are_retried(tmp_path):
    for script, kind, calls in (
        ([ValueError("a mistake")], ValueError, 1),
        ([BrokenProcessPool("no memory")] * 9, BrokenProcessPool, ATTEMPTS + 1),
    ):
        executor = Carried(*script)
        with pytest.raises(kind):
            gym({"none": FEW}, tmp_path, tasks=["place"], seeds=[0], progress=False, executor=executor)
        assert len(executor.calls) == calls


def test_an_interrupted_gym_resumes_with_the_next_training(tmp_path, monkeypatch):
    trained, real = [], module.train

    def stop_at_the_second(recipe, *args):
        if len(trained) == 1:
            trained.append("stopped")
            raise KeyboardInterrupt
        trained.append(recipe.encoding)
        return real(recipe, *args)

    monkeypatch.setattr(module, "train", stop_at_the_second)
    options = {"tasks": ["border"], "seeds": [3], "progress": False}
    with pytest.raises(KeyboardInterrupt):
        gym(CHOICES, tmp_path, **options)
    assert [score.choice for score in read_profile(tmp_path / "gym.csv").rows] == ["none"]
    profile = gym(CHOICES, tmp_path, **options)
    assert trained == ["none", "stopped", "peg"] and profile.choices == ["none", "peg"]


def test_scores_of_another_recipe_are_not_mixed_in(finished):
    folder, _ = finished
    with pytest.raises(ValueError, match=r"must have no scores of another recipe, got .* where 'peg' was"):
        gym({"peg": dataclasses.replace(CHOICES["peg"], steps=3)}, folder, tasks=["place"], seeds=[0])


def test_invalid_runs_are_refused_before_any_training(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train", lambda *args: pytest.fail("trained"))
    peg = CHOICES["peg"]
    cases = [
        ({}, {}, "`choices` must not be empty"),
        ({"peg": peg}, {"seeds": [0, 0]}, "`seeds` must not be empty or have duplicates, got [0, 0]."),
        ({"peg": peg}, {"tasks": ["plaice"]}, "did you mean 'place'"),
        ({"peg": peg}, {"sides": [5]}, "`sizes` must be at least 6, got 5."),
        ({"a": dataclasses.replace(peg, side=4)}, {}, "`side` must be at least 6, got 4."),
        ({"a": dataclasses.replace(peg, encoding="pge")}, {}, "did you mean 'peg'"),
        ({"a": dataclasses.replace(peg, joining="lape")}, {}, "`choices` must be models that can be built, got 'a'"),
        ({"a": peg, "b": dataclasses.replace(peg, side=8)}, {}, "`side` must be the same for all choices, got 6, 8."),
        ({"a": dataclasses.replace(peg, surface="torus")}, {"tasks": ["border"]}, "`surface` must be plane"),
    ]
    for choices, options, message in cases:
        with pytest.raises(ValueError) as refused:
            gym(choices, tmp_path, **options)
        assert message in str(refused.value), (message, str(refused.value))


def test_on_a_torus_the_tasks_are_those_that_it_has():
    recipe = GymRecipe(surface="torus")
    assert "border" not in module.standard_tasks({"a": recipe}) and "place" in module.standard_tasks({"a": recipe})
    assert "border" in module.standard_tasks({"a": GymRecipe()})


def test_the_table_has_means_and_deviations_over_seeds():
    rows = [row(seed=seed, normalized=value) for seed, value in enumerate((0.5, 0.7, 0.9))]
    profile = Profile((*rows, row(choice="b", seed=0, normalized=math.nan)))
    assert profile.table(6) == [
        ("choice", "parameters (maximum)", "place"),
        ("a", "1,234", "70 ± 20"),
        ("b", "1,234", "-"),
    ]
    assert "mean ± s.d. of 3 seeds" in profile.title(6)


def test_profiles_are_drawn_with_their_scores():
    many = Profile(tuple(row(str(number), side=side) for number in range(9) for side in (6, 9)))
    maps = heat_map(many).axes
    assert [ax.get_title() for ax in maps[:2]] == ["6 × 6 cells, one seed", "9 × 9 cells, trained on 6 × 6, one seed"]
    assert [text.get_text() for text in maps[0].texts] == ["50"] * 9
    low = Profile(tuple(row(str(n), seed=seed, normalized=-6.65 - seed) for n in range(9) for seed in (0, 1)))
    assert {text.get_text() for text in heat_map(low).axes[0].texts} == {"< -20\n±71"}


def test_a_damaged_file_is_an_error_that_names_the_line(tmp_path):
    file = tmp_path / "gym.csv"
    good = csv_of_records(ProfileRow, [row()])
    assert read_profile(file) == Profile(())
    cases = [("a,b\n", "must have the columns"), (good + "x,y\n", "line 3 must have 13 cells, got 2")]
    cases.append((good.replace("1.5", "soon"), "line 2: `seconds` must be a valid number"))
    for text, message in cases:
        file.write_text(text)
        with pytest.raises(ValueError) as refused:
            read_profile(file)
        assert message in str(refused.value), message
    file.write_text(good)
    assert read_profile(file).rows == (row(),)


def test_text_between_markers_is_replaced():
    text = "a\n<!-- tasks: begin -->\nold\n<!-- tasks: end -->\nb\n"
    text += "<!-- places: begin -->\n<!-- places: end -->\n"
    new = page_text(text, Profile(()), Profile((row(),)))
    assert "old" not in new and "| place | In which of nine regions" in new and "| a | 1,234 | 50 |" in new
    assert page_text(new, Profile(()), Profile((row(),))) == new
    with pytest.raises(ValueError, match="must have the markers"):
        between(text, "image", "x")


def test_choices_are_labeled_by_all_that_tells_them_apart():
    gated = "encoding=sgu,model=gmlp,model_kwargs=num_blocks="
    assert choice_labels([f"{gated}2", "encoding=rope"]) == ["sgu, gmlp", "rope"]
    assert choice_labels([f"{gated}2", f"{gated}4"]) == [f"sgu, gmlp,model_kwargs=num_blocks={n}" for n in (2, 4)]


def test_the_list_of_tasks_has_their_needs_and_chances():
    rows = {name: cells for name, *cells in task_rows()}
    assert rows["place"][-1] == "1/9" and rows["shift"][-1] == "1/35" and rows["box"][-1] == "0"
    assert all(question.endswith((".", "?")) for question, *_ in list(rows.values())[1:])


def test_the_hash_of_kept_scores_is_that_of_their_recipe():
    assert GymRecipe(encoding="none").hash == "ca87dd70c17c"  # as in docs/data/gym.csv
