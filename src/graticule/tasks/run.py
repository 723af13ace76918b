"""A run folder: the recipe as resolved, versions, metrics, checkpoints; and the training that fills it."""

from __future__ import annotations

import json
import platform
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerStatus
from safetensors.torch import save_file
from torch import nn

from graticule.backbones import create_model
from graticule.data import DataModule, build_mixup
from graticule.files import write_json, write_whole
from graticule.surgery import load_checkpoint, read_checkpoint
from graticule.tasks.callbacks import History, Progress, WholeFileCheckpoints
from graticule.tasks.classification import Classification
from graticule.tasks.recipe import Recipe

_VERSIONS = ("graticule", "torch", "torchvision", "timm", "lightning", "torchmetrics", "numpy")
#: What Lightning warns of and is meant here: a resumed run, small images without workers, its own use of torch.
_EXPECTED_WARNINGS = (
    r"Checkpoint directory .* exists and is not empty",
    r"The '.*_dataloader' does not have many workers",
    r".isinstance\(treespec, LeafSpec\). is deprecated",
)


class Interrupted(Exception):
    """Training was stopped by the user; the run can be resumed."""


@dataclass(frozen=True)
class Run:
    """A run folder and the names of what is in it."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open a run that is there.

        Raises:
            FileNotFoundError: if the folder is not there, or is no run.
        """
        run = cls(Path(folder))
        if not run.recipe_file.is_file():
            what = "has no recipe.json, so it is no run" if run.folder.is_dir() else "is not there"
            raise FileNotFoundError(f"`run` must be the folder of a run, got {str(folder)!r}, which {what}.")
        return run

    @property
    def recipe_file(self) -> Path:
        """The recipe as resolved, JSON."""
        return self.folder / "recipe.json"

    @property
    def metrics_file(self) -> Path:
        """One line an epoch, CSV."""
        return self.folder / "metrics.csv"

    @property
    def last(self) -> Path:
        """The checkpoint that training is resumed from."""
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def best(self) -> Path:
        """The checkpoint of the best top-1."""
        return self.folder / "checkpoints" / "best.ckpt"

    @property
    def weights(self) -> Path:
        """The best weights, under published names where there are any."""
        return self.folder / "weights.safetensors"

    @property
    def result_file(self) -> Path:
        """What came of a finished run, JSON."""
        return self.folder / "result.json"

    @property
    def finished(self) -> bool:
        """Whether training went to its end."""
        return self.result_file.is_file()

    def recipe(self) -> Recipe:
        """Read the recipe.

        Raises:
            ValueError: if the file is damaged.
        """
        try:
            return Recipe.from_dict(json.loads(self.recipe_file.read_text(encoding="utf-8"))["recipe"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.recipe_file} is no recipe that this version can read ({error}).") from None

    def check_recipe(self, recipe: Recipe) -> None:
        """Check that a run that is here was made by `recipe`.

        Raises:
            ValueError: if another recipe made it.
        """
        if self.recipe_file.exists() and self.recipe() != recipe:
            raise ValueError(
                f"`folder` must hold no run or one of the same recipe, got {str(self.folder)!r}, which another recipe "
                "made; name another folder."
            )

    def result(self) -> dict[str, Any]:
        """Read what came of a finished run."""
        return json.loads(self.result_file.read_text(encoding="utf-8"))

    def data(self) -> DataModule:
        """Build the data of the run, checked."""
        return build_data(self.recipe())

    def model(self, data: DataModule | None = None, checkpoint: Literal["best", "last"] = "best") -> nn.Module:
        """Build the model with its best or last weights, in evaluation mode.

        Raises:
            FileNotFoundError: if nothing was saved yet.
            ValueError: if the checkpoint cannot be read or does not fit.
        """
        recipe = self.recipe()
        if data is None:
            described = json.loads(self.recipe_file.read_text(encoding="utf-8"))
            classes, channels = described["num_classes"], described["channels"]
        else:
            classes, channels = data.info.num_classes, data.info.channels
        path = self.best if checkpoint == "best" else self.last
        if not path.is_file():
            raise FileNotFoundError(f"{self.folder} has no checkpoint yet; its training ended before the first epoch.")
        return load_checkpoint(build_model(recipe, classes, channels), path).eval()


def build_data(recipe: Recipe) -> DataModule:
    """Build and check the data of a recipe."""
    data = DataModule(
        dataset=recipe.dataset,
        root=recipe.data_root,
        size=recipe.img_size,
        batch_size=recipe.batch_size,
        eval_batch_size=recipe.eval_batch_size,
        workers=recipe.workers,
        seed=recipe.seed,
        augmentation=recipe.augmentation,
        limit_train=recipe.limit_train,
        limit_test=recipe.limit_test,
        drop_last=recipe.mixing.mixup > 0 or recipe.mixing.cutmix > 0,
    )
    data.setup("fit")
    return data


def build_model(recipe: Recipe, num_classes: int, channels: int) -> Any:
    """Build the untrained model of a recipe."""
    return create_model(
        recipe.model,
        encoding=recipe.encoding,
        joining=recipe.joining,
        joined_layers=recipe.joined_layers,
        decomposition=recipe.decomposition,
        img_size=recipe.img_size,
        patch_size=recipe.patch_size,
        global_pool=recipe.global_pool,
        class_token=recipe.global_pool == "token",
        drop_path_rate=recipe.drop_path_rate,
        num_classes=num_classes,
        in_chans=channels,
    )


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
