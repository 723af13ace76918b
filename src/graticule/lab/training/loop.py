"""The training of a run: one loop over epochs and batches, on Lightning Fabric."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric, seed_everything
from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch import nn

from graticule.checkpoints.read import save_weights
from graticule.lab.data.sampling import BatchOrder, TaskData
from graticule.lab.training.checkpoints import Checkpoints, read_training
from graticule.lab.training.progress import History, Progress
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import Interrupted, Preempted, Signals, lock_folder
from graticule.lab.training.sharding import is_sharded, sharded_strategy
from graticule.lab.training.start import notes_of, record_run, starting_weights
from graticule.lab.training.task import Task, task_of
from graticule.lab.training.training import Training
from graticule.lab.training.workers import loading
from graticule.registry.checks import checked
from graticule.surgery.freeze import freeze
from graticule.system.files import make_folder, write_json


@checked
def train(recipe: TrainingRecipe, folder: str | Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Train `recipe` in `folder`; returns the run.

    Randomness is a function of the seed, the step and the process, and checkpoints are complete or absent, so a run
    that is killed at any moment and resumed has the same result as one that was not. All processes call this in the
    same way, whether started by torchrun, by SLURM, or once per node (then Fabric starts a process per device).

    Raises:
        FileExistsError: if `folder` already contains a run and `resume` is off.
        BlockingIOError: if another process trains in `folder`.
        ValueError: if the recipe is invalid, or `folder` contains a run of another recipe.
        Preempted: if a cluster preempted the run; a checkpoint was saved.
        Interrupted: if the user stopped the run; it can be resumed.
        OSError: if the disk is full, or a process that loads images died.
    """
    if recipe.data_root is not None:  # a relative one would point elsewhere from another folder
        recipe = dataclasses.replace(recipe, data_root=recipe.data_root.absolute())
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)  # lines on devices
    run, signals = Run(Path(folder)), Signals()
    with signals.listening():
        try:
            return _train(task_of(recipe), run, signals, resume, progress)
        except ChildProcessError as error:
            if signals.number is not None:  # it killed a process that loads images before that could ignore it
                raise Preempted from error
            raise


def _train(task: Task[Any, Any], run: Run, signals: Signals, resume: bool, progress: bool) -> Run:
    recipe, fabric = task.recipe, build_fabric(task.recipe, sync_batchnorm=task.sync_batchnorm)
    if first := fabric.is_global_zero:  # the other processes wait until the folder is prepared
        run.check_use(recipe, resume)
    finished = run.finished
    seed_everything(recipe.seed, verbose=False)
    data = task.build_data(run if run.recipe_file.exists() else None)
    run.check_data(data)
    batches = data.train_order(fabric.global_rank, fabric.world_size, recipe.accumulate)
    notes = notes_of(task, data, batches)
    described = run.described() if run.recipe_file.exists() else task.describe(data)
    model: Any = task.build_model(described)
    if finished:
        return run
    last, history = run.last, History(run, first)
    report = starting_weights(task, model, data) if last is None else None
    if recipe.freeze is not None:
        freeze(model, recipe.freeze)
    if recipe.grad_checkpointing:
        getattr(model, "backbone", model).set_grad_checkpointing(True)
    task.setup(model, data, fabric.device)
    if recipe.compile:
        model.compile()
    with contextlib.ExitStack() as stack:
        if first:
            if not stack.enter_context(lock_folder(make_folder(run.folder))):
                raise BlockingIOError(
                    f"`folder` must be of one run at a time, got {str(run.folder)!r}, in which another process is "
                    "training."
                )
            run.check_use(recipe, resume)  # another process may have trained here while data and model were built
            if run.finished:
                if fabric.world_size > 1:  # the other processes wait for this one
                    raise FileExistsError(f"the run in {str(run.folder)!r} was finished by other processes meanwhile.")
                return run
            record_run(run, task, data, model, described)
            if run.last is None:
                for line in notes:
                    print(line, file=sys.stderr)
                    history.say(line)
            if report is not None:
                print(report)
                history.say(f"starts from {recipe.start_from or recipe.model}")
        fabric.launch()
        saved = Checkpoints(run.checkpoints, recipe.keep, task.metric, first)
        _fit(fabric, task, model, data, batches, run, history, saved, signals, progress and first)
        if first:
            _finish(run, task, data, history.rows)
    return run


def _fit(
    fabric: Fabric,
    task: Task[Any, Any],
    model: nn.Module,
    data: TaskData,
    batches: BatchOrder,
    run: Run,
    history: History,
    checkpoints: Checkpoints,
    signals: Signals,
    progress: bool,
) -> None:
    """Train the epochs that are left."""
    recipe, training = task.recipe, Training(fabric, task, model, batches, history.say)
    epochs, seconds = recipe.epochs + recipe.cooldown_epochs, 0.0
    if (last := run.last) is not None:
        state = read_training(last)
        if state["progress"]["batches"] and (before := state["progress"]["accumulate"]) != recipe.accumulate:
            raise ValueError(f"`accumulate` must be {before} until the end of the epoch, got {recipe.accumulate}.")
        training.load_state_dict(state)
        checkpoints.restore(state["best"])
        history.rows = [{**row, "epoch": int(row["epoch"])} for row in state["history"]["rows"]]
        seconds = state["history"]["seconds"]

    def save(score: float | None = None) -> None:
        rows = {"rows": history.rows, "seconds": history.seconds if score is None else 0.0}
        checkpoints.save({**training.state_dict(), "history": rows}, training.steps, score)

    start = f"resumed after step {training.steps}" if training.steps else "starts"
    devices = f"{fabric.world_size} device{'s' * (fabric.world_size > 1)}"
    sharded = ", sharded" if is_sharded(training.loss) else ""
    history.say(f"{start} on {devices}, {fabric.device.type}{sharded}")
    total = epochs * batches.steps
    where = {"epoch": training.epoch, "epochs": epochs, "step": training.steps, "steps": total}
    bar = Progress(task.metric, task.rate, **where) if progress else None
    loader = data.train_dataloader(batches)
    held_out = data.eval_dataloader(data.size, fabric.global_rank, fabric.world_size)
    signals.at_once = False
    try:
        with loading(loader, held_out), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"torch\.distributed\.nn\.functional\.all_gather is deprecated")
            for epoch in range(training.epoch, epochs):
                batches.start(epoch, training.batches_done)
                history.start_epoch(seconds)
                seconds = 0.0
                if training.batches_done == 0:
                    training.start_epoch()
                for batch in loader:
                    if not training.step(batch):
                        continue  # a step has several micro-batches
                    if bar is not None:
                        bar.step()
                    stop = training.any_process(signals.number is not None)
                    if training.batches_done < len(batches):  # the last step is saved after the epoch
                        if stop or (recipe.checkpoint_steps and training.steps % recipe.checkpoint_steps == 0):
                            save()
                        if stop:
                            raise Preempted
                scores = training.validate(held_out)
                row = history.add(scores, epoch + 1, epochs, training.steps)
                training.epoch, training.batches_done = epoch + 1, 0
                if bar is not None:
                    bar.end_epoch(row)
                score, stop = row[task.metric.column], training.any_process(signals.number is not None)
                due = (epoch + 1) % recipe.checkpoint_epochs == 0 or epoch + 1 == epochs
                if due or stop or checkpoints.is_best(score):
                    save(score)
                if stop:
                    raise Preempted
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk may be the reason
            reason = str(error).strip().splitlines()
            history.say(f"stopped by {type(error).__name__}{': ' + reason[0] if reason else ''}")
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(str(run.folder)) from None
        raise
    finally:
        history.close()
        if bar is not None:
            bar.close()


def build_fabric(recipe: TrainingRecipe, *, sync_batchnorm: bool = False) -> Fabric:
    """Build Lightning's Fabric of a recipe, and check that it has the recipe's number of processes."""
    processes = recipe.devices * recipe.nodes
    several = sharded_strategy(processes) if recipe.strategy == "fsdp" else DDPStrategy(gradient_as_bucket_view=True)
    fabric = Fabric(
        accelerator=recipe.accelerator,
        devices=recipe.devices,
        num_nodes=recipe.nodes,
        strategy=several if processes > 1 else "auto",
        precision=recipe.precision,
        plugins=[SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else None,
    )
    if sync_batchnorm and fabric.device.type == "cpu":
        raise ValueError("`sync_batchnorm` must be off on CPUs, since PyTorch has it for GPUs only, got True.")
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if recipe.nodes > 1 and type(environment) is LightningEnvironment and "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "`nodes` must be 1 unless the machines are known: start the same command on each, by "
            "torchrun or SLURM, or with MASTER_ADDR and MASTER_PORT (of the first machine) and NODE_RANK (0, 1, ...) "
            f"in the environment; got {recipe.nodes}."
        )
    if fabric.world_size != recipe.devices * recipe.nodes:
        raise ValueError(
            f"`devices` x `nodes` must be the number of processes that were started, {fabric.world_size}, got "
            f"{recipe.devices} x {recipe.nodes}."
        )
    return fabric


def _finish(run: Run, task: Task[Any, Any], data: TaskData, history: list[dict[str, float]]) -> None:
    """Write the best weights to a separate file, and the results."""
    metric = task.metric
    best = metric.best(history)
    save_weights(run.model().state_dict(), run.weights)
    task.finish(run, data)
    write_json(
        run.result_file,
        {
            f"best_{metric.key}": best[metric.column],
            "best_epoch": int(best["epoch"]),
            f"last_{metric.key}": history[-1][metric.column],
            "epochs": len(history),
            "seconds": sum(row["seconds"] for row in history),
            "skipped_images": [str(path) for path in data.skipped],
        },
    )
