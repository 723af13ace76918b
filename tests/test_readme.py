"""The code, commands and links of README and docs are valid."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

import graticule
from graticule.lab.cli import main
from graticule.lab.commands import options
from graticule.lab.recipes.load import list_recipes

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")
#: Pages for users, in which a line of four spaces and `graticule` is a command.
PAGES = [README, *(path.read_text(encoding="utf-8") for path in sorted((TOP / "docs").glob("*.md")))]
COMMANDS = [line for page in PAGES for line in re.findall(r"^    (graticule .*)", page, flags=re.MULTILINE)]


def test_each_door_has_a_picture_and_code_of_five_lines_that_runs(tmp_path, monkeypatch):
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
        one for one in extras if one != "dev"
    ]


def test_the_table_of_joinings_names_every_one():
    page = (TOP / "docs" / "joinings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
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


def test_every_recipe_in_a_command_exists():
    named = {match[1] for line in COMMANDS if (match := re.match(r"graticule (?:train|compare) ([a-z]\w*)", line))}
    plugin = (TOP / "docs" / "my_methods.py").read_text(encoding="utf-8")
    known = {*list_recipes(), *re.findall(r'register_recipe\("(\w+)"', plugin)}
    assert len(named) > 5 and named <= known, named - known


@pytest.mark.parametrize("command", sorted({line.split()[1] for line in COMMANDS}))
def test_every_command_that_is_shown_exists(capsys, command):
    try:
        code = main([command, "--help"])
    except SystemExit as exit:
        code = exit.code
    assert code == 0 and "usage" in capsys.readouterr().out


def test_every_command_that_is_shown_has_valid_options(capsys, monkeypatch, tmp_path):
    """The commands stop when their options have been read; those that need a file which is not here stop before."""

    class Parsed(BaseException):
        pass

    def parse(*arguments):
        parse_arguments(*arguments)
        raise Parsed

    parse_arguments = options.parse_arguments
    monkeypatch.setattr(options, "parse_arguments", parse)
    (tmp_path / "docs").mkdir()
    for name in ("docs/my_methods.py", "FILE.py", "city_block.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    pages = [re.sub(r" \\\n +", " ", page) for page in PAGES]
    shown = [line for page in pages for line in re.findall(r"^    (graticule [a-z].*)", page, flags=re.MULTILINE)]
    wrong, read = [], 0
    for line in sorted(set(shown)):
        try:
            code = main(shlex.split(line, comments=True)[1:])
        except Parsed:
            read += 1
        else:
            said = capsys.readouterr().err
            if code == 2 or not re.search(r"does not exist|got '(RECIPE|slant_digits|fourier_digits)'", said):
                wrong.append((line, said))
    assert not wrong and read > 0.7 * len(set(shown)), (wrong, read, len(set(shown)))
