"""Tables and figures of measurements are written from stored cells, each with command, date and machine."""

import csv
import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from evidence.contrasts import Registry
from evidence.records import read_records
from evidence.results import PARTS, Cell, page_text, parts_of, table_of, write_pages

TOP = Path(__file__).parents[3]
sys.path.append(str(TOP / "benchmarks"))

import gpu  # noqa: E402 - a script of benchmarks

DOCS = TOP / "docs"
GPU = DOCS / "results" / "gpu.md"
DATA = DOCS / "data" / "measured"
NAMES = [field.name for field in dataclasses.fields(Cell)]
PAGE = "before\n<!-- measured x: begin, written by a command -->\nold\n<!-- measured x: end -->\nafter\n"


def cell(row="a", column="10", value="1", **others):
    empty = dict.fromkeys(NAMES, "")
    return Cell(**{**empty, "keys": "choice", "row": row, "column": column, "value": value, **others})


def write(path, *cells):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([NAMES, *(dataclasses.astuple(stored) for stored in cells)])


def test_the_tables_of_every_page_are_those_of_their_files():
    names, registry = [], Registry(DATA.parent)
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        names += [name for kind, name in parts_of(text) if kind == "measured"]
        names += re.findall(r"data/measured/(\w+)\.csv\)", text)
        assert page_text(text, registry) == text, f"{page.name}: run python -m evidence.results"
    assert sorted(names) == sorted(path.stem for path in DATA.glob("*.csv"))


def test_every_cell_names_its_command_date_and_machine():
    for path in DATA.glob("*.csv"):
        for stored in read_records(path, Cell):
            assert stored.command and stored.machine and re.fullmatch(r"\d{4}-\d\d-\d\d", stored.date), path.name
            assert stored.row and stored.column, path.name


def test_no_table_of_results_is_typed_by_hand():
    for page in {DOCS / "results.md", *(DOCS / "results").glob("*.md")} - {GPU}:
        kind = rf"<!-- ((?:{'|'.join(PARTS)}) \S+): begin.*?<!-- \1: end -->"
        written = re.sub(kind, "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert [line for line in written.splitlines() if line.startswith("|")] == [], page.name


def test_the_page_of_a_gpu_is_made_of_its_figures():
    figures = json.loads((DOCS / "data" / "gpu.json").read_text(encoding="utf-8"))
    assert GPU.read_text(encoding="utf-8") == gpu.page(figures)


def test_a_cell_is_written_with_its_quartiles():
    assert str(cell(value="12544")) == "12,544"
    assert str(cell(value="1.01", low="0.99", high="1763")) == "1.01 [0.99, 1,763]"
    assert str(cell(value="")) == ""


def test_a_table_has_the_order_of_its_cells_and_rows_may_have_several_keys():
    cells = [
        cell(row, column, value, keys="shape | batch")
        for row, column, value in (("s | 8", "x", "1"), ("s | 8", "y", ""), ("s | 32", "x", "2"), ("s | 32", "y", "3"))
    ]
    assert table_of(cells) == [("shape", "batch", "x", "y"), ("s", "8", "1", ""), ("s", "32", "2", "3")]


def test_pages_are_rebuilt_and_a_file_without_a_page_is_an_error(tmp_path):
    data = tmp_path / "data" / "measured"
    data.mkdir(parents=True)
    (tmp_path / "page.md").write_text(PAGE)
    points = [cell(row, column, "5", low="4", high="6") for row in "ab" for column in ("28 (trained)", "1,024")]
    write(data / "x.csv", *points)
    assert write_pages(tmp_path, []) == [tmp_path / "page.md"]
    text = (tmp_path / "page.md").read_text()
    assert "| a | 5 [4, 6] | 5 [4, 6] |" in text and text.startswith("before\n") and text.endswith("after\n")
    write(data / "y.csv", cell())
    with pytest.raises(
        ValueError, match="`docs` must have markers of every table, or a link to it, got none for peg, y"
    ):
        write_pages(tmp_path, ["peg"])
    (data / "y.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"y\.csv must have the columns keys, row"):
        read_records(data / "y.csv", Cell)
