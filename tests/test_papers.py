"""The page of the papers has every table and figure of each, its command, the printed values, and our figures."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from evidence.contrasts import Registry
from evidence.papers import ITEMS, Item, filled, first_name, hours, is_uncontrolled, papers_part, text_of
from evidence.records import read_records
from graticule.lab.recipes.load import RECIPES, list_recipes

TOP = Path(__file__).parents[1]
REGISTRY = Registry(TOP / "docs" / "data")
ALL = read_records(ITEMS, Item)
#: Paper -> its numbers of tables and figures.
SIZES = {
    "LaPE (2023)": (8, 5),
    "LaPE, first version (2022)": (7, 8),
    "CPVT (2023)": (16, 6),
    "PosMLP (2022)": (11, 8),
    "Introduction to Transformers (2023)": (0, 5),
}
#: Paper -> the keys of its figures in figures.yaml.
KEYS = {
    "LaPE (2023)": ("lape",),
    "LaPE, first version (2022)": ("lape", "lape_first_version"),
    "CPVT (2023)": ("cpvt",),
    "PosMLP (2022)": ("posmlp",),
}
#: Printed numbers that figures.yaml does not have.
OTHERS = {
    *("73.26", "71.88", "81.10", "82.25", "82.5", "83.0", "86.6", "87.7", "500.7", "536.5", "80.6", "39.4", "41.8"),
    *("75.49", "38.3", "41.7", "38.5", "75.43", "74.68", "75.81"),
}
TIMED = {
    "parts": {
        "models": [
            {"name": "deit_tiny_patch16_224", "phase": "training", "compiled": True, "images_per_second": 10_000.0}
        ],
        "position": [{"name": "lape", "phase": "inference", "compiled": False, "ratio": 1.25}],
    }
}


def numbers(value):
    """Return all numbers of nested lists and dictionaries, as text."""
    if isinstance(value, dict):
        return set().union(*(numbers(part) for part in value.values()))
    if isinstance(value, list):
        return set().union(set(), *(numbers(part) for part in value))
    if not isinstance(value, int | float):
        return set()
    return {f"{value:.{digits}f}" for digits in (1, 2, 3)} | {f"{value / 1e6:.3f}"}  # parameters in millions


@pytest.mark.parametrize("paper", SIZES)
def test_every_table_and_figure_of_a_paper_is_an_item_once(paper):
    names = Counter(name for item in ALL if item.paper == paper for name in item.names)
    tables, figures = SIZES[paper]
    expected = [f"Table {n + 1}" for n in range(tables)] + [f"Figure {n + 1}" for n in range(figures)]
    assert {name: names[name] for name in expected} == dict.fromkeys(expected, 1)
    assert {name for name in names if re.match("Table|Figure", name)} == set(expected)


def test_every_item_has_a_command():
    assert [item for item in ALL if not item.command and not item.item.startswith("our ")] == []


def test_every_recipe_of_a_paper_is_in_a_command():
    text = " ".join(item.command for item in ALL)
    small = re.compile(r"my_|digits|fashion|gym|scenes|camvid|adapt")
    own = [name for name in list_recipes() if RECIPES[name].function.__module__.startswith("graticule.lab.recipes.")]
    missing = [name for name in own if not small.match(name) and not re.search(rf"\b{name}\b", text)]
    assert missing == []


def test_every_contrast_with_a_question_is_printed_once():
    for paper in SIZES:
        part, asked = papers_part(paper, REGISTRY), [pair for pair in REGISTRY.of(family=paper) if pair[0].question]
        for row, contrast in asked:
            assert row.control and row.question.endswith("?"), row
            if is_uncontrolled(row):
                continue
            names = [item.item for item in ALL if item.paper == paper and first_name(row.where) in item.names]
            assert len(names) == 1 and f"{row.label}: {text_of(row, contrast)} (" in part, row


@pytest.mark.parametrize("paper", KEYS)
def test_printed_values_are_those_of_the_paper(paper):
    figures = yaml.safe_load((TOP / "tests/parity/golden/figures.yaml").read_text(encoding="utf-8"))
    known = numbers([figures[key] for key in KEYS[paper]]) | OTHERS
    for item in (item for item in ALL if item.paper == paper):
        assert set(re.findall(r"\d+\.\d+", item.printed)) <= known, item


def test_hours_are_scaled_from_the_measured_time_per_image():
    expected = 1_281_167 * 300 * 0.5 * 2 / 10_000 / 3600
    assert hours("deit", 2.5, 300, 0.5, TIMED) == f"{float(f'{expected:.2g}'):.0f}" == "11"
    assert (
        filled("about {hours deit 1.25} hours, {gpu lape False inference} times", TIMED) == "about 11 hours, 1.25 times"
    )
