"""Bits per byte and cost of a language model at any length, including those that it was not trained at."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.backbones.language import LanguageModel
from graticule.lab.data.sampling import PADDING
from graticule.lab.data.text_module import TextModule
from graticule.lab.training.cost import inference_cost
from graticule.lab.training.validation import batch_results
from graticule.surgery.fold import fold, unfold


@dataclass(frozen=True)
class TextScore:
    """Scores and cost of a language model in windows of one length, in tokens.

    bits_per_byte: of the whole held-out text, whose number of bytes is the same at every length; loss: nats per token;
        tokens: number of predicted tokens.
    resampled: whether a table was resampled, for a length beyond the context of the model.
    batch, tokens_per_second, memory: of inference only, on `batch` windows; memory in bytes per token (`Cost`).
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
    memory: float
    by_place: list[tuple[int, int, float]]


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
            raise ValueError(
                f"`lengths` must be at most {len(windows)}, the number of held-out tokens, for at least one "
                f"whole window, got {length}."
            )


@torch.inference_mode()
def evaluate_text(
    model: Any,
    data: TextModule,
    lengths: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
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
    resampled = length > model.context and bool(model.position.resampled_encodings())
    model = _at_length(model, length)
    nats = torch.zeros(length, dtype=torch.float64)  # per position in a window, over all windows
    num_bytes = torch.zeros(length, dtype=torch.int64)
    sizes = torch.as_tensor(data.tokenizer.lengths)
    tokens, first = 0, None
    loader, label = data.eval_dataloader(length), f"{length} tokens"
    for (inputs, targets), found, _ in batch_results(
        lambda batch: token_nats(model(batch[0]), batch[1]), loader, label, device, progress
    ):
        first = inputs if first is None else first
        nats += found.cpu().sum(0, dtype=torch.float64)
        counted = targets != PADDING
        num_bytes += (sizes[targets.masked_fill(~counted, 0)] * counted).sum(0)
        tokens += int(counted.sum())
    assert first is not None  # `check_lengths` raises if there is no whole window
    cost = inference_cost(model, first.to(device))
    bits = nats / math.log(2)
    return TextScore(
        length=length,
        bits_per_byte=float(bits.sum() / num_bytes.sum()),
        loss=float(nats.sum() / tokens),
        tokens=tokens,
        resampled=resampled,
        batch=cost.batch,
        tokens_per_second=cost.images_per_second * length,
        memory=cost.memory / length,
        by_place=[
            (begin, end, float(bits[begin - 1 : end].sum() / num_bytes[begin - 1 : end].sum()))
            for begin, end in _doubling(length)
        ],
    )


def _at_length(model: LanguageModel, length: int) -> LanguageModel:
    """Return `model`, or beyond its context a copy for `length` tokens, with folded position."""
    if length > model.context:
        model = copy.deepcopy(unfold(model))
        model.set_context(length)
    return fold(model)


def _doubling(length: int) -> list[tuple[int, int]]:
    """Split the positions 1 to `length` into bins of doubling size, (first, last) each."""
    ends = [1 << power for power in range((length - 1).bit_length())] + [length]
    return list(zip([1, *(end + 1 for end in ends)], ends, strict=False))


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of each target, (B, n), 0 where it is `PADDING`, from logits (B, n, vocab_size)."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(exact, targets.flatten(), ignore_index=PADDING, reduction="none").view_as(targets)
