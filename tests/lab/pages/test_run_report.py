"""The page of runs shows the scores and the recipes of the runs' files."""

import json
import re

import pytest

from commands import run_command


def text_of(path):
    return re.sub(r"<[^>]+>|data:image/png;base64,[^\"]+", " ", path.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("quick_pictures")
def test_train_and_compare_write_a_page_with_the_values_of_their_runs(capsys, tmp_path):
    assert run_command(capsys, "train", "digits_quick", "--quick", "--output", tmp_path / "a")[0] == 0
    page = text_of(tmp_path / "a" / "report.html")
    assert "against" not in page.partition("Training")[0] and "Recipes" in page and "limit_train=" in page
    choices = ("--choices", "joining=default", "joining=lape", "--seeds", 0, 1)
    assert run_command(capsys, "compare", "digits_quick", *choices, "--quick", "--output", tmp_path / "b")[0] == 0
    page, html = text_of(tmp_path / "b" / "report.html"), (tmp_path / "b" / "report.html").read_text(encoding="utf-8")
    assert "no difference within error" in page or "not tested" in page or "beyond chance" in page
    assert html.count("<img") == 4 and "<script" not in html  # scores, accuracy and two losses while training
    run = next((tmp_path / "b").glob("*default*")) / "seed-0"
    assert f"{json.loads((run / 'recipe.json').read_text())['parameters']:,}" in page
