"""A training step as one graph. Without a GPU, `capture` is replaced by a function that returns the step itself, so a
replay runs it on the tensors of the graph: all is tested but the capture of kernels, which tests/gpu has."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import graticule
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.recipes.load import load_recipe
from graticule.lab.tasks.classification import Classification
from graticule.lab.tasks.options import ImageMixing, Recipe, TextRecipe
from graticule.lab.training import graph
from graticule.lab.training.graph import WARM_UP, StepGraph, obstacle
from graticule.lab.training.loop import train
from graticule.lab.training.optimization import build_optimizer
from graticule.lab.training.task import task_of
from graticule.lab.training.training import Training
from short_runs import assert_same_end, rows, short, stopped

#: Each with a random state of its own, and whether its last batch is smaller.
RECIPES = {
    "adamw, mixed, averaged, clipped": {
        "joining": "lape",
        "drop_path_rate": 0.2,
        "augmentation": Augmentation(random_crop_padding=2, hflip=0.5),
        "mixing": ImageMixing(mixup=0.5, cutmix=0.5, off_epoch=1),
        "label_smoothing": 0.1,
        "ema_decay": 0.8,
        "clip_grad": 1.0,
        "warmup_epochs": 1,
    },
    "sgd, smaller last batch": {"optimizer": "sgd", "lr": 0.05, "limit_train": 110, "label_smoothing": 0.1},
    "bfloat16": {"precision": "bf16-mixed", "drop_path_rate": 0.1},
    "float64, layer decay": {"precision": "64-true", "layer_decay": 0.7},
}


@pytest.fixture
def with_graph(monkeypatch):
    """Train with a graph on the CPU; returns its captures, the addresses of its batches, and its sentences."""
    record = {"captures": 0, "addresses": [], "sentences": []}
    build = Training.__init__

    def capture(function):
        record["captures"] += 1
        return function

    def with_step_graph(self, fabric, task, model, batches, say=print):
        build(self, fabric, task, model, batches, say)

        def compute(batch):
            record["addresses"].append([tensor.data_ptr() for tensor in batch])
            assert all(isinstance(group["lr"], torch.Tensor) for group in self.optimizer.param_groups)
            return self._whole_step(batch)

        self._graph = StepGraph(compute, self.optimizer, self.recipe.batch_size, record["sentences"].append)

    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(Training, "__init__", with_step_graph)
    return record


@pytest.mark.parametrize("name", RECIPES)
def test_a_replayed_step_is_the_usual_one_bit_for_bit(name, tmp_path, request):
    recipe = short(**{"limit_train": 100, **RECIPES[name]})
    usual = train(recipe, tmp_path / "usual", progress=False)
    record = request.getfixturevalue("with_graph")
    captured = train(recipe, tmp_path / "captured", progress=False)
    assert_same_end(captured, usual)
    assert rows(captured) == rows(usual)  # losses, scores and learning rates
    smaller = "smaller" in name
    assert record["captures"] == 1 and len(record["sentences"]) == smaller
    full = len(record["addresses"]) - 2 * smaller
    static = max(record["addresses"], key=record["addresses"].count)
    assert full == 10 and record["addresses"].count(static) == full - WARM_UP


def test_a_resumed_run_is_captured_again_and_ends_in_the_same_way(tmp_path, with_graph):
    recipe = short(limit_train=100, **RECIPES["adamw, mixed, averaged, clipped"])
    whole = train(recipe, tmp_path / "whole", progress=False)
    run = stopped(recipe, tmp_path / "stopped", step=5)
    train(recipe, run.folder, resume=True, progress=False)
    assert_same_end(run, whole)


def test_a_step_that_cannot_be_captured_runs_as_usual_and_says_why(tmp_path, with_graph, monkeypatch):
    def refused(function):
        raise RuntimeError("operation not permitted when stream is capturing\nand advice")

    usual = train(short(limit_train=100, cuda_graph=False), tmp_path / "usual", progress=False)
    monkeypatch.setattr(graph, "capture", refused)
    run = train(short(limit_train=100), tmp_path / "run", progress=False)
    assert_same_end(run, usual)
    why = "its capture failed: RuntimeError: operation not permitted when stream is capturing"
    assert with_graph["sentences"][-1] == f"no CUDA graph of a step, since {why}"


class OtherLoss(Classification):
    """A task whose loss is its own, so that `mixed_loss` of its base is not its loss."""

    def loss(self, model, batch, epoch):
        return super().loss(model, batch, epoch) * 2


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("changes", "model", "processes", "reason"),
    [
        ({}, nn.Linear, 1, ""),
        ({"optimizer": "sgd", "precision": "16-mixed", "compile": True, "ema_decay": 0.9}, nn.Linear, 1, ""),
        ({}, nn.Linear, 2, "2 processes share a step"),
        ({"accumulate": 2}, nn.Linear, 1, "a step has 2 micro-batches"),
        ({"grad_checkpointing": True}, nn.Linear, 1, "activations are recomputed (`grad_checkpointing`)"),
        ({"train_sizes": ("28", "32")}, nn.Linear, 1, "training images have several sizes"),
        ({"optimizer": "lamb"}, nn.Linear, 1, "the optimizer lamb has no fused step"),
        (
            {"precision": "16-mixed", "clip_grad": 1.0},
            nn.Linear,
            1,
            "16-mixed precision clips gradients without a fused step",
        ),
        ({}, Hooked, 1, "the model has hooks"),
    ],
)
def test_what_keeps_a_step_from_capture_is_named(changes, model, processes, reason):
    task = task_of(Recipe(batch_size=8, **changes))
    model = model() if model is Hooked else model(2, 2)
    assert obstacle(task, model, build_optimizer(task.recipe, model), processes) == reason


@pytest.mark.parametrize("joining", ["default", "lape"])
@pytest.mark.parametrize("name", ["vit_lite_7_4_32", "cct_7_3x1_32", "cvt_7_4_32", "deit_tiny_patch16_224"])
def test_nothing_keeps_the_models_of_the_recipes_from_capture(name, joining):
    """Neither hooks nor a value of a tensor, for which a step would wait: tensors without values have none."""
    task = task_of(load_recipe("vit_lite_cifar10"))
    model = graticule.create_model(name, joining=joining, drop_path_rate=0.1).train()
    assert obstacle(task, model, build_optimizer(task.recipe, model), 1) == ""
    loss = loss_without_values(lambda images, labels: task.mixed_loss(model, (images, labels)), model)
    assert loss.shape == () and loss.dtype == torch.float32
    with pytest.raises(DataDependentOutputException):
        loss_without_values(
            lambda images, labels: task.mixed_loss(model, (images, labels)) * images.max().item(), model
        )


def loss_without_values(function, model):
    """Compute the loss of images and its gradients with tensors that have shapes and no values; returns the loss."""
    side = model.img_size[0]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        for owner in model.modules():
            for part, parameter in [*owner.named_parameters(recurse=False)]:
                setattr(owner, part, nn.Parameter(fake.from_tensor(parameter)))
        images, labels = torch.empty(8, 3, side, side), torch.empty(8, model.num_classes)
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(images, labels)
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return loss


def test_only_a_loss_of_tensors_alone_is_captured():
    reasons = []
    for task in (OtherLoss(Recipe()), task_of(TextRecipe()), task_of(Recipe())):
        model = nn.Linear(2, 2)
        reasons.append(obstacle(task, model, build_optimizer(task.recipe, model), 1))
    assert reasons[:2] == [
        f"the loss of the task {name} depends on more than tensors" for name in ("classification", "language")
    ]
    assert reasons[2] == ""


def test_the_optimizer_is_unchanged_between_steps(monkeypatch):
    monkeypatch.setattr(graph, "capture", lambda function: function)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.25)
    before, seen = dict(optimizer.param_groups[0]), []

    def compute(batch):
        optimizer.zero_grad()
        loss = (weight * batch[0].mean(0)).sum()
        loss.backward()
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        return loss.detach()

    step = StepGraph(compute, optimizer, 4, print)
    rates = [0.25, 0.5, 0.125, 0.0625, 0.03125]
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        step([torch.ones(4, 3)])
        assert optimizer.param_groups[0] == {**before, "lr": rate}
    assert seen == rates  # also in the replays, which read a tensor
