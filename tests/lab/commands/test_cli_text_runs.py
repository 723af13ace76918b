"""Commands for runs on text: results and error messages."""

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


# Training


def refused_training(capsys, tmp_path: Path, *arguments: object, recipe: object = "pydoc_quick") -> str:
    """Run a training that must fail; returns the one-line error."""
    folder = tmp_path / "run"
    err = refused(capsys, "train", recipe, "--quick", "--output", folder, *arguments)
    assert not folder.exists()
    return err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, ["`data_root`", "which does not exist"]),
        ({}, ["`data_root` must have text files", "got none in"]),
        ({"a.txt": b" \n", "b.txt": b""}, ["`data_root`", "got 2 empty ones"]),
        ({"a.txt": b"one text"}, ["two text files or more", "only a.txt", "split it in two"]),
        ({"a.txt": b"text", "b.txt": b"\xdcbung"}, ["b.txt", "byte 0xdc at offset 0", "Latin-1", "save it as UTF-8"]),
        ({"a.txt": b"text", "b.txt": b"caf\xe9"}, ["b.txt", "byte 0xe9 at offset 3", "save it as UTF-8"]),
        ({"a.txt": b"text", "b.txt": "text".encode("utf-16")}, ["b.txt", "byte 0xff", "UTF-16", "save it as UTF-8"]),
        ({"a.txt": b"text", "b.txt": b"t\0e\0"}, ["b.txt", "byte 0x00 at offset 1", "UTF-16"]),
        ({"a.txt": b"text", "b.txt": b"other"}, ["`context`", "training tokens"]),
        ({"train/a.txt": b"text"}, ["`data_root`", "val"]),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_named(capsys, tmp_path, files, message):
    root = tmp_path / "texts"
    for name, content in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    if files is not None:
        root.mkdir(exist_ok=True)
    err = refused_training(capsys, tmp_path, "--dataset", "text_folder", "--data-root", root)
    assert all(text in err for text in message), err
    assert str(root) in err or "`context`" in message


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
