"""The demo writes one self-contained page, with its runs in the same folder."""

import json
import re

import pytest

import graticule.lab.pages.demo as module
from graticule.lab.studies.comparison import supported_decimals
from graticule.lab.studies.sizes import Resolutions
from graticule.lab.training.results import TOP1


@pytest.mark.usefixtures("quick_pictures")
def test_the_page_has_tables_curves_and_pictures_and_needs_nothing_else(tmp_path):
    report = module.demo(tmp_path, seeds=[0, 1], quick=True, progress=False)
    page = report.read_text(encoding="utf-8")
    assert report == tmp_path / "report.html"
    assert len(re.findall("<table>", page)) == 2 and len(re.findall("<img ", page)) == 3
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)([^"']*)""", page) == ["explorer.html"]  # in the same folder
    explorer = (tmp_path / "explorer.html").read_text(encoding="utf-8")
    assert all(name in explorer for name in module.EXPLORED) and len(explorer) < 3_000_000
    places = supported_decimals(TOP1, 40, 2)
    for number in json.loads((tmp_path / "comparison.json").read_text())["top1"].values():
        assert f'<td class="number">{sum(number) / 2:.{places}f}</td>' in page
    found = json.loads((tmp_path / "resolutions.json").read_text())["top1"]
    assert set(found) == set(module.CHOICES)
    for by_size in found.values():
        assert list(by_size) == [str(height) for height, _ in module.SIZES] and len(by_size) == 3
        assert all(f"{sum(values) / 2:.{places}f} ±" in page for values in by_size.values())
    assert "on 80 MNIST digits, 2 epochs" in page and "40 test digits" in page
    assert "neither confirm nor refute" in page and "the control of amplitude" in page
    assert (tmp_path / "position.png").is_file()
    assert all(
        (tmp_path / f"correlations-{name}.{kind}").is_file() for name in ("std-1", "lape") for kind in ("png", "npz")
    )


def scores(default, control, lape, control_large, lape_large):
    small, middle, large = module.SIZES
    kept = {
        "default": {small: default, middle: default, large: default},
        "std 1": {small: control, middle: control, large: control_large},
        "lape": {small: lape, middle: lape, large: lape_large},
    }
    return Resolutions(tuple(range(len(lape))), kept, small, 1000)


@pytest.mark.parametrize(
    ("control", "said"),
    [
        ([95.0, 95.4, 94.8], "So LaPE's gain at this size is amplitude, as far as 3 seeds show."),
        ([91.0, 91.4, 91.1], "So amplitude alone does not explain the gain."),
        ([89.0, 99.0, 93.0], "With 3 seeds it is undecided whether LaPE's gain at this size is amplitude."),
    ],
)
def test_the_headline_says_what_the_control_of_amplitude_says(control, said):
    first, second = module.headline(scores([85.0, 85.6, 84.7], control, [95.2, 95.3, 95.0], [50, 51, 49], [70, 70, 71]))
    assert first.endswith(said) and "LaPE less the default table: +10.1 points (95 % interval +9.3 to +10.9)" in first
    assert "less the table of its amplitude: +20.3 points" in second and "There amplitude does not explain it" in second


def test_the_headline_claims_no_gain_that_the_seeds_do_not_show():
    first, second = module.headline(
        scores([95.0, 94.0, 95.5], [95.0, 95.4, 94.8], [94.9, 95.1, 95.0], [50, 60, 49], [49, 61, 50])
    )
    assert first.endswith("No gain of LaPE at this size is seen with 3 seeds.")
    assert second.endswith("Beyond amplitude, no gain of LaPE is seen there with 3 seeds.")
    first, second = module.headline(scores([90.0], [95.0], [95.0], [50.0], [70.0]))  # one seed has no interval
    assert "(no interval)" in first and first.endswith("decide nothing.") and second.endswith("decide nothing.")
