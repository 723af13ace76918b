"""The metadata of the package is correct and consistent everywhere."""

import re
import tomllib
from pathlib import Path

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
    named = [one.removeprefix("Programming Language :: Python :: 3.") for one in PROJECT["classifiers"]]
    assert [int(one) for one in named if one.isdigit()] == list(range(lowest, highest))


def test_every_extra_but_those_of_tools_is_installed_for_development():
    extras = PROJECT["optional-dependencies"]
    assert list(extras) == ["lab", "transformers", "text", "export", "cluster", "docs", "dev"]
    assert "graticule[lab]" in extras["dev"]
    for name in ("transformers", "text", "export", "cluster"):
        assert set(extras[name]) <= set(extras["dev"]), name


def test_the_files_that_the_package_names_exist():
    for name in (PROJECT["readme"], *PROJECT["license-files"], "src/graticule/py.typed"):
        assert (TOP / name).is_file(), name
