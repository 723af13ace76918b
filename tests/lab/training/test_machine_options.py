"""Options of a run that may change when it is resumed, and errors of failing machines."""

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import time

import pytest
import torch
from torch import nn

from commands import run_command
from forked import forked
from graticule.checkpoints.read import read_checkpoint
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.studies.runs import summarize
from graticule.lab.training.loop import build_fabric, train
from graticule.lab.training.run import Run
from graticule.lab.training.training import Training
from in_turn import in_turn
from short_runs import assert_same, assert_same_end, at_step, copied, short, stopped

# of Python since 3.12, about the loader's processes
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
#: Random augmentation of single images, so that other processes have work.
EACH = Augmentation(erasing=0.3)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Run:
    return train(short(augmentation=EACH), tmp_path_factory.mktemp("whole") / "run", progress=False)


@pytest.fixture(scope="module")
def between(tmp_path_factory) -> Run:
    """Return a run stopped after the first epoch."""
    return stopped(short(augmentation=EACH), tmp_path_factory.mktemp("between") / "run", step=2)


@pytest.fixture(scope="module")
def within(tmp_path_factory) -> Run:
    """Return a run stopped within the second epoch."""
    return stopped(short(augmentation=EACH), tmp_path_factory.mktemp("within") / "run", step=3)


def resumed(capsys, run, options="") -> tuple[int, str]:
    """Resume a run with options on the command line; returns the exit code and the errors."""
    capsys.readouterr()
    code, _, errors = run_command(capsys, "train", "--resume", run.folder, *options.split())
    return code, errors


@pytest.mark.parametrize(
    "options",
    [
        "--workers 1 --keep 3 --grad-checkpointing",
        "--eval-batch-size 7",
        pytest.param("--checkpoint-steps 1 --keep 2", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_with_other_machine_options_has_the_same_end(tmp_path, capsys, within, uninterrupted, options):
    run = copied(within, tmp_path / "run")
    assert resumed(capsys, run, options)[0] == 0
    if "eval" in options:  # the validation loss is summed in a different order
        assert_same(*(read_checkpoint(ended.last)["state_dict"] for ended in (run, uninterrupted)))
    else:
        assert_same_end(run, uninterrupted)
    assert run.recipe() == within.recipe()  # as it was started


def test_micro_batches_can_change_between_epochs_and_not_within_one(tmp_path, capsys, between, within, uninterrupted):
    run = copied(between, tmp_path / "between")
    assert resumed(capsys, run, "--accumulate 2")[0] == 0
    weights, expected = (read_checkpoint(ended.last)["state_dict"] for ended in (run, uninterrupted))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-3)  # Adam enlarges what is near 0
    run = copied(within, tmp_path / "within")
    code, errors = resumed(capsys, run, "--accumulate 2")
    assert code == 1 and "`accumulate` must be 1 until the end of the epoch, got 2" in errors
    assert resumed(capsys, run)[0] == 0
    assert_same_end(run, uninterrupted)


@in_turn(
    ("options", "message"),
    [
        ("--lr 0.5", "differs: `lr` would change"),
        ("--augmentation.erasing 0.1", "differs: `augmentation` would change"),
        ("--batch-size 10 --accumulate 2", "differs: `batch_size` would change"),
        ("--output elsewhere", "`--resume` must be given without --output"),
        ("--auto-resume", "`--resume` must be given without --output"),
    ],
)
def test_other_changes_of_a_resumed_run_are_refused_by_name(capsys, within, options, message):
    last = within.last.name
    code, errors = resumed(capsys, within, options)
    assert code == 1 and message in errors and within.last.name == last, errors


@in_turn(
    ("change", "message"),
    [
        (lambda recipe: recipe.update(epoch=3), "epoch (did you mean epochs?)"),
        (lambda recipe: recipe["mixing"].update(mixupp=3), "`mixing` must not have the keys mixupp (did"),
        (lambda recipe: recipe.update(lr=-1), "`lr` must be greater than 0, got -1"),
        (lambda recipe: recipe.update(lr="\x1b[31m\n"), r"`lr` must be a valid number, got '\x1b[31m\n'"),
        (lambda recipe: recipe.clear(), "is not a recipe: `model` must be given"),
    ],
)
def test_damage_in_the_file_of_a_recipe_is_named(tmp_path, capsys, within, change, message):
    described, run = json.loads(within.recipe_file.read_text()), Run(tmp_path)
    change(described["recipe"])
    run.recipe_file.write_text(json.dumps(described))
    code, errors = resumed(capsys, run)
    assert code == 1 and message in errors and str(run.recipe_file) in errors and errors.count("\n") == 1


def test_a_folder_is_of_one_run_until_that_is_killed_and_its_processes_end_with_it(tmp_path, monkeypatch):
    run, recipe = Run(tmp_path / "run"), short(augmentation=EACH, workers=2)
    begun = tmp_path / "the first step has begun"

    def wait(*_):
        begun.touch()
        time.sleep(600)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", wait)
        patch.setattr("torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL", 600)  # when loaders look for parents
        process = forked(functools.partial(train, recipe, run.folder, progress=False))
    try:
        while not begun.exists():
            assert process.is_alive(), "the run ended by itself"
            time.sleep(0.05)
        assert summarize(run.folder).state == "running"
        before = sorted(run.folder.rglob("*"))
        with pytest.raises(
            BlockingIOError, match=r"`folder` must be of one run at a time.*another process is training"
        ):
            train(recipe, run.folder, resume=True, progress=False)
        assert sorted(run.folder.rglob("*")) == before
    finally:
        process.kill()
    process.join()
    killed = time.time()
    while summarize(run.folder).state == "running":  # the loader's processes also hold the lock
        assert time.time() - killed < 60
        time.sleep(0.05)


def kill_a_loader(number: int = signal.SIGKILL) -> None:
    pid = multiprocessing.active_children()[0].pid
    subprocess.run(["/bin/sh", "-c", f"kill -{int(number)} {pid}"], check=True)  # from a process other than its parent
    if number == signal.SIGKILL:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # PyTorch's handler looks for it, too


def test_a_killed_loader_is_reported_and_the_run_resumes(tmp_path, capsys, monkeypatch, uninterrupted):
    # PyTorch installs its handler for ended processes only once
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    run, recipe = Run(tmp_path / "run"), short(augmentation=EACH, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 3, kill_a_loader)
        with pytest.raises(ChildProcessError, match=r"a process that loads images died .*Killed.*The last checkpoint"):
            train(recipe, run.folder, progress=False)
    assert run.last.name == "step-000000003.ckpt" and "stopped by" in run.log_file.read_text()
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 4, kill_a_loader)
        code, errors = resumed(capsys, run)
    assert code == 1 and errors.splitlines()[-1].startswith("graticule: error: a process that loads images died")
    assert resumed(capsys, run)[0] == 0
    assert_same_end(run, uninterrupted)


def test_a_loader_outlives_the_signals_of_a_cluster(tmp_path, uninterrupted):
    run, recipe = Run(tmp_path / "run"), short(augmentation=EACH, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 3, lambda: [kill_a_loader(signal.SIGTERM), kill_a_loader(signal.SIGUSR1)])
        train(recipe, run.folder, progress=False)
    assert_same_end(run, uninterrupted)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_activations_that_are_computed_again_give_the_same_weights(tmp_path, uninterrupted):
    run = train(short(augmentation=EACH, grad_checkpointing=True), tmp_path / "run", progress=False)
    assert_same_end(run, uninterrupted)
    options = {"drop_path_rate": 0.3, "ema_decay": 0.8}
    again = train(short(grad_checkpointing=True, **options), tmp_path / "again", progress=False)
    assert_same_end(again, train(short(**options), tmp_path / "once", progress=False))


def test_a_compiled_model_is_trained_saved_under_the_same_names_and_resumed(tmp_path, monkeypatch, uninterrupted):
    inner, compiled = nn.Module.compile, []

    def compile(module: nn.Module) -> None:
        compiled.append(module)
        inner(module, backend="eager")  # captures the model, without a C++ compiler

    monkeypatch.setattr(nn.Module, "compile", compile)
    run = stopped(short(augmentation=EACH, compile=True), tmp_path / "run", step=3)
    train(run.recipe(), run.folder, resume=True, progress=False)
    assert len(compiled) == 2
    weights, expected = (read_checkpoint(ended.last)["state_dict"] for ended in (run, uninterrupted))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-3)
    assert_same(run.model(checkpoint="last").state_dict(), {n.removeprefix("model."): v for n, v in weights.items()})


def test_batch_norm_over_gpus_is_refused_without_them(tmp_path):
    with pytest.raises(ValueError, match="`sync_batchnorm` must be off on CPUs"):
        train(short(sync_batchnorm=True), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    assert not short(sync_batchnorm=True).quick().sync_batchnorm


def test_several_machines_that_nobody_started_are_refused_and_not_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"`nodes` must be 1 unless the machines are known.*torchrun"):
        train(short(nodes=2), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert build_fabric(short(nodes=2)).world_size == 2
