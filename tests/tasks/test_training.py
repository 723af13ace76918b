"""Training follows the recipe: schedule, optimizer, decay, averaging, precision."""

import math

import pytest
import torch
from safetensors.torch import load_file
from short_runs import short

from graticule.checkpoints import read_checkpoint
from graticule.tasks import Classification, Recipe
from graticule.training import build_data, build_model, train
from graticule.training.module import TrainingModule


def module_of(recipe: Recipe) -> TrainingModule:
    return TrainingModule(Classification(recipe), build_model(recipe, num_classes=10), build_data(recipe).train_order())


def rates(recipe: Recipe, steps: int) -> list[float]:
    """Return the optimizer's learning rate at every step."""
    configured = module_of(recipe).configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    found = []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step_update(step + 1)
    return found


def test_the_rate_warms_up_linearly_falls_as_a_cosine_and_stays_at_its_minimum():
    recipe = short(epochs=10, warmup_epochs=2, cooldown_epochs=2, lr=1e-2, min_lr=1e-4, warmup_lr=1e-3)
    found = rates(recipe, 36)
    line = [1e-3 + (1e-2 - 1e-3) * step / 6 for step in range(6)]
    cosine = [1e-4 + (1e-2 - 1e-4) / 2 * (1 + math.cos(math.pi * step / 30)) for step in range(6, 30)]
    assert found == pytest.approx(line + cosine + [1e-4] * 6, rel=1e-6)


def test_position_and_vectors_do_not_decay_and_matrices_do():
    task = module_of(short(joining="lape", weight_decay=0.3))
    optimizer = task.configure_optimizers()["optimizer"]
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in task.model.named_parameters():
        spared = name.startswith("position.") or name == "cls_token" or parameter.ndim < 2
        assert decay[id(parameter)] == (0.0 if spared else 0.3), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_every_optimizer_of_the_recipes_learns(tmp_path, optimizer):
    lr = 0.05 if optimizer == "sgd" else 3e-3
    run = train(short(optimizer=optimizer, lr=lr, epochs=6, warmup_epochs=1), tmp_path, progress=False)
    rows = read_checkpoint(run.last)["callbacks"]["History"]["rows"]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_a_fixed_table_stays_as_it_is(tmp_path):
    run = train(short(encoding="sinusoidal_2d", joining="lape"), tmp_path, progress=False)
    torch.manual_seed(0)
    fresh = build_model(run.recipe(), num_classes=10, channels=1)
    name = "position.encodings.0.pos_embed"
    assert torch.equal(load_file(run.weights)[name], fresh.get_parameter(name))


def test_the_moving_average_is_kept_and_evaluated(tmp_path):
    run = train(short(ema_decay=0.9), tmp_path, progress=False)
    checkpoint = read_checkpoint(run.last)
    averaged, current = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert not torch.equal(averaged["model.head.weight"], current["model.head.weight"])
    assert torch.equal(run.model(checkpoint="last").head.weight, averaged["model.head.weight"])


def test_bfloat16_and_clipping_train(tmp_path):
    run = train(short(precision="bf16-mixed", clip_grad=1.0), tmp_path, progress=False)
    assert run.finished and all(value.isfinite().all() for value in load_file(run.weights).values())


def test_a_loss_that_is_not_finite_stops_with_advice_and_leaves_the_last_checkpoint(tmp_path):
    with pytest.raises(FloatingPointError, match="`lr`"):
        train(short(optimizer="sgd", lr=1e30, epochs=3), tmp_path, progress=False)


def test_the_order_of_the_images_is_that_of_the_seed_and_the_epoch():
    loader = build_data(short()).train_dataloader()
    orders = []
    for epoch in (0, 0, 1):
        loader.batch_sampler.sampler.set_epoch(epoch)
        orders.append([key[1] for batch in loader.batch_sampler for key in batch])
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == list(range(60))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("epochs", 0),
        ("lr", 0.0),
        ("label_smoothing", 1.0),
        ("ema_decay", 1.0),
        ("warmup_epochs", 2),
        ("optimizer_eps", 0.0),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"`{field}`"):
        short(**{field: value})
