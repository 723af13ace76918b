"""The report on any runs shows the values of the runs' files."""

import dataclasses
import json
import re

import pytest

from commands import refused, run_command
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.loop import train

pytestmark = pytest.mark.usefixtures("quick_pictures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train two choices with two seeds each."""
    root = tmp_path_factory.mktemp("reported")
    recipe = Recipe(encoding="learnable", limit_train=20, limit_test=20, batch_size=20, epochs=1, accelerator="cpu")
    for joining in ("default", "lape"):
        for seed in (0, 1):
            one = dataclasses.replace(recipe, joining=joining, seed=seed)
            train(one, root / joining / f"seed-{seed}", progress=False)
    return root


def text_of(path):
    return re.sub(r"<[^>]+>|data:image/png;base64,[^\"]+", " ", path.read_text(encoding="utf-8"))


def test_choices_are_compared_with_their_seeds(capsys, tmp_path, folder):
    code, out, _ = run_command(capsys, "report", folder, "--output", tmp_path / "a.html", "--untrained", 3)
    page, html = text_of(tmp_path / "a.html"), (tmp_path / "a.html").read_text(encoding="utf-8")
    assert code == 0 and str(tmp_path / "a.html") in out
    assert "joining=lape against joining=default" in page and "paired t" in page
    assert page.count("seed-") >= 4 and "uniform" not in page.partition("Position in each layer")[0]
    # scores, accuracy and two losses while training, a correlation sheet of each choice, and the reaches
    assert html.count("<img") == 7 and "<script" not in html
    assert 'alt="Position correlations"' in html and "graticule explore" in page


def test_one_run_has_a_page_without_tests(capsys, folder):
    run = folder / "lape" / "seed-1"
    code, *_ = run_command(capsys, "report", run, "--no-position")
    page = text_of(run / "report.html")
    assert code == 0 and "against" not in page.partition("Training")[0] and "joining" in page and "Recipes" in page
    assert "Position in each layer" not in page


def test_the_explorer_is_named_for_runs_that_it_takes_alone(capsys, tmp_path, folder, monkeypatch):
    given = ("report", folder / "lape" / "seed-1", "--output", tmp_path / "a.html", "--untrained", 0)
    assert run_command(capsys, *given)[0] == 0 and "graticule explore" in text_of(tmp_path / "a.html")
    monkeypatch.setattr("graticule.lab.tasks.classification.Classification.inputs", "text")
    assert run_command(capsys, *given)[0] == 0 and "graticule explore" not in text_of(tmp_path / "a.html")


def test_choices_with_other_seeds_are_listed_without_tests(capsys, tmp_path, folder):
    given = (folder / "default" / "seed-0", folder / "lape" / "seed-1")
    code, *_ = run_command(capsys, "report", *given, "--output", tmp_path / "a.html", "--no-position")
    assert code == 0 and "paired t" not in text_of(tmp_path / "a.html")


def test_runs_without_a_report_are_refused(capsys, tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    cases = {
        ("nowhere",): "'nowhere', which does not exist",
        ("empty",): "in which none has an epoch yet",
        (str(folder), "--output", "a.pdf"): "NAME.html",
        (str(folder), "--untrained", "-1"): "`untrained` must be at least 0",
    }
    for given, said in cases.items():
        assert said in refused(capsys, "report", *given)
    assert not list(tmp_path.glob("*.html"))


def test_the_number_of_parameters_is_that_of_the_recipe(capsys, tmp_path, folder):
    run_command(capsys, "report", folder, "--output", tmp_path / "a.html", "--no-position")
    count = json.loads((folder / "default" / "seed-0" / "recipe.json").read_text())["parameters"]
    assert f"{count:,}" in text_of(tmp_path / "a.html")
