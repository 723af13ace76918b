"""The evaluation of image classifiers at several sizes, for `graticule evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graticule.lab.arguments import Rare
from graticule.lab.tasks.parts.image_scores import (
    Score,
    check_crop,
    check_sizes,
    evaluate,
    read_real,
    set_windows,
)
from graticule.lab.training.results import Evaluated, Evaluation, Metric, Table
from graticule.registry.checks import parse_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class ImageEvaluation(Evaluation["Score"]):
    """Accuracy and cost at several sizes of the images."""

    sizes: list[str] = field(default_factory=list)
    """for images: sides in pixels or HEIGHTxWIDTH, multiples of the patch; for detection and segmentation
    SHORTERxLONGER, any sides that images are fitted in (default: the training size)"""
    mode: Literal["zoom", "canvas", "crop"] = "zoom"
    """for images: at other sizes, zoom scales the content; canvas keeps its scale on a larger canvas; crop keeps it and
    uses the middle"""
    windows: Rare[list[int]] = field(default_factory=list)
    """for images: side of the windows of each stage of a PosMLP, in patches (default: those of the run)"""
    real: Rare[Path | None] = None
    """for images of ImageNet's validation set: real.json of ImageNet-ReaL, which adds the share of images whose top-1
    is one of their labels"""

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check the sizes, and set the windows of the model."""

        check_sizes(model, self._sizes(task))
        self._real(data)
        for size in self._sizes(task) if self.mode == "crop" else ():
            check_crop(size, data.size)
        if self.windows:
            set_windows(model, self.windows)

    def scores(self, task: Any, model: Any, data: Any, *, device: str, progress: bool = True) -> list[Score]:
        """Score a model at every size."""

        sizes, real = self._sizes(task), self._real(data)
        return evaluate(model, data, sizes, device=device, progress=progress, mode=self.mode, real=real)

    def table(self, metric: Metric, evaluated: Sequence[Evaluated[Score]]) -> Table:
        """Return a row for each run and size, with the difference from the training size and windows."""
        rows = []
        for run in evaluated:
            trained = run.recipe.img_size
            same = (score.top1 for score in run.scores if score.size == trained and not self.windows)
            reference = next(same, run.measured)
            for score in run.scores:
                rows.append(
                    [
                        run.label,
                        "x".join(map(str, score.size)) + (" *" if score.size == trained else ""),
                        f"{score.top1:.2f}",
                        "-" if reference is None else f"{score.top1 - reference:+.2f}",
                        "-" if score.top5 is None else f"{score.top5:.2f}",
                        *([] if score.real is None else [f"{score.real:.2f}"]),
                        f"{score.loss:.3f}",
                        f"{score.images:,}",
                        show_multiply_adds(score.multiply_adds),
                        "-" if score.images_per_second is None else f"{score.images_per_second:,.0f}",
                        "-" if score.memory is None else f"{score.memory / 1e6:.2f}",
                    ]
                )
        notes = ["* the training size of the run; speed and peak memory are of the forward pass only"]
        if self.mode == "canvas":
            notes.append("canvas: the content keeps its scale, at a random position in the image")
        if self.mode == "crop":
            notes.append(
                "crop: the middle of the image at the scale of the training, with its position in the whole image"
            )
            if unplaced := [run.label for run in evaluated if any(score.placed is False for score in run.scores)]:
                notes.append(
                    f"with the position of a whole image, since they cannot encode a crop: {', '.join(unplaced)}"
                )
        if self.windows:
            named = ", ".join(map(str, self.windows))
            notes.append(f"with windows of {named}; drop: relative to the windows of the training")
        scored = ("top-1 (%)", "drop", "top-5 (%)", *(["ReaL (%)"] if self.real else []), "loss", "images")
        columns = ("run", "size", *scored, "multiply-adds", "images/s", "MB/image")
        return Table(columns, rows, notes)

    def records(self, evaluated: Sequence[Evaluated[Score]]) -> list[dict[str, Any]]:
        """Return each score as plain values, with its run, the mode, and the windows if they are given."""
        given = {"mode": self.mode, **({"windows": self.windows} if self.windows else {})}
        return [{"run": record.pop("run"), **given, **record} for record in super().records(evaluated)]

    def figure(self, evaluated: Sequence[Evaluated[Score]]) -> Figure:
        """Plot accuracy against size."""
        from graticule.lab.figures.scores import resolution_plot

        curves = {run.label: {score.size: [score.top1] for score in run.scores} for run in evaluated}
        return resolution_plot(curves, trained_at=evaluated[0].recipe.img_size)

    def _real(self, data: Any) -> list[list[int]] | None:

        return None if self.real is None else read_real(self.real, data)

    def _sizes(self, task: Any) -> list[tuple[int, int]]:
        return parse_sizes(self.sizes) or [task.recipe.img_size]


def show_multiply_adds(count: int | None) -> str:
    """Return a number of multiply-adds for a table, a dash if it is not known."""
    if count is None:
        return "-"
    return f"{count / 1e9:.2f} G" if count >= 1e8 else f"{count / 1e6:.2f} M"
