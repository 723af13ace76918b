"""A run that is killed and resumed ends with the same state as an uninterrupted one."""

import signal
import time
from pathlib import Path

import pytest

from forked import forked, run_command
from graticule.lab.cli import main
from graticule.lab.tasks.options import Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import Interrupted
from short_runs import assert_same_end, at_step, copied, rows, short, signal_itself, stopped

#: All options with random numbers or state are on; three epochs of 10 steps.
TYPED = """
    digits_quick --epochs 3 --warmup-epochs 1 --limit-train 100 --limit-test 50 --batch-size 10 --joining lape
    --drop-path-rate 0.2 --augmentation.random-crop-padding 2 --mixing.mixup 0.5 --ema-decay 0.9 --accelerator cpu
    --model-kwargs depth=2
"""


def resume_and_die(run: Run, step: int) -> None:
    """Kill this process in the step after `step`."""
    at_step(pytest.MonkeyPatch(), step, lambda: signal_itself(signal.SIGKILL))
    main(["train", *TYPED.split(), "--output", str(run.folder), "--auto-resume"])


def die_in_step(recipe: Recipe, folder: Path, step: int) -> None:
    """Train, and kill this process in the step after `step`."""
    at_step(pytest.MonkeyPatch(), step, lambda: signal_itself(signal.SIGKILL))
    train(recipe, folder, progress=False)


def test_a_run_killed_again_and_again_ends_with_the_same_weights_bit_for_bit(tmp_path):
    uninterrupted, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    assert main(["train", *TYPED.split(), "--output", str(uninterrupted.folder)]) == 0

    for step, last in ((4, None), (13, "step-000000010.ckpt")):  # before the first checkpoint, and after it
        process = forked(resume_and_die, killed, step)
        process.join(600)
        assert process.exitcode == -signal.SIGKILL and not killed.finished
        assert (killed.last and killed.last.name) == last
    errors = tmp_path / "errors"
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 25, lambda: time.sleep(600))  # it would end if this process did not run for a while
        process = forked(run_command, ["train", "--resume", str(killed.folder), "--checkpoint-steps", "2"], errors)
    while killed.last is None or killed.last.name == last:
        assert process.is_alive(), f"the run ended before it could be killed: {errors.read_text()}"
        time.sleep(0.005)
    process.kill()  # at any step after 11
    process.join()
    assert not killed.finished

    assert main(["train", "--resume", str(killed.folder)]) == 0
    assert_same_end(killed, uninterrupted)
    assert len(rows(uninterrupted)) == 3


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path):
    def stop():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 4, stop)
        with pytest.raises(Interrupted):
            train(short(), tmp_path / "run", progress=False)
    run = Run.open(tmp_path / "run")
    assert run.last.exists() and not run.finished
    train(run.recipe(), run.folder, resume=True, progress=False)
    assert run.finished and run.result()["epochs"] == 2


def test_a_run_with_few_checkpoints_repeats_epochs_bit_for_bit(tmp_path):
    recipe = short(epochs=3, lr=1e-30, min_lr=0.0, warmup_lr=0.0, checkpoint_epochs=3)  # so the first epoch is the best
    uninterrupted = train(recipe, tmp_path / "whole", progress=False)
    process = forked(die_in_step, recipe, tmp_path / "run", 7)
    process.join(600)
    run = Run.open(tmp_path / "run")
    assert process.exitcode == -signal.SIGKILL and run.last.name == "step-000000003.ckpt" and len(rows(run)) == 2
    train(recipe, run.folder, resume=True, progress=False)
    assert_same_end(run, uninterrupted)
    assert len(rows(run)) == 3


def test_a_run_folder_is_not_trained_over(plain_run):
    with pytest.raises(FileExistsError, match="--resume"):
        train(short(seed=1), plain_run.folder, progress=False)
    assert plain_run.recipe() == short()


def test_a_run_killed_after_its_last_epoch_only_writes_its_results(tmp_path, plain_run):
    run = copied(plain_run, tmp_path / "run")
    result, written = run.result(), run.last.stat().st_mtime_ns
    run.result_file.unlink()
    run.weights.unlink()
    train(short(), run.folder, resume=True, progress=False)
    assert run.result() == result and run.weights.is_file() and run.last.stat().st_mtime_ns == written


def test_a_run_with_images_of_several_sizes_resumes_bit_for_bit(tmp_path):
    recipe = short(train_sizes=("28", "20x36", "36"), model_kwargs=("depth=1",))
    uninterrupted = train(recipe, tmp_path / "whole", progress=False)
    resumed = stopped(recipe, tmp_path / "resumed", step=4)
    train(recipe, resumed.folder, resume=True, progress=False)
    assert_same_end(resumed, uninterrupted)
    with pytest.raises(ValueError, match="`img_size` must be a positive multiple of the patch size, got height 30"):
        train(short(train_sizes=("30",)), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "recipe.json").exists()
