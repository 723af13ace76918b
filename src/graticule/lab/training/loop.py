"""The training of a run, on Lightning's Trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn

from graticule.checkpoints.load import load_position
from graticule.checkpoints.read import save_weights
from graticule.checkpoints.transfer import Transfer
from graticule.hub.config import classes_within
from graticule.lab.data.sampling import BatchOrder
from graticule.lab.training.callbacks import Checkpoints, History, Progress, WholeFileCheckpoints
from graticule.lab.training.checkpoints import read_rest, saved_checkpoints
from graticule.lab.training.module import TrainingModule
from graticule.lab.training.opening import label_names, open_backbone
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run import Run, run_of, surroundings
from graticule.lab.training.run_folder import Interrupted, Preempted, lock_folder
from graticule.lab.training.task import Task, TaskData, recipe_plugins, task_of
from graticule.registry.checks import checked
from graticule.surgery.freeze import freeze
from graticule.system.files import keep_open, make_folder, read_json, remove, write_json


def start(task: Task[Any, Any], model: nn.Module, data: Any) -> Transfer | None:
    """Load the weights that a recipe starts from; returns the report on a whole checkpoint."""
    recipe, run, report = task.recipe, None, None
    names: tuple[str, ...] = ()
    source: Path | None = recipe.start_from
    weights: Any = source
    if source is not None:
        if not source.exists():
            raise FileNotFoundError(f"`start_from` must be a run or a checkpoint, got {str(source)!r}, no such file.")
        run, names = run_of(source), label_names(source)
        if run is not None and run.folder == source and (weights := run.best) is None:
            raise FileNotFoundError(f"`start_from` must be a run with a checkpoint, got {str(source)!r}.")
    elif recipe.of_source:
        opened = open_backbone(recipe.model)
        weights, names = opened.state_dict(), label_names(opened)
    if weights is not None:
        same = task.same_outputs(run, names, data)
        report = task.take_weights(model, weights, same)
        if not same:
            rows = (row._replace(detail="other classes") if row.detail == "as asked" else row for row in report.rows)
            report = Transfer(tuple(rows))
    if recipe.position_from is not None:
        load_position(getattr(model, "backbone", model), recipe.position_from)
    return report


#: Expected warnings of Lightning: about a resumed run, frozen modules, small images without workers, its use of torch.
_EXPECTED_WARNINGS = (
    r"Checkpoint directory .* exists and is not empty",
    r"Found \d+ module\(s\) in eval mode at the start of training",
    r"The '.*_dataloader' does not have many workers",
    r".isinstance\(treespec, LeafSpec\). is deprecated",
    r"torch\.distributed\.nn\.functional\.all_gather is deprecated",
    r"It is recommended to use `self.log\(.*, sync_dist=True\)`",
    r"You're resuming from a checkpoint that ended before the epoch ended",
)


@checked
def train(recipe: TrainingRecipe, folder: str | Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Train `recipe` in `folder`; returns the run.

    Randomness is a function of the seed, the step and the process, and checkpoints are complete or absent, so a run
    that is killed at any moment and resumed has the same result as one that was not. All processes call this in the
    same way, whether started by torchrun, by SLURM, or once per node (then Lightning starts a process per device).

    Raises:
        FileExistsError: if `folder` already contains a run and `resume` is off.
        BlockingIOError: if another process trains in `folder`.
        ValueError: if the recipe is invalid, or `folder` contains a run of another recipe.
        Preempted: if a cluster preempted the run; a checkpoint was saved.
        Interrupted: if the user stopped the run; it can be resumed.
        OSError: if the disk is full, or a process that loads images died.
    """
    if recipe.data_root is not None:  # a relative one would be another folder for who evaluates the run elsewhere
        recipe = dataclasses.replace(recipe, data_root=recipe.data_root.absolute())
    for name in ("lightning.pytorch", "lightning.fabric"):  # lines on devices, and an advertisement
        logging.getLogger(name).setLevel(logging.ERROR)
    run = Run(Path(folder))
    saver = Checkpoints(run.checkpoints, recipe.keep, recipe.checkpoint_steps, recipe.metric)
    with saver.listening(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "|".join(_EXPECTED_WARNINGS))
        try:
            return _train(task_of(recipe), run, saver, resume, progress)
        except ChildProcessError as error:
            if saver.signalled:  # it killed a process that loads images before that could ignore it
                raise Preempted from error
            raise


def _train(task: Task[Any, Any], run: Run, saver: Checkpoints, resume: bool, progress: bool) -> Run:
    recipe, folder = task.recipe, run.folder
    history = History(run)
    trainer = build_trainer(task, run, [history, saver, *([Progress(task.metric)] if progress else [])])
    first = trainer.is_global_zero
    if first:  # the other processes wait until the folder is prepared
        run.check_use(recipe, resume)
    finished = run.finished
    L.seed_everything(recipe.seed, verbose=False)
    data = task.build_data(run if run.recipe_file.exists() else None)
    run.check_data(data)
    batches = data.train_order(trainer.global_rank, trainer.world_size, recipe.accumulate)
    warmup = recipe.warmup(batches.steps)
    described = run.described() if run.recipe_file.exists() else task.describe(data)
    model: Any = task.build_model(described)
    if finished:
        return run
    report = start(task, model, data) if run.last is None else None
    if parts := "all-but-head" if recipe.layer_decay == 0 else recipe.freeze:
        freeze(model, parts)
    if recipe.grad_checkpointing:
        getattr(model, "backbone", model).set_grad_checkpointing(True)
    task.setup(model, data, trainer.strategy.root_device)
    if recipe.compile:
        model.compile()
    module = TrainingModule(task, model, batches)
    with contextlib.ExitStack() as stack:
        if first:
            make_folder(folder)
            if not stack.enter_context(lock_folder(folder)):
                raise BlockingIOError(
                    f"`folder` must be of one run at a time, got {str(folder)!r}, in which another process is training."
                )
            run.check_use(recipe, resume)  # another process may have trained here while data and model were built
            if run.finished:
                if trainer.world_size > 1:  # the other processes wait for this one
                    raise FileExistsError(f"the run in {str(folder)!r} was finished by other processes meanwhile.")
                return run
            for path in (folder, run.checkpoints, run.events):
                stack.enter_context(keep_open(path))
            files = (run.weights, run.metrics_file, run.result_file, run.recipe_file)
            for name in ("checkpoints/.step-*", "checkpoints/.best.json.*", *(f".{file.name}.*" for file in files)):
                for left in folder.glob(f"{name}.tmp"):  # incomplete, of a killed process
                    remove(left)
            if not run.recipe_file.exists():
                task.save(data, folder)
                write_json(run.recipe_file, _describe(task, data, model, described))
            elif run.changes(data):  # test images were repaired, and none was scored before
                write_json(run.recipe_file, {**read_json(run.recipe_file), "data": data.fingerprint()})
            notes = [] if run.last else [*task.notes(data), *batches.notes()]
            if warmup < recipe.warmup_steps:
                notes.append(f"the warm-up of the recipe, {recipe.warmup_steps} steps, is shortened to {warmup}")
            for line in notes:
                print(line, file=sys.stderr)
                history.say(line)
            if report is not None:
                print(report)
                history.say(f"starts from {recipe.start_from or recipe.model}")
        if (last := run.last) is not None:
            _skip_to(last, recipe, batches)
        _fit(trainer, module, data, batches, last)
        if first:
            _finish(run, data, module, history.rows)
    return run


def build_trainer(task: Task[Any, Any], run: Run, callbacks: list[L.Callback]) -> L.Trainer:
    """Build Lightning's trainer of a task."""
    recipe = task.recipe
    if recipe.ema_decay is not None:
        callbacks.insert(0, EMAWeightAveraging(decay=recipe.ema_decay))
    plugins: list[Any] = [WholeFileCheckpoints()]
    if SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # signals are handled by `Checkpoints`
    trainer = L.Trainer(
        max_epochs=recipe.epochs + recipe.cooldown_epochs,
        accelerator=recipe.accelerator,
        devices=recipe.devices,
        num_nodes=recipe.nodes,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if recipe.devices * recipe.nodes > 1 else "auto",
        precision=recipe.precision,
        gradient_clip_val=recipe.clip_grad,
        accumulate_grad_batches=recipe.accumulate,
        sync_batchnorm=task.sync_batchnorm,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=False,  # `History` writes the files of TensorBoard
        plugins=plugins,
        default_root_dir=run.folder,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,  # nothing is logged by step
    )
    _check_trainer(trainer, recipe, task.sync_batchnorm)
    return trainer


def _check_trainer(trainer: L.Trainer, recipe: TrainingRecipe, sync_batchnorm: bool) -> None:
    """Check that the number of processes is that of the recipe, and that they can find each other."""
    if sync_batchnorm and trainer.strategy.root_device.type == "cpu":
        raise ValueError("`sync_batchnorm` must be off on CPUs, since PyTorch has it for GPUs only, got True.")
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if recipe.nodes > 1 and type(environment) is LightningEnvironment and "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "`nodes` must be 1 unless the machines are known: start the same command on each, by "
            "torchrun or SLURM, or with MASTER_ADDR and MASTER_PORT (of the first machine) and NODE_RANK (0, 1, ...) "
            f"in the environment; got {recipe.nodes}."
        )
    if trainer.world_size != recipe.devices * recipe.nodes:
        raise ValueError(
            f"`devices` x `nodes` must be the number of processes that were started, {trainer.world_size}, got "
            f"{recipe.devices} x {recipe.nodes}."
        )


def _skip_to(last: Path, recipe: TrainingRecipe, batches: BatchOrder) -> None:
    """Check a checkpoint from which a run is resumed, and skip the batches before it."""
    try:
        rest = read_rest(last)
        progress = rest["progress"]
        epochs, steps = recipe.epochs + recipe.cooldown_epochs, batches.steps * progress["accumulate"]
        if progress["epoch"] > epochs or progress["batches"] > steps:
            raise ValueError(
                f"{last} is damaged: `progress` must be within {epochs} epochs of {steps} batches, got epoch "
                f"{progress['epoch']} and batch {progress['batches']}."
            )
        for row in rest["callbacks"]["History"]["rows"]:
            if missing := {"epoch", "seconds", recipe.metric.column} - row.keys():
                raise ValueError(f"{last} is damaged: its history lacks {', '.join(sorted(missing))} of an epoch.")
    except (ValueError, FileNotFoundError) as error:
        older = [path.name for path in saved_checkpoints(last.parent) if path != last]
        advice = f"remove it to resume from {older[-1]}" if older else "there is no older one"
        reason = str(error).rstrip(".")
        raise ValueError(f"`run` cannot be resumed from the checkpoint {last}: {reason}; {advice}.") from None
    if progress["batches"] and progress["accumulate"] != recipe.accumulate:
        before = progress["accumulate"]
        raise ValueError(f"`accumulate` must be {before} until the end of the epoch, got {recipe.accumulate}.")
    batches.sampler.set_epoch(progress["epoch"])
    batches.skip(progress["batches"])


def _fit(trainer: L.Trainer, module: TrainingModule, data: TaskData, batches: BatchOrder, last: Path | None) -> None:
    loader = data.train_dataloader(batches)
    evaluated = data.eval_dataloader(data.size, trainer.global_rank, trainer.world_size)
    loader.worker_init_fn = evaluated.worker_init_fn = _outlive_signals
    try:
        trainer.fit(module, loader, evaluated, ckpt_path=last, weights_only=True)
    except SystemExit:
        if trainer.state.status != TrainerStatus.INTERRUPTED:
            raise
    except (ValueError, OSError) as error:  # of a process that loads images, without its traceback
        message = str(error).rpartition(f"\n{type(error).__name__}: ")[2].strip()
        if str(error).startswith("Caught ") and message:
            raise type(error)(message) from error
        raise
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):  # it exited unexpectedly, or was killed by a signal
            raise
        raise ChildProcessError(
            f"a process that loads images died ({str(error).splitlines()[0]}); is the memory too small for "
            "`workers`, or was it killed? The last checkpoint is intact."
        ) from error
    finally:  # after an error, live workers would hold the lock of the folder
        for batches_of in (loader, evaluated):
            iterator: Any = batches_of._iterator
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
    if trainer.state.status == TrainerStatus.INTERRUPTED:
        raise Interrupted(str(trainer.default_root_dir))


def _outlive_signals(worker: int) -> None:
    """Make a worker ignore the signals of a cluster, which the training process handles, and end with that process.

    A cluster sends signals to all processes; without images, the current step could not be completed. And if the
    training process is killed, a worker must not hold the lock of the folder any longer.
    """
    parent = os.getppid()
    blocked = {signal.SIGTERM, signal.SIGUSR1} if hasattr(signal, "sigtimedwait") else set()  # macOS hides the sender
    if blocked:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    def watch() -> None:
        while os.getppid() == parent:
            if not blocked:
                time.sleep(0.5)
                continue
            sent = signal.sigtimedwait(blocked, 0.5)
            if sent is not None and (sent.si_signo, sent.si_pid) == (signal.SIGTERM, parent):
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _describe(task: Task[Any, Any], data: TaskData, model: nn.Module, described: Mapping[str, Any]) -> dict[str, Any]:
    recipe = task.recipe
    plugins = recipe_plugins(recipe, classes_within(model.modules()))
    return {
        "recipe": recipe.to_dict(),
        "metric": dataclasses.asdict(task.metric),
        **described,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        **({"data": data.fingerprint()} if hasattr(data, "fingerprint") else {}),
        **surroundings(),
        **({"plugins": plugins} if plugins else {}),
    }


def _finish(run: Run, data: TaskData, module: TrainingModule, history: list[dict[str, float]]) -> None:
    """Write the best weights to a separate file, and the results."""
    metric = module.task.metric
    best = metric.best(history)
    save_weights(run.model().state_dict(), run.weights)
    module.task.finish(run, data)
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
