"""Report pages are self-contained, and no input can break them."""

import base64
import json
import re

import pytest
from matplotlib.figure import Figure

from commands import run_command
from graticule.lab.pages.report import Report

EVIL = "<script>alert('x')</script> & \" onload='x' {braces} {{ 7 * 7 }} {% raw %} </style>"


@pytest.fixture
def report():
    page = Report(EVIL, EVIL)
    page.heading(EVIL)
    page.text(EVIL)
    page.note(EVIL)
    page.table([EVIL, "top-1"], [[EVIL, "71.5 ± 0.2"], ["b", "-"]], EVIL)
    page.figure(Figure(figsize=(4, 1)), EVIL, EVIL)
    return page


def test_all_text_is_escaped(report):
    html = report.html()
    assert "<script" not in html
    assert (
        html.count("&lt;script&gt;") == 14
    )  # title and table caption are there twice, the alternative text three times
    assert "{braces} {{ 7 * 7 }} {% raw %}" in html and "49" not in html  # text is data, never a template
    assert html.count("</style>") == 1 and not re.search(r"\"[^<>\"]*\" onload", html)


def test_nothing_is_fetched_from_outside(report):
    html = report.html()
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,")
    assert base64.b64decode(sources[0].partition(",")[2]).startswith(b"\x89PNG")
    assert not re.search(r"https?://|url\(|@import|<link", html)
    assert "default-src 'none'" in html  # so that browsers refuse it, too


def test_numbers_are_aligned_and_words_are_not():
    page = Report("t")
    page.table(["joining", "top-1", "p", "note"], [["lape", 73.1, "< 0.001", "-"], ["default", "71.5 ± 0.2", "-", "-"]])
    assert re.findall(r"<th [^>]*>", page.html()) == [
        '<th scope="col">',
        '<th scope="col" class="number">',
        '<th scope="col" class="number">',
        '<th scope="col">',
    ]


def test_a_row_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="`rows` must have 2 cells each, got 1"):
        Report("t").table(["a", "b"], [["1"]])


def text_of(path):
    return re.sub(r"<[^>]+>|data:image/png;base64,[^\"]+", " ", path.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("quick_figures")
def test_train_and_compare_write_a_page_with_the_values_of_their_runs(capsys, tmp_path):
    assert run_command(capsys, "train", "digits_quick", "--quick", "--output", tmp_path / "a")[0] == 0
    page = text_of(tmp_path / "a" / "report.html")
    assert "against" not in page.partition("Training")[0] and "Recipes" in page and "limit_train=" in page
    assert "the accuracy cannot be told from guessing" in page and "encoding learnable, joining default" in page
    choices = ("--choices", "joining=default", "joining=lape", "--seeds", 0)
    assert run_command(capsys, "compare", "digits_quick", *choices, "--quick", "--output", tmp_path / "b")[0] == 0
    page, html = text_of(tmp_path / "b" / "report.html"), (tmp_path / "b" / "report.html").read_text(encoding="utf-8")
    assert "not tested" in page
    assert html.count("<img") == 4 and "<script" not in html  # scores, accuracy and two losses while training
    run = next((tmp_path / "b").glob("*default*")) / "seed-0"
    assert f"{json.loads((run / 'recipe.json').read_text())['parameters']:,}" in page
