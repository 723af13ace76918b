"""The examples of docs/dense.md work as shown."""

import re
import runpy
from pathlib import Path

import torch

from evidence.results import Cell
from graticule.dense.detector import HEADS
from graticule.dense.features import NECKS
from graticule.dense.segmentation import DECODERS
from graticule.lab.studies.tables import read_records

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "dense.md").read_text(encoding="utf-8")


def test_the_code_runs_and_gives_the_shown_results():
    torch.manual_seed(0)
    names = {}
    exec(compile("".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)), "dense.md", "exec"), names)
    assert {"loss_classifier", "loss_mask"} < names["losses"].keys()
    assert names["predictions"][0].keys() == {"boxes", "labels", "scores", "masks"}
    assert names["logits"].shape == (1, 19, 128, 200)


def test_the_tables_have_every_name_with_its_options_and_defaults():
    shown = set(re.findall(r"^\| `(\w+(?:\(.*\))?)` \|", PAGE, flags=re.MULTILINE))
    for registry in (NECKS, HEADS, DECODERS):
        for name in registry:
            given = ", ".join(f"{option}={value.default!r}" for option, value in registry.options(name).items())
            assert (f"{name}({given})" if given else name) in shown, name


def test_the_dense_rows_of_the_papers_have_the_parameters_that_are_recorded_and_but_for_four_printed(
    capsys, monkeypatch
):
    path = DOCS / "data" / "measured" / "dense_counts.csv"
    cells = {(cell.row, cell.column): cell.value for cell in read_records(path, Cell)}
    monkeypatch.setattr("sys.argv", ["dense_counts.py"])
    runpy.run_path(str(DOCS.parent / "benchmarks" / "dense_counts.py"), run_name="__main__")
    rows = [line.strip("| ").rsplit(" | ", 2) for line in capsys.readouterr().out.splitlines()[2:]]
    assert {(row, "parameters (M)"): counted for row, counted, _ in rows} == {
        key: value for key, value in cells.items() if key[1] == "parameters (M)"
    }
    assert {row: cells[row, "printed"] for row, *_ in rows} == {row: printed for row, _, printed in rows}
    digits = {row: len(printed.partition(".")[2]) for row, _, printed in rows}
    others = [row for row, counted, printed in rows if f"{float(counted):.{digits[row]}f}" != printed]
    assert [re.sub(r"_patch16_224|_224| \| ", " ", row) for row in others] == [  # those that docs/papers.md names
        "LaPE, Table 4 deit_small  segmenter_mask, lape",
        "PosMLP, Table 8 posmlp_tiny  mask_rcnn",
        "PosMLP, Table 8 posmlp_small  mask_rcnn",
        "PosMLP, Table 8 posmlp_small  retinanet",
    ]
