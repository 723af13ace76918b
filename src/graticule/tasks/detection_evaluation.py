"""The evaluation of detectors at several sizes, for `graticule evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graticule.tasks.dense_results import DetectionScore, show
from graticule.training.evaluation import Evaluated, Evaluation, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from graticule.metric import Metric

_SHOWN = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


@dataclass
class DetectionEvaluation(Evaluation[DetectionScore]):
    """COCO's average precision of boxes and masks at several sizes, on the original images."""

    sizes: list[str] = field(default_factory=list)
    """for images: sides in pixels or HEIGHTxWIDTH, multiples of the patch; for detection and segmentation
    SHORTERxLONGER, any sides that images are fitted in (default: the training size)"""
    per_class: bool = False
    """for detection and segmentation: add a row for each class"""

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check the sizes."""
        from graticule.tasks.dense_sizes import read_fits

        read_fits(self.sizes, task.recipe)

    def scores(self, task: Any, model: Any, data: Any, *, device: str, progress: bool = True) -> list[DetectionScore]:
        """Score a detector at every size."""
        from graticule.tasks.dense_sizes import read_fits
        from graticule.tasks.detection_scores import evaluate_detection

        return [
            evaluate_detection(model, data, size, device=device, progress=progress)
            for size in read_fits(self.sizes, task.recipe)
        ]

    def table(self, metric: Metric, evaluated: Sequence[Evaluated[DetectionScore]]) -> Table:
        """Return a row of boxes for each run and size, one of masks if predicted, and one per class if `per_class`."""
        rows, records = [], []
        for run in evaluated:
            for score in run.scores:
                size = f"{score.size[0]}x{score.size[1]}" + (" *" if score.size == tuple(run.recipe.fit) else "")
                for kind in ("box", "mask"):
                    if f"{kind}_map" in score.values:
                        shown = [show(score.values[f"{kind}_{name}"]) for name in _SHOWN]
                        rows.append(
                            [run.label, size, kind, *shown, f"{score.images:,}", f"{score.images_per_second:,.1f}"]
                        )
                records.append({"run": run.folder, **dataclasses.asdict(score)})
                if self.per_class:
                    rows += [
                        [f"  {name}", size, "box", show(value), *[""] * 7] for name, value in score.class_map.items()
                    ]
        notes = ["* the training size of the run; mAP in percent over IoU 0.50 to 0.95, as COCO's; S, M, L: areas"]
        columns = ("run", "size", "of", "mAP", "at 0.50", "at 0.75", "S", "M", "L", "images", "images/s")
        return Table(columns, rows, notes, records)

    def figure(self, evaluated: Sequence[Evaluated[DetectionScore]]) -> Figure | None:
        """Plot the average precision of boxes against size, if there are several sizes."""
        from graticule.tasks.dense_sizes import size_figure

        curves = {run.label: {score.size: score.values["box_map"] or 0.0 for score in run.scores} for run in evaluated}
        return size_figure(curves, "box mAP (%)", evaluated[0].recipe.fit)
