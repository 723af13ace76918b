"""Examples in docstrings have the shown results."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
WITH_EXAMPLES = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_of_a_module_give_what_they_show(path):
    module = import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed
