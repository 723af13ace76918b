"""A picture of a prediction: an image with boxes, masks or classes of pixels."""

from __future__ import annotations

import colorsys

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from graticule.lab.training.results import Prediction


def color(number: int) -> tuple[float, float, float]:
    """Return the color of a class: hues by the golden section, so that neighbors in number differ."""
    return colorsys.hsv_to_rgb(number * 0.618034 % 1, (0.9, 0.6)[number // 8 % 2], (1.0, 0.75)[number // 4 % 2])


def picture(prediction: Prediction, title: str) -> Figure:
    """Draw an image with its boxes, masks or classes, and a legend of the classes of pixels.

    Background and ignored pixels are not drawn. Without boxes, their labels are lines of text below the image.
    """
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
