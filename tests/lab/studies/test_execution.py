"""Runs in other processes equal runs in this one, and runs that die or are stopped are resumed."""

import json
import os
import signal
import threading
import time
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool

import pytest

import graticule.lab.studies.execution as module
from forked import forked
from graticule.lab.studies.comparison import compare
from graticule.lab.studies.execution import ATTEMPTS, OUTPUT, executor_of, outcomes, train_job, train_runs
from graticule.lab.studies.plan import plan
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import lock_folder

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
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    monkeypatch.setattr(module, "_TIMEOUT", 0.5)


class Scripted(Executor):
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
    return {key: record[key] for key in ("recipe", "choices", "seeds", "top1", "parameters")}


def test_a_comparison_by_an_executor_has_the_same_numbers_also_if_processes_died(here, tmp_path):
    executor = Scripted(BrokenProcessPool("a process died"), OSError("the disk was away"))
    compare(CHOICES, [0], tmp_path, progress=False, executor=executor)
    assert executor.calls == 4 and table(tmp_path) == table(here)
    assert all((run.folder / OUTPUT).exists() for run in plan(CHOICES, [0], tmp_path))
    finished = Scripted()
    train_runs(plan(CHOICES, [0], tmp_path), finished, progress=False)
    assert finished.calls == 0


def test_outcomes_are_those_of_the_jobs_and_errors_of_their_own_are_not_tried_again():
    executor = Scripted(None, ValueError("wrong"), BrokenProcessPool("died"))
    results = dict(outcomes([1, 2, 3], lambda job: (pow, job, 2), executor))
    assert (results[1], results[3], str(results[2]), executor.calls) == (1, 9, "wrong", 4)
    assert list(outcomes([2, 3], lambda job: (pow, job, 2))) == [(2, 4), (3, 9)]
    (lost,) = outcomes([1], lambda job: (pow, job, 2), Scripted(*[OSError("gone")] * (ATTEMPTS + 1)))
    assert str(lost[1]) == "gone"


@pytest.mark.slow
def test_a_run_whose_worker_of_a_dask_cluster_is_killed_has_the_same_numbers(tmp_path, monkeypatch):
    """A worker that trains is killed after its first checkpoint; the run goes on elsewhere, with the same scores."""
    import distributed

    monkeypatch.undo()  # polls as usual
    choices = {name: Recipe(**{**vars(recipe), "epochs": 4}) for name, recipe in CHOICES.items()}
    alone = compare(choices, [0], tmp_path / "here", progress=False)
    killed = []

    def kill(address, folder):
        with distributed.Client(address) as client:
            while not Run(folder).last:
                time.sleep(0.02)
            busy = next(worker for worker, keys in client.processing().items() if keys)
            killed.append(client.run(os.getpid, workers=[busy])[busy])
            os.kill(killed[0], signal.SIGKILL)

    options = {"processes": True, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        address = cluster.scheduler_address
        first = plan(choices, [0], tmp_path / "there")[0].folder
        killer = threading.Thread(target=kill, args=(address, first))
        killer.start()
        with executor_of(f"dask:{address}") as executor:
            results = compare(choices, [0], tmp_path / "there", progress=False, executor=executor)
        killer.join()
    assert killed and results.scores() == alone.scores()


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


def test_a_run_that_another_process_trains_is_submitted_again(tmp_path):
    (run, *_) = plan(CHOICES, [0], tmp_path)
    run.folder.mkdir(parents=True)
    with lock_folder(run.folder) as free:
        assert free
        with pytest.raises(BlockingIOError):
            train_job(run.recipe.to_dict(), str(run.folder), [])
    train_runs([run], Scripted(BlockingIOError("in use"), BlockingIOError("in use")), progress=False)
    assert Run(run.folder).finished


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
    def shutdown(self, **_):
        pass


def test_a_worker_imports_the_plugins_that_were_loaded(tmp_path, registered_data):
    plugin = tmp_path / "broken.py"
    plugin.write_text("raise RuntimeError('imported')")
    run = plan(CHOICES, [0], tmp_path)[0]
    with pytest.raises(ValueError, match="imported"):
        train_job(run.recipe.to_dict(), str(run.folder), [str(plugin)])


def test_a_local_process_starts_with_one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(module, "ProcessPoolExecutor", lambda *_, **options: Scripted())
    threads = [module.LocalProcesses(1).submit(os.getenv, f"{name}_NUM_THREADS").result() for name in ("OMP", "MKL")]
    assert threads == ["1", "1"] and os.environ["OMP_NUM_THREADS"] == "7" and "MKL_NUM_THREADS" not in os.environ


def test_unknown_executors_are_refused():
    for on, message in [
        ("everywhere", "`on` must be here, local:N"),
        ("local:0", "`on` must be here, local:N"),
        ("local:many", "`on` must be here, local:N"),
        ("dask:", "`on` must be here, local:N"),
        ("dask:tcp://127.0.0.1:1", "`on` must be the address of a running scheduler"),
        ("here:2", "`on` must be here, local:N"),
    ]:
        with pytest.raises(ValueError, match=message), executor_of(on):
            pytest.fail(on)
