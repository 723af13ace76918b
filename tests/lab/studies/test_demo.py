"""The demo writes one self-contained page, with its runs in the same folder."""

import json
import re

import pytest

import graticule.lab.pages.demo as module
from graticule.lab.studies.comparison import supported_decimals
from graticule.lab.training.results import TOP1

pytestmark = pytest.mark.usefixtures("quick_pictures")


def test_the_page_has_tables_curves_and_pictures_and_needs_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "UNTRAINED", 2)
    report = module.demo(tmp_path, seeds=[0, 1], quick=True, progress=False)
    page = report.read_text(encoding="utf-8")
    assert report == tmp_path / "report.html"
    assert len(re.findall("<table>", page)) == 4 and len(re.findall("<img ", page)) == 6
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)([^"']*)""", page) == ["explorer.html"]  # in the same folder
    explorer = (tmp_path / "explorer.html").read_text(encoding="utf-8")
    assert all(f"joining {joining}" in explorer for joining in module.JOININGS) and len(explorer) < 3_000_000
    places = supported_decimals(TOP1, 40, 2)
    for number in json.loads((tmp_path / "comparison.json").read_text())["top1"].values():
        assert f'<td class="number">{sum(number) / 2:.{places}f}</td>' in page
    found = json.loads((tmp_path / "resolutions.json").read_text())["top1"]
    assert set(found) == set(module.JOININGS)
    for by_size in found.values():
        assert list(by_size) == [str(height) for height, _ in module.SIZES] and len(by_size) == 3
        assert all(f"{sum(values) / 2:.{places}f} ±" in page for values in by_size.values())
    assert "on 80 MNIST digits, 2 epochs" in page and "40 test digits" in page
    assert "neither confirm nor refute" in page and "amplitude of the table is not controlled for" in page
    assert all(
        (tmp_path / f"correlations-{joining}.{kind}").is_file()
        for joining in module.JOININGS
        for kind in ("png", "npz")
    )
