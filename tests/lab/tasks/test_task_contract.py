"""The contract of tasks: `graticule.lab.testing.check_task` accepts correct tasks and finds faults."""

import dataclasses

import pytest
import torch

from graticule.lab.testing import check_task


@pytest.fixture(scope="module")
def recipe(my_methods):
    """Return the recipe of the task in docs/my_methods.py, with one layer."""
    return dataclasses.replace(my_methods.slant_digits(), model_kwargs=("depth=1",))


def test_the_task_of_a_plugin_keeps_the_contract(recipe):
    check_task(recipe)


def test_broken_tasks_fail_the_contract(recipe, my_methods, monkeypatch):
    loss, validate = my_methods.Slant.loss, my_methods.Slant.validate
    faults = [
        ("loss", lambda task, model, batch, epoch: model(batch[0])[:, 0], r"`loss` must be one number, got .* \(8,\)"),
        ("loss", lambda *arguments: loss(*arguments).detach(), "`loss` must have a gradient"),
        ("loss", lambda *arguments: loss(*arguments) * float("nan"), "`loss` must be finite"),
        (
            "loss",
            lambda task, model, batch, epoch: model.patch_embed(batch[0]).square().mean(),
            "must reach every parameter, not .*head.weight",
        ),
        (
            "validate",
            lambda *arguments: {name: value[:, None] for name, value in validate(*arguments).items()},
            "one value per example",
        ),
        (
            "validate",
            lambda *arguments: {"loss": validate(*arguments)["loss"]},
            "`validate` must return 'mae', .* got loss",
        ),
        ("validate", lambda *arguments: {}, "`validate` must return a value of each example, got none"),
        ("describe", lambda task, data: {"mean": torch.zeros(3)}, "`describe` must return plain values"),
    ]
    for method, wrong, law in faults:
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match=law):
            patch.setattr(my_methods.Slant, method, wrong)
            check_task(recipe)


def test_state_that_a_resumed_run_has_lost_is_found(recipe, my_methods, monkeypatch):
    loss, steps = my_methods.Slant.loss, []

    def counting(task, model, batch, epoch):
        steps.append(task)
        return loss(task, model, batch, epoch) * sum(step is task for step in steps)

    monkeypatch.setattr(my_methods.Slant, "loss", counting)
    with pytest.raises(AssertionError, match="a run that is resumed must end with the same weights, bit for bit"):
        check_task(recipe)
