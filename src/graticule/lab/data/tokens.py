"""Lossless tokenizers of text: their interface, and the tokenizer of bytes."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import ClassVar

import numpy as np


class Tokenizer(ABC):
    """Interface of tokenizers: text to tokens and back; the last token of the vocabulary ends a document.

    Tokens 0 to 255 are the bytes of UTF-8. No text encodes to the end of a document.

    Attributes:
        vocabulary: the bytes of every token except the last.
        lengths: (vocab_size,), the number of bytes of each token, for bits per byte. The end of a document counts as
            one with every tokenizer, since it must be predicted, as a byte that ends a string must be.
    """

    name: ClassVar[str]

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self.vocabulary = tuple(vocabulary)
        self.lengths = np.asarray([*map(len, vocabulary), 1])

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, including the one that ends a document."""
        return len(self.vocabulary) + 1

    @property
    def end(self) -> int:
        """The token that ends a document."""
        return len(self.vocabulary)

    @property
    def fingerprint(self) -> str:
        """Return an identifier of the vocabulary: its kind, its size, and a hash of its rules."""
        return f"{self.name}-{self.vocab_size}-{self._digest()}"

    def bytes_of(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Return the number of bytes of `tokens`."""
        return int(self.lengths[np.asarray(tokens, dtype=np.int64)].sum())

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; bytes that are not UTF-8, which a model can produce, become "\\ufffd".

        The end of a document adds no text.

        Raises:
            ValueError: for a token that is not in the vocabulary.
        """
        pieces = []
        for token in map(int, tokens):
            if not 0 <= token <= self.end:
                raise ValueError(f"`tokens` must be from 0 to {self.end}, got {token}.")
            pieces.append(self.vocabulary[token] if token < self.end else b"")
        return b"".join(pieces).decode("utf-8", errors="replace")

    def stream(self, texts: Iterable[str]) -> np.ndarray:
        """Return the tokens of all `texts`, each followed by the end of a document: (n,), of the smallest dtype."""
        kind = np.uint16 if self.vocab_size <= 2**16 else np.int32
        end = np.asarray([self.end])
        parts = chain.from_iterable((self.encode(text), end) for text in texts)
        return np.concatenate([np.empty(0, kind), *(part.astype(kind) for part in parts)])

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, (n,), without the end of a document.

        Raises:
            UnicodeEncodeError: if UTF-8 cannot encode it, such as half of a surrogate pair.
        """

    @abstractmethod
    def _digest(self) -> str:
        """Return a hash of all rules by which text is tokenized."""


class ByteTokenizer(Tokenizer):
    """One token per byte: 256, and one that ends a document.

    Reference: ByT5 (Xue et al., 2022), without its three special tokens at the start.
    """

    name = "bytes"

    def __init__(self) -> None:
        super().__init__([bytes([byte]) for byte in range(256)])

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, (n,)."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def _digest(self) -> str:
        return vocabulary_hash([])


def check_vocabulary(tokenizer: Tokenizer, fingerprint: str, source: str) -> None:
    """Check that `tokenizer` is the one that `source`, a checkpoint or a run, was made with.

    Raises:
        ValueError: with both fingerprints, if it is not.
    """
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(
            f"`tokenizer` must have the vocabulary of {source}, {fingerprint}, got {tokenizer.fingerprint}: the "
            "numbers would mean other text."
        )


def vocabulary_hash(merges: Sequence[tuple[int, int]]) -> str:
    """Return a hash of the merged pairs of tokens, which are none for the byte tokenizer."""
    return hashlib.sha256(json.dumps([list(pair) for pair in merges]).encode()).hexdigest()[:12]
