"""Recipes and files of runs with arbitrary edits: a named error or a correct result, and nothing changes."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from fuzz import altered, changed, fuzzed, outcome, replaced, tree
from graticule.lab.studies.runs import read_metrics, summarize
from graticule.lab.tasks.classification import class_names
from graticule.lab.tasks.options import Recipe, TextRecipe
from graticule.lab.training.checkpoints import best_checkpoint, read_training
from graticule.lab.training.run import Run
from graticule.lab.training.task import read_recipe
from graticule.registry.fields import Count, check_value

RECIPES = [kind().to_dict() for kind in (Recipe, TextRecipe)]
RESULT = {"best_top1": 50.0, "best_epoch": 1, "last_top1": 40.0, "epochs": 2, "seconds": 3.5}
RESULT |= {"skipped_images": ["a.png"]}
METRICS = "epoch,train_loss,val_loss,val_top1,lr,seconds\n1,2.3,2.2,12.5,0.001,3.1\n2,2.1,2.0,20,0.0001,3\n"
STATE = {
    **{"state_dict": {}, "optimizer": {}, "precision": {}},
    "progress": {**{"epoch": 1, "batches": 2, "sums": [[3.5, 20.0]]}, "accumulate": 1},
    "history": {"rows": [{"epoch": 1, "val_top1": 50.0, "seconds": 1.5}], "seconds": 0.5},
    "best": {"score": 50.0, "name": "step-000000003.ckpt"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a finished run, without its weights."""
    root = tmp_path_factory.mktemp("fuzz") / "run"
    (root / "checkpoints").mkdir(parents=True)
    described = {"recipe": RECIPES[0], "num_classes": 2, "channels": 1, "class_names": ["cat", "dog"]}
    described |= {"size": [28, 28], "mean": [0.5], "std": [0.5]}
    (root / "recipe.json").write_text(json.dumps(described))
    (root / "result.json").write_text(json.dumps(RESULT))
    (root / "metrics.csv").write_text(METRICS)
    (root / "checkpoints" / "best.json").write_text('{"checkpoint": "step-000000003.ckpt", "val_top1": 50.0}')
    return root


@fuzzed(60, values=st.sampled_from(RECIPES).flatmap(changed))
def test_a_changed_recipe_is_refused_or_keeps_its_values(values):
    made = outcome(lambda: read_recipe(values), names="`")
    if isinstance(made, (Recipe, TextRecipe)):
        assert read_recipe(json.loads(json.dumps(made.to_dict()))) == made
        for name in ("lr", "weight_decay", "min_lr", "warmup_lr"):
            assert type(getattr(made, name)) is float and 0 <= getattr(made, name) < math.inf
        assert type(made.epochs) is int and type(made.joining) is str and 0 <= made.seed < 2**32


READERS = {
    "recipe.json": lambda run: run.recipe(),
    "result.json": lambda run: run.result(),
    "metrics.csv": lambda run: read_metrics(run.metrics_file),
    "best.json": lambda run: best_checkpoint(run.checkpoints),
}


@pytest.mark.parametrize("name", READERS)
@fuzzed(24, data=st.data())
def test_a_file_of_a_run_with_other_content_is_named_or_read(folder, name, data):
    (path,) = folder.rglob(name)
    with replaced(path, data.draw(altered(path))):
        before = tree(folder)
        outcome(lambda: READERS[name](Run(folder)), names=name)
        printed = outcome(lambda: summarize(folder), names="").damage  # the summary reports it
        assert printed == "" or name in printed
        assert tree(folder) == before


@fuzzed(30, values=changed(STATE))
def test_changed_progress_in_a_checkpoint_is_refused_or_has_its_types(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "step-000000003.ckpt"
    torch.save(values, path)
    result = outcome(lambda: read_training(path), names=path.name)
    if isinstance(result, dict):
        progress = result["progress"]
        assert all(type(progress[name]) is int and progress[name] >= 0 for name in ("epoch", "batches", "accumulate"))
        assert all(len(pair) == 2 and pair[1] >= 0 for pair in progress["sums"])


def test_an_unedited_run_is_read(folder):
    run = Run(folder)
    assert run.recipe() == Recipe() and run.result() == RESULT and class_names(run) == ("cat", "dog")
    assert read_metrics(run.metrics_file)["val_top1"] == [12.5, 20.0]
    assert best_checkpoint(run.checkpoints) == run.checkpoints / "step-000000003.ckpt"
    with pytest.raises(ValueError, match="x: it must be a valid integer, got 'a'"):
        check_value(Count, "a", "x")
