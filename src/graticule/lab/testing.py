"""The contracts of tasks, and of backbones in training."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones.registry import create_model, list_arguments
from graticule.checkpoints.read import read_state
from graticule.lab.tasks.options import Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.optimization import build_optimizer
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run import Run
from graticule.lab.training.task import Task, read_recipe, task_of
from graticule.registry.fields import check_value

_CLASSES = 5


def check_training(name: str, **kwargs: Any) -> None:
    """Check that a recipe builds a registered backbone and trains it for a step.

    Args:
        name: name of the model.
        kwargs: arguments of the model, such as smaller sizes.

    Raises:
        AssertionError: if it does not.
    """
    model = create_model(name, num_classes=_CLASSES, **kwargs)
    choices: dict[str, Any] = {key: str(kwargs[key]) for key in ("encoding", "joining") if key in kwargs}
    settled = {"img_size", "patch_size", "in_chans", "num_classes"}
    others = {key: kwargs[key] for key in list_arguments(name) if key not in settled and kwargs.get(key) is not None}
    texts = tuple(f"{key}={json.dumps(value)}" for key, value in others.items())
    recipe = Recipe(name, img_size=model.img_size, patch_size=kwargs.get("patch_size"), model_kwargs=texts, **choices)
    task = task_of(recipe)
    try:
        built = task.build_model({"num_classes": _CLASSES, "channels": model.in_chans})
    except ValueError as error:
        raise AssertionError(f"a recipe must be able to build the backbone: {error}") from error
    batch = torch.randn(2, model.in_chans, *model.img_size), torch.arange(2)
    before = {key: value.clone() for key, value in built.state_dict().items()}
    optimizer = build_optimizer(recipe, built)
    task.loss(built.train(), batch, 0).backward()
    optimizer.step()
    after = built.state_dict()
    assert all(value.isfinite().all() for value in after.values()), "a step must leave finite weights"
    assert any(not torch.equal(value, before[key]) for key, value in after.items()), "a step must change the weights"


def check_task(recipe: TrainingRecipe) -> None:
    """Check the contract of tasks for the task of a recipe, in two short runs on the CPU.

    The recipe and the description of the data are the same after a round trip through JSON, a gradient of the loss
    reaches every parameter, held-out examples have the values that the score needs, and a run that was interrupted
    after an epoch ends like an uninterrupted one, bit for bit. The runs use `recipe.quick()`, with its data.

    Args:
        recipe: an instance of the recipe class of the task.

    Raises:
        AssertionError: naming the law that does not hold.
    """
    recipe = dataclasses.replace(recipe.quick(), keep=2)
    task = task_of(recipe)
    again = read_recipe(json.loads(json.dumps(recipe.to_dict())))
    names = recipe.differences(again)
    assert again == recipe, f"a recipe must be the same after it was written as JSON, not differ in {', '.join(names)}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        data = task.build_data()
        described = _check_description(task, data)
        model = task.build_model(described)
        task.setup(model, data, torch.device("cpu"))
        _check_loss(task, model, next(iter(data.train_dataloader(data.train_order()))))
        _check_validation(task, model, data)
        with tempfile.TemporaryDirectory() as folder:
            _check_runs(recipe, Path(folder))


def _check_description(task: Task[Any, Any], data: Any) -> dict[str, Any]:
    """Check the result of `describe`, and return it as it would be in recipe.json."""
    described = task.describe(data)
    try:
        text = json.dumps(described)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"`describe` must return plain values: {error}") from error
    try:
        check_value(task.description, json.loads(text), "`describe`")
    except ValueError as error:
        raise AssertionError(f"the result of `describe` must have the type `description`: {error}") from error
    return json.loads(text)


def _check_loss(task: Task[Any, Any], model: nn.Module, batch: Any) -> None:
    model.train()
    loss = task.loss(model, batch, 0)
    assert loss.ndim == 0, f"`loss` must be one number, got the shape {tuple(loss.shape)}"
    assert loss.isfinite(), f"`loss` must be finite, got {loss.item()}"
    assert loss.requires_grad, "`loss` must have a gradient"
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without, f"the gradient of `loss` must reach every parameter, not {', '.join(without)}"
    model.zero_grad()


@torch.no_grad()
def _check_validation(task: Task[Any, Any], model: nn.Module, data: Any) -> None:
    model.eval()
    task.start_validation()
    sums: dict[str, float] = {}
    count = 0
    for batch in data.eval_dataloader(data.size):
        values: Mapping[str, Tensor] = task.validate(model, batch)
        sizes = {name: tuple(value.shape) for name, value in values.items()}
        assert sizes, "`validate` must return a value of each example, got none"
        size = len(next(iter(values.values())))
        assert all(shape == (size,) for shape in sizes.values()), (
            f"`validate` must return one value per example, (n,), got the shapes {sizes}"
        )
        wrong = [name for name, value in values.items() if not value.isfinite().all()]
        assert not wrong, f"`validate` must return finite values, not of {', '.join(wrong)}"
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value.double().sum())
        count += size
    key = task.metric.key
    assert type(task).score is not Task.score or key in sums, (
        f"`validate` must return {key!r}, of which the score is the mean, got {', '.join(sums)}"
    )
    assert isinstance(task.score(sums, count), float | int), "`score` must return a number"


def _check_runs(recipe: TrainingRecipe, folder: Path) -> None:
    complete = train(recipe, folder / "whole", progress=False)
    part = Run(Path(shutil.copytree(complete.folder, folder / "part")))
    assert part.last is not None
    part.last.unlink()  # as if it had been killed in the second epoch
    for path in (part.weights, part.result_file):
        path.unlink()
    resumed = train(recipe, part.folder, resume=True, progress=False)
    weights, others = (read_state(run.weights) for run in (complete, resumed))
    wrong = [name for name, value in weights.items() if name not in others or not torch.equal(value, others[name])]
    assert not wrong and weights.keys() == others.keys(), (
        f"a run that is resumed must end with the same weights, bit for bit, not others in {', '.join(wrong[:3])}"
    )
    results = [{**run.result(), "seconds": 0} for run in (complete, resumed)]
    assert results[0] == results[1], f"a run that is resumed must have the same results, got {results}"
