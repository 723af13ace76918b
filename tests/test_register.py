"""The register of the position code of other libraries: its rows, and its tables on the page."""

import json
import shutil
from pathlib import Path

import pytest

from evidence import register

SQUARE, SWIN = "transformers.vit.ViTEmbeddings 3 x 12", "timm.swin_transformer.WindowAttention"


@pytest.mark.slow
def test_the_register_has_a_row_for_each_class_and_the_page_names_the_failures(tmp_path, monkeypatch):
    monkeypatch.setattr(register, "codes", lambda: dict.fromkeys([SQUARE, SWIN]))
    monkeypatch.setattr(register, "DATA", tmp_path / "register.json")
    monkeypatch.setattr(register, "PAGE", Path(shutil.copy(register.PAGE, tmp_path)))
    register.main([])
    rows = {row["name"]: row for row in json.loads((tmp_path / "register.json").read_text())["rows"]}
    assert rows[SWIN]["failed"] == {} and "autocast" in rows[SWIN]["passed"] and "native" in rows[SQUARE]["failed"]
    assert "|native, separation of 3 x 12|`vit.ViTEmbeddings`|" in (tmp_path / "conformance.md").read_text()
