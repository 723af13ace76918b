"""A page on a detector or a segmentation model: predictions beside truth, scores, and position in its backbone."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graticule.analysis import Report
from graticule.analysis.pictures import confusion_figure, picture
from graticule.analysis.position_maps import position_maps
from graticule.analysis.position_sheets import position_sheets
from graticule.data.dense_transforms import plain
from graticule.tasks.dense_results import DetectionScore, PixelScore
from graticule.training.prediction import above


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
        count: how many held-out images are drawn, at even distances.
        threshold: detections of a lower score are not drawn.
        checkpoint: best or last.
        device: where it is computed.
        progress: whether to show a bar.
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
    report.heading("Which class is taken for which")
    extra = len(score.confusion) > len(names)
    rows, columns = [*names, *(["nothing"] if extra else [])], [*names, *(["missed"] if extra else [])]
    what = (
        "Objects by row, as what they were found, of detections with a score and an overlap of at least one half; "
        "the last row: detections of nothing."
        if extra
        else "Pixels of each class by row, as what they were found."
    )
    report.figure(confusion_figure(score.confusion, rows, columns), what, "confusion of classes")
    _position(report, model.backbone, task.recipe)
    return report


def _position(report: Report, backbone: Any, recipe: Any) -> None:
    """Add what the layers of the backbone see of position, at the size that it is held for."""
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
    kinds = [kind for kind in ("box", "mask") if f"{kind}_map" in score.values]
    names = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")
    rows = [[kind, *(f"{score.values[f'{kind}_{name}']:.2f}" for name in names)] for kind in kinds]
    return ["of", "mAP (%)", "at 0.50", "at 0.75", "small", "medium", "large"], rows


def _classes(score: DetectionScore | PixelScore, names: list[str]) -> tuple[list[str], list[list[str]]]:
    pixels = isinstance(score, PixelScore)
    values = score.class_iou if isinstance(score, PixelScore) else score.class_map
    counts = [sum(row) for row in score.confusion]
    header = ["class", "IoU (%)" if pixels else "box mAP (%)", "pixels" if pixels else "objects"]
    rows = [
        [name, "-" if values[name] is None else f"{values[name]:.2f}", f"{count:,}"]
        for name, count in zip(names, counts, strict=False)
    ]
    return header, rows
