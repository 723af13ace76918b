"""Pickles of byte arrays, the format of CIFAR, read without importing or running anything that they name."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from graticule.files import read_bytes

#: Largest pickle in bytes; the training images of CIFAR-100 take 155 million.
_LARGEST = 1 << 30
#: Most tuples in a pickle: hashing nested tuples recurses as deep as they are nested; an array needs five.
_MOST_TUPLES = 10_000
#: Errors that a damaged pickle raises.
_DAMAGED = (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError, OverflowError)


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of plain values and arrays of bytes; byte strings in it, Python 2's text, become `str`.

    Raises:
        FileNotFoundError: if it does not exist.
        ValueError: if it is not a regular file, is too large or damaged, contains other types, or would run code.
    """
    content = read_bytes(path, _LARGEST)
    try:
        _check_sizes(content)
        values = _ArraysOnly(content).load()
        if not isinstance(values, dict):
            raise ValueError(f"it must contain a dictionary, got {type(values).__name__}")
        return {_plain(key): _plain(value) for key, value in values.items()}
    except _ForbiddenError as error:
        raise ValueError(f"{path} must contain plain values only, but imports {error}; it was not read.") from None
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged, or no batch of images ({type(error).__name__}: {error}).") from None


def _check_sizes(content: bytes) -> None:
    """Check that no size in a pickle exceeds the pickle itself, since that much memory would be allocated at once."""
    tuples = 0
    for operation, value, _ in pickletools.genops(content):  # `genops` checks the lengths of strings
        tuples += operation.name.startswith("TUPLE")
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(value, int) and value > len(content):
            raise ValueError(f"it has a memo of {value} values")
    if tuples > _MOST_TUPLES:
        raise ValueError(f"it must have at most {_MOST_TUPLES:,} tuples, got {tuples:,}")


def _plain(value: object) -> Any:
    if isinstance(value, _Array):
        return value.array
    if isinstance(value, list):
        return [part.decode() if isinstance(part, bytes) else part for part in value]
    return value.decode() if isinstance(value, bytes) else value


class _ForbiddenError(Exception):
    pass


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of NumPy arrays, by the old and new names of their parts; it imports nothing, not even NumPy's code."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.left = len(content)  # limit for the text that is encoded to bytes

    def find_class(self, module: str, name: str) -> _Named:
        known = [("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")]
        for core in ("numpy.core", "numpy._core"):
            known += [(f"{core}.multiarray", "_reconstruct"), (f"{core}.numeric", "_frombuffer")]
        if (module, name) not in known:
            raise _ForbiddenError(f"{module}.{name}")
        return _Named(name, self)


class _Named:
    """A function or a type that a pickle names; only calls that make a byte array, or bytes, are allowed."""

    __slots__ = ("name", "reader")

    def __init__(self, name: str, reader: _ArraysOnly) -> None:
        self.name = name
        self.reader = reader

    def __call__(self, *given: Any) -> Any:
        match self.name, given:
            case "dtype", ("u1" | b"u1", *_):
                return _Named("u1", self.reader)
            case "_reconstruct", _:
                return _Array()
            case "_frombuffer", (bytes() | bytearray() as content, _Named(name="u1"), shape, "C" | "F" as order):
                return _Array().fill(content, shape, order)
            case "encode", (str(text), "latin1") if len(text) <= self.reader.left:
                self.reader.left -= len(text)
                return text.encode("latin1")
        raise ValueError(f"{self.name} of something else than bytes")

    def __setstate__(self, state: object) -> None:
        """Ignore the state of a dtype: single bytes have no byte order."""


class _Array:
    """A byte array that is filled from its pickled state."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array = np.empty(0, np.uint8)

    def fill(self, content: bytes | bytearray, shape: Any, order: Any) -> _Array:
        whole = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if not whole or len(shape) > 4 or math.prod(shape) != len(content):
            raise ValueError(f"an array of shape {str(shape)[:80]} has {len(content):,} bytes")
        self.array = np.frombuffer(content, np.uint8).reshape(shape, order=order)
        return self

    def __setstate__(self, state: object) -> None:
        match state:
            case (_, shape, _Named(name="u1"), fortran, bytes(content)):
                self.fill(content, shape, "F" if fortran else "C")
            case _:
                raise ValueError("an array of something else than bytes")
