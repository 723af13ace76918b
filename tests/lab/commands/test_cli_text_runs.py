"""Commands for runs on text: results and error messages."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import refused, run_command
from graticule.lab.training.run import Run

pytestmark = pytest.mark.usefixtures("quick_figures")


# Commands on a run


def test_position_correlations_of_a_run_on_text_are_drawn(capsys, tmp_path, table_run):
    code, out, _ = run_command(capsys, "analyze", "correlations", table_run.folder, "--output", tmp_path)
    assert (tmp_path / "correlations.png").read_bytes().startswith(b"\x89PNG")
    grid = np.load(tmp_path / "correlations.npz")["grid"]
    assert code == 0 and "reach (tokens)" in out and tuple(grid) == (1, table_run.recipe().context, 0)
    code, _, err = run_command(capsys, "analyze", "correlations", table_run.folder, "--img-size", "28")
    assert code == 1 and "`img_size` must be left out with a language model" in err


def test_a_look_at_images_refuses_a_run_on_text(capsys, table_run):
    before = sorted(table_run.folder.iterdir())
    err = refused(capsys, "analyze", "translation", table_run.folder)
    assert sorted(table_run.folder.iterdir()) == before
    assert "`runs` must be on images" in err and str(table_run.folder) in err and "graticule evaluate" in err


def test_evaluate_gives_the_score_of_each_run_at_its_context(capsys, tmp_path, table_run, folder_run):
    folders = (table_run.folder, folder_run.folder)
    code, out, err = run_command(capsys, "evaluate", *folders, "--checkpoint", "last", "--output", tmp_path)
    assert code == 0 and "bits per byte" in out, err
    records = json.loads((tmp_path / "evaluation.json").read_text())
    assert [record["run"] for record in records] == list(map(str, folders))
    for record, run in zip(records, (table_run, folder_run), strict=True):
        assert record["score"] == pytest.approx(run.result()["last_bpb"], rel=1e-5)
        assert f"{record['score']:.3f}" in out
    err = refused(capsys, "evaluate", table_run.folder, "--sizes", 28)
    assert "`sizes` must be left out with TextModule, which resizes nothing, got 28" in err


# Training


def refused_training(capsys, tmp_path: Path, *arguments: object, recipe: object = "pydoc_quick") -> str:
    """Run a training that must fail; returns the one-line error."""
    folder = tmp_path / "run"
    err = refused(capsys, "train", recipe, "--quick", "--output", folder, *arguments)
    assert not folder.exists()
    return err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ["`data_root`", "which does not exist"]),
        (b" \n", ["`data_root` must have text in its first nine tenths"]),
        (b"text, \xdcbung", ["byte 0xdc at offset 6", "Latin-1", "save it as UTF-8"]),
        ("text".encode("utf-16"), ["byte 0xff", "UTF-16", "save it as UTF-8"]),
        (b"t\0e\0", ["byte 0x00 at offset 1", "UTF-16"]),
        (b"text and other", ["`context`", "training tokens"]),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_named(capsys, tmp_path, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    err = refused_training(capsys, tmp_path, "--dataset", "text_file", "--data-root", file)
    assert all(text in err for text in message), err
    assert str(file) in err or "`context`" in message


def test_a_run_on_text_is_started_from_and_repeated(capsys, tmp_path, table_run):
    words = ("--limit-test", 4, "--start-from", table_run.folder)
    code, out, err = run_command(
        capsys, "train", table_run.folder, *words, "--context", 48, "--output", tmp_path / "run"
    )
    assert code == 0, err
    assert Run.open(tmp_path / "run").recipe().context == 48 and re.search(r"^embed +loaded", out, re.MULTILINE)


def test_a_run_on_text_is_resumed_and_one_that_is_finished_says_so(capsys, tmp_path, folder_run):
    shutil.copytree(folder_run.folder, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    code, out, _ = run_command(capsys, "train", "--resume", run.folder)
    assert code == 0 and "already finished" in out
    assert "`context` would change" in refused(capsys, "train", "--resume", run.folder, "--context", 48)
    run.result_file.unlink()
    before = run.metrics_file.read_bytes()
    code, _, err = run_command(capsys, "train", "--resume", run.folder)
    assert code == 0 and run.finished, err
    assert run.metrics_file.read_bytes() == before and run.result()["best_bpb"] == folder_run.result()["best_bpb"]
