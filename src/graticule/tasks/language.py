"""Language modelling: its loss, and what is measured."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.data import PADDING, BatchOrder
from graticule.tasks.text_recipe import TextRecipe
from graticule.training.module import Sharded, Task


class LanguageModeling(Task):
    """A language model that learns every next token, trained as a recipe says.

    Reference: An Introduction to Transformers (Turner, 2024), section 4.1: the loss is -log p(w_{n+1} | w_{1:n}).

    Args:
        model: the language model.
        recipe: optimiser, schedule, length.
        batches: which windows each batch of this process has.
        num_bytes: what the held-out tokens stand for, of all processes.
    """

    examples = "windows"
    recipe: TextRecipe

    def __init__(self, model: Any, recipe: TextRecipe, batches: BatchOrder, num_bytes: int) -> None:
        super().__init__(model, recipe, batches)
        self.num_bytes = num_bytes

    @property
    def rate(self) -> tuple[str, int]:
        """Tokens a second, and the tokens of a step."""
        return "tok/s", self.recipe.batch_size * self.recipe.context

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        """Return the mean loss of a token, in nats, of inputs and targets (B, context), and B."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten()), len(inputs)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Count the nats of a batch; tokens that only fill up are not counted."""
        self.hold_out(token_nats(self(batch[0]), batch[1])[batch[1] != PADDING])

    def score(self, total: float) -> float:
        """Return bits per byte; `total` is in nats."""
        return total / math.log(2) / self.num_bytes


class ShardedLanguageModeling(Sharded, LanguageModeling):
    """The same with the model's parameters shared out over the processes."""


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of each target, (B, n), 0 where it is `PADDING`, from logits (B, n, vocab_size)."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(exact, targets.flatten(), ignore_index=PADDING, reduction="none").view_as(targets)
