"""The code and links of README and docs are valid."""

import re
import tomllib
from pathlib import Path

import graticule

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")


def test_each_door_has_an_image_and_code_of_five_lines_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    doors = re.findall(r"^## (A .*?)\n(.*?)(?=^## )", README, flags=re.DOTALL | re.MULTILINE)
    assert [name for name, _ in doors] == ["A model of your own", "A model that you have", "A question"]
    for name, text in doors:
        (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert len([line for line in block.splitlines() if line]) <= 5
        assert len(re.findall(r"!\[[^]]+\]", text)) == 1 and "\n    graticule " in text
        exec(compile(block, f"README.md: {name}", "exec"), {})
    assert README.count("```python") == len(doors)


def test_it_fits_a_screen_and_a_half():
    assert len(README.splitlines()) <= 110


def test_its_table_of_extras_names_every_one():
    extras = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert re.findall(r"^\| `(\w+)` \| [^|]+ \|$", README, flags=re.MULTILINE) == [
        extra for extra in extras if extra != "dev"
    ]


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
