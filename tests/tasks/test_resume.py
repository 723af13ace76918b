"""A run that is killed and resumed ends as one that was not."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graticule.checkpoints import read_checkpoint
from graticule.tasks import Recipe
from graticule.training import Interrupted, Run, train

# Everything that draws random numbers or keeps state of its own is on.
OPTIONS = """
    digits_quick --epochs 3 --warmup-epochs 1 --limit-train 400 --limit-test 50 --batch-size 10 --joining lape
    --drop-path-rate 0.2 --augmentation.random-crop-padding 2 --mixing.mixup 0.5 --ema-decay 0.9 --accelerator cpu
"""


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "graticule.cli", "train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)


def test_a_run_killed_again_and_again_ends_with_the_same_weights_bit_for_bit(tmp_path):
    whole, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    finish(start(*OPTIONS.split(), "--output", str(whole.folder)))

    process = start(*OPTIONS.split(), "--output", str(killed.folder))
    wait_for(killed.recipe_file.exists, process)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)  # in the first epoch or just before it: there is no checkpoint
    process.communicate()
    assert not killed.finished

    process = start("--resume", str(killed.folder))
    wait_for(lambda: killed.last is not None, process)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)  # in the middle of an epoch, or where one ends
    process.communicate()
    assert not killed.finished

    finish(start("--resume", str(killed.folder)))
    ours, theirs = load_file(killed.weights), load_file(whole.weights)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    last = [read_checkpoint(run.last) for run in (killed, whole)]
    for state in ("state_dict", "current_model_state"):  # the moving average, and the weights themselves
        assert all(torch.equal(last[0][state][name], last[1][state][name]) for name in last[0][state])
    rows = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in c["callbacks"]["History"]["rows"]] for c in last
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3


def small(**kwargs) -> Recipe:
    return Recipe(limit_train=60, limit_test=20, batch_size=20, epochs=2, accelerator="cpu", **kwargs)


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path, monkeypatch):
    calls = 0
    step = torch.nn.functional.cross_entropy

    def stop(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    previous = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", stop)
    with pytest.raises(Interrupted):
        train(small(), tmp_path / "run", progress=False)
    signal.signal(signal.SIGINT, previous)  # Lightning shields its shutdown from a second Ctrl-C
    run = Run.open(tmp_path / "run")
    assert run.last.exists() and not run.finished
    monkeypatch.undo()
    train(run.recipe(), run.folder, resume=True, progress=False)
    assert run.finished and run.result()["epochs"] == 2


def test_a_run_folder_is_not_trained_over(tmp_path):
    train(small(), tmp_path, progress=False)
    with pytest.raises(FileExistsError, match="--resume"):
        train(small(seed=1), tmp_path, progress=False)
    assert Run.open(tmp_path).recipe() == small()


def test_a_run_can_be_repeated_from_its_folder(tmp_path):
    first = train(small(joining="lape"), tmp_path / "first", progress=False)
    again = train(Run.open(first.folder).recipe(), tmp_path / "again", progress=False)
    ours, theirs = load_file(first.weights), load_file(again.weights)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_seed_gives_other_weights(tmp_path):
    first = train(small(), tmp_path / "a", progress=False)
    other = train(small(seed=1), tmp_path / "b", progress=False)
    name = "head.weight"
    assert not torch.equal(load_file(first.weights)[name], load_file(other.weights)[name])


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"recipe\.json"):
        Run.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="not there"):
        Run.open(Path(tmp_path, "nowhere"))


def test_a_run_is_not_resumed_with_another_recipe(tmp_path):
    train(small(), tmp_path, progress=False)
    with pytest.raises(ValueError, match="another recipe"):
        train(small(lr=0.5), tmp_path, resume=True, progress=False)


def test_a_run_killed_behind_its_last_epoch_only_says_what_came_of_it(tmp_path):
    run = train(small(), tmp_path, progress=False)
    result, written = run.result(), run.last.stat().st_mtime_ns
    run.result_file.unlink()
    run.weights.unlink()
    train(small(), tmp_path, resume=True, progress=False)
    assert run.result() == result and run.weights.is_file() and run.last.stat().st_mtime_ns == written
