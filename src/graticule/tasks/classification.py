"""Image classification: its loss, and what is measured."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from graticule.data import PADDING, BatchOrder
from graticule.tasks.distillation import Teacher
from graticule.tasks.recipe import Recipe
from graticule.training.module import Sharded, Task


class Classification(Task):
    """A backbone with a classifier, trained as a recipe says.

    Args:
        model: the backbone.
        recipe: optimiser, schedule, smoothing.
        batches: which images each batch of this process has.
        mixup: timm's Mixup, or None; it makes soft labels, smoothing included.
        teacher: what is learned from beside the labels, or None.
    """

    examples = "images"
    recipe: Recipe
    teacher: Teacher | None

    def __init__(
        self, model: Any, recipe: Recipe, batches: BatchOrder, mixup: Mixup | None, teacher: Teacher | None = None
    ) -> None:
        super().__init__(model, recipe, batches)
        self.mixup = mixup
        # not a part of the module: it is neither trained nor saved
        object.__setattr__(self, "teacher", teacher)
        self.top1 = MulticlassAccuracy(model.num_classes, average="micro", ignore_index=PADDING)

    @property
    def rate(self) -> tuple[str, int]:
        """Images a second, and the images of a step."""
        return "img/s", self.recipe.batch_size

    def on_fit_start(self) -> None:
        """Bring the teacher to where the model is."""
        if self.teacher is not None:
            self.teacher.to(self.device)
            if hasattr(self.model, "set_distilled_training"):
                self.model.set_distilled_training(True)

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        """Return the loss of images (B, C, height, width) and labels (B,), and B."""
        images, labels = batch
        smoothing = self.recipe.label_smoothing
        if self.mixup is not None:
            off = self.recipe.mixing.off_epoch
            self.mixup.mixup_enabled = not off or self.current_epoch < off
            images, labels = self.mixup(images, labels)  # labels: (B, num_classes)
            smoothing = 0.0
        outputs = self(images)
        # a model with a token for it learns from the teacher there, any other in its one classifier
        logits, distilled = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if self.teacher is not None:
            loss = self.teacher.combine(loss, distilled, self.teacher(images))
        return loss, len(images)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Count the loss and top-1 of a batch; images that only fill up are not counted."""
        images, labels = batch
        logits = self(images)
        real = labels != PADDING
        self.hold_out(F.cross_entropy(logits[real].float(), labels[real], reduction="none"))
        self.top1.update(logits, labels)

    def score(self, total: float) -> float:
        """Return top-1 in percent, and begin again."""
        top1 = round(100 * float(self.top1.compute()), 5)  # 37.5, not 37.50000149: the share is in float32
        self.top1.reset()
        return top1


class ShardedClassification(Sharded, Classification):
    """The same with the backbone's parameters shared out over the processes."""
