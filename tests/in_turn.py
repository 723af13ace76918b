"""Many small cases in one test, since pytest's overhead per test would exceed the time of the cases."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch


def in_turn(names: str | tuple[str, ...], cases: Sequence[Any] | Callable[[Any], Sequence[Any]]) -> Any:
    """Call a test for all cases, each with the same seed, like `pytest.mark.parametrize` but in one test.

    A failure names its case. `cases` may be a function of another parameter of the test.
    """
    filled = (names,) if isinstance(names, str) else names
    of = next(iter(inspect.signature(cases).parameters)) if callable(cases) else None

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def together(**given: Any) -> None:
            found = cases(given[of]) if callable(cases) else cases
            assert found
            for case in found:
                values = dict(zip(filled, (case,) if isinstance(names, str) else case, strict=True))
                torch.default_generator.manual_seed(0)
                try:
                    test(**given, **values)
                except BaseException as error:
                    error.add_note("where " + ", ".join(f"{name} is {value!r}" for name, value in values.items()))
                    raise

        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in filled]
        together.__signature__ = signature.replace(parameters=left)
        return together

    return decorate


@contextlib.contextmanager
def case(what: object) -> Iterator[None]:
    """Name the case in errors."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case of {what}")
        raise


def refusals(
    *cases: tuple[Any, str], call: Callable[[Any], object] = lambda act: act(), error: Any = ValueError
) -> Any:
    """Return a test that the function of each case, or `call` of it, raises an error with the message of the case."""

    @in_turn(("case", "message"), cases)
    def test(case: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            call(case)

    return test
