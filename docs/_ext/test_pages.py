"""The commands and code of the site that take longer than the tests of the library may; `make docs` runs them."""

import re
import shlex
from pathlib import Path

from graticule.cli import main

DOCS = Path(__file__).parents[1]


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def block(name, word):
    """Return the block of Python of a page that begins with "```python WORD"."""
    (code,) = re.findall(rf"^```python {word}\n(.*?)^```", page(name), flags=re.DOTALL | re.MULTILINE)
    return compile(code, f"{name}.md", "exec")


def test_the_first_five_minutes_go_as_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    (graticule .*)$", page("start"), flags=re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["train", "evaluate", "correlations", "explore", "compare"]
    for command in commands:
        short = {"train": " --quick", "compare": " --quick", "explore": " --no-open"}.get(command.split()[1], "")
        assert main(shlex.split(command.replace("--epochs 3", "") + short)[1:]) == 0, capsys.readouterr().err
    exec(block("start", "start"), {})
    assert "(6, 7, 7)" in capsys.readouterr().out


def test_an_exported_file_is_served_without_graticule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import graticule

    names = {"graticule": graticule}
    exec(block("export", "serve"), names)
    assert names["logits"].shape == (4, 10)
