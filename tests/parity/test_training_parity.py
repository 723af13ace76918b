"""Recorded losses, learning rates and drop path rates of DeiT, timm, PVT and Twins compared with ours."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timm.loss import SoftTargetCrossEntropy

import graticule
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.sampling import BatchOrder
from graticule.lab.tasks.distillation import Teacher
from graticule.lab.tasks.options import Distillation, Recipe
from graticule.lab.training.optimization import build_optimizer, build_schedule
from tiny import assert_same, without_memory

GOLDEN = Path(__file__).parent / "golden"
CLASSES = 6


def teacher(**options):
    info = DatasetInfo("digits", tuple("abcdef"), 1, (28, 28), (0.5,), (0.5,))
    return Teacher(torch.nn.Identity(), Distillation(**options), info, mean=(0.5,), std=(0.5,), size=(1, 28, 28))


@pytest.mark.parametrize("form", ["hard", "soft", "none"])
def test_distillation_is_that_of_deits_code_with_gradients(form):
    """DeiT's soft loss is divided by the number of logits, ours by that of images: alpha compensates the difference."""
    case = load_file(GOLDEN / "deit_distillation.safetensors")
    outputs = case["input_outputs"].double().requires_grad_()
    outputs_kd = case["input_outputs_kd"].double().requires_grad_()
    teacher_logits = case["input_teacher"].double()
    loss = SoftTargetCrossEntropy()(outputs, case["input_labels"].double())
    if form == "hard":
        loss = teacher(form="hard", alpha=0.5).combine(loss, outputs_kd, teacher_logits)
    elif form == "soft":
        # (1 - a) loss + a / K soft = s * ((1 - b) loss + b soft), as DeiT's soft is ours over K
        scale = 0.9 + 0.1 / CLASSES
        loss = scale * teacher(form="soft", alpha=0.1 / CLASSES / scale, temperature=3.0).combine(
            loss, outputs_kd, teacher_logits
        )
    loss.backward()
    assert_same(loss.detach().reshape(1), case[f"loss_{form}"], 1e-9)
    for name, logits in (("outputs", outputs), ("outputs_kd", outputs_kd)):
        gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
        assert_same(gradient, case[f"grad_{name}_{form}"], 1e-9)


def rates(epochs: int, **options: Any) -> torch.Tensor:
    """Return the learning rate of a training of one step per epoch, for each epoch and three more."""
    recipe = Recipe(epochs=epochs, lr=1e-3, min_lr=1e-5, warmup_lr=1e-6, **options)
    optimizer = build_optimizer(recipe, torch.nn.Linear(2, 2))
    scheduler = build_schedule(recipe, optimizer, 1)
    values = []
    for step in range(epochs + recipe.cooldown_epochs + 1):
        scheduler.step_update(step)
        values.append(optimizer.param_groups[0]["lr"])
    return torch.tensor(values, dtype=torch.float64)


def test_the_learning_rates_are_those_of_timms_cosine_schedule_with_deits_values():
    """The warm-up is part of the epochs; cool-down has `min_lr`. (DeiT's loop is one epoch late, ours is not.)"""
    ours = rates(300, warmup_epochs=5, cooldown_epochs=10)
    recorded = load_file(GOLDEN / "deit_schedule.safetensors")
    assert_same(ours, recorded["rate_at_t"][: len(ours)], 1e-12)
    assert_same(ours[:300], recorded["rate_in_epoch_timm"], 1e-12)


def test_the_schedule_poly_is_its_formula():
    share = torch.arange(20, dtype=torch.float64) / 20
    falls = (1 - share) ** 0.9  # as 1 - share**0.9 would not be
    assert_same(rates(20, schedule="poly", poly_power=0.9)[:20], 1e-5 + (1e-3 - 1e-5) * falls, 1e-12)
    with pytest.raises(ValueError, match="`poly_power` must be left out without the schedule poly"):
        Recipe(poly_power=0.9)


def test_deits_late_loop_differs_by_half_a_percent_of_the_rate_after_the_warmup():
    recorded = load_file(GOLDEN / "deit_schedule.safetensors")
    late, timms = recorded["rate_in_epoch_deit"], recorded["rate_in_epoch_timm"]
    assert torch.equal(late[1:], timms[:-1]) and (late - timms)[6:].abs().max() < 0.0055 * 1e-3
    assert abs(late.sum() / timms.sum() - 1) < 1.5e-4


def test_the_floor_of_deits_sampler_leaves_out_images_that_fill_no_batch():
    """With as many repeats and in the order of the recorded sampler, both take the same images of full batches."""
    recorded = load_file(GOLDEN / "deit_rasampler.safetensors")["indices_4"]
    order = BatchOrder(300, 256, 0, repeats=3, drop_last=True)
    order.indices = lambda epoch: np.arange(300)
    (batch,) = order
    assert batch.indices.tolist() == recorded.tolist()


@pytest.mark.parametrize(
    ("case", "name", "sizes"),
    [
        ("pvt_tiny", "pvt_tiny", {"drop_path_rate": 0.1}),
        ("pvt_small", "pvt_small", {"drop_path_rate": 0.1}),
        ("pcpvt_small_v0", "pvt_small_peg_gap", {"drop_path_rate": 0.2}),
    ],
)
def test_drop_path_grows_over_all_blocks_of_a_pyramid_not_within_a_stage(case, name, sizes):
    with without_memory():
        model = graticule.create_model(name, **sizes)
    ours = [getattr(block.drop_path1, "drop_prob", 0.0) for stage in model.blocks for block in stage]
    recorded = load_file(GOLDEN / "pyramid_drop_path.safetensors")[f"rates_{case}"]
    assert_same(torch.tensor(ours, dtype=torch.float64), recorded, 1e-8)  # float32 steps
