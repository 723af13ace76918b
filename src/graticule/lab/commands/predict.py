"""`graticule predict`."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graticule.lab import data, figures, training
from graticule.lab.arguments import Positional
from graticule.lab.commands.opening import choose_device, read_input
from graticule.lab.commands.options import Figures, JsonOutput, OfCheckpoint, OnDevice, output_folder
from graticule.lab.training.results import Prediction, above, image_ids
from graticule.registry.checks import printable
from graticule.registry.fields import Share
from graticule.system.files import write_json, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class PredictOptions(Figures, JsonOutput, OnDevice, OfCheckpoint):
    """Draw the predictions of a run: the most likely classes, boxes and masks with labels, or the class of each pixel.

        graticule predict RUN a.jpg b.jpg

    They are also written as JSON: boxes.json and masks.json are results in COCO's format, images.json has the ids of
    the images.
    """

    run: Positional[Path]
    """run folder"""
    images: Positional[list[Path]]
    """files of images"""
    threshold: Share | None = None
    """for detectors: boxes with a lower score are not drawn; JSON has all (default: 0.5)"""
    output: Path | None = None
    """folder for figures and JSON (default: predictions in the run folder)"""


def run(options: PredictOptions) -> int:
    """Draw and write the predictions of a run."""
    import torch

    run = training.Run.open(options.run)
    if missing := [path for path in options.images if not path.is_file()]:
        problem = f"is a folder; give {missing[0]}/*" if missing[0].is_dir() else "does not exist"
        raise FileNotFoundError(f"`images` must be files, got {str(missing[0])!r}, which {problem}.")
    stems = [path.stem for path in options.images]
    if twice := [path for path in options.images if stems.count(path.stem) > 1]:
        raise ValueError(f"`images` must differ in their names, got {twice[0]} and another {twice[0].stem!r}.")
    device = choose_device(options.device)
    folder = output_folder(options.output, run.folder / "predictions")
    images = [read_input(path, data.read_image) for path in options.images]  # all errors come before a prediction
    task, described = run.task(), run.described()
    model = run.model(checkpoint=options.checkpoint).to(device)
    numbers = image_ids(options.images)
    entries: dict[str, list[dict[str, Any]]] = {}
    written, texts = [], {}
    for path, image, number in zip(options.images, images, numbers, strict=True):
        with torch.inference_mode():
            prediction = task.predict(model, data.plain(image), number, described)
        for name, values in prediction.entries.items():
            entries.setdefault(name, []).extend(values)
        if prediction.boxes is None and options.threshold is not None:
            raise ValueError(f"`threshold` must be left out for a model without boxes, got {options.threshold}.")
        likely = above(prediction, 0.5 if options.threshold is None else options.threshold)
        written.append(
            figures.save_figure(draw_prediction(likely, printable(path.name)), folder / f"{path.stem}.{options.format}")
        )
        if prediction.classes is not None:
            written.append(_save_classes(prediction.classes, folder / f"{path.stem}.classes.png"))
        texts[str(path)] = _summary(likely)
        options.say(f"{printable(str(path))}: {', '.join(texts[str(path)]) or 'nothing'}")
    written += [write_json(folder / name, values) for name, values in entries.items()]
    files = [{"id": number, "file": str(path)} for number, path in zip(numbers, options.images, strict=True)]
    written.append(write_json(folder / "images.json", files))
    return options.finish(texts, *written)


def color(number: int) -> tuple[float, float, float]:
    """Return the color of a class: hues by the golden section, so that neighbors in number differ."""
    return colorsys.hsv_to_rgb(number * 0.618034 % 1, (0.9, 0.6)[number // 8 % 2], (1.0, 0.75)[number // 4 % 2])


def draw_prediction(prediction: Prediction, title: str) -> Figure:
    """Draw an image with its boxes, masks or classes, and a legend of the classes of pixels.

    Background and ignored pixels are not drawn. Without boxes, their labels are lines of text below the image.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    names, classes = prediction.class_names, prediction.classes
    present = [] if classes is None else np.unique(np.asarray(classes)).tolist()
    present = [number for number in present if number < len(names) and names[number] != "background"]
    image = np.asarray(prediction.image).transpose(1, 2, 0)
    height, width = image.shape[:2]
    side = 4.5
    across, down = (side, side * height / width) if width >= height else (side * width / height, side)
    below = 0.22 * len(prediction.labels) if prediction.boxes is None else 0.0
    figure = Figure(figsize=(across + (1.6 if present else 0.0), down + 0.4 + below), layout="constrained")
    ax = figure.subplots()
    ax.imshow(image, interpolation="nearest")
    ax.set_axis_off()
    ax.set_title(title, fontsize=9)
    overlay = np.zeros((height, width, 4))
    if prediction.masks is not None:
        for number, mask in zip(prediction.numbers, np.asarray(prediction.masks), strict=True):
            overlay[mask.astype(bool)] = (*color(number), 0.45)
    for number in present:
        overlay[np.asarray(classes) == number] = (*color(number), 0.55)
    if overlay.any():
        ax.imshow(overlay, interpolation="nearest")
    if present:
        patches = [Patch(color=color(number), label=names[number]) for number in present]
        figure.legend(handles=patches, loc="outside right upper", fontsize=7, frameon=False)
    if prediction.boxes is None:
        for line, text in enumerate(prediction.labels):
            ax.text(0, -0.04 - 0.06 * line, text, transform=ax.transAxes, fontsize=8, va="top")
        return figure
    boxes = np.asarray(prediction.boxes).tolist()
    for text, number, (left, top, right, bottom) in zip(prediction.labels, prediction.numbers, boxes, strict=True):
        # pixels are squares centered at integers
        corner, sides = (left - 0.5, top - 0.5), (right - left, bottom - top)
        ax.add_patch(Rectangle(corner, *sides, fill=False, edgecolor=color(number), linewidth=1.3))
        style = {"facecolor": color(number), "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
        ax.text(*corner, text, fontsize=6, color="black", va="bottom", bbox=style, clip_on=True)
    return figure


def _summary(prediction: Any) -> list[str]:
    if prediction.classes is None:
        return list(prediction.labels)
    counts = prediction.classes.flatten().bincount(minlength=len(prediction.class_names))
    order = counts.argsort(descending=True)[:5].tolist()
    total = prediction.classes.numel()
    return [f"{prediction.class_names[n]} {100 * int(counts[n]) / total:.1f} %" for n in order if counts[n]]


def _save_classes(classes: Any, path: Path) -> Path:
    """Write the class of each pixel as a PNG of 8 bits, or 16 with more classes."""
    import numpy as np
    from PIL import Image

    values = classes.numpy()
    image = Image.fromarray(values.astype(np.uint8 if values.max() < 256 else np.uint16))
    return write_whole(path, lambda temporary: image.save(temporary, format="PNG"))
