"""What a training run of a language model is made of, as one plain dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graticule.metric import BITS_PER_BYTE, Metric
from graticule.training.recipe import TrainingRecipe
from graticule.typed import Count, Flag, ShareBelowOne


@dataclass(frozen=True)
class TextRecipe(TrainingRecipe):
    """A training run of a language model: every value that decides its result is here, and a run folder keeps it.

    Lengths are in tokens; rates are per step; epochs count passes over the training text.
    """

    task: ClassVar[str] = "language"
    metric: ClassVar[Metric] = BITS_PER_BYTE

    model: str = "lm_tiny"
    """language model, one of `graticule models`"""
    dataset: str = "pydoc"
    """text, one of pydoc, text_folder"""
    limit_train: Count | None = None
    """train on so many windows from the beginning of the text only"""
    limit_test: Count | None = None
    """test on so many windows from the beginning of the held-out text only"""
    batch_size: Count = 16
    """windows a step, over all devices, nodes and accumulated parts"""
    eval_batch_size: Count = 64
    """windows a batch in evaluation"""
    context: Count = 128
    """tokens a window in training, for which position information is held"""
    tokenizer: str = "bytes"
    """bytes, bpe (byte pairs learned from the training text), or the file of a saved one"""
    vocab_size: Count | None = None
    """tokens of bpe"""
    tied: Flag = True
    """whether the head has the weights of the token embedding"""
    drop_rate: ShareBelowOne = 0.0
    """dropout on the tokens that enter the first block, and on what attention and MLPs put out"""
