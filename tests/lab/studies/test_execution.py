"""Runs in other processes equal runs in this one, and runs that die or are stopped are resumed."""

import json
import os
import signal
import threading
import time
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children

import pytest

import graticule.lab.studies.execution as module
from graticule.lab.studies.comparison import compare
from graticule.lab.studies.execution import OUTPUT, executor_of, train_job, train_runs
from graticule.lab.studies.plan import plan
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import lock_folder
from short_runs import short

TINY = {"model_kwargs": ("depth=1", "embed_dim=8", "num_heads=1"), "limit_train": 20, "limit_test": 10, "epochs": 1}
CHOICES = {name: short(encoding=name, **TINY) for name in ("none", "learnable")}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Run the comparison in one process, run by run."""
    folder = tmp_path_factory.mktemp("here")
    compare(CHOICES, [0], folder, progress=False)
    return folder


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
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


def test_a_comparison_by_an_executor_has_the_same_numbers_and_resumes_runs_that_died(here, tmp_path):
    executor = Scripted(BrokenProcessPool("out of memory"), OSError("the disk was away"))
    with pytest.raises(RuntimeError, match=r"resumes them:\n.*learnable.*OSError.*\n.*none.*BrokenProcessPool: out of"):
        compare(CHOICES, [0], tmp_path, progress=False, executor=executor)
    compare(CHOICES, [0], tmp_path, progress=False, executor=executor)
    assert executor.calls == 4 and table(tmp_path) == table(here)
    assert all((run.folder / OUTPUT).exists() for run in plan(CHOICES, [0], tmp_path))
    finished = Scripted()
    train_runs(plan(CHOICES, [0], tmp_path), finished, progress=False)
    assert finished.calls == 0


@pytest.mark.slow
def test_a_run_whose_process_is_killed_is_named_and_the_same_command_resumes_it(tmp_path):
    choices = {name: short(encoding=name, **TINY | {"epochs": 4}) for name in CHOICES}
    alone = compare(choices, [0], tmp_path / "here", progress=False)
    first, _ = plan(choices, [0], tmp_path / "there")

    def kill():
        while not Run(first.folder).last:
            time.sleep(0.02)
        active_children()[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with (
        pytest.raises(RuntimeError, match=r"(?s)resumes them:.*none.*BrokenProcessPool"),
        executor_of("local:1") as pool,
    ):
        compare(choices, [0], tmp_path / "there", progress=False, executor=pool)
    killer.join()
    assert not first.run.finished
    with executor_of("local:1") as pool:
        results = compare(choices, [0], tmp_path / "there", progress=False, executor=pool)
    assert results.scores() == alone.scores()


@pytest.mark.slow
def test_a_run_whose_worker_of_a_dask_cluster_is_killed_has_the_same_numbers(tmp_path, monkeypatch):
    """A worker that trains is killed after its first checkpoint; the run goes on elsewhere, with the same scores."""
    import distributed

    monkeypatch.undo()  # waits as usual
    choices = {name: short(encoding=name, **TINY | {"epochs": 4}) for name in CHOICES}
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


def test_a_run_with_an_invalid_recipe_is_named_after_the_others(tmp_path):
    runs = plan(CHOICES, [0], tmp_path)
    executor = Scripted(ValueError("`lr` must be positive"))
    with pytest.raises(RuntimeError, match="`lr` must be positive"):
        train_runs(runs, executor, progress=False)
    assert executor.calls == 2 and not Run(runs[0].folder).finished and Run(runs[1].folder).finished


def test_a_run_that_another_process_trains_is_not_trained(tmp_path):
    (run, *_) = plan(CHOICES, [0], tmp_path)
    run.folder.mkdir(parents=True)
    with lock_folder(run.folder) as free:
        assert free
        with pytest.raises(BlockingIOError):
            train_job(run.recipe.to_dict(), str(run.folder), [])


def test_a_worker_imports_the_plugins_that_were_loaded(tmp_path, registered_data):
    plugin = tmp_path / "broken.py"
    plugin.write_text("raise RuntimeError('imported')")
    run = plan(CHOICES, [0], tmp_path)[0]
    with pytest.raises(ValueError, match="imported"):
        train_job(run.recipe.to_dict(), str(run.folder), [str(plugin)])


def test_unknown_executors_are_refused():
    unknown = dict.fromkeys(("everywhere", "local:0", "local:many", "dask:", "here:2"), "`on` must be here, local:N")
    unreachable = {"dask:tcp://127.0.0.1:1": "`on` must be the address of a running scheduler"}
    for on, message in (unknown | unreachable).items():
        with pytest.raises(ValueError, match=message), executor_of(on):
            pytest.fail(on)
