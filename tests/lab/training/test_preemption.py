"""Preemption: the run saves a checkpoint, exits with its code, and resumes as if never interrupted."""

import os
import signal
import time

import pytest

from forked import forked, run_command
from graticule.checkpoints.read import save_weights
from graticule.lab.cli import main
from graticule.lab.training.checkpoints import saved_checkpoints
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import Interrupted, Preempted
from graticule.lab.training.training import Training
from short_runs import assert_same_end, at_step, short, signal_itself, stopped

#: All options with random numbers or state: two epochs of three steps of two micro-batches.
TYPED = """
    digits_quick --limit-train 60 --limit-test 20 --batch-size 20 --epochs 2 --accelerator cpu --model-kwargs depth=2
    --joining lape --drop-path-rate 0.2 --augmentation.random-crop-padding 2 --augmentation.erasing 0.3
    --mixing.mixup 0.5 --mixing.cutmix 0.5 --ema-decay 0.8 --warmup-epochs 1 --aug-repeats 3 --accumulate 2
"""


@pytest.fixture(autouse=True)
def _the_process_has_its_handlers_back():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture(scope="module")
def rich(tmp_path_factory) -> Run:
    """Train an uninterrupted run."""
    command = [*TYPED.split(), "--output", str(tmp_path_factory.mktemp("rich") / "run")]
    assert main(["train", *command]) == 0
    return Run.open(command[-1])


def steps(run: Run) -> list[int]:
    return [int(path.name[5:14]) for path in saved_checkpoints(run.checkpoints)]


def test_a_cluster_that_signals_every_process_gets_its_code_and_the_run_resumes_bit_for_bit(
    tmp_path, monkeypatch, rich
):
    folder, errors = tmp_path / "run", tmp_path / "errors"
    command = ["train", *TYPED.split(), "--workers", "2", "--output", str(folder), "--auto-resume"]
    step = Training.step

    started, signaled = tmp_path / "both workers have started", tmp_path / "signaled"

    def slow(self, batch):  # so that the signal arrives within a step, while both workers wait or load
        if self.batches_done == 1:
            started.touch()
            while not signaled.exists():
                time.sleep(0.05)
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", slow)
        process = forked(run_command, command, errors)
    while not started.exists():
        assert process.is_alive(), errors.read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    signaled.touch()
    process.join()
    run, printed = Run.open(folder), errors.read_text()
    assert process.exitcode == 75, printed
    assert f"resume with: graticule train --resume {folder}" in printed and "Traceback" not in printed
    (saved,) = steps(run)
    assert 1 <= saved <= 3 and not run.finished
    assert "stopped by Preempted" in run.log_file.read_text()
    assert main(command) == 0
    assert f"resumed after step {saved}" in run.log_file.read_text()
    assert_same_end(run, rich)


def test_the_current_step_is_completed_and_saved_on_slurms_signal_too(tmp_path, capsys, rich):
    command = ["train", *TYPED.split(), "--output", str(tmp_path / "run"), "--auto-resume"]
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 4, lambda: signal_itself(signal.SIGUSR1))
        assert main(command) == 75
    run = Run.open(tmp_path / "run")
    assert steps(run)[-1] == 5 and not run.finished
    assert capsys.readouterr().err.count("saved and stopped on a signal") == 1
    assert main(command) == 0
    assert "resumed after step 5" in run.log_file.read_text()
    assert_same_end(run, rich)


@pytest.mark.parametrize(
    ("method", "step", "saved"),
    [
        ("validate", 3, 3),
        pytest.param("validate", 6, 6, marks=pytest.mark.slow),
        pytest.param("check_last", 3, 3, marks=pytest.mark.slow),
    ],
)
def test_within_the_last_step_or_validation_the_run_stops_after_the_epoch(tmp_path, method, step, saved, rich):
    recipe = rich.recipe()
    run = stopped(recipe, tmp_path / "run", step, method)
    assert steps(run)[-1] == saved and not run.finished
    assert len(run.metrics_file.read_text().splitlines()) == 1 + saved // 3
    train(recipe, run.folder, resume=True, progress=False)
    assert_same_end(run, rich)


def test_a_run_stopped_in_every_step_ends_as_one_that_was_not(tmp_path, rich):
    for step in range(6):
        run = stopped(rich.recipe(), tmp_path / "run", step)
        assert steps(run)[-1] == step + 1
    train(rich.recipe(), run.folder, resume=True, progress=False)
    assert_same_end(run, rich)


@pytest.mark.parametrize(
    "at",
    [
        pytest.param("Classification.build_data", marks=pytest.mark.slow),
        pytest.param("Classification.build_model", marks=pytest.mark.slow),
        "write_json",
    ],
)
def test_before_the_first_step_the_run_stops_at_once_and_can_be_started_again(tmp_path, monkeypatch, capsys, at):
    def signalled(*arguments):
        signal_itself()
        raise AssertionError("it continues")

    room = "lab.tasks.classification" if at.startswith("Classification") else "lab.training.start"
    monkeypatch.setattr(f"graticule.{room}.{at}", signalled)
    command = ["train", *TYPED.split(), "--output", str(tmp_path / "run"), "--auto-resume"]
    assert main(command) == 75
    assert not Run(tmp_path / "run").recipe_file.exists()
    monkeypatch.undo()
    assert main(command) == 0


@pytest.mark.parametrize("command", ["demo", "compare digits_quick --choices encoding=peg"])
def test_a_command_of_many_runs_says_in_one_line_that_it_was_stopped_and_resumes(
    tmp_path, monkeypatch, capsys, command
):
    name, *rest = command.split()
    arguments = [name, *rest, "--output", str(tmp_path)]
    work = {"demo": "commands.demo.demo", "compare": "studies.compare"}[name]
    resumes = "the same command resumes it."
    for reason, code, message in (
        (Preempted, 75, "graticule: stopped on a signal"),  # a run has saved its checkpoint
        (signal.SIGTERM, 75, "graticule: stopped on a signal"),  # between two runs
        (Interrupted, 130, "graticule: stopped"),
        (KeyboardInterrupt, 130, "graticule: stopped"),
    ):

        def stop(*_, reason=reason, **__):
            if reason is signal.SIGTERM:
                signal_itself()
            else:
                raise reason

        monkeypatch.setattr(f"graticule.lab.{work}", stop)
        assert main(arguments) == code, reason
        assert capsys.readouterr().err.strip() == f"{message}; {resumes}"


def test_a_signal_between_the_last_epoch_and_the_weights_does_not_lose_them(tmp_path, monkeypatch):
    def signalled(*arguments):
        signal_itself()
        save_weights(*arguments)

    monkeypatch.setattr("graticule.lab.training.loop.save_weights", signalled)
    run = train(short(), tmp_path / "run", progress=False)
    assert run.finished and run.weights.is_file()
