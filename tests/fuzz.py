"""Helpers of the fuzzing tests: number of cases, a time limit per case, edits of files, and allowed outcomes.

The cases are the same each time. The environment variable GRATICULE_FUZZ multiplies their number: GRATICULE_FUZZ=100.
"""

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: Any JSON value, including unusual numbers.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 1e300, float("inf"), float("nan"), -0.5]),
    st.sampled_from(["", "0", "a\nb", "\x1b[31m", "../..", "/dev/zero", "\x00", "\udcff", "true"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=6,
)


def fuzzed(cases: int) -> Any:
    """Return the settings of a test of `cases` cases, the same each time."""
    return settings(
        max_examples=cases * int(os.environ.get("GRATICULE_FUZZ", 1)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Hung(BaseException):
    """Raised when a case takes too long; no code under test catches it."""


@contextmanager
def limit(seconds: float = 10.0) -> Any:
    """Limit a case to `seconds`."""

    def stop(*_: Any) -> None:
        raise Hung(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(call: Callable[[], Any], *, names: str, allowed: tuple[type[Exception], ...] = (ValueError,)) -> Any:
    """Return the result of `call`, or its error if that is `allowed` and its message contains `names`; else raise."""
    with limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries, such as Pillow's on unknown tags
        try:
            return call()
        except allowed as error:
            assert names in str(error), f"{error!r} does not name {names}"
            return error


def tree(folder: Path) -> dict[str, bytes]:
    """Read every file below `folder`, to check later that none has changed."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@st.composite
def edited(draw: Any, content: bytes, header: int = 64) -> bytes:
    """Draw `content` with one to six pieces replaced, removed, inserted or cut, mostly in the first `header` bytes."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 6))):
        last = max(len(changed) - 1, 0)
        place = draw(st.one_of(st.integers(0, min(header, last)), st.integers(0, last)))
        kind = draw(st.sampled_from(["byte", "edge", "insert", "remove", "cut"]))
        if kind == "byte":
            changed[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "edge":
            changed[place : place + 4] = draw(st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"9999"]))
        elif kind == "insert":
            changed[place:place] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "remove":
            del changed[place : place + draw(st.integers(1, 8))]
        elif draw(st.integers(0, 3)) == 0:
            del changed[place:]
    return bytes(changed)
