"""What README and docs show is what happens."""

import re
from pathlib import Path

import pytest

import graticule
from graticule.cli import main
from graticule.recipes import list_recipes

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")
#: What users read, in which a line of four spaces and `graticule` is a command.
PAGES = [README, *(path.read_text(encoding="utf-8") for path in sorted((TOP / "docs").glob("*.md")))]
COMMANDS = [line for page in PAGES for line in re.findall(r"^    (graticule .*)", page, flags=re.MULTILINE)]


def test_the_ten_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    more = re.findall(r"```python continued\n(.*?)```", README, flags=re.DOTALL)
    assert len(more) == 6
    exec(compile(block + "".join(more), "README.md", "exec"), {})
    assert (tmp_path / "correlations.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_joinings_names_every_one():
    section = README.partition("## Joinings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert rows == graticule.list_joinings()


def test_every_file_that_it_points_to_is_there():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links and all((TOP / link).exists() for link in links), links


def test_every_recipe_in_a_command_exists(my_methods):
    named = {match[1] for line in COMMANDS if (match := re.match(r"graticule (?:train|compare) ([a-z]\w*)", line))}
    assert len(named) > 5 and named <= set(list_recipes()), named - set(list_recipes())


@pytest.mark.parametrize("command", sorted({line.split()[1] for line in COMMANDS}))
def test_every_command_that_is_shown_exists(capsys, command):
    try:
        code = main([command, "--help"])
    except SystemExit as exit:
        code = exit.code
    assert code == 0 and "usage" in capsys.readouterr().out
