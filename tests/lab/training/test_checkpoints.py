"""A checkpoint is complete or absent, the last ones and the best are kept, and a damaged one does not affect others."""

import errno
import json
import os
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from commands import run_command
from graticule.lab.training.checkpoints import best_checkpoint, saved_checkpoints
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from in_turn import in_turn
from short_runs import assert_same_end, copied, rows, short, stopped


@pytest.fixture(scope="module")
def halfway(tmp_path_factory) -> Run:
    """Return a run stopped within the second epoch, with the checkpoints of steps 2 to 5."""
    return stopped(short(keep=9, checkpoint_steps=2), tmp_path_factory.mktemp("halfway") / "run", step=4)


def steps(run: Run) -> list[int]:
    return [int(path.name[5:14]) for path in saved_checkpoints(run.checkpoints)]


#: A rate at which nothing changes, so that the first epoch stays the best.
STILL = {"lr": 1e-30, "min_lr": 0.0, "warmup_lr": 0.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 2}, [3, 6, 9]),
        pytest.param({"keep": 1}, [3, 9], marks=pytest.mark.slow),
        pytest.param({"keep": 1, "checkpoint_steps": 2}, [3, 9], marks=pytest.mark.slow),
        ({"keep": 9, "checkpoint_epochs": 3}, [3, 9]),
        ({"keep": 3, "checkpoint_steps": 2}, [3, 6, 8, 9]),  # 6 after the second epoch; 8 and 9 follow
        pytest.param({"keep": 9, "checkpoint_steps": 2}, [2, 3, 4, 6, 8, 9], marks=pytest.mark.slow),
    ],
)
def test_exactly_the_last_ones_and_the_best_are_kept(tmp_path, options, expected):
    run = train(short(epochs=3, **STILL, **options), tmp_path / "run", progress=False)
    assert steps(run) == expected
    assert run.last.name == "step-000000009.ckpt" and run.best.name == "step-000000003.ckpt"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "best.json",
        *[f"step-{step:09d}.ckpt" for step in expected],
    ]


def test_the_best_is_that_of_the_highest_top1(plain_run):
    pointer = json.loads((plain_run.checkpoints / "best.json").read_text())
    scores = [float(row["val_top1"]) for row in rows(plain_run)]
    assert pointer["val_top1"] == max(scores)
    assert pointer["checkpoint"] == f"step-{3 * (1 + scores.index(max(scores))):09d}.ckpt"


@pytest.mark.parametrize("left", [None, '{"checkpoint": "step-000000001.ckpt", "val_top1": 0}'])
def test_a_run_killed_between_saving_and_pointing_points_to_the_best_when_it_is_resumed(tmp_path, left):
    run = stopped(short(**STILL), tmp_path / "run", step=3)
    pointer = run.checkpoints / "best.json"
    pointer.unlink() if left is None else pointer.write_text(left)
    train(short(**STILL), run.folder, resume=True, progress=False)
    assert run.best.name == "step-000000003.ckpt" and run.best.is_file()


BESIDE = [
    (json.dumps({"checkpoint": name}), "must name a checkpoint beside it") for name in ("../x", "/x", "step-1.ckpt")
]
DAMAGED = [
    (text, "(is damaged|must be JSON)") for text in ("", "{", "[]", "{}", "null", '{"checkpoint": 3}', "[" * 100_000)
]


@in_turn(("text", "message"), [*BESIDE, *DAMAGED])
def test_a_damaged_pointer_or_one_to_anything_but_a_checkpoint_beside_it_is_refused(tmp_path, text, message):
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(ValueError, match=rf"best\.json {message}"):
        best_checkpoint(tmp_path)


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_one_changed_byte_of_a_checkpoint_is_named(tmp_path, halfway, capsys, at):
    run = copied(halfway, tmp_path / "run")
    content = bytearray(run.last.read_bytes())
    with zipfile.ZipFile(run.last) as file:  # a byte of the contents, which the check sums cover
        largest = max(file.infolist(), key=lambda entry: entry.file_size)
    start = content.index(b"data/", largest.header_offset) + 200
    content[start + int(at * (largest.file_size - 400))] ^= 1
    run.last.write_bytes(content)
    code, _, errors = run_command(capsys, "train", "--resume", run.folder)
    assert code == 1 and "its check sums do not fit its contents" in errors and "remove it to resume from" in errors
    with pytest.raises(ValueError, match="check sums do not fit"):
        run.model(checkpoint="last")


def test_only_incomplete_files_of_a_killed_process_are_removed(tmp_path, halfway):
    run = copied(halfway, tmp_path / "run")
    (run.checkpoints / ".step-000000098.ckpt.77.tmp").write_bytes(b"half")
    (run.checkpoints / ".best.json.77.tmp").write_text("{")
    (run.folder / ".weights.safetensors.77.tmp").write_bytes(b"half")
    (run.folder / ".mine.tmp").write_text("of the user")
    (run.checkpoints / "step-x.ckpt").write_text("of the user")
    train(short(), run.folder, resume=True, progress=False)
    assert sorted(path.name for path in run.checkpoints.iterdir() if not path.name.startswith("step-0")) == [
        "best.json",
        "step-x.ckpt",
    ]
    assert sorted(path.name for path in run.folder.iterdir() if path.name.startswith(".")) == [".lock", ".mine.tmp"]


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "log.txt", ".lock", "metrics.csv"])
def test_nothing_is_written_through_a_link_out_of_the_run_s_folder(tmp_path, halfway, name):
    run, elsewhere = copied(halfway, tmp_path / "run"), tmp_path / "elsewhere"
    (run.folder / name).rename(elsewhere)
    if elsewhere.is_dir():
        (elsewhere / ".mine.tmp").mkdir()
    (run.folder / name).symlink_to(elsewhere)
    before = {path: path.stat().st_mtime_ns for path in (elsewhere, *elsewhere.rglob("*"))}
    with pytest.raises(ValueError, match="`folder` must contain its files"):
        train(short(keep=9, checkpoint_steps=2), run.folder, resume=True, progress=False)
    assert {path: path.stat().st_mtime_ns for path in (elsewhere, *elsewhere.rglob("*"))} == before


def cut(path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def test_a_checkpoint_that_is_cut_is_named_and_so_are_the_older_ones(tmp_path, capsys, halfway, plain_run):
    run = copied(halfway, tmp_path / "run")
    assert steps(run) == [2, 3, 4, 5]
    cut(run.last)
    code, _, errors = run_command(capsys, "train", "--resume", run.folder)
    assert code == 1 and "step-000000005.ckpt" in errors and "truncated" in errors
    assert "remove it to resume from step-000000004.ckpt" in errors
    run.last.unlink()
    train(short(), run.folder, resume=True, progress=False)
    assert_same_end(run, plain_run)
    assert "resumed after step 4" in run.log_file.read_text()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"step-000000002\.ckpt.*there is no older one"),
        (lambda path: torch.save({"state_dict": {}}, path), "`optimizer` must be given"),
    ],
)
def test_a_damaged_only_checkpoint_is_named(tmp_path, damage, message):
    run = stopped(short(), tmp_path / "run", step=1)
    damage(run.last)
    with pytest.raises(ValueError, match=message):
        train(short(), run.folder, resume=True, progress=False)


def test_going_back_to_an_older_checkpoint_finds_the_best_again(tmp_path, plain_run):
    run = copied(train(short(keep=9, checkpoint_steps=1), tmp_path / "first", progress=False), tmp_path / "run")
    run.result_file.unlink()
    for step in (3, 4, 5, 6):  # including the best one
        (run.checkpoints / f"step-{step:09d}.ckpt").unlink()
    train(short(), run.folder, resume=True, progress=False)
    assert run.best.is_file() and run.result() | {"seconds": 0} == plain_run.result() | {"seconds": 0}
    assert torch.equal(load_file(run.weights)["head.weight"], load_file(plain_run.weights)["head.weight"])


def test_after_a_full_disk_the_run_resumes_from_the_last_checkpoint(tmp_path, monkeypatch, capsys, plain_run):
    save, folder = torch.save, tmp_path / "run"

    def limited(values, path, *arguments):
        if "step-000000004" in str(path):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return save(values, path, *arguments)

    monkeypatch.setattr("graticule.lab.training.checkpoints.torch.save", limited)
    with pytest.raises(OSError, match=r"step-000000004\.ckpt could not be written .*No space left.*is the disk full"):
        train(short(checkpoint_steps=2), folder, progress=False)
    monkeypatch.undo()
    run = Run.open(folder)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["best.json", "step-000000003.ckpt"]
    assert "stopped by OSError" in run.log_file.read_text()
    train(short(checkpoint_steps=2), folder, resume=True, progress=False)
    assert_same_end(run, plain_run)
