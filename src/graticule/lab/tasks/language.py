"""Language modeling: recipe, data, model, loss and score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from graticule.lab.training.cost import inference_cost
from graticule.lab.training.results import Evaluated, Evaluation, Metric, ScoreTable, show
from graticule.lab.training.task import Task, TrainedRun, register_task
from graticule.lab.training.validation import batch_results
from graticule.registry.checks import known_name
from graticule.registry.fields import Count
from graticule.surgery.fold import fold, unfold


@dataclass(frozen=True)
class TextScore:
    """Scores and cost of a language model on the held-out text, in windows of its context.

    bits_per_byte, loss: of the whole text, loss in nats per token; tokens: number of predicted tokens.
    batch, tokens_per_second, memory: of inference only, on `batch` windows; bytes per token on a GPU (`Cost`).
    """

    bits_per_byte: float
    loss: float
    tokens: int
    batch: int
    tokens_per_second: float
    memory: float | None


class TextEvaluation(Evaluation[TextScore]):
    """Bits per byte and cost at the training length."""

    def scores(self, task: Any, model: Any, data: Any, *, device: str, progress: bool = True) -> list[TextScore]:
        """Score a model."""
        return [evaluate_text(model, data, device=device, progress=progress)]

    def table(self, metric: Metric, evaluated: Sequence[Evaluated[TextScore]]) -> ScoreTable:
        """Return a row for each run."""
        rows = [
            [
                run.label,
                str(run.recipe.context),
                metric.show(score.bits_per_byte, unit=False),
                f"{score.loss:.3f}",
                f"{score.tokens:,}",
                f"{score.tokens_per_second:,.0f}",
                show(score.memory and score.memory / 1e3, ".1f"),
            ]
            for run in evaluated
            for score in run.scores
        ]
        has_memory = any(score.memory is not None for run in evaluated for score in run.scores)
        measured = "speed and peak memory are" if has_memory else "speed is"  # memory is measured on GPUs alone
        columns = ("run", "context", "bits/byte", "nats/token", "tokens", "tokens/s", "kB/token")
        end = None if has_memory else -1
        return ScoreTable(columns[:end], [row[:end] for row in rows], [f"{measured} of the forward pass only"])


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
    evaluation = TextEvaluation
    description = _Vocabulary
    examples = "windows"
    inputs = "text"

    num_bytes: int

    def build_data(self, run: TrainedRun | None = None) -> TextModule:
        """Build the text and its tokens."""
        data = TextModule(**self.recipe.data_arguments(), context=self.recipe.context)
        return data

    def describe(self, data: TextModule) -> dict[str, Any]:
        """Return the number of tokens of the vocabulary and its fingerprint."""
        return {"num_classes": data.info.vocab_size, "vocabulary": data.info.vocabulary}

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
        """Return bits per byte."""
        return sums["loss"] / math.log(2) / self.num_bytes

    @property
    def rate(self) -> tuple[str, int]:
        """Return the unit, tokens per second, and the number of tokens per step."""
        return "tok/s", self.recipe.batch_size * self.recipe.context


def evaluate_text(
    model: Any, data: TextModule, *, device: torch.device | str = "cpu", progress: bool = True
) -> TextScore:
    """Score a language model on the held-out text in windows of the context of `data`.

    Position that does not depend on tokens is computed once (`fold`). The model is unchanged afterwards. Speed and
    memory are those of the forward pass on a full batch, without reading.

    Raises:
        ValueError: for a model of another kind or vocabulary.
    """
    if not isinstance(model, LanguageModel):
        raise ValueError(f"`model` must be a LanguageModel, got {type(model).__name__}.")
    if model.vocab_size != data.info.vocab_size:
        raise ValueError(
            f"`data` must have the vocabulary of the model, {model.vocab_size} tokens, got {data.info.vocab_size}."
        )
    was_training = model.training
    model = fold(model.to(device))
    nats, tokens, first = 0.0, 0, None
    try:
        for (inputs, targets), token_losses, _ in batch_results(
            lambda batch: token_nats(model(batch[0]), batch[1]), data.eval_dataloader(data.size), "", device, progress
        ):
            first = inputs if first is None else first
            nats += float(token_losses.sum(dtype=torch.float64))
            tokens += int((targets != PADDING).sum())
        assert first is not None  # `EvaluationWindows` raises if there is no token
        cost = inference_cost(model, first.to(device))
    finally:
        unfold(model).train(was_training)
    return TextScore(
        bits_per_byte=nats / math.log(2) / tokens,
        loss=nats / tokens,
        tokens=tokens,
        batch=cost.batch,
        tokens_per_second=cost.images_per_second * data.size,
        memory=None if cost.memory is None else cost.memory / data.size,
    )


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of each target, (B, n), 0 where it is `PADDING`, from logits (B, n, vocab_size)."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(exact, targets.flatten(), ignore_index=PADDING, reduction="none").view_as(targets)
