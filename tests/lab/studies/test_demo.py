"""The demo writes one self-contained page, with its runs in the same folder."""

import json
import re

import pytest

import graticule.lab.commands.demo as module


@pytest.mark.usefixtures("quick_figures")
def test_the_page_has_tables_curves_and_images_and_needs_nothing_else(tmp_path):
    report = module.demo(tmp_path, seeds=[0, 1], quick=True, progress=False)
    page = report.read_text(encoding="utf-8")
    assert report == tmp_path / "report.html"
    assert len(re.findall("<img ", page)) == 6  # scores, sizes, accuracy, two losses, position
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)([^"']*)""", page) == ["explorer.html"]  # in the same folder
    explorer = (tmp_path / "explorer.html").read_text(encoding="utf-8")
    assert all(name in explorer for name in module.EXPLORED) and len(explorer) < 3_000_000
    for scores in json.loads((tmp_path / "comparison.json").read_text())["top1"].values():
        assert re.search(rf">{sum(scores) / 2:.2f} ±", page)
    assert all(f"zoom {height}" in page for height, _ in module.SIZES)
    assert "neither confirm nor refute the paper" in page and "the control for the larger initialization" in page
    assert page.count(" points over default") == 2 and page.count(" points over std 1") == 2
