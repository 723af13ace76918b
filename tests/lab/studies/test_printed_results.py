"""Results print themselves as a table of at most 20 lines and 110 columns, and as one of HTML in a notebook."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from test_compare import results

import graticule
import tiny
from graticule.analysis.share import Estimate, PositionShare
from graticule.system.tables import format_table, plain
from graticule.testing.identify import Identity


def share(layers=40):
    values = np.linspace(-0.1, 0.987, layers)
    parts = [Estimate(values, values - 0.123, values + 0.123)] * 5
    return PositionShare((224, 224), 64, *parts, values, 1000 * values, features=True)


def audit():
    model = tiny.draw(tiny.tiny("learnable", num_classes=3)).eval()
    return graticule.audit(model, tiny.images(batch=6), labels=torch.arange(6) % 3, timed=True)


def debiased():
    torch.manual_seed(0)
    model, labels = tiny.draw(tiny.tiny("sinusoidal_2d")).eval(), torch.arange(12) % 3
    return graticule.debias(model, tiny.images(batch=12), "leace", components=2, labels=labels).certificate


RESULTS = {
    "share": share,
    "audit": audit,
    "debiased": debiased,
    "comparison": lambda: results(
        {f"encoding=rope(base={n}),joining=default": [70.0 + n, 71.5 - n] for n in range(30)}
    ),
    "one run": lambda: results({"a": [70.0]}),
    "long names": lambda: results({f"rope(base={n})" * 9: [1e3 * n, 7.0, 8.5] for n in range(3)}),
    "a diverged run": lambda: results({"a": [70.0, float("nan")], "b": [71.0, 72.0]}),
    "identity": lambda: Identity(None, "Grid(H, W)", 0.1, ((6, 6), (5, 12)), "rope(base=100)", notes=("words " * 40,)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_print_a_small_table(name):
    result = RESULTS[name]()
    lines = str(result).splitlines()
    assert repr(result) == str(result) and 2 < len(lines) <= 20 and max(map(len, lines)) <= 110
    assert not any(word in str(result) for word in ("array(", "tensor(", "nan", "None"))
    page = ElementTree.fromstring(f"<div>{result._repr_html_().replace('<br>', '<br/>')}</div>")
    rows = page.findall("table/tr")
    assert 0 < len(rows) <= 20 and {len(row) for row in rows} == {len(result.summary()[0])}


def test_the_middle_of_a_long_table_is_left_out_and_the_last_row_is_kept():
    text = str(share())
    assert "... 24\n" in text and text.splitlines()[-1].startswith("features") and len(share().summary()) == 41
    assert format_table([("layer", "score"), ("0", "0.5")]) == "layer  score\n-----  -----\n0        0.5"


def test_a_certificate_has_the_words_of_the_field_and_a_comparison_its_differences():
    text = str(debiased())
    assert "4 of 12 images, held out" in text and "patch location from kNN (R²)" in text and "correspondence" in text
    header, first, second = results({"a": [70.0, 71.0, 72.0], "b": [75.0, 77.0, 76.0]}).summary()
    assert header[2] == "score" and first == ("a", "3", "71.00 ± 1.00", "", "", "")
    assert second[3:] == ("+5.00 [+2.52, +7.48]", "0.013", "a difference beyond chance")


def test_names_are_cut_and_numbers_are_not():
    text = str(RESULTS["long names"]())
    assert re.search(r"\nrope\(base=1\S*\.\.\.  ", text) and "+666.67 [-2201.77, +3535.10]" in text
    assert "not finite" in str(RESULTS["a diverged run"]())
    assert "not tested" in str(results({"a": [7.0], "b": [8.0]}))
    scores = {"a": [70.0, 71.0, 72.0, 73.0], "b": [71.0, 73.0, 73.0, 76.0], "c": [70.0, 71.5, 71.9, 73.2]}
    assert [row[5] for row in results(scores).summary()[1:]] == [
        "",
        "not significant after correction for 2 tests",
        "no difference found",
    ]


def test_json_has_the_fields_alone_and_the_values_of_tensors():
    result = share()
    before = plain(result)
    assert result.summary() and plain(result) == before and plain(torch.ones(2)) == [1.0, 1.0]
