"""Runs in other processes equal runs in this one, and runs that die or are stopped are resumed."""

import contextlib
import json
import signal
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

import graticule.lab.studies.execution as module
from forked import forked
from graticule.lab.studies.comparison import compare
from graticule.lab.studies.execution import ATTEMPTS, OUTPUT, executor_of, train_job, train_runs
from graticule.lab.studies.plan import plan
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import locked

CHOICES = {
    name: Recipe(
        model="vit_nano_patch4_28",
        model_kwargs=("depth=1", "embed_dim=8", "num_heads=1"),
        encoding=name,
        dataset="digits",
        limit_train=20,
        limit_test=10,
        batch_size=20,
        epochs=1,
        accelerator="cpu",
    )
    for name in ("none", "learnable")
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Run the comparison in one process, run by run."""
    folder = tmp_path_factory.mktemp("here")
    compare(CHOICES, [0], folder, progress=False)
    return folder


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "_POLL", 0.0)
    monkeypatch.setattr(module, "_PATIENCE", 0.0)


class Scripted:
    """Calls immediately in this process, or fails by the script: one entry per call, None to call."""

    def __init__(self, *script):
        self.script = list(script)
        self.calls = 0

    def submit(self, fn, *args):
        future = Future()
        self.calls += 1
        error = self.script.pop(0) if self.script else None
        try:
            future.set_result(fn(*args)) if error is None else future.set_exception(error)
        except Exception as raised:
            future.set_exception(raised)
        return future


def table(folder):
    record = json.loads((folder / "comparison.json").read_text())
    return {key: record[key] for key in ("recipe", "choices", "seeds", "top1", "parameters", "runs")}


def test_a_comparison_by_an_executor_has_the_same_numbers(here, tmp_path):
    compare(CHOICES, [0], tmp_path, progress=False, executor=Scripted())
    assert table(tmp_path) == table(here)
    assert all((one.folder / OUTPUT).exists() for one in plan(CHOICES, [0], tmp_path))


def test_a_run_whose_process_died_is_submitted_again(here, tmp_path):
    executor = Scripted(BrokenProcessPool("a process died"), OSError("the disk was away"))
    compare(CHOICES, [0], tmp_path, progress=False, executor=executor)
    assert executor.calls == 4 and table(tmp_path) == table(here)


def test_a_run_that_dies_again_and_again_without_a_new_checkpoint_is_given_up_after_the_others(tmp_path):
    runs = plan(CHOICES, [0], tmp_path)

    class Dies(Scripted):
        def submit(self, fn, *args):
            folder = runs[0].folder
            if args[1] == str(folder):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / OUTPUT).touch()
                self.script.insert(0, BrokenProcessPool("out of memory"))
            return super().submit(fn, *args)

    executor = Dies()
    with pytest.raises(RuntimeError, match=r"some runs failed.*\n.*none.*BrokenProcessPool: out of memory"):
        train_runs(runs, executor, progress=False)
    assert executor.calls == ATTEMPTS + 2 and Run(runs[1].folder).finished


def test_runs_that_only_waited_are_not_counted_as_dead(tmp_path):
    executor = Scripted(*[BrokenProcessPool("another run's memory")] * (4 * ATTEMPTS))
    train_runs(plan(CHOICES, [0], tmp_path)[:1], executor, progress=False)
    assert executor.calls == 4 * ATTEMPTS + 1


def test_a_run_with_an_invalid_recipe_is_not_submitted_again(tmp_path):
    runs = plan(CHOICES, [0], tmp_path)
    executor = Scripted(ValueError("`lr` must be positive"))
    with pytest.raises(RuntimeError, match="`lr` must be positive"):
        train_runs(runs, executor, progress=False)
    assert executor.calls == 2 and not Run(runs[0].folder).finished and Run(runs[1].folder).finished


@pytest.mark.parametrize("executor", [None, Scripted()], ids=["here", "elsewhere"])
def test_a_run_in_another_process_is_waited_for(tmp_path, monkeypatch, executor):
    runs = plan(CHOICES, [0], tmp_path)
    runs[0].folder.mkdir(parents=True)
    with locked(runs[0].folder) as free:
        assert free and train_job(runs[0].recipe.to_dict(), str(runs[0].folder), []) == "in use"
    monkeypatch.setattr("graticule.lab.training.loop.locked", _free_after(2))
    train_runs(runs, executor, progress=False)
    assert all(Run(one.folder).finished for one in runs)


def _free_after(times):
    """Return a lock that another process holds the first `times` times."""
    count = iter(range(times))

    @contextlib.contextmanager
    def lock(folder):
        yield next(count, None) is None

    return lock


def test_a_process_that_starts_another_run_after_a_signal_gets_another_signal(tmp_path, monkeypatch):
    def two_runs():
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        (tmp_path / "begun").touch()
        time.sleep(60)

    monkeypatch.setattr("graticule.lab.studies.execution.LocalProcesses", lambda count: Idle())
    with pytest.raises(KeyboardInterrupt), executor_of("local:1"):
        process = forked(two_runs)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert process.exitcode == -signal.SIGTERM


class Idle:
    def close(self):
        pass


def test_finished_runs_are_not_submitted(here):
    executor = Scripted()
    train_runs(plan(CHOICES, [0], here), executor, progress=False)
    assert executor.calls == 0


def test_a_worker_imports_the_plugins_that_were_loaded(tmp_path, registered_data):
    plugin = tmp_path / "broken.py"
    plugin.write_text("raise RuntimeError('imported')")
    one = plan(CHOICES, [0], tmp_path)[0]
    with pytest.raises(ValueError, match="imported"):
        train_job(one.recipe.to_dict(), str(one.folder), [str(plugin)])


def test_unknown_executors_are_refused():
    for on, message in [
        ("everywhere", "`on` must be here, or local:N"),
        ("local:0", "`on` must be here, or local:N"),
        ("local:many", "`on` must be here, or local:N"),
        ("here:2", "`on` must be here, or local:N"),
    ]:
        with pytest.raises(ValueError, match=message), executor_of(on):
            pytest.fail(on)
