"""Language modeling: recipe, data, model, loss and score."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

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
from graticule.lab.arguments import Usual
from graticule.lab.data.registry import TEXTS
from graticule.lab.data.sampling import PADDING
from graticule.lab.data.text_module import TextModule
from graticule.lab.tasks.parts.models import build_checked, model_arguments
from graticule.lab.training.cost import inference_cost
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.results import BITS_PER_BYTE, Evaluated, Evaluation, Metric, ScoreTable, show
from graticule.lab.training.task import Task, TrainedRun, register_task
from graticule.lab.training.validation import batch_results
from graticule.registry.checks import known_name
from graticule.registry.fields import Count, Flag, ShareBelowOne
from graticule.registry.plugins import Definition
from graticule.surgery.fold import fold, unfold

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TextScore:
    """Scores and cost of a language model in windows of one length, in tokens.

    bits_per_byte: of the whole held-out text, whose number of bytes is the same at every length; loss: nats per token;
        tokens: number of predicted tokens.
    resampled: whether a table was resampled, for a length beyond the context of the model.
    batch, tokens_per_second, memory: of inference only, on `batch` windows; bytes per token on a GPU (`Cost`).
    by_place: (first position, last position, bits per byte) of the tokens at these positions of their windows, in bins
        of doubling size: 1, 2, 3-4, 5-8, ... The token at position p is predicted from p others.
    """

    length: int
    bits_per_byte: float
    loss: float
    tokens: int
    resampled: bool
    batch: int
    tokens_per_second: float
    memory: float | None
    by_place: list[tuple[int, int, float]]


@dataclass
class TextEvaluation(Evaluation[TextScore]):
    """Bits per byte and cost at several lengths of the windows."""

    lengths: list[int] = field(default_factory=list)
    """for text: tokens per window of the held-out text (default: the training length)"""

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check the lengths."""
        check_lengths(model, self._lengths(task), data)

    def scores(self, task: Any, model: Any, data: Any, *, device: str, progress: bool = True) -> list[TextScore]:
        """Score a model at every length."""
        return evaluate_text(model, data, self._lengths(task), device=device, progress=progress)

    def table(self, metric: Metric, evaluated: Sequence[Evaluated[TextScore]]) -> ScoreTable:
        """Return a row for each run and length, with the difference from the training length."""
        rows = []
        for run in evaluated:
            trained = run.recipe.context
            reference = next((score.bits_per_byte for score in run.scores if score.length == trained), run.measured)
            for score in run.scores:
                mark = " *" if score.length == trained else " ~" if score.resampled else ""
                rows.append(
                    [
                        run.label,
                        f"{score.length}{mark}",
                        metric.show(score.bits_per_byte, unit=False),
                        show(None if reference is None else score.bits_per_byte - reference, f"+.{metric.decimals}f"),
                        f"{score.loss:.3f}",
                        f"{score.tokens:,}",
                        f"{score.tokens_per_second:,.0f}",
                        show(score.memory and score.memory / 1e3, ".1f"),
                    ]
                )
        has_memory = any(score.memory is not None for run in evaluated for score in run.scores)
        measured = "speed and peak memory are" if has_memory else "speed is"  # memory is measured on GPUs alone
        notes = [f"* the training length of the run; {measured} of the forward pass only"]
        if any(score.resampled for run in evaluated for score in run.scores):
            notes.append("~ longer than the learned position table of the run, which was resampled to the length")
        columns = ("run", "length", "bits/byte", "against *", "nats/token", "tokens", "tokens/s", "kB/token")
        end = None if has_memory else -1
        return ScoreTable(columns[:end], [row[:end] for row in rows], notes)

    def figure(self, evaluated: Sequence[Evaluated[TextScore]]) -> Figure:
        """Plot bits per byte against length, and against the position in the longest windows."""
        from graticule.lab.figures.scores import length_plot

        curves = {run.label: {score.length: [score.bits_per_byte] for score in run.scores} for run in evaluated}
        longest = {run.label: max(run.scores, key=lambda score: score.length) for run in evaluated}
        places = {label: {last: [bits] for _, last, bits in score.by_place} for label, score in longest.items()}
        return length_plot(curves, places, [run.recipe.context for run in evaluated])

    def _lengths(self, task: Any) -> list[int]:
        return self.lengths or [task.recipe.context]


@dataclass(frozen=True)
class TextRecipe(TrainingRecipe):
    """The values of a training run of a language model.

    Lengths are in tokens; rates are per step; epochs count passes over the training text.
    """

    task: ClassVar[str] = "language"
    metric: ClassVar[Metric] = BITS_PER_BYTE

    model: Usual[str] = "lm_tiny"
    """language model, one of `graticule models`"""
    dataset: Usual[str] = "pydoc"
    """text of `graticule models`, such as pydoc or text_folder"""
    batch_size: Usual[Count] = 16
    """windows per step, over all devices, nodes and micro-batches"""
    eval_batch_size: Count = 64
    """windows per batch in evaluation"""
    context: Usual[Count] = 128
    """tokens per window in training, for which position information is built"""
    tied: Flag = True
    """share the weights of the token embedding with the head"""
    drop_rate: ShareBelowOne = 0.0
    """dropout of the tokens before the first block, and of the outputs of attention and MLPs"""


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
        data.setup()
        return data

    def loader(self) -> Definition | None:
        """Return the registered function that loads the text of the recipe."""
        return TEXTS[self.recipe.dataset]

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


def check_lengths(model: nn.Module, lengths: Sequence[int], data: TextModule) -> None:
    """Check that a language model can be scored on `data` in windows of `lengths`, in tokens.

    Raises:
        ValueError: for a model of another kind or vocabulary, for no length, a repeated one, one below 1, or one
            longer than the held-out text, whose last positions would have no token.
    """
    if not isinstance(model, LanguageModel):
        raise ValueError(f"`model` must be a LanguageModel, got {type(model).__name__}.")
    if model.vocab_size != data.info.vocab_size:
        raise ValueError(
            f"`data` must have the vocabulary of the model, {model.vocab_size} tokens, got {data.info.vocab_size}."
        )
    if not lengths or len(set(lengths)) < len(lengths):
        raise ValueError(f"`lengths` must be different lengths, at least one, got {list(lengths)}.")
    windows: Any = data.eval_dataloader(1).dataset  # one window per token
    for length in lengths:
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"`lengths` must be whole numbers of at least 1, got {length}.")
        if length > len(windows):
            raise ValueError(f"`lengths` must be at most {len(windows)}, the number of held-out tokens, got {length}.")


def evaluate_text(
    model: Any, data: TextModule, lengths: Sequence[int], *, device: torch.device | str = "cpu", progress: bool = True
) -> list[TextScore]:
    """Score a language model on the held-out text in windows of each of `lengths`, in tokens.

    Up to the context of the model, a window gets the first rows of the position information. Beyond it, computed
    encodings follow their formula, and a table is resampled to the length on a copy of the model, as for other image
    sizes (position interpolation). Position that does not depend on tokens is computed once per length (`fold`). The
    model is unchanged afterwards. Speed and memory are those of the forward pass on a full batch, without reading.

    Reference: Extending Context Window of Large Language Models via Positional Interpolation (Chen et al., 2023), who
    interpolate rotary angles; here those are computed, and tables are interpolated.

    Raises:
        ValueError: for lengths, or a model, that `check_lengths` refuses, before any work.
    """
    lengths = list(lengths)
    check_lengths(model, lengths, data)
    was_training = model.training
    model.to(device)
    try:
        return [_score(model, data, length, device, progress) for length in lengths]
    finally:
        unfold(model).train(was_training)


def _score(
    model: LanguageModel, data: TextModule, length: int, device: torch.device | str, progress: bool
) -> TextScore:
    longer = length > model.context
    resampled = longer and bool(model.position.resampled_encodings())
    if longer:
        model = copy.deepcopy(unfold(model))
        model.set_context(length)
    model = fold(model)
    nats = torch.zeros(length, dtype=torch.float64)  # per position in a window, over all windows
    counts = torch.zeros(length, dtype=torch.int64)
    first = None
    loader, label = data.eval_dataloader(length), f"{length} tokens"
    for (inputs, targets), token_losses, _ in batch_results(
        lambda batch: token_nats(model(batch[0]), batch[1]), loader, label, device, progress
    ):
        first = inputs if first is None else first
        nats += token_losses.cpu().sum(0, dtype=torch.float64)
        counts += (targets != PADDING).sum(0)
    assert first is not None  # `check_lengths` raises if there is no whole window
    cost = inference_cost(model, first.to(device))
    bits = nats / math.log(2)
    ends = [1 << power for power in range((length - 1).bit_length())] + [length]
    bins = zip([0, *ends], ends, strict=False)  # of doubling size
    return TextScore(
        length=length,
        bits_per_byte=float(bits.sum() / counts.sum()),
        loss=float(nats.sum() / counts.sum()),
        tokens=int(counts.sum()),
        resampled=resampled,
        batch=cost.batch,
        tokens_per_second=cost.images_per_second * length,
        memory=None if cost.memory is None else cost.memory / length,
        by_place=[(start + 1, end, float(bits[start:end].sum() / counts[start:end].sum())) for start, end in bins],
    )


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of each target, (B, n), 0 where it is `PADDING`, from logits (B, n, vocab_size)."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(exact, targets.flatten(), ignore_index=PADDING, reduction="none").view_as(targets)
