"""The evaluation of segmentation models at several sizes, for `graticule evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graticule.tasks.dense_results import PixelScore, show, windows_of
from graticule.training.evaluation import Evaluated, Evaluation, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from graticule.metric import Metric


@dataclass
class SegmentationEvaluation(Evaluation[PixelScore]):
    """Intersection over union and accuracy of pixels at several sizes, on the original images."""

    sizes: list[str] = field(default_factory=list)
    """for images: sides in pixels or HEIGHTxWIDTH, multiples of the patch; for detection and segmentation
    SHORTERxLONGER, any sides that images are fitted in (default: the training size)"""
    per_class: bool = False
    """for detection and segmentation: add a row for each class"""
    window: int | None = None
    """for segmentation: side of the windows that images are split into, in pixels (default: as in the recipe)"""
    stride: int | None = None
    """for segmentation: distance of the windows in pixels (default: two thirds of `--window`; without it, as in the
    recipe)"""
    located: bool = False
    """for segmentation: encode each window with its position in the image"""

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check sizes and windows."""
        from graticule.tasks.dense_sizes import read_fits

        read_fits(self.sizes, task.recipe)
        self.recipe_of(task)

    def scores(self, task: Any, model: Any, data: Any, *, device: str, progress: bool = True) -> list[PixelScore]:
        """Score a model at every size."""
        from graticule.tasks.dense_sizes import read_fits
        from graticule.tasks.segmentation_scores import evaluate_segmentation

        windows = self.recipe_of(task)
        return [
            evaluate_segmentation(model, data, size, windows, device=device, progress=progress)
            for size in read_fits(self.sizes, task.recipe)
        ]

    def table(self, metric: Metric, evaluated: Sequence[Evaluated[PixelScore]]) -> Table:
        """Return a row for each run and size, and one per class if `per_class`."""
        rows, records = [], []
        for run in evaluated:
            for score in run.scores:
                size, same = f"{score.size[0]}x{score.size[1]}", score.size == tuple(run.recipe.fit)
                if score.window is not None:
                    size += f" in {score.window}/{score.stride}" + ", located" * score.located
                windows = (score.window, score.stride, score.located)
                label = [run.label, size + " *" * (same and windows == windows_of(run.recipe))]
                shown = [f"{score.miou:.2f}", f"{score.accuracy:.2f}", f"{score.images:,}"]
                rows.append([*label, *shown, f"{score.images_per_second:,.1f}"])
                records.append({"run": run.folder, **dataclasses.asdict(score)})
                if self.per_class:
                    rows += [[f"  {name}", size, show(iou), "", "", ""] for name, iou in score.class_iou.items()]
        notes = ["* the size and the windows of the recipe; scores are on the original images"]
        if any(score.window is not None for run in evaluated for score in run.scores):
            notes.append("in SIDE/STRIDE: in windows of this side and distance, in pixels; located: encoded as crops")
        return Table(("run", "size", "mIoU (%)", "pixels (%)", "images", "images/s"), rows, notes, records)

    def figure(self, evaluated: Sequence[Evaluated[PixelScore]]) -> Figure | None:
        """Plot mIoU against size, if there are several sizes."""
        from graticule.tasks.dense_sizes import size_figure

        curves = {run.label: {score.size: score.miou for score in run.scores} for run in evaluated}
        return size_figure(curves, "mIoU (%)", evaluated[0].recipe.fit)

    def recipe_of(self, task: Any) -> Any:
        """Return the recipe of a task with the windows of the options."""
        recipe, window, stride = task.recipe, self.window, self.stride
        if window is None:
            window, stride = recipe.window, recipe.stride if stride is None else stride
        return dataclasses.replace(recipe, window=window, stride=stride, located=self.located or recipe.located)
