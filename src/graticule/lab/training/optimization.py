"""The optimizer and the schedule of a recipe, both timm's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from graticule.lab.training.recipe import TrainingRecipe


def build_optimizer(recipe: TrainingRecipe, model: nn.Module) -> torch.optim.Optimizer:
    """Build timm's optimizer, without decay for parameters that the model excludes."""
    eps: dict[str, Any] = {} if recipe.optimizer_eps is None else {"eps": recipe.optimizer_eps}
    excluded: set[str] = set() if recipe.decay_position else getattr(model, "no_weight_decay", set)()
    groups: Any = param_groups_weight_decay
    if recipe.layer_decay is not None:
        groups = partial(param_groups_layer_decay, layer_decay=recipe.layer_decay)
    return create_optimizer_v2(
        model,
        opt=recipe.optimizer,
        lr=recipe.lr,
        momentum=0.9,
        param_group_fn=partial(groups, weight_decay=recipe.weight_decay, no_weight_decay_list=excluded),
        **eps,
    )


def build_schedule(recipe: TrainingRecipe, optimizer: torch.optim.Optimizer, steps: int) -> Scheduler:
    """Build timm's schedule of the learning rate, of which `step_update(step)` sets the rate of a step.

    Args:
        recipe: the values.
        optimizer: whose rates it sets.
        steps: number of steps per epoch.
    """
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="multistep" if recipe.schedule == "step" else recipe.schedule,
        num_epochs=recipe.epochs * steps,  # in steps, as the following arguments
        min_lr=recipe.min_lr,
        warmup_lr=recipe.warmup_lr,
        warmup_epochs=recipe.warmup(steps),
        cooldown_epochs=recipe.cooldown_epochs * steps,
        decay_milestones=[epoch * steps + 1 for epoch in recipe.decay_epochs],  # timm decays one step earlier
        decay_rate=recipe.poly_power if recipe.schedule == "poly" else 0.1,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    assert scheduler is not None  # the recipe has no schedule without one
    return scheduler
