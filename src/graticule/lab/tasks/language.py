"""Language modeling: recipe, data, model, loss and score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import TypedDict

from graticule.backbones.language import (
    LanguageModel,
    create_language_model,
    list_language_arguments,
    list_language_models,
)
from graticule.lab.data.text_module import PADDING, TextModule
from graticule.lab.tasks.options import TextRecipe
from graticule.lab.tasks.parts.models import build_checked, model_arguments
from graticule.lab.training.task import Task, TrainedRun, register_task
from graticule.registry.checks import known_name
from graticule.registry.fields import Count


class _Vocabulary(TypedDict):
    """The description of the data in recipe.json."""

    num_classes: Count
    vocabulary: str


@register_task("language")
class LanguageModeling(Task[TextRecipe, "TextModule"]):
    """A language model that learns to predict the next token.

    Reference: An Introduction to Transformers (Turner, 2024), section 4.1: the loss is -log p(w_{n+1} | w_{1:n}).

    num_bytes: length of the held-out text, in bytes.
    """

    recipe_class = TextRecipe
    description = _Vocabulary
    inputs = "text"

    num_bytes: int

    def build_data(self, run: TrainedRun | None = None) -> TextModule:
        data = TextModule(**self.recipe.data_arguments(), context=self.recipe.context)
        return data

    def describe(self, data: TextModule) -> dict[str, Any]:
        """Return the number of tokens of the vocabulary and its fingerprint."""
        return {"num_classes": data.tokenizer.vocab_size, "vocabulary": data.tokenizer.fingerprint}

    def build_model(self, described: Mapping[str, Any]) -> LanguageModel:
        """Build the language model for `num_classes` tokens."""
        recipe = self.recipe
        known_name("model", recipe.model, list_language_models())
        values: dict[str, Any] = {name: getattr(recipe, name) for name in ("context", "tied", "drop_path_rate")}
        values |= dict.fromkeys(("pos_drop_rate", "proj_drop_rate"), recipe.drop_rate)
        values["vocab_size"] = described["num_classes"]
        arguments = model_arguments(recipe, list_language_arguments(), values)
        return build_checked(partial(create_language_model, recipe.model, **arguments), recipe)

    def same_outputs(self, source: TrainedRun | None, names: Sequence[str], data: TextModule) -> bool:
        """Return True; a run that is not on text is refused, since its inputs mean something else."""
        if source is not None and "vocabulary" not in source.described():
            raise ValueError(f"`start_from` must be a run on text, got {str(source.folder)!r}, which is not.")
        return True

    def setup(self, model: nn.Module, data: TextModule, device: torch.device) -> None:
        """Count the bytes of the held-out text."""
        self.num_bytes = data.num_bytes("test")

    def loss(self, model: nn.Module, batch: Any, epoch: int) -> Tensor:
        """Return the mean loss per token, in nats, of inputs and targets (B, context)."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def validate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the nats of each token."""
        inputs, targets = batch
        return {"loss": token_nats(model(inputs), targets)[targets != PADDING]}

    def score(self, sums: Mapping[str, float], count: int) -> float:
        return sums["loss"] / math.log(2) / self.num_bytes

    @property
    def rate(self) -> tuple[str, int]:
        """Return the unit, tokens, and their number per step."""
        return "tok", self.recipe.batch_size * self.recipe.context


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of each target, (B, n), 0 where it is `PADDING`, from logits (B, n, vocab_size)."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(exact, targets.flatten(), ignore_index=PADDING, reduction="none").view_as(targets)
