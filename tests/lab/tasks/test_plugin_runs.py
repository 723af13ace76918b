"""A run with model, encoding and joining from a file outside of the package."""

import json
from pathlib import Path

import pytest

import graticule
from commands import run_command
from graticule.lab.cli import main
from graticule.lab.studies.comparison import recipe_hash
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import Interrupted
from graticule.position.position import ENCODINGS
from graticule.registry import plugins
from short_runs import assert_same_end, stopped

pytestmark = pytest.mark.usefixtures("quick_figures")

FILE = Path(__file__).parents[3] / "docs" / "my_methods.py"


@pytest.fixture(scope="module", autouse=True)
def methods(my_methods):
    """Load the methods for every test of this file."""
    return my_methods


@pytest.fixture(scope="module")
def run(methods, tmp_path_factory):
    """Train a run on the command line with model, encoding and joining from the file."""
    folder = tmp_path_factory.mktemp("plugins") / "run"
    command = ["train", "digits_quick", "--plugin", FILE, "--quick", "--output", folder, "--model", "convolutional_vit"]
    chosen = ["--encoding", "random_fourier(frequencies=4) + distance", "--joining", "decayed(rate=0.9)"]
    assert main([str(word) for word in [*command, *chosen]]) == 0
    return Run.open(folder)


def test_a_stopped_run_prints_the_whole_command_that_resumes_it(tmp_path, capsys, monkeypatch):
    def stop(*arguments, **options):
        raise Interrupted

    monkeypatch.setattr("graticule.lab.training.train", stop)
    folder = tmp_path / "my run"
    code, _, err = run_command(capsys, "train", "fourier_digits", "--plugin", FILE, "--output", folder)
    assert code == 130 and f"resume with: graticule train --resume '{folder}' --plugin {FILE}\n" in err


def test_a_run_is_evaluated_and_drawn_from_the_command_line(run, capsys):
    for command in (("evaluate", run.folder, "--sizes", 36), ("analyze", "correlations", run.folder, "--untrained", 0)):
        code, out, _ = run_command(capsys, *command, "--plugin", FILE)
        assert code == 0 and "wrote" in out


def test_without_its_plugin_a_run_is_refused_and_nothing_is_imported(run, monkeypatch, capsys):
    monkeypatch.setattr(plugins, "_registered", {})
    with pytest.raises(ValueError, match=r"needs the plugin my_methods\.py, which is imported only if named"):
        run.model()
    code, _, err = run_command(capsys, "evaluate", run.folder)
    assert code == 1 and "--plugin my_methods.py" in err


def test_a_run_is_resumed_bit_for_bit_and_not_with_a_changed_plugin(run, tmp_path, monkeypatch):
    recipe = run.recipe()
    uninterrupted = train(recipe, tmp_path / "uninterrupted", progress=False)
    part = stopped(recipe, tmp_path / "part", 7)
    changed = {FILE: "0" * 64}
    with monkeypatch.context() as patch:
        patch.setattr(plugins, "_registered", changed)
        with pytest.raises(ValueError, match=r"cannot be resumed: its plugin my_methods\.py has changed"):
            train(recipe, part.folder, resume=True, progress=False)
        with pytest.warns(UserWarning, match="the plugin my_methods.py has changed since"):
            part.recipe()
    train(recipe, part.folder, resume=True, progress=False)
    assert_same_end(part, uninterrupted)


def test_a_comparison_takes_it_and_mixes_no_versions_of_it(run, tmp_path, capsys, monkeypatch):
    command = ["compare", "digits_quick", "--plugin", FILE, "--quick", "--seeds", 0, "--output", tmp_path / "compared"]
    choices = ["encoding=learnable", "encoding=random_fourier(frequencies=4, sigma=1.0),joining=lape(layers=2)"]
    code, out, _ = run_command(capsys, *command, "--choices", *choices)
    assert code == 0 and choices[1] in out
    recorded = json.loads((tmp_path / "compared" / "comparison.json").read_text())["command"]
    assert recorded.startswith("graticule compare digits_quick ") and recorded.endswith(f" --plugin {FILE}")
    monkeypatch.setattr(plugins, "_registered", {FILE: "0" * 64})
    code, _, err = run_command(capsys, *command, "--choices", *choices)
    assert code == 1 and "its plugin my_methods.py has changed since it was started" in err


def test_scores_of_a_study_are_of_one_version_of_a_plugin(monkeypatch):
    with_plugin = [
        graticule.Recipe(encoding="learnable(resampler='nearest')"),
        graticule.Recipe(joining="decayed"),
        graticule.Recipe(encoding="rope + distance"),
        graticule.Recipe(model="convolutional_vit"),
    ]
    other = graticule.Recipe(encoding="rope")
    before = [recipe_hash(recipe) for recipe in (*with_plugin, other)]
    monkeypatch.setattr(plugins, "_registered", {FILE: "0" * 64})
    *changed, same = (recipe_hash(recipe) for recipe in (*with_plugin, other))
    assert all(a != b for a, b in zip(before[:-1], changed, strict=True)) and same == before[-1]


def test_a_recipe_imports_modules_beside_it(tmp_path, capsys):
    (tmp_path / "beside_methods.py").write_text(
        "import graticule\nfrom graticule.position.position import NoEncoding\n"
        "@graticule.register_encoding('beside')\nclass Beside(NoEncoding):\n    pass\n"
    )
    (tmp_path / "my_recipe.py").write_text(
        "import beside_methods\nfrom graticule.lab.tasks import Recipe\n"
        "def recipe():\n    return Recipe(encoding='beside', limit_train=40, limit_test=40, epochs=1)\n"
    )
    try:
        code, _, err = run_command(capsys, "train", tmp_path / "my_recipe.py", "--output", tmp_path / "run")
        assert code == 0, err
        assert list(Run.open(tmp_path / "run").plugins) == ["beside_methods.py"]
    finally:
        ENCODINGS.data.pop("beside", None)
