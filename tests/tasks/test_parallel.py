"""Several processes do what one does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graticule.checkpoints import read_checkpoint
from graticule.tasks import Recipe
from graticule.training import Run, train
from graticule.training.devices import check_shards, read_shards

#: Plain gradient descent in float64, so that a sum in another order stays as small as it is; 3 steps an epoch, the
#: last of them not full, and a number of test images that two does not divide.
PLAIN = {
    "limit_train": 50,
    "limit_test": 21,
    "batch_size": 20,
    "eval_batch_size": 4,
    "epochs": 2,
    "joining": "lape",
    "optimizer": "sgd",
    "lr": 0.05,
    "precision": "64-true",
    "accelerator": "cpu",
}
FLOAT32 = {"precision": "32-true"}
SHARED_OUT = {"strategy": "fsdp", "checkpoint_steps": 2, "keep": 2} | FLOAT32
#: A process starts itself again for every further device, so it must be a script.
SCRIPT = """
import json, sys
from graticule.tasks import Recipe
from graticule.training import train
if __name__ == "__main__":
    train(Recipe.from_dict(json.loads(sys.argv[1])), sys.argv[2], resume=True, progress=False)
"""


def start(folder, recipe, script=SCRIPT):
    path = folder.parent / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), json.dumps(recipe.to_dict()), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def together(folder, script=SCRIPT, **options) -> Run:
    process = start(folder, Recipe(**(PLAIN | {"devices": 2} | options)), script)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return Run(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Run:
    return train(Recipe(**PLAIN), tmp_path_factory.mktemp("alone") / "run", progress=False)


@pytest.fixture(scope="module")
def alone_in_float32(tmp_path_factory) -> Run:
    """What a shared-out run is held against: Lightning shares out in float32 and bfloat16 only."""
    return train(Recipe(**(PLAIN | FLOAT32)), tmp_path_factory.mktemp("alone32") / "run", progress=False)


def assert_equal_runs(run: Run, other: Run, atol: float = 1e-10) -> None:
    ours, theirs = load_file(run.weights), load_file(other.weights)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=atol)
    rows = [
        [[float(value) for value in line.split(",")[:-1]] for line in one.metrics_file.read_text().split()[1:]]
        for one in (run, other)
    ]
    torch.testing.assert_close(torch.tensor(rows[0]), torch.tensor(rows[1]), rtol=0, atol=1e-5)
    assert [row[3] for row in rows[0]] == pytest.approx([row[3] for row in rows[1]], abs=1e-9)  # top-1, to the image


def test_parts_of_a_batch_add_up_to_the_step_of_the_whole(tmp_path, alone):
    assert_equal_runs(train(Recipe(**PLAIN, accumulate=2), tmp_path / "run", progress=False), alone)


def test_two_processes_make_the_steps_and_the_scores_of_one(tmp_path, alone):
    run = together(tmp_path / "run")
    assert_equal_runs(run, alone)
    assert "on 2 devices, cpu" in run.log_file.read_text()


def test_two_processes_with_two_parts_each_make_the_steps_of_one(tmp_path, alone):
    assert_equal_runs(together(tmp_path / "run", accumulate=2), alone)


def test_shared_out_parameters_are_trained_saved_and_put_together_again(tmp_path, alone_in_float32):
    run = together(tmp_path / "run", **SHARED_OUT)
    assert_equal_runs(run, alone_in_float32, atol=1e-6)
    assert run.last is not None and run.last.is_dir()
    assert len(list(run.last.glob("*.distcp"))) == 2  # each process wrote its share
    ours = read_shards(run.last)
    theirs = run.model(checkpoint="last").state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_shared_out_run_that_was_interrupted_goes_on(tmp_path, alone_in_float32):
    stop = SCRIPT.replace(
        "if __name__",
        "import os, signal\n"
        "from graticule.training.module import TrainingModule\n"
        "step = TrainingModule.training_step\n"
        "def stopping(self, batch, batch_idx):\n"
        "    if self.current_epoch == 1 and batch_idx == 1 and self.global_rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return step(self, batch, batch_idx)\n"
        "TrainingModule.training_step = stopping\n"
        "if __name__",
    )
    folder = tmp_path / "run"
    process = start(folder, Recipe(**(PLAIN | {"devices": 2} | SHARED_OUT)), stop)
    _, errors = process.communicate(timeout=300)
    run = Run(folder)
    assert process.returncode != 0 and "Preempted" in errors and not run.finished
    assert run.last is not None and run.last.name == "step-000000005.ckpt"  # the first epoch's 3, and 2
    assert_equal_runs(together(folder, **SHARED_OUT), alone_in_float32, atol=1e-6)
    assert "resumed after step 5" in run.log_file.read_text()


def test_a_run_goes_on_with_another_number_of_processes(tmp_path, alone):
    folder = tmp_path / "run"
    recipe = Recipe(**PLAIN)
    first = train(recipe, folder, progress=False)
    for path in (first.result_file, first.weights, first.last):
        path.unlink()  # as if it had been killed in the second epoch
    assert first.last is not None and first.last.name == "step-000000003.ckpt"
    assert_equal_runs(together(folder), alone)


def test_what_cannot_work_together_is_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=r"`batch_size` must be a multiple of devices x nodes x accumulate.*2 x 1 x 3"):
        Recipe(batch_size=20, devices=2, accumulate=3)
    with pytest.raises(ValueError, match="`ema_decay` must be left out with strategy fsdp"):
        Recipe(strategy="fsdp", ema_decay=0.9)
    with pytest.raises(ValueError, match="`precision` must be"):
        train(Recipe(strategy="fsdp", precision="16-mixed"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_shared_out_checkpoint_that_is_not_whole_or_would_run_code_is_not_read(tmp_path):
    import pickle

    with pytest.raises(ValueError, match=r"lacks \.metadata"):
        check_shards(tmp_path)
    (tmp_path / "meta.pt").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Path.cwd))  # a method: getattr of a class
    with pytest.raises(ValueError, match="would import"):
        check_shards(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch %b'\ntR." % str(tmp_path / "ran").encode())
    with pytest.raises(ValueError, match=r"would import os\.system"):
        check_shards(tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / ".metadata").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match="damaged"):
        check_shards(tmp_path)


def test_one_checkpoint_of_several_processes_is_read_as_plain_data(tmp_path):
    run = together(tmp_path / "run", epochs=1)
    assert run.last is not None
    assert [images for _, images in read_checkpoint(run.last)["progress"]["sums"]] == [25, 25]
