"""Reading run folders without their models: progress, results, and which runs differ only in the seed."""

import dataclasses
import json
import math
import os
import re
import time

import pytest

from graticule.lab.studies.runs import curve, find_runs, read_metrics, summarize
from graticule.lab.tasks.options import Recipe, TextRecipe
from graticule.lab.training.run_folder import lock_folder
from in_turn import in_turn

HEADER = "epoch,train_loss,val_loss,{column},lr,seconds"


def write_run(folder, scores=(), kind=Recipe, **recipe):
    """Write a run with the files of training; returns its folder."""
    folder.mkdir(parents=True)
    described = {"recipe": kind(**recipe).to_dict(), "metric": dataclasses.asdict(kind.metric), "parameters": 10}
    (folder / "recipe.json").write_text(json.dumps(described))
    if scores:
        rows = [f"{epoch},{2 / epoch},{3 / epoch},{score},0.001,{10 + epoch}" for epoch, score in enumerate(scores, 1)]
        (folder / "metrics.csv").write_text("\n".join([HEADER.format(column=kind.metric.column), *rows]) + "\n")
    return folder


def test_runs_are_found_at_any_depth_and_nothing_is_looked_for_in_a_run(tmp_path):
    for name in ("b", "a/seed-1", "a/seed-0", "x/y/z"):
        write_run(tmp_path / name)
    write_run(tmp_path / "b" / "checkpoints" / "inner")
    write_run(tmp_path / ".trash" / "old")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "circle").symlink_to(tmp_path)
    names = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]
    assert sorted(names) == ["a/seed-0", "a/seed-1", "b", "x/y/z"]
    assert list(find_runs(tmp_path / "b")) == [tmp_path / "b"]
    assert list(find_runs(tmp_path / "empty")) == []


def test_a_missing_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"`folders`.*nowhere.*does not exist"):
        list(find_runs(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"file', which is not a folder"):
        list(find_runs(tmp_path / "file"))


def test_a_run_is_finished_running_stopped_or_has_no_epoch_yet(tmp_path):
    new, stopped, finished, running = (
        write_run(tmp_path / name, top1) for name, top1 in (("n", ()), ("s", (50,)), ("f", (50, 60)), ("r", (50,)))
    )
    (finished / "result.json").write_text("{}")
    with lock_folder(running) as free:
        assert free
        assert [summarize(path).state for path in (new, stopped, finished)] == ["no epoch yet", "stopped", "finished"]
        assert summarize(running).state == "running"
    assert summarize(running).state == "stopped"


def test_reading_a_run_does_not_change_it(tmp_path):
    folder = write_run(tmp_path / "run", (50,))
    before = sorted(folder.iterdir())
    summarize(folder)
    assert sorted(folder.iterdir()) == before
    with lock_folder(folder):
        pass
    os.chmod(folder / ".lock", 0o444)  # a run of another user, which can only be read
    assert summarize(folder).state == "stopped"


@pytest.mark.parametrize(
    ("kind", "scores", "expected"),
    [  # epoch, best score and its epoch, the first of equals, and last score; those that are not finite are neither
        (Recipe, (50, 70.5, 70.5, 60.25), (4, (70.5, 2), 60.25)),
        (Recipe, ("nan", 40, ""), (3, (40.0, 2), None)),
        (Recipe, ("nan",), (1, None, None)),
        (Recipe, (), (0, None, None)),
        (TextRecipe, (3.5, 2.25, 2.25, 2.5, "nan"), (5, (2.25, 2), None)),
        (TextRecipe, ("nan", 3.5, 2.25), (3, (2.25, 3), 2.25)),
        (TextRecipe, (), (0, None, None)),
    ],
)
def test_epochs_and_scores_are_those_of_the_metrics(tmp_path, kind, scores, expected):
    summary = summarize(write_run(tmp_path / "run", scores, kind, epochs=30, cooldown_epochs=5))
    assert (summary.epoch, summary.best, summary.last) == expected
    assert (summary.epochs, summary.metric, summary.damage) == (35, kind.metric, "")
    assert summary.state == ("stopped" if scores else "no epoch yet") and summary.recipe["model"] == kind().model


def test_the_metric_of_a_run_is_the_recorded_one(tmp_path):
    folder = write_run(tmp_path / "run", kind=TextRecipe)
    (folder / "metrics.csv").write_text("epoch,val_top1,val_bpb\n1,50,3\n2,60,4\n")
    assert (summarize(folder).best, summarize(folder).last) == ((3.0, 1), 4.0)
    (folder / "metrics.csv").write_text("epoch,val_top1\n1,50\n")
    assert (summarize(folder).best, summarize(folder).last) == (None, None)


def test_a_run_of_a_task_that_is_not_in_the_package_is_judged_by_the_metric_that_it_recorded(tmp_path):
    folder = write_run(tmp_path / "run")
    described = {"recipe": {"task": "detection", "epochs": 7, "model": "detr"}}
    (folder / "metrics.csv").write_text("epoch,val_map\n1,0.25\n2,0.125\n")
    (folder / "recipe.json").write_text(json.dumps(described))
    summary = summarize(folder)
    assert (summary.state, summary.epoch, summary.epochs, summary.recipe["task"]) == ("stopped", 2, 7, "detection")
    assert (summary.metric, summary.best, summary.last) == (None, None, None)
    metric = {"key": "map", "label": "mAP", "unit": "", "highest": True, "decimals": 3}
    (folder / "recipe.json").write_text(json.dumps(described | {"metric": metric}))
    summary = summarize(folder)
    assert (summary.metric.title, summary.best, summary.last, summary.damage) == ("mAP", (0.25, 1), 0.125, "")
    (folder / "recipe.json").write_text(json.dumps(described | {"metric": metric | {"highest": "yes"}}))
    assert summarize(folder).damage.endswith(
        "recipe.json is damaged: `metric.highest` must be a valid boolean, got 'yes'"
    )


def test_the_last_change_is_that_of_metrics_or_log(tmp_path):
    folder = write_run(tmp_path / "run", (50,))
    (folder / "log.txt").touch()
    now = int(time.time())
    for name, age in (("recipe.json", 0), ("metrics.csv", 500), ("log.txt", 300)):
        os.utime(folder / name, (now - age, now - age))
    assert summarize(folder).changed == now - 300
    (folder / "log.txt").unlink()
    assert summarize(folder).changed == now - 500
    (folder / "metrics.csv").unlink()
    assert summarize(folder).changed == now


BAD = (
    b"\x00\xff\xfe\x80",
    b"hello\n",
    b"epoch,val_top1\n1,50\n2\n",
    b"epoch,val_top1\n1,50,60\n",
    b"epoch,val_top1\n1,good\n",
)
UNORDERED = (b"epoch\n1\n1\n", b"epoch\n2\n1\n", b"epoch\nnan\n", b"epoch,val_top1\n,50\n", b"epoch\n1.5\n")


@in_turn("text", [b"", *BAD, *UNORDERED, b"epoch\n" + b"1" * (65 << 20)])
def test_damaged_metrics_are_reported_in_the_summary(tmp_path_factory, text):
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", (50,))
    (folder / "metrics.csv").write_bytes(text)
    with pytest.raises(ValueError, match=r"metrics\.csv") as told:
        read_metrics(folder / "metrics.csv")
    summary = summarize(folder)
    assert summary.damage == str(told.value).rstrip(".")
    assert (summary.state, summary.epoch, summary.epochs, summary.best) == ("damaged", 0, 10, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "must be JSON"),
        (b'{"recipe": {\n"epochs": 3,', "line 2"),
        (b"\xff\xfe\x80", "must be JSON"),
        (b"[]", "it must be a valid dictionary, got []"),
        (b'{"recipe": {}}', "`recipe.epochs` must be given"),
        (b'{"recipe": {"epochs": "ten"}}', "`recipe.epochs` must be a valid integer, got 'ten'"),
        (b" " * (5 << 20) + b"{}", "must have at most"),
    ],
)
def test_a_damaged_recipe_is_reported_in_the_summary(tmp_path, text, message):
    folder = write_run(tmp_path / "run", (50, 60))
    (folder / "recipe.json").write_bytes(text)
    summary = summarize(folder)
    assert summary.state == "damaged" and "recipe.json" in summary.damage and message in summary.damage
    assert (summary.epoch, summary.epochs, summary.best, summary.recipe) == (2, None, None, {})


def test_missing_files_and_folders_instead_of_files_are_damage(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.csv").mkdir()
    (folder / "recipe.json").unlink()
    assert re.search(
        r"No such file.*recipe\.json'; .*metrics\.csv must be a plain file, got a folder", summarize(folder).damage
    )


def metrics(*top1, seconds=10.0):
    return {
        "epoch": [float(epoch) for epoch in range(1, len(top1) + 1)],
        "val_top1": list(map(float, top1)),
        "seconds": [seconds] * len(top1),
    }


def test_a_curve_has_means_and_deviations_over_the_epochs_of_all_runs():
    assert curve([metrics(50, 60)], "val_top1") == [(1, 50, None), (2, 60, None)]
    points = curve([metrics(50, 60, 70), metrics(54, 64, seconds=20)], "val_top1")
    assert points == [(1, 52, pytest.approx(8**0.5)), (2, 62, pytest.approx(8**0.5))]
    assert curve([metrics(50), metrics()], "val_top1") == []


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_the_curve_has_no_value_where_a_run_has_none(missing):
    first, second = curve([metrics(50, missing), metrics(54, 64)], "val_top1")
    assert first[1] == 52 and all(map(math.isnan, second[1:]))
