"""Report page of a detector or a segmentation model: predictions beside truth, scores, position in its backbone."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graticule.analysis.position_maps import position_maps
from graticule.lab.data.dense_transforms import plain
from graticule.lab.figures.pictures import confusion_figure, picture
from graticule.lab.pages.report import Report, position_sheets
from graticule.lab.tasks.parts.dense import show
from graticule.lab.tasks.parts.detection_scores import DetectionScore
from graticule.lab.tasks.segmentation import PixelScore
from graticule.lab.training.results import above


def dense_report(
    run: Any,
    count: int,
    threshold: float = 0.5,
    *,
    checkpoint: Literal["best", "last"] = "best",
    device: str = "cpu",
    progress: bool = True,
) -> Report:
    """Return the page of a run on its held-out images.

    Args:
        run: of detection or segmentation.
        count: number of held-out images that are drawn, evenly spaced.
        threshold: detections with a lower score are not drawn.
        checkpoint: best or last.
        device: device of the model.
        progress: whether to show a progress bar.
    """
    task, data, described = run.task(), run.data(), run.described()
    model = run.model(data, checkpoint).to(device)
    (score,) = type(task).evaluation().scores(task, model, data, device=device, progress=progress)
    subtitle = f"{score.images:,} held-out images, {checkpoint} checkpoint"
    report = Report(f"{run.folder.name}: {task.recipe.task}", subtitle)
    report.heading("Score")
    report.table(*_summary(score))
    report.heading("Truth and prediction")
    total = data.num_test
    for place in range(min(count, total)):
        image, target = data.images["test"][int(data.indices["test"][place * total // min(count, total)])]
        target = {name: plain(value) for name, value in target.items()}
        with torch.inference_mode():
            found = task.predict(model, plain(image), 1, described)
        shown = above(found, threshold)
        truth = task.truth_of(plain(image), target, described)
        caption = f"image {target['image_id']}"
        report.figure(picture([("truth", truth), ("prediction", shown)]), caption, f"truth and prediction of {caption}")
    names = list(described["class_names"])
    report.heading("Classes")
    report.table(*_classes(score, names))
    report.heading("Confusion matrix")
    extra = len(score.confusion) > len(names)
    rows, columns = [*names, *(["nothing"] if extra else [])], [*names, *(["missed"] if extra else [])]
    what = (
        "Rows: true classes of objects; columns: predicted classes, of detections with a score and an overlap of at "
        "least one half. The last row: detections without an object."
        if extra
        else "Rows: true classes of pixels; columns: predicted classes."
    )
    report.figure(confusion_figure(score.confusion, rows, columns), what, "confusion of classes")
    _position(report, model.backbone, task.recipe)
    return report


def _position(report: Report, backbone: Any, recipe: Any) -> None:
    """Add the maps of position of the backbone's layers, at the size that the model is built for."""
    report.heading("Position in the backbone")
    report.text(f"{recipe.model}, encoding {recipe.encoding or 'its own'}, joining {recipe.joining}.")
    try:
        stages = position_maps(backbone)
    except ValueError as error:
        report.text(f"Not drawn: {error}")
        return
    position_sheets(report, stages, recipe.model)


def _summary(score: DetectionScore | PixelScore) -> tuple[list[str], list[list[str]]]:
    if isinstance(score, PixelScore):
        return ["mIoU (%)", "pixels (%)"], [[f"{score.miou:.2f}", f"{score.accuracy:.2f}"]]
    return ["of", "mAP (%)", "at 0.50", "at 0.75", "small", "medium", "large"], score.kinds


def _classes(score: DetectionScore | PixelScore, names: list[str]) -> tuple[list[str], list[list[str]]]:
    pixels = isinstance(score, PixelScore)
    values = score.class_iou if isinstance(score, PixelScore) else score.class_map
    counts = [sum(row) for row in score.confusion]
    header = ["class", "IoU (%)" if pixels else "box mAP (%)", "pixels" if pixels else "objects"]
    rows = [[name, show(values[name]), f"{count:,}"] for name, count in zip(names, counts, strict=False)]
    return header, rows
