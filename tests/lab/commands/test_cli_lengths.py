"""Evaluating runs on text at several lengths on the command line."""

import json

import pytest

from commands import refused, run_command
from graticule.lab.tasks.language import TextRecipe
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from in_turn import in_turn
from text_commands import spoiled_after_first_epoch

pytestmark = pytest.mark.usefixtures("quick_figures")

#: 4 windows of 16 held-out tokens.
SHORT = {"model": "lm_nano", "model_kwargs": ("depth=1",), "context": 16, "limit_train": 16, "limit_test": 4}
SHORT |= {"batch_size": 8, "epochs": 2, "accelerator": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def trained(folder, encoding: str) -> Run:
    """Train two epochs, of which the first is the best by far."""
    with spoiled_after_first_epoch():
        run = train(TextRecipe(encoding=encoding, lr=1e-2, **SHORT), folder, progress=False)
    assert run.result()["best_bpb"] + 1 < run.result()["last_bpb"]
    return run


@pytest.fixture(scope="module")
def learned(folder) -> Run:
    return trained(folder / "learned", "learnable")


@pytest.fixture(scope="module")
def rotary(folder) -> Run:
    return trained(folder / "rope", "rope_1d")


def lines_of(out: str, start: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(start)]


def test_one_row_per_length_with_the_difference_against_the_training_length(capsys, tmp_path, learned, rotary):
    folders = (learned.folder, rotary.folder)
    code, out, err = run_command(capsys, "evaluate", *folders, "--lengths", 8, 16, 32, "--output", tmp_path)
    assert code == 0, err
    records = json.loads((tmp_path / "evaluation.json").read_text())
    assert [record["run"] for record in records] == [str(folder) for folder in folders for _ in range(3)]
    assert [record["length"] for record in records] == [8, 16, 32] * 2
    assert [record["resampled"] for record in records] == [False, False, True, False, False, False]
    assert {record["tokens"] for record in records} == {64}
    assert records[1]["bits_per_byte"] == pytest.approx(learned.result()["best_bpb"], rel=1e-5)
    rows = [row.split() for name in ("learned ", "rope ") for row in lines_of(out, name)]
    assert [row[1] for row in rows] == ["8", "16", "32"] * 2
    for row, record, reference in zip(rows, records, [1, 1, 1, 4, 4, 4], strict=True):
        numbers = [cell for cell in row[2:] if cell not in "*~"]
        assert numbers[0] == f"{record['bits_per_byte']:.3f}"
        assert numbers[1] == f"{record['bits_per_byte'] - records[reference]['bits_per_byte']:+.3f}"
    marks = ["".join(cell for cell in row if cell in "*~") for row in rows]
    assert marks == ["", "*", "~", "", "*", ""]
    assert len(lines_of(out, "~ longer than the learned")) == 1
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_by_default_it_is_the_training_length_and_the_run_s_own_folder(capsys, rotary):
    code, out, _ = run_command(capsys, "evaluate", rotary.folder, "--checkpoint", "last")
    assert code == 0 and "16 *" in out and "+0.000" in out and "resampled" not in out
    (record,) = json.loads((rotary.folder / "evaluation.json").read_text())
    assert record["bits_per_byte"] == pytest.approx(rotary.result()["last_bpb"], rel=1e-5)
    assert [place[:2] for place in record["by_place"]] == [[1, 1], [2, 2], [3, 4], [5, 8], [9, 16]]
    assert (rotary.folder / "evaluation.png").is_file()


@in_turn(
    ("arguments", "message"),
    [
        (["TEXT", "--sizes", 28], "`sizes` must be left out with the task language, which has --lengths"),
        (["IMAGES", "--lengths", 8, 16], "`lengths` must be left out with the task classification"),
        (["TEXT", "IMAGES", "--lengths", 8], "`models` must be all of one task, got"),
        (["IMAGES", "TEXT"], "of language: evaluate them separately"),
        (["TEXT", "--lengths", 16, 65], "`lengths` must be at most 64, the number of held-out tokens"),
        (["TEXT", "--lengths", 0], "`lengths` must be whole numbers of at least 1, got 0"),
        (["TEXT", "--lengths", 8, 8], "`lengths` must be different lengths, at least one, got [8, 8]"),
        (["TEXT", "--length", 8], "did you mean --lengths"),
    ],
)
def test_invalid_arguments_of_evaluate_are_refused(capsys, tmp_path, rotary, plain_run, arguments, message):
    named = {"TEXT": rotary.folder, "IMAGES": plain_run.folder}
    words = [named.get(argument, argument) for argument in arguments]
    assert message in refused(capsys, "evaluate", *words, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
