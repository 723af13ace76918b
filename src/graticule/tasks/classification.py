"""Image classification on Lightning: what is optimised, how, and what is measured."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import Tensor
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from graticule.tasks.recipe import Recipe


class Classification(L.LightningModule):
    """A backbone with a classifier, trained as a recipe says.

    Args:
        model: the backbone.
        recipe: optimiser, schedule, smoothing.
        mixup: timm's Mixup, or None; it makes soft labels, smoothing included.
        steps_per_epoch: number of training batches.
    """

    def __init__(self, model: Any, recipe: Recipe, mixup: Mixup | None, steps_per_epoch: int) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.mixup = mixup
        self.steps_per_epoch = steps_per_epoch
        classes = model.num_classes
        self.val_loss = MeanMetric()
        self.top1 = MulticlassAccuracy(classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Classify images (B, C, height, width): (B, num_classes)."""
        return self.model(images)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make dropout and mixing a function of seed and step, so that a resumed run repeats the same."""
        seed = np.random.SeedSequence([self.recipe.seed, self.current_epoch, batch_idx]).generate_state(1)[0]
        random.seed(int(seed))
        np.random.seed(seed)
        torch.manual_seed(int(seed))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch: images (B, C, height, width) and labels (B,)."""
        images, labels = batch
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)  # labels: (B, num_classes)
            loss = F.cross_entropy(self(images), labels)
        else:
            loss = F.cross_entropy(self(images), labels, label_smoothing=self.recipe.label_smoothing)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} in epoch {self.current_epoch + 1}, step {batch_idx}; a smaller `lr`, a "
                "longer warm-up or `clip_grad` may help. The last checkpoint is as it was."
            )
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(images))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Count the loss and top-1 of a batch."""
        images, labels = batch
        logits = self(images)
        self.val_loss.update(F.cross_entropy(logits.float(), labels), len(images))
        self.top1.update(logits, labels)

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss`, `val_top1` (percent) and the learning rate."""
        metrics = {"val_loss": self.val_loss.compute(), "val_top1": 100 * self.top1.compute()}
        rates = {"lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        self.log_dict(metrics | rates)
        self.val_loss.reset()
        self.top1.reset()

    def configure_optimizers(self) -> Any:
        """Build timm's optimiser, sparing what the model says takes no decay, and its cosine schedule by step."""
        recipe = self.recipe
        optimizer = create_optimizer_v2(
            self.model, opt=recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay, momentum=0.9
        )
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched="cosine",
            num_epochs=recipe.epochs,
            min_lr=recipe.min_lr,
            warmup_lr=recipe.warmup_lr,
            warmup_epochs=recipe.warmup_epochs,
            cooldown_epochs=recipe.cooldown_epochs,
            step_on_epochs=False,
            updates_per_epoch=self.steps_per_epoch,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Move timm's schedule to the step that is next."""
        scheduler.step_update(self.global_step)
