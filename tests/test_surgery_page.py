"""The code of docs/surgery.md runs."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "surgery.md").read_text(encoding="utf-8")


def test_the_code_about_export_and_publishing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    section = "## Export" + PAGE.partition("## Export\n")[2]
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len(blocks) >= 2
    exec(compile("".join(blocks[:2]), "surgery.md", "exec"), {})
    assert capsys.readouterr().out.startswith("batch of any size, height 28, width 28")
    assert {path.name for path in (tmp_path / "published").iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }


def test_the_code_about_conversion_runs():
    section = PAGE.partition("## Convert")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    exec(compile("".join(blocks), "surgery.md", "exec"), names)
    assert type(names["back"]).__name__ == "Eva"
