"""Accuracy at other sizes: the table is that of the scores, and a wrong size is found before any work."""

import json

import pytest

from graticule.lab.studies.comparison import compare
from graticule.lab.studies.sizes import Resolutions, resolutions
from graticule.lab.tasks.classification import Recipe
from graticule.lab.tasks.parts.image_scores import evaluate

pytestmark = pytest.mark.usefixtures("quick_pictures")

FOUND = Resolutions(
    seeds=(0, 1, 2),
    trained_at=(28, 28),
    scores={
        "a": {(20, 20): [50.0, 51.0, 51.0], (28, 28): [70.0, 71.0, 71.0]},
        "b": {(20, 20): [60.0, 60.0, 63.0], (28, 28): [71.0, 73.0, 74.0]},
    },
    images=1000,
)


def test_the_tables_have_mean_deviation_difference_and_p():
    assert FOUND.rows() == [
        ("choice", "20", "28 (trained)"),
        ("a", "50.67 ± 0.58", "70.67 ± 0.58"),
        ("b", "61.00 ± 1.73", "72.67 ± 1.53"),
    ]
    assert FOUND.differences()[1][2] == "+2.00 (p 0.074; 0.074)"
    tables = FOUND.markdown().split("\n\n")
    assert [len(table.splitlines()) for table in tables] == [4, 3, 1]
    assert tables[1].splitlines()[2] == "| b | +10.33 (p 0.007; 0.014) | +2.00 (p 0.074; 0.074) |"
    assert tables[2].endswith("adjusted by Holm's method for 2 comparisons")


def test_tables_values_and_figures_are_written(tmp_path):
    table, numbers, *pictures = FOUND.write(tmp_path)
    assert "61.00 ± 1.73" in table.read_text(encoding="utf-8")
    assert json.loads(numbers.read_text())["top1"]["b"]["20"] == [60.0, 60.0, 63.0]
    assert [path.read_bytes()[:4] for path in pictures] == [b"\x89PNG", b"%PDF", b"<?xm"]


def test_every_run_is_scored_at_every_size_with_its_last_weights(tmp_path):
    base = {"limit_train": 40, "limit_test": 20, "batch_size": 20, "epochs": 1, "accelerator": "cpu"}
    choices = {"learnable": Recipe(**base), "peg": Recipe(encoding="peg", global_pool="avg", **base)}
    comparison = compare(choices, [0, 1], tmp_path, progress=False)
    found = resolutions(comparison, [(28, 28), (20, 36)], progress=False)
    assert list(found.scores["peg"]) == [(28, 28), (20, 36)] and found.trained_at == (28, 28)
    for name, runs in comparison.runs.items():
        assert found.scores[name][28, 28] == pytest.approx(comparison.scores[name], abs=1e-4)
        (score,) = evaluate(runs[1].model(checkpoint="last"), runs[1].data(), [(20, 36)], progress=False)
        assert found.scores[name][20, 36][1] == score.top1
    with pytest.raises(ValueError, match="`img_size`"):
        resolutions(comparison, [(28, 28), (30, 28)], progress=False)
    with pytest.raises(ValueError, match="`sizes`"):
        resolutions(comparison, [(28, 28), (28, 28)], progress=False)
