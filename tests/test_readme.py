"""The code and links of README and docs are valid."""

import re
import tomllib
from pathlib import Path

import pytest
import timm

import graticule
from test_printed_commands import image, tiny

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")
DOORS = dict(re.findall(r"^## (A .*?)\n(.*?)(?=^## )", README, flags=re.DOTALL | re.MULTILINE))


def test_it_begins_with_a_pretrained_model():
    assert list(DOORS) == ["A model that you have", "A model of your own", "A question"]


@pytest.mark.parametrize("door", DOORS)
def test_the_code_of_a_door_runs_and_its_table_has_the_rows_of_the_page(door, tmp_path, monkeypatch, capsys):
    """The first with a small encoder of random weights and noise, the last with 2 of 400 steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timm, "create_model", tiny(timm.create_model))
    Path("FOLDER").mkdir()
    for index in range(9):
        image(index).save(f"FOLDER/{index}.jpg")
    (code,) = re.findall(r"```python\n(.*?)```", DOORS[door], flags=re.DOTALL)
    code = re.sub(', "checkpoint_path": [^}]*', "", code).replace("168", "56").replace("252", "84")
    code = code.replace("=name)", "=name, steps=2, test=8)")
    exec(compile(code, f"README.md: {door}", "exec"), {})
    names = {re.split(r" {2,}| \|", line)[0] for line in capsys.readouterr().out.splitlines()[3:]}
    assert bool(names) == (door != "A model of your own")
    assert all(re.search(rf"^( {{4}})?{re.escape(name)} ", DOORS[door], re.MULTILINE) for name in names)


def test_it_fits_a_screen_and_a_half():
    assert len(README.splitlines()) <= 120


def test_it_names_every_extra():
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [name for name in project["optional-dependencies"] if f"`{name}`" not in README] == ["dev"]


def test_the_table_of_joinings_names_every_one():
    page = (TOP / "docs" / "encodings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page.partition("## Joinings")[2].partition("\n## ")[0], flags=re.MULTILINE)
    assert rows == graticule.list_joinings()


def test_every_file_that_a_page_points_to_is_there():
    """Except those that `make docs` generates, which tests the links of the whole site."""
    generated = ("gallery/", "api/", "commands/")
    for path in (TOP / "README.md", TOP / "CONTRIBUTING.md", *(TOP / "docs").glob("*.md")):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        links = [
            link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "#", *generated))
        ]
        missing = [link for link in links if not (path.parent / link.partition("#")[0]).exists()]
        assert not missing, f"{path.name}: {missing}"
