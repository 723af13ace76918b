"""The training that fills a run folder, on Lightning's Trainer."""

from __future__ import annotations

import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerStatus
from safetensors.torch import save_file
from torch import nn

from graticule.data import DataModule, build_mixup
from graticule.files import write_json, write_whole
from graticule.surgery import load_position, read_checkpoint
from graticule.tasks.build import build_data, build_model
from graticule.tasks.callbacks import History, Progress, WholeFileCheckpoints
from graticule.tasks.classification import Classification
from graticule.tasks.recipe import Recipe
from graticule.tasks.run import Run

_VERSIONS = ("graticule", "torch", "torchvision", "timm", "lightning", "torchmetrics", "numpy")
#: What Lightning warns of and is meant here: a resumed run, small images without workers, its own use of torch.
_EXPECTED_WARNINGS = (
    r"Checkpoint directory .* exists and is not empty",
    r"The '.*_dataloader' does not have many workers",
    r".isinstance\(treespec, LeafSpec\). is deprecated",
)


class Interrupted(Exception):
    """Training was stopped by the user; the run can be resumed."""


def train(recipe: Recipe, folder: str | Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Train as `recipe` says into `folder`; returns the run.

    Randomness is a function of the seed and the step, and every epoch ends with a checkpoint that is whole or
    not there, so that a run killed at any moment and resumed ends as one that was not.

    Raises:
        FileExistsError: if `folder` holds a run already and `resume` is off.
        ValueError: if something in the recipe cannot be, or `folder` holds a run of another recipe.
        Interrupted: if the user stopped it; it can be resumed.
        OSError: if the disk is full.
    """
    run = Run(Path(folder))
    if run.recipe_file.exists() and not resume:
        raise FileExistsError(
            f"`folder` must not hold a run already, got {str(folder)!r}; resume it with --resume, or name another."
        )
    run.check_recipe(recipe)
    L.seed_everything(recipe.seed, verbose=False)
    data = build_data(recipe)
    model = build_model(recipe, data.info.num_classes, data.info.channels)
    if recipe.position_from is not None and not run.last.is_file():
        load_position(model, recipe.position_from)
    mixup = build_mixup(
        mixup=recipe.mixing.mixup,
        cutmix=recipe.mixing.cutmix,
        prob=recipe.mixing.prob,
        switch_prob=recipe.mixing.switch_prob,
        label_smoothing=recipe.label_smoothing,
        num_classes=data.info.num_classes,
    )
    task = Classification(model, recipe, mixup, len(data.train_dataloader()))
    if recipe.compile:
        model.compile()
    if not run.recipe_file.exists():
        write_json(run.recipe_file, _describe(recipe, data, model))
    if run.finished:
        return run

    epochs = recipe.epochs + recipe.cooldown_epochs
    callbacks: list[L.Callback] = [
        History(run.metrics_file),
        ModelCheckpoint(
            run.best.parent,
            run.best.stem,
            monitor="val_top1",
            mode="max",
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        ),
        ModelCheckpoint(run.last.parent, run.last.stem, save_on_train_epoch_end=True, enable_version_counter=False),
    ]
    if recipe.ema_decay is not None:
        callbacks.insert(0, EMAWeightAveraging(decay=recipe.ema_decay))
    if progress:
        callbacks.append(Progress())
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator=recipe.accelerator,
        devices=1,
        precision=recipe.precision,
        gradient_clip_val=recipe.clip_grad,
        callbacks=callbacks,
        logger=TensorBoardLogger(run.folder, name="", version="tensorboard"),
        plugins=[WholeFileCheckpoints()],
        default_root_dir=run.folder,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=max(1, len(data.train_dataloader()) // 10),
    )
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message)
            trainer.fit(
                task,
                train_dataloaders=data.train_dataloader(),
                val_dataloaders=data.val_dataloader(),
                ckpt_path=run.last if run.last.is_file() else None,
                weights_only=True,
            )
    except SystemExit:
        if trainer.state.status != TrainerStatus.INTERRUPTED:
            raise
    if trainer.state.status == TrainerStatus.INTERRUPTED:
        raise Interrupted(str(run.folder))
    _finish(run, data)
    return run


def _describe(recipe: Recipe, data: DataModule, model: nn.Module) -> dict[str, Any]:
    return {
        "recipe": recipe.to_dict(),
        "num_classes": data.info.num_classes,
        "channels": data.info.channels,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _VERSIONS}},
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
    }


def _finish(run: Run, data: DataModule) -> None:
    """Leave the best weights alone in a file, and say what came of it."""
    model = run.model()
    write_whole(run.weights, lambda path: save_file(model.state_dict(), path))
    history = read_checkpoint(run.last)["callbacks"]["History"]["rows"]
    best = max(history, key=lambda row: row["val_top1"])
    write_json(
        run.result_file,
        {
            "best_top1": best["val_top1"],
            "best_epoch": best["epoch"],
            "last_top1": history[-1]["val_top1"],
            "epochs": len(history),
            "seconds": sum(row["seconds"] for row in history),
            "skipped_images": [str(path) for path in data.skipped],
        },
    )
