"""What the README shows is what happens."""

import re
from pathlib import Path

import pytest

import graticule
from graticule.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_ten_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    more = re.findall(r"```python continued\n(.*?)```", README, flags=re.DOTALL)
    assert len(more) == 3
    exec(compile(block + "".join(more), "README.md", "exec"), {})
    assert (tmp_path / "correlations.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_joinings_names_every_one():
    section = README.partition("## Joinings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert rows == graticule.list_joinings()


def test_every_file_that_it_points_to_is_there():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links and all((Path(__file__).parents[1] / link).exists() for link in links), links


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^    graticule (\w+)", README, flags=re.MULTILINE))))
def test_every_command_that_it_shows_is_there(capsys, command):
    try:
        code = main([command, "--help"])
    except SystemExit as exit:
        code = exit.code
    assert code == 0 and "usage" in capsys.readouterr().out
