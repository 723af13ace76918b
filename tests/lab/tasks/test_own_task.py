"""A task from a file outside of the package: the regression of a digit's slant, in docs/my_methods.py."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import graticule
from commands import refused, run_command
from graticule.lab.cli import main
from graticule.lab.recipes.load import load_recipe
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_data, list_tasks, recipe_plugins
from short_runs import rows

FILE = Path(__file__).parents[3] / "docs" / "my_methods.py"
SHORT = ["--limit-train", 60, "--limit-test", 20, "--batch-size", 20, "--epochs", 2, "--model-kwargs", "depth=1"]


@pytest.fixture(scope="module", autouse=True)
def methods(my_methods):
    """Load the methods for every test of this file."""
    return my_methods


@pytest.fixture(scope="module")
def run(methods, tmp_path_factory) -> Run:
    """Train a run on the command line."""
    folder = tmp_path_factory.mktemp("slant") / "run"
    command = ["train", "slant_digits", "--plugin", FILE, *SHORT, "--accelerator", "cpu", "--output", folder]
    assert main([str(word) for word in command]) == 0
    return Run.open(folder)


def test_it_is_trained_and_described_by_the_command_line(run):
    assert run.recipe() == load_recipe("slant_digits").__class__(**vars(run.recipe()))
    described = json.loads(run.recipe_file.read_text())
    assert described["recipe"]["task"] == "slant" and FILE.name in described["plugins"]
    assert described["metric"]["key"] == "mae" and "num_classes" not in described
    scores = [float(row["val_mae"]) for row in rows(run)]
    assert run.result()["best_mae"] == min(scores) and run.result()["last_mae"] == scores[-1]


def test_its_score_is_the_mean_absolute_error(run, methods):
    data, model = run.data(), run.model(checkpoint="last")
    images = torch.cat([images for images, _ in data.eval_dataloader(data.size)])
    with torch.no_grad():
        error = (model(images)[:, 0] - methods.slant(images)).double()
    assert len(images) == 20 and run.result()["last_mae"] == pytest.approx(error.abs().mean().item(), rel=1e-5)
    assert float(rows(run)[-1]["val_loss"]) == pytest.approx(error.square().mean().item(), rel=1e-5)


def test_it_is_evaluated_with_the_metric_of_its_task(run, tmp_path, capsys):
    code, out, err = run_command(capsys, "evaluate", run.folder, "--output", tmp_path, "--plugin", FILE)
    assert code == 0, err
    (record,) = json.loads((tmp_path / "evaluation.json").read_text())
    assert record["score"] == pytest.approx(run.result()["best_mae"], rel=1e-6) and record["examples"] == 20
    assert "mean absolute error" in out and not (tmp_path / "evaluation.png").exists()


def test_it_is_evaluated_at_other_sizes_of_its_images(run, methods, tmp_path, capsys):
    code, out, err = run_command(capsys, "evaluate", run.folder, "--sizes", 28, "36x32", "--output", tmp_path)
    assert code == 0 and "36x32" in out, err
    trained, larger = json.loads((tmp_path / "evaluation.json").read_text())
    assert trained["score"] == pytest.approx(run.result()["best_mae"], rel=1e-6) and larger["size"] == [36, 32]
    images = torch.cat([images for images, _ in run.data().eval_dataloader((36, 32))])
    with torch.no_grad():
        error = (run.model()(images)[:, 0] - methods.slant(images)).abs().mean()
    assert larger["score"] == pytest.approx(float(error), rel=1e-5)
    assert "nearest sizes are 28 and 32" in refused(capsys, "evaluate", run.folder, "--sizes", 30)
    error = refused(capsys, "compare", "slant_digits", "--choices", "lr=1", "lr=2", "--sizes", 32)
    assert "`sizes` must be left out with the task slant" in error


def test_invalid_registrations_are_refused(methods):
    slant = list_tasks()["slant"]
    with pytest.raises(ValueError, match="`recipe_class` of the task 'tilt' must be a TrainingRecipe with task = 'ti"):
        graticule.register_task("tilt")(type("Tilt", (slant,), {}))
    with pytest.raises(ValueError, match="`name` must be new, got 'slant'"):
        graticule.register_task("slant")(type("Other", (slant,), {}))
    with pytest.raises(TypeError, match="must be a subclass of Task"):
        graticule.register_task("tilt")(int)
    known = ", ".join(list_tasks())
    with pytest.raises(ValueError, match=f"`task` must be one of {known}; got 'slnt'"):
        list_tasks()["slnt"]
    assert build_data(load_recipe("slant_digits")).num_test > 0


NOISE = """
import graticule
import numpy as np
from graticule.lab.data import ArrayImages, DatasetInfo


@graticule.register_dataset("noise_of_a_plugin")
def noise(split, root):
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    info = DatasetInfo("noise_of_a_plugin", ("dark", "light"), 1, (28, 28), (0.5,), (0.3,))
    return ArrayImages(images, np.arange(20) % 2), info
"""


def test_a_run_on_a_data_set_of_a_plugin_records_its_file(tmp_path, registered_data):
    file = tmp_path / "noise.py"
    file.write_text(NOISE)
    graticule.load_plugin(file)
    small = {"model_kwargs": ("depth=1", "embed_dim=12", "num_heads=3"), "epochs": 1, "warmup_epochs": 0}
    recipe = graticule.Recipe(dataset="noise_of_a_plugin", batch_size=10, **small)
    recorded = {"noise.py": hashlib.sha256(NOISE.encode()).hexdigest()}
    assert recipe_plugins(recipe) == recorded
    for ours in (graticule.Recipe(), graticule.TextRecipe()):
        assert recipe_plugins(ours) == {}
    run = train(recipe, tmp_path / "run", progress=False)
    assert json.loads(run.recipe_file.read_text())["plugins"] == recorded
