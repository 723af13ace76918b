"""Training of one tiny model on one task, in a plain loop: starting a run of the engine would take as long again."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.lab.gym.answers import Answer
from graticule.lab.gym.base import CELL, GymTask, generators
from graticule.lab.gym.recipe import GymRecipe
from graticule.lab.tasks.classification import Recipe
from graticule.lab.tasks.parts.models import build_backbone

#: Share of the steps in which the learning rate rises.
_WARMUP = 0.1
#: Steps whose mean loss decides that a task is solved.
_WINDOW = 20
#: Pictures per batch of an evaluation.
_BATCH = 256


class GymModel(nn.Module):
    """A backbone whose patches are the cells, with mean pooling and a head, or with a head for each token.

    Linear layers are initialized by Xavier's rule, as in the first ViT: with the usual standard deviation of 0.02,
    which suits hundreds of channels, the output of attention with 32 channels starts near zero, and about a hundred
    steps pass before it grows. Parameters of the position are initialized by their encodings.
    """

    def __init__(self, recipe: GymRecipe, answer: Answer) -> None:
        super().__init__()
        image = (recipe.side * CELL, recipe.side * CELL)
        chosen = Recipe(
            model=recipe.model,
            encoding=recipe.encoding,
            joining=recipe.joining,
            model_kwargs=recipe.model_kwargs,
        )
        outputs = 0 if answer.per_token else answer.outputs
        self.backbone: Backbone = build_backbone(chosen, outputs, 1, image, CELL, "avg")
        if answer.per_token and self.backbone.position_grids(self.backbone.grid)[-1].shape != (recipe.side,) * 2:
            raise ValueError(f"`model` must have a token for each cell for tasks on cells, got {recipe.model}.")
        for name, module in self.backbone.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("position.") and module.out_features:
                nn.init.xavier_uniform_(module.weight)
        self.mixed = recipe.precision == "bf16-mixed"
        self.head: nn.Linear | None = None
        if answer.per_token:
            self.head = nn.Linear(self.backbone.num_features, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return answers for images (count, 1, height, width): (count, outputs), or one per cell, (count, N)."""
        if not self.mixed:
            return self._answers(images)
        with torch.autocast(images.device.type, torch.bfloat16):
            return self._answers(images).float()

    def _answers(self, images: Tensor) -> Tensor:
        if self.head is None:
            answers: Tensor = self.backbone(images)
            return answers
        tokens = self.backbone.forward_features(images)[:, self.backbone.num_prefix_tokens :]
        if isinstance(self.backbone, VisionTransformer):
            tokens = self.backbone.fc_norm(tokens)  # its norm after pooling; other backbones have it before
        found: Tensor = self.head(tokens)[..., 0]
        return found


class Trained(NamedTuple):
    """Result of a training: the model, and the loss of each step."""

    model: GymModel
    losses: list[float]


def build_model(recipe: GymRecipe, task: GymTask, seed: int) -> GymModel:
    """Build the model of a recipe for a task; the same seed results in the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GymModel(recipe, task.answer)


def train(recipe: GymRecipe, task: GymTask, seed: int, step_done: Callable[[], object] = lambda: None) -> Trained:
    """Train a model on a task. The pictures depend on the seed and not on the model, so all choices see the same ones.

    Training ends early when the mean loss of 20 steps is below `recipe.solved_loss`.

    Args:
        recipe: of the model and the training.
        task: at the training size.
        seed: of the weights and the pictures.
        step_done: called after every step.
    """
    model = build_model(recipe, task, seed).train()
    kept = {f"backbone.{name}" for name in model.backbone.no_weight_decay()}
    optimizer = torch.optim.AdamW(
        param_groups_weight_decay(model, recipe.weight_decay, no_weight_decay_list=kept),
        lr=recipe.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    streams = generators(seed, "train")
    losses = []
    for step in range(recipe.steps):
        rate = recipe.lr * _rate((step + 1) / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        examples = task.sample(recipe.batch_size, *streams)
        loss = task.answer.loss(model(examples.images), examples.target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        step_done()
        if len(losses) >= _WINDOW and fmean(losses[-_WINDOW:]) < recipe.solved_loss:
            break
    return Trained(model.eval(), losses)


def _rate(share: float) -> float:
    """Return the learning rate after `share` of the steps, as a share of the highest one."""
    return share / _WARMUP if share < _WARMUP else 0.5 * (1 + math.cos(math.pi * (share - _WARMUP) / (1 - _WARMUP)))


@torch.no_grad()
def evaluate(model: nn.Module, task: GymTask, count: int, seed: int) -> float:
    """Return the score of a model on `count` held-out pictures of a task, at any size."""
    examples = task.sample(count, *generators(seed, "test"))
    answers = torch.cat([model(images) for images in examples.images.split(_BATCH)])
    return task.answer.score(answers, examples.target)
