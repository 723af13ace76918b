"""`graticule runs` on the command line, on run folders with the files of training."""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from commands import refused, run_command
from graticule.lab.tasks.options import Recipe, TextRecipe

HEADER = "epoch,train_loss,val_loss,{column},lr,seconds"


def write_run(folder: Path, scores=(), age: float = 0, seconds: float = 10.0, kind=Recipe, **recipe) -> Path:
    """Write a run with the files of training, last changed `age` seconds ago; returns its folder."""
    folder.mkdir(parents=True)
    described = {"recipe": kind(**recipe).to_dict(), "metric": dataclasses.asdict(kind.metric), "parameters": 10}
    (folder / "recipe.json").write_text(json.dumps(described))
    (folder / "log.txt").write_text("2026-01-01 00:00:00  starts on 1 device, cpu\n")
    if scores:
        rows = [f"{n},{2 / n},{3 / n},{score},{0.001 / n},{seconds}" for n, score in enumerate(scores, 1)]
        (folder / "metrics.csv").write_text("\n".join([HEADER.format(column=kind.metric.column), *rows]) + "\n")
    for path in folder.iterdir():
        os.utime(path, (time.time() - age,) * 2)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Write a folder with a run in every state, inside the current folder."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    write_run(root / "done", (70, 81.5, 80), age=3 * 86_400, epochs=3, joining="lape")
    (root / "done" / "result.json").write_text("{}")
    write_run(root / "study" / "seed-0", (60, 65), age=2 * 3600 + 5, epochs=20, cooldown_epochs=10, seed=0)
    write_run(root / "study" / "seed-1", (62, "nan"), age=190, seed=1, encoding="sinusoidal_2d")
    write_run(root / "new", age=20)
    write_run(root / "broken", (50,), age=90_000)
    (root / "broken" / "metrics.csv").write_text("epoch,val_top1\n1,good\n")
    os.utime(root / "broken" / "metrics.csv", (time.time() - 90_000,) * 2)
    return root


def table(out: str) -> list[list[str]]:
    """Return the cells of a table: of the header, and of every row."""
    lines = out.splitlines()
    rule = next(line for line in lines if set(line) <= {"-", " "} and "--" in line)
    ends = np.cumsum([len(dashes) + 2 for dashes in rule.split("  ")])
    above = lines.index(rule) - 1
    rows = [line for line in lines[above:] if line[: ends[0]].strip() and line != rule]
    return [[line[a:b].strip() for a, b in zip([0, *ends], ends, strict=False)] for line in rows]


def snapshot(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# runs


def test_runs_lists_the_progress_of_every_run_the_newest_last(capsys, folder):
    before = snapshot(folder)
    code, out, err = run_command(capsys, "runs")
    assert code == 0 and err == ""
    head, *rows = table(out)[:6]
    differing = ["encoding", "joining", "seed", "epochs", "cooldown_epochs"]
    assert head == ["run", "state", *differing, "epoch", "best top-1 (%)", "last", "time", "changed"]
    assert ["|".join(row[:-1]) for row in rows] == [
        "done|finished|own|lape|0|3|0|3/3|81.50 (2)|80.00|30 s",
        "broken|damaged|own|default|0|10|0|0/10|-|-|-",
        "study/seed-0|stopped|own|default|0|20|10|2/30|65.00 (2)|65.00|20 s",
        "study/seed-1|stopped|sinusoidal_2d|default|1|10|0|2/10|62.00 (1)|-|20 s",
        "new|no epoch yet|own|default|0|10|0|0/10|-|-|-",
    ]
    assert [row[-1] for row in rows[:4]] == ["3 d", "1 d", "2 h", "3 min"]
    assert rows[4][-1].endswith(" s")
    assert "all have model vit_nano_patch4_28, lr 0.001\n" in out
    assert "5 runs: 1 finished, 1 damaged, 2 stopped, 1 no epoch yet" in out
    assert "metrics.csv is damaged: it must be a table of numbers" in out
    assert snapshot(folder) == before


def test_values_that_differ_are_columns(capsys, tmp_path):
    for lr in (0.001, 0.002):
        write_run(tmp_path / str(lr), (50, 60), lr=lr, dataset="digits")
    _, out, _ = run_command(capsys, "runs", tmp_path)
    assert table(out)[0][2:4] == ["lr", "epoch"] and "seed 0" in out


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("name", ["broken", "done", "new", "study/seed-0", "study/seed-1"]),
        ("best", ["broken", "new", "study/seed-1", "study/seed-0", "done"]),
        ("age", ["done", "broken", "study/seed-0", "study/seed-1", "new"]),
    ],
)
def test_runs_are_sorted_as_asked(capsys, folder, order, names):
    _, out, _ = run_command(capsys, "runs", "--sort", order)
    listed = [row[0] for row in table(out)[1:6]]
    assert listed[2:] == names[2:] and sorted(listed[:2]) == sorted(names[:2])  # those without a score come first


def test_several_folders_are_one_list_and_no_run_is_in_it_twice(capsys, folder):
    _, out, _ = run_command(capsys, "runs", "runs/study", "runs/done", "runs", "--sort", "name")
    names = ("broken", "done", "new", "study/seed-0", "study/seed-1")
    assert [row[0] for row in table(out)[1:6]] == [f"runs/{name}" for name in names]
    _, out, _ = run_command(capsys, "runs", "runs/done")
    assert table(out)[1][0] == "done" and "1 run: 1 finished" in out


def records(capsys, *folders) -> dict[str, dict]:
    """Return the output of `runs --json`, by the names of the runs."""
    code, out, err = run_command(capsys, "runs", *folders, "--json")
    assert code == 0 and err == ""
    return {record["name"]: record for record in json.loads(out)}


def test_runs_prints_a_list_that_a_program_can_read(capsys, folder):
    runs = records(capsys)
    assert len(runs) == 5 and runs["done"]["seconds"] == 30 and runs["done"]["recipe"]["epochs"] == 3
    run = runs["study/seed-1"]
    assert (run["state"], run["encoding"], run["seed"], run["epoch"]) == ("stopped", "sinusoidal_2d", 1, 2)
    assert (run["best_top1"], run["best_epoch"], run["last_top1"], run["damage"]) == (62.0, 1, None, None)
    assert "metrics.csv is damaged" in runs["broken"]["damage"]


@pytest.fixture
def mixed(tmp_path, monkeypatch) -> Path:
    """Write a folder with runs on images and on text, one of them of an unknown task."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "mixed"
    write_run(root / "images" / "low", (50, 60), age=600)
    write_run(root / "images" / "high", (97.8, 97), age=500)
    write_run(root / "text" / "low", (3.5, 2.156, 2.1564), age=400, kind=TextRecipe, encoding="rope_1d")
    write_run(root / "text" / "high", (3.25, "nan"), age=300, kind=TextRecipe, seed=7)
    write_run(root / "text" / "new", age=200, kind=TextRecipe)
    strange = write_run(root / "strange", age=100)
    (strange / "recipe.json").write_text('{"recipe": {"task": "detection", "model": "detr", "epochs": 50}}')
    return root


def test_runs_on_text_are_judged_by_bits_per_byte_of_which_the_lowest_is_best(capsys, mixed):
    code, out, err = run_command(capsys, "runs", "mixed/text")
    assert code == 0 and err == ""
    head, *rows = table(out)[:4]
    assert head == ["run", "state", "encoding", "seed", "epoch", "best bits per byte", "last", "time", "changed"]
    assert [(row[0], *row[2:7]) for row in rows] == [
        ("low", "rope_1d", "0", "3/10", "2.156 (2)", "2.156"),
        ("high", "own", "7", "2/10", "3.250 (1)", "-"),
        ("new", "own", "0", "0/10", "-", "-"),
    ]


def test_a_run_of_an_unknown_task_is_listed_as_far_as_it_can_be_read(capsys, mixed):
    shutil.rmtree(mixed / "text")
    code, out, err = run_command(capsys, "runs", "mixed")
    assert code == 0 and err == ""
    head, *rows = table(out)
    assert "best top-1 (%)" in head
    strange = dict(zip(head, rows[2], strict=True))
    assert [strange[key] for key in ("run", "state", "model", "epoch")] == ["strange", "no epoch yet", "detr", "0/50"]
    assert "values differ or are not in all recipes" in out


def test_a_score_has_the_name_of_its_metric_for_a_program(capsys, mixed):
    runs = records(capsys, "mixed")
    text, images, strange = (runs[name] for name in ("text/low", "images/high", "strange"))
    assert (text["task"], text["best_bpb"], text["best_epoch"], text["last_bpb"]) == ("language", 2.156, 2, 2.1564)
    assert (images["task"], images["best_top1"], images["last_top1"]) == ("classification", 97.8, 97)
    assert runs["text/new"]["best_bpb"] is None and runs["text/new"]["last_bpb"] is None
    assert not any("top1" in key for key in text) and not any("bpb" in key for key in images)
    assert not any("bpb" in key or "top1" in key for key in strange)


def test_unusual_names_are_one_row_each(capsys, tmp_path):
    names = ["with space", "näme", "a$b$", "_under", "line\nend", "\x1b[31mred", "=1+1", os.fsdecode(b"no\xfftext")]
    for name in names:
        write_run(tmp_path / name, (50, 60))
    code, out, _ = run_command(capsys, "runs", tmp_path)
    assert code == 0 and "\x1b" not in out
    listed = {row[0] for row in table(out)[1:9]}
    assert listed == {*names[:4], "line\\nend", "\\x1b[31mred", "=1+1", "no\\udcfftext"}
    assert len(records(capsys, tmp_path)) == 8


def test_an_empty_folder_has_no_runs_and_one_that_is_not_there_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, "runs")
    assert "`folders`" in err and "'runs', which does not exist" in err
    (tmp_path / "runs").mkdir()
    code, out, err = run_command(capsys, "runs")
    assert code == 0 and out == "no run in runs\n" and err == ""
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]
