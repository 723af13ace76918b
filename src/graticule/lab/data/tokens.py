"""Lossless tokenizers of text: their interface, bytes, and byte pairs learned from the training text."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from graticule.registry.checks import install
from graticule.registry.fields import check_value
from graticule.system.files import read_json, write_text

#: Limits on the bytes of all tokens together and on the number of tokens; GPT-2's 50,257 have 0.3 million bytes.
_LARGEST, _MOST = 1 << 26, 1 << 20


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
    """Check that `tokenizer` is the one that `source`, a checkpoint or a run, was made with."""
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(
            f"`tokenizer` must have the vocabulary of {source}, {fingerprint}, got {tokenizer.fingerprint}: the "
            "numbers would mean other text."
        )


def vocabulary_hash(merges: Sequence[tuple[int, int]]) -> str:
    """Return a hash of the merged pairs of tokens, which are none for the byte tokenizer."""
    return hashlib.sha256(json.dumps([list(pair) for pair in merges]).encode()).hexdigest()[:12]


_Token = Annotated[int, Field(strict=True)]


class _Saved(TypedDict):
    """The contents of a file of a tokenizer."""

    format: Literal["graticule byte pairs, 1"]
    fingerprint: str
    merges: list[tuple[_Token, _Token]]


class BytePairTokenizer(Tokenizer):
    """Byte-pair encoding: merges the pairs of tokens that were most frequent in training, within words, in their order.

    Text is split into words as in GPT-2. Unlike in the library `tokenizers`, the number of a token follows from the
    merges alone, so only the merges are saved.

    Reference: Neural Machine Translation of Rare Words with Subword Units (Sennrich et al., 2016); on bytes, Language
    Models are Unsupervised Multitask Learners (Radford et al., 2019).

    Args:
        merges: pairs of tokens, each of which is a byte or the result of an earlier pair.

    Raises:
        ValueError: for a pair of tokens that do not exist yet, or that exists already.
        ImportError: if the library `tokenizers` is not installed.
    """

    name = "bpe"

    def __init__(self, merges: Sequence[tuple[int, int]]) -> None:
        tokenizers = _library()
        numbers = {bytes([byte]): byte for byte in range(256)}
        vocabulary = list(numbers)
        size = 0
        for place, (left, right) in enumerate(merges):
            if not (0 <= left < len(vocabulary) and 0 <= right < len(vocabulary)):
                raise ValueError(
                    f"`merges` must be pairs of earlier tokens, 0 to {len(vocabulary) - 1}, got {(left, right)} at "
                    f"index {place}."
                )
            size += len(vocabulary[left]) + len(vocabulary[right])
            if size > _LARGEST:  # each merge can double the length
                raise ValueError(
                    f"`merges` must make tokens of at most {_LARGEST:,} bytes in all, got more at index {place}."
                )
            joined = vocabulary[left] + vocabulary[right]
            if joined not in numbers:  # "a" + "bc" may exist as "ab" + "c"
                numbers[joined] = len(vocabulary)
                vocabulary.append(joined)
        if len(set(merges)) < len(merges):
            raise ValueError(f"`merges` must be different pairs, got {len(merges) - len(set(merges))} twice.")
        super().__init__(vocabulary)
        self.merges = tuple(merges)
        spelled = [_spell(token) for token in vocabulary]
        model = tokenizers.models.BPE(
            {spelling: number for number, spelling in enumerate(spelled)},
            [(spelled[left], spelled[right]) for left, right in merges],
        )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)

    @classmethod
    def train(cls, texts: Sequence[str], vocab_size: int) -> BytePairTokenizer:
        """Learn `vocab_size` tokens, including the bytes and the end of a document, from `texts`; deterministic.

        Raises:
            ValueError: if `vocab_size` is below 257, or more than the texts give.
            ImportError: if the library `tokenizers` is not installed.
        """
        if not 257 <= vocab_size <= _MOST:
            raise ValueError(
                f"`vocab_size` must be from 257, the bytes and the end of a text, to {_MOST:,}, got {vocab_size}."
            )
        tokenizers = _library()
        learning = tokenizers.Tokenizer(tokenizers.models.BPE())
        learning.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=sorted(_ALPHABET),
            show_progress=False,
        )
        learning.train_from_iterator(texts, trainer)
        numbers = {_spell(bytes([byte])): byte for byte in range(256)}
        merges = []
        for left, right in json.loads(learning.to_str())["model"]["merges"]:
            merges.append((numbers[left], numbers[right]))
            numbers.setdefault(left + right, len(numbers))
        found = cls(merges)
        if found.vocab_size < vocab_size:
            raise ValueError(
                f"`vocab_size` must be at most what the training text gives, {found.vocab_size}, got {vocab_size}."
            )
        return found

    @classmethod
    def load(cls, path: str | Path) -> BytePairTokenizer:
        """Load a tokenizer that `save` wrote.

        Raises:
            FileNotFoundError: if `path` does not exist.
            ValueError: if it is another kind of file, or damaged.
            ImportError: if the library `tokenizers` is not installed.
        """
        where = f"`tokenizer` must be a saved tokenizer, got {str(path)!r}"
        try:
            values: _Saved = check_value(_Saved, read_json(Path(path)), where)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"`tokenizer` must be the file of a saved tokenizer, got {str(path)!r}, which does not exist."
            ) from None
        try:
            found = cls(values["merges"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        check_vocabulary(found, values["fingerprint"], str(path))
        return found

    def save(self, path: str | Path) -> Path:
        """Write the merges as JSON to `path`, whole or not at all; returns `path`."""
        values = {"format": "graticule byte pairs, 1", "fingerprint": self.fingerprint, "merges": self.merges}
        return write_text(Path(path), json.dumps(values) + "\n")

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, (n,)."""
        text.encode("utf-8")  # a clear error for text that UTF-8 cannot encode; the library gives none
        return np.asarray(self._tokenizer.encode(text).ids, dtype=np.int64)

    def _digest(self) -> str:
        return vocabulary_hash(self.merges)


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers  # version 1 has none
    except ImportError as error:
        raise ImportError(
            f"`tokenizer` bpe needs the library tokenizers, below version 1 ({error}): {install('text')}."
        ) from None
    return tokenizers


def _alphabet() -> str:
    """Return the character that represents each byte in the spelling of tokens, as in GPT-2.

    A printable byte is represented by itself, the others by the characters from 256 on.
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printed else next(others)) for byte in range(256))


_ALPHABET = _alphabet()


def _spell(token: bytes) -> str:
    return "".join(_ALPHABET[byte] for byte in token)
