"""The register of the position code of other libraries: what it stores, and what it says has changed."""

import json
import shutil
from pathlib import Path

import pytest

from evidence import register

SQUARE, SWIN, OTHER = "transformers.vit.ViTEmbeddings 3 x 12", "timm.swin_transformer.WindowAttention", "transformers.x"


def test_changes_are_new_classes_laws_and_encodings():
    before = {"rows": [{"name": "a", "failed": {"axes": "x"}, "spec": "rope"}, {"name": "b", "reason": "an error"}]}
    after = {"rows": [{"name": "a", "failed": {"dtype": "y"}, "spec": None}, {"name": "c", "failed": {}}]}
    lines = ["a: no longer fails axes", "a: now fails dtype", "a: spec was rope, now None", "b: gone", "c: new"]
    assert register.changes(before, after) == lines
    assert register.changes(after, after) == []


@pytest.mark.slow
def test_an_interrupted_register_resumes_and_a_second_one_has_changed_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(register, "codes", lambda: dict.fromkeys([SQUARE, SWIN, OTHER]))
    monkeypatch.setattr(register, "DATA", tmp_path / "register.json")
    monkeypatch.setattr(register, "PAGE", Path(shutil.copy(register.PAGE, tmp_path)))
    stored = {"name": OTHER, "kind": "table", "reproducer": "x", "reason": "an error"}  # cannot be built anew
    lines = [json.dumps(register.versions()), json.dumps(stored)]
    (tmp_path / "register.part.jsonl").write_text("\n".join(lines) + "\n")
    for said in (f"{SWIN}: new\n{SQUARE}: new\n{OTHER}: new", "nothing changed"):
        register.main(["--processes", "1"])
        assert capsys.readouterr().out.strip() == said
        if said != "nothing changed":
            (tmp_path / "register.part.jsonl").write_text("\n".join(lines) + "\n")
    rows = {row["name"]: row for row in json.loads((tmp_path / "register.json").read_text())["rows"]}
    assert rows[SWIN]["failed"] == {} and "autocast" in rows[SWIN]["passed"]
    assert "native" in rows[SQUARE]["failed"] and rows[OTHER]["reason"] == "an error"
    assert "|native, separation of 3 x 12|`vit.ViTEmbeddings`|" in (tmp_path / "conformance.md").read_text()
