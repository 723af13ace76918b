"""Fuzzing: values and edits to draw, limits per input, and allowed outcomes.

Tests draw the same few inputs each time. The environment variable GRATICULE_FUZZ multiplies their number, and with
GRATICULE_FUZZ_SEED they draw others.
"""

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

#: Any JSON value, including unusual numbers.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 1e300, float("inf"), float("nan"), -0.5]),
    st.sampled_from([2**16, 2**20, 10**9, 10**400, 4e7, 1e-300]),
    st.sampled_from(["", "0", "a\nb", "\x1b[31m", "../..", "/dev/zero", "\x00", "\udcff", "true"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=6,
)


def fuzzed(cases: int, *drawn: Any, **named: Any) -> Any:
    """Decorate a test of `cases` inputs, drawn from strategies, the same each time unless a seed is given."""
    number = os.environ.get("GRATICULE_FUZZ_SEED")

    def decorate(test: Any) -> Any:
        fuzz = given(*drawn, **named)(test)
        fuzz.hypothesis.inner_test = _limited(test)
        fuzz = settings(
            max_examples=cases * int(os.environ.get("GRATICULE_FUZZ", 1)),
            derandomize=number is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(fuzz)
        return fuzz if number is None else seed(int(number))(fuzz)

    return decorate


class Hung(BaseException):
    """Raised when an input takes too long; no code under test catches it."""


def _limited(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test whose inputs take at most 120 s each."""

    def stop(*_: Any) -> None:
        raise Hung("more than 120 s")

    def case(**arguments: Any) -> None:
        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(120)
        try:
            test(**arguments)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return case


def outcome(call: Callable[[], Any], *, names: str, allowed: tuple[type[Exception], ...] = (ValueError,)) -> Any:
    """Return the result of `call`, or its error if that is `allowed` and its message contains `names`; else raise."""
    with warnings.catch_warnings():
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


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """Replace the content of a file within the block, which must not change it."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
        assert path.read_bytes() == content
    finally:
        path.write_bytes(before)


def places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths to all values within `values`."""
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@st.composite
def changed(draw: Any, values: Any, new: Any = JSON) -> Any:
    """Replace or remove a value somewhere in `values`, or add one next to it."""
    *way, last = draw(st.sampled_from([place for place in places(values) if place]))
    values = json.loads(json.dumps(values))
    within = values
    for key in way:
        within = within[key]
    action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    if action == "remove":
        del within[last]
    elif action == "add" and isinstance(within, dict):
        within[draw(st.sampled_from(["new", "\x1b", ""])) + str(last)] = draw(new)
    else:
        within[last] = draw(new)
    return values


@st.composite
def altered(draw: Any, path: Path, new: Any = JSON, header: int = 400) -> bytes:
    """Draw other content for a file: other bytes, or another value if it is JSON."""
    content = path.read_bytes()
    if path.suffix == ".json" and draw(st.integers(0, 3)):
        return json.dumps(draw(changed(json.loads(content), new))).encode()
    return draw(edited(content, len(content) if path.suffix == ".json" else header))
