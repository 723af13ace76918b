"""Windows of text: in an epoch, each token is a target about once; in an evaluation, exactly once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from graticule.data.sampling import PADDING, Key
from graticule.data.tokens import Tokenizer

#: Separates the offset from the order of an epoch, which is drawn from (seed, epoch).
_OFFSETS = 1


class TextWindows(Dataset[tuple[Tensor, Tensor]]):
    """Training windows of one stream of tokens, which wraps around.

    Window i of an epoch begins at i * context + offset, where the offset is a position in the stream, drawn from seed
    and epoch. So windows do not overlap, an epoch leaves out fewer than `context` tokens, different ones each time, and
    windows do not depend on the process or the worker. A window may extend into the next document, after the token that
    ends the first.

    Keys are those of `EpochSampler`.

    Args:
        tokens: (n,), all documents, each with the token that ends it.
        context: tokens per window.
        seed: seed of the offsets.
    """

    def __init__(self, tokens: np.ndarray, context: int, seed: int) -> None:
        if context < 1:
            raise ValueError(f"`context` must be at least 1, got {context}.")
        if len(tokens) < context:
            raise ValueError(f"`context` must not exceed the number of training tokens, {len(tokens)}, got {context}.")
        self.tokens = tokens
        self.context = context
        self.seed = seed

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def offset(self, epoch: int) -> int:
        """Return the start of the first window of an epoch."""
        drawn = np.random.SeedSequence([self.seed, epoch, _OFFSETS]).generate_state(1, np.uint64)[0]
        return int(drawn) % len(self.tokens)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([key])
        return inputs[0], targets[0]

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """Return the inputs (B, context) of a whole batch, and the targets (B, context), shifted by one token."""
        offsets = {epoch: self.offset(epoch) for epoch in {key[0] for key in keys}}
        begins = np.asarray([key[1] * self.context + offsets[key[0]] for key in keys])
        places = (begins[:, None] + np.arange(self.context + 1)) % len(self.tokens)
        windows = torch.from_numpy(self.tokens[places].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


class EvaluationWindows(Dataset[tuple[Tensor, Tensor]]):
    """Held-out text, split into windows that do not overlap; each token sees only its own window.

    The stream begins with a token that ends a document, which is never a target. Every other token is the target of
    one window, and their bytes, `num_bytes`, are the same at every length and with every tokenizer: the bytes of the
    text, and one more per document. Bits per byte are the sum of the nats of all targets / ln 2 / num_bytes.

    The last window, if it is shorter, is padded at its end, with targets `PADDING`. The index -1 - i gives window i
    without any target, for the padding of `EvaluationOrder`.

    Args:
        tokens: (n,), all documents, each with the token that ends it.
        length: targets per window.
        tokenizer: the tokenizer of `tokens`.
    """

    def __init__(self, tokens: np.ndarray, length: int, tokenizer: Tokenizer) -> None:
        if length < 1:
            raise ValueError(f"`length` must be at least 1, got {length}.")
        if not len(tokens):
            raise ValueError("`tokens` must be at least 1, got none.")
        self.length = length
        self.num_bytes = tokenizer.bytes_of(tokens)
        windows = -(-len(tokens) // length)
        self._targets = np.full(windows * length, PADDING, dtype=np.int64)
        self._targets[: len(tokens)] = tokens
        self._inputs = np.full(windows * length, tokenizer.end, dtype=np.int64)
        self._inputs[1 : len(tokens)] = tokens[:-1]

    def __len__(self) -> int:
        return len(self._targets) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the inputs (B, length) of a whole batch, and its targets (B, length)."""
        numbers = torch.as_tensor(indices)
        repeated = numbers < 0
        numbers = torch.where(repeated, -1 - numbers, numbers)
        inputs = torch.from_numpy(self._inputs).view(-1, self.length)[numbers]
        targets = torch.from_numpy(self._targets).view(-1, self.length)[numbers]
        return inputs, targets.masked_fill(repeated[:, None], PADDING)
