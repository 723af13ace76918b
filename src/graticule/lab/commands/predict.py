"""`graticule predict`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from graticule.lab.arguments import Positional
from graticule.lab.commands.opening import choose_device, read_picture
from graticule.lab.commands.options import Figures, JsonOutput, OfCheckpoint, OnDevice, output_folder, parse
from graticule.lab.data.dense import read_image
from graticule.lab.data.dense_transforms import plain
from graticule.lab.figures.pictures import picture
from graticule.lab.figures.save import save_figure
from graticule.lab.training.results import above, image_ids
from graticule.lab.training.run import Run
from graticule.registry.checks import Range, printable
from graticule.system.files import write_json, write_whole


@dataclass
class Predict(Figures, JsonOutput, OnDevice, OfCheckpoint):
    """Draw the predictions of a run: the most likely classes, boxes and masks with labels, or the class of each pixel.

        graticule predict RUN a.jpg b.jpg

    They are also written as JSON: boxes.json and masks.json are results in COCO's format, images.json has the ids of
    the images.
    """

    run: Positional[Path]
    """run folder"""
    images: Positional[list[Path]]
    """files of images"""
    threshold: Annotated[float, Range(0, 1)] = 0.5
    """detections with a lower score are not drawn; JSON has all"""
    output: Path | None = None
    """folder for pictures and JSON (default: predictions in the run folder)"""


def run(arguments: list[str]) -> int:
    """Draw and write the predictions of a run."""
    options = parse(Predict, "predict", arguments)
    run = Run.open(options.run)
    if missing := [path for path in options.images if not path.is_file()]:
        raise FileNotFoundError(f"`images` must be files, got {str(missing[0])!r}, which does not exist.")
    stems = [path.stem for path in options.images]
    if twice := [path for path in options.images if stems.count(path.stem) > 1]:
        raise ValueError(f"`images` must differ in their names, got {twice[0]} and another {twice[0].stem!r}.")
    device = choose_device(options.device)
    folder = output_folder(options.output, run.folder / "predictions")
    images = [read_picture(path, read_image) for path in options.images]  # all errors come before a prediction
    task, described = run.task(), run.described()
    model = run.model(checkpoint=options.checkpoint).to(device)
    numbers = image_ids(options.images)
    entries: dict[str, list[dict[str, Any]]] = {}
    written, texts = [], {}
    for path, image, number in zip(options.images, images, numbers, strict=True):
        with torch.inference_mode():
            prediction = task.predict(model, plain(image), number, described)
        for name, values in prediction.entries.items():
            entries.setdefault(name, []).extend(values)
        likely = above(prediction, options.threshold)
        written.append(save_figure(picture(likely, printable(path.name)), folder / f"{path.stem}.{options.format}"))
        if prediction.classes is not None:
            written.append(_save_classes(prediction.classes, folder / f"{path.stem}.classes.png"))
        texts[str(path)] = _summary(likely)
        options.say(f"{printable(str(path))}: {', '.join(texts[str(path)]) or 'nothing'}")
    written += [write_json(folder / name, values) for name, values in entries.items()]
    files = [{"id": number, "file": str(path)} for number, path in zip(numbers, options.images, strict=True)]
    written.append(write_json(folder / "images.json", files))
    return options.finish(texts, *written)


def _summary(prediction: Any) -> list[str]:
    if prediction.classes is None:
        return list(prediction.labels)
    counts = prediction.classes.flatten().bincount(minlength=len(prediction.class_names))
    order = counts.argsort(descending=True)[:5].tolist()
    total = prediction.classes.numel()
    return [f"{prediction.class_names[n]} {100 * int(counts[n]) / total:.1f} %" for n in order if counts[n]]


def _save_classes(classes: Any, path: Path) -> Path:
    """Write the class of each pixel as a PNG of 8 bits, or 16 with more classes."""
    from PIL import Image

    values = classes.numpy()
    image = Image.fromarray(values.astype(np.uint8 if values.max() < 256 else np.uint16))
    return write_whole(path, lambda temporary: image.save(temporary, format="PNG"))
