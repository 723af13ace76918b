"""Scores at other sizes and lengths: the tables equal the scores, and invalid sizes are refused before any work."""

import json
from dataclasses import replace

import pytest

from graticule.lab.studies.comparison import compare
from graticule.lab.studies.sizes import Lengths, Resolutions, lengths, resolutions
from graticule.lab.tasks.classification import Recipe
from graticule.lab.tasks.language import TextRecipe, evaluate_text
from graticule.lab.tasks.parts.image_scores import evaluate
from text_commands import spoiled_after_first_epoch

pytestmark = pytest.mark.usefixtures("quick_pictures")

RESOLUTIONS = Resolutions(
    seeds=(0, 1, 2),
    trained_at=(28, 28),
    scores={
        "a": {(20, 20): [50.0, 51.0, 51.0], (28, 28): [70.0, 71.0, 71.0]},
        "b": {(20, 20): [60.0, 60.0, 63.0], (28, 28): [71.0, 73.0, 74.0]},
    },
    images=1000,
)
LENGTHS = Lengths(
    seeds=(0, 1, 2),
    trained_at={"a": 128, "b": 256},
    num_bytes={"a": 9000, "b": 9000},
    scores={
        "a": {128: [2.5, 2.51, 2.51], 256: [2.7, 2.8, 2.6]},
        "b": {128: [2.6, 2.6, 2.63], 256: [2.4, 2.5, 2.3]},
    },
    resampled={"a": [256], "b": []},
    places={"a": {1: [5.0, 5.1, 5.2], 256: [3.0, 3.0, 3.0]}, "b": {1: [5.0, 5.0, 5.0], 256: [2.0, 2.0, 2.1]}},
)


@pytest.mark.parametrize("found", [RESOLUTIONS, LENGTHS], ids=lambda found: found.file)
def test_tables_values_and_figures_are_written(tmp_path, found):
    table, numbers, *pictures = found.write(tmp_path)
    assert [path.name for path in (table, numbers)] == [f"{found.file}.md", f"{found.file}.json"]
    assert [path.read_bytes()[:4] for path in pictures] == [b"\x89PNG", b"%PDF", b"<?xm"]
    assert table.read_text(encoding="utf-8") == found.markdown() + "\n"
    assert json.loads(numbers.read_text()) == json.loads(json.dumps(found.record()))


def test_the_records_have_the_values_of_every_seed():
    assert RESOLUTIONS.record()["top1"]["b"]["20"] == [60.0, 60.0, 63.0]
    record = LENGTHS.record()
    assert record["bpb"]["b"][128] == [2.6, 2.6, 2.63] and record["trained_at"] == {"a": 128, "b": 256}
    assert record["resampled"] == {"a": [256], "b": []} and record["by_place"]["a"][256] == [3.0, 3.0, 3.0]


def test_the_tables_of_sizes_have_mean_deviation_difference_and_p():
    assert RESOLUTIONS.rows() == [
        ("choice", "20", "28 (trained)"),
        ("a", "50.67 ± 0.58", "70.67 ± 0.58"),
        ("b", "61.00 ± 1.73", "72.67 ± 1.53"),
    ]
    assert RESOLUTIONS.differences()[1][2] == "+2.00 (p 0.074; 0.074)"
    tables = RESOLUTIONS.markdown().split("\n\n")
    assert [len(table.splitlines()) for table in tables] == [4, 3, 1]
    assert tables[1].splitlines()[2] == "| b | +10.33 (p 0.007; 0.014) | +2.00 (p 0.074; 0.074) |"
    assert tables[2].endswith("adjusted by Holm's method for 2 comparisons")


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


def test_the_tables_of_lengths_have_mean_deviation_difference_p_and_marks():
    assert LENGTHS.rows() == [
        ("choice", "128", "256"),
        ("a", "2.507 ± 0.006 *", "2.700 ± 0.100 ~"),
        ("b", "2.610 ± 0.017", "2.400 ± 0.100 *"),
    ]
    assert LENGTHS.differences() == [
        ("against the first", "128", "256"),
        ("b", "+0.103 (p 0.007; 0.007)", "-0.300 (p -; -)"),
    ]
    tables = LENGTHS.markdown().split("\n\n")
    assert [len(table.splitlines()) for table in tables] == [4, 3, 1, 1]
    assert tables[1].splitlines()[2] == "| b | +0.103 (p 0.007; 0.007) | -0.300 (p -; -) |"
    assert tables[2].endswith("for 1 comparison")  # if all differences are equal there is no test
    assert "~" in tables[3] and "*" in tables[3]


def test_marks_that_are_not_there_are_not_explained():
    alone = Lengths((0,), {"a": {128: [2.5]}}, {"a": 128}, {"a": 9000}, {"a": []}, {"a": {1: [5.0]}})
    assert "~" not in alone.markdown() and len(alone.markdown().split("\n\n")) == 2


def test_the_legend_warns_if_choices_were_scored_on_different_text():
    assert "not to be compared" not in LENGTHS.markdown()
    assert "not to be compared: limit_test" in replace(LENGTHS, num_bytes={"a": 9000, "b": 18000}).markdown()


def test_every_run_is_scored_at_every_length_with_its_last_weights(tmp_path):
    base = {"model": "lm_nano", "limit_train": 16, "limit_test": 4, "batch_size": 8, "epochs": 2, "accelerator": "cpu"}
    base |= {"model_kwargs": ("depth=1",), "lr": 1e-2}
    choices = {
        "learnable": TextRecipe(encoding="learnable", context=16, **base),
        "bucketed_bias": TextRecipe(encoding="bucketed_bias", context=32, **base),
    }
    with spoiled_after_first_epoch():
        comparison = compare(choices, [0, 1], tmp_path, progress=False)
    found = lengths(comparison, [32, 16], progress=False)
    assert list(found.scores["learnable"]) == [32, 16] and found.trained_at == {"learnable": 16, "bucketed_bias": 32}
    assert found.resampled == {"learnable": [32], "bucketed_bias": []}
    assert found.num_bytes == {"learnable": 64, "bucketed_bias": 128}  # 4 windows each
    for name, runs in comparison.runs.items():
        assert all(run.result()["best_bpb"] + 1 < run.result()["last_bpb"] for run in runs)
        same = found.scores[name][found.trained_at[name]]
        assert same == pytest.approx(comparison.scores[name], rel=1e-5)  # which Lightning stores in float32
        (score,) = evaluate_text(runs[1].model(checkpoint="last"), runs[1].data(), [32], progress=False)
        assert found.scores[name][32][1] == score.bits_per_byte
        assert {last: values[1] for last, values in found.places[name].items()} == {
            last: bits for _, last, bits in score.by_place
        }
    for wrong in ([32, 32], [], [0], [100]):  # the first choice has 64 tokens, the other 128
        with pytest.raises(ValueError, match="`lengths` must be"):
            lengths(comparison, wrong, progress=False)


def test_a_comparison_on_images_is_refused(tmp_path):
    recipe = Recipe(limit_train=20, limit_test=20, batch_size=20, epochs=1, accelerator="cpu")
    comparison = compare({"a": recipe}, [0], tmp_path, progress=False)
    with pytest.raises(ValueError, match="`comparison` must be of runs on text, got one that is judged by top-1"):
        lengths(comparison, [16], progress=False)
