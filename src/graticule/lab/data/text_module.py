"""A text, its tokens and its windows, as loaders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graticule.lab.data.images import Split, fingerprint
from graticule.lab.data.sampling import Batches, BatchIndices, TaskData
from graticule.lab.data.sets.texts import load_text

#: The target of an input that has none, which is neither learned nor scored.
PADDING = -1
#: Separates the offset from the order of an epoch, which is drawn from (seed, epoch).
_OFFSETS = 1


class ByteTokenizer:
    """One token per byte of UTF-8, 0 to 255, and one, `end`, that ends a document.

    Reference: ByT5 (Xue et al., 2022), without its three special tokens at the start.

    Attributes:
        fingerprint: identifies the vocabulary in the files of a run.
    """

    vocab_size = 257
    end = 256
    fingerprint = "bytes-257-4f53cda18c2b"

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, (n,), without the end of a document.

        Raises:
            UnicodeEncodeError: if UTF-8 cannot encode it, such as half of a surrogate pair.
        """
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; bytes that are not UTF-8, which a model can produce, become "\\ufffd".

        The end of a document adds no text.
        """
        numbers = [int(token) for token in tokens]
        for token in numbers:
            if not 0 <= token <= self.end:
                raise ValueError(f"`tokens` must be from 0 to {self.end}, got {token}.")
        return bytes(token for token in numbers if token < self.end).decode("utf-8", errors="replace")

    def stream(self, texts: Iterable[str]) -> np.ndarray:
        """Return the tokens of all `texts`, each followed by the end of a document: (n,), uint16."""
        parts = [np.append(self.encode(text), self.end) for text in texts]
        return np.concatenate([np.empty(0), *parts]).astype(np.uint16)


class TextWindows(Batches):
    """Training windows of one stream of tokens, which wraps around.

    Window i of an epoch begins at i * context + offset, where the offset is a position in the stream, drawn from seed
    and epoch. So windows do not overlap, and an epoch leaves out fewer than `context` tokens, different ones each time.
    A window may extend into the next document, after the token that ends the first.

    Args:
        tokens: (n,), all documents, each with the token that ends it.
        context: tokens per window.
        seed: seed of the offsets.
    """

    def __init__(self, tokens: np.ndarray, context: int, seed: int) -> None:
        if len(tokens) < context:
            raise ValueError(f"`context` must not exceed the number of training tokens, {len(tokens)}, got {context}.")
        self.tokens, self.context, self.seed = tokens, context, seed

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, batch: BatchIndices) -> tuple[Tensor, Tensor]:
        """Return the inputs (B, context) of a batch, and the targets (B, context), shifted by one token."""
        offset = np.random.SeedSequence([self.seed, batch.epoch or 0, _OFFSETS]).generate_state(1, np.uint64)[0]
        begins = batch.indices * self.context + int(offset) % len(self.tokens)
        windows = torch.from_numpy(self.tokens[(begins[:, None] + np.arange(self.context + 1)) % len(self.tokens)])
        return windows[:, :-1].long(), windows[:, 1:].long()


class EvaluationWindows(Batches):
    """Held-out text, split into windows that do not overlap; each token sees only its own window.

    The stream begins with a token that ends a document, which is never a target. Every other token is the target of
    one window: the bytes of the text, and one more per document. Bits per byte are the sum of the nats of all targets /
    ln 2 / their number. The last window, if it is shorter, is padded at its end, with targets `PADDING`.

    Args:
        tokens: (n,), all documents, each with the token that ends it.
        length: targets per window.
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        if not len(tokens):
            raise ValueError("`tokens` must be at least 1, got none.")
        windows = -(-len(tokens) // length)
        stream = torch.from_numpy(tokens.astype(np.int64))
        self._targets = torch.full((windows, length), PADDING)
        self._targets.view(-1)[: len(tokens)] = stream
        self._inputs = torch.full((windows, length), ByteTokenizer.end)
        self._inputs.view(-1)[1 : len(tokens)] = stream[:-1]

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, batch: BatchIndices) -> tuple[Tensor, Tensor]:
        """Return the inputs (B, length) of a batch, and its targets (B, length)."""
        return self._inputs[batch.indices], self._targets[batch.indices]


@dataclass(eq=False, repr=False)
class TextModule(TaskData):
    """The batches of a text for training and evaluation.

    Args:
        dataset: pydoc or text_file.
        root: the text file.
        context: tokens per window.
        batch_size: windows per training batch.
        eval_batch_size: windows per batch in evaluation.
        seed: seed of order and offsets of the windows.
        limit_train: use only this many windows from the beginning of the training text.
        limit_test: use only this many windows from the beginning of the held-out text.
    """

    dataset: str = "pydoc"
    _: KW_ONLY
    root: str | Path | None = None
    context: int = 128
    batch_size: int = 64
    eval_batch_size: int = 256
    seed: int = 0
    limit_train: int | None = None
    limit_test: int | None = None

    tokenizer = ByteTokenizer()

    def __post_init__(self) -> None:
        self.size = self.context
        self._tokens: dict[Split, np.ndarray] = {}
        for split, documents in load_text(self.dataset, self.root).items():
            limit = {"train": self.limit_train, "test": self.limit_test}[split]
            self._tokens[split] = self.tokenizer.stream(documents)[: limit and limit * self.context]
        self._train = TextWindows(self._tokens["train"], self.context, self.seed)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number and a hash of the tokens of each split, which tell whether they are the same."""
        return {split: fingerprint(len(tokens), [tokens]) for split, tokens in self._tokens.items()}

    def num_bytes(self, split: Split) -> int:
        """Return the number of bytes of a split; for "test", the denominator of bits per byte."""
        return len(self._tokens[split])

    def train_batches(self) -> Batches:
        """Return inputs (B, context) and targets (B, context), different in each epoch."""
        return self._train

    def eval_batches(self, size: int) -> Batches:
        """Return the held-out text in windows of `size` tokens: inputs and targets (B, size)."""
        return EvaluationWindows(self._tokens["test"], size)
