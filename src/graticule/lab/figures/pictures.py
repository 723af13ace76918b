"""Pictures of predictions: images with boxes, masks or classes of pixels."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle


class Shown(Protocol):
    """An image and the boxes, masks or classes drawn on it; PyTorch tensors."""

    @property
    def image(self) -> Any:
        """The image, uint8, (3, height, width)."""

    @property
    def boxes(self) -> Any:
        """Left, top, right, bottom of each box, (n, 4), or None."""

    @property
    def labels(self) -> list[str]:
        """The text of each box, or lines of text where there are no boxes."""

    @property
    def numbers(self) -> list[int]:
        """The class of each box."""

    @property
    def masks(self) -> Any:
        """The mask of each box, (n, height, width), or None."""

    @property
    def classes(self) -> Any:
        """The class of each pixel, (height, width), or None; background and ignored pixels are not drawn."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes of pixels."""


def color(number: int) -> tuple[float, float, float]:
    """Return the color of a class: hues by the golden section, so that neighbors in number differ."""
    return colorsys.hsv_to_rgb(number * 0.618034 % 1, (0.9, 0.6)[number // 8 % 2], (1.0, 0.75)[number // 4 % 2])


def picture(panels: Sequence[tuple[str, Shown]]) -> Figure:
    """Draw images side by side, each with a title, its boxes, masks or classes; one legend of the classes of pixels.

    Args:
        panels: title and content, from left to right.
    """
    height, width = panels[0][1].image.shape[1:]
    side = 4.5
    across, down = (side, side * height / width) if width >= height else (side * width / height, side)
    named = sorted({n for _, shown in panels for n in _present(shown)})
    legend = 1.6 if named else 0.0
    below = 0.22 * max((len(shown.labels) for _, shown in panels if shown.boxes is None), default=0)
    figure = Figure(figsize=(across * len(panels) + legend, down + 0.4 + below), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, shown) in zip(axes, panels, strict=True):
        _draw(ax, shown)
        ax.set_title(title, fontsize=9)
    if named:
        names = panels[0][1].class_names
        patches = [Patch(color=color(n), label=names[n]) for n in named]
        figure.legend(handles=patches, loc="outside right upper", fontsize=7, frameon=False)
    return figure


def _present(shown: Shown) -> list[int]:
    if shown.classes is None:
        return []
    names = shown.class_names
    found = np.unique(np.asarray(shown.classes)).tolist()
    return [n for n in found if n < len(names) and names[n] != "background"]


def _draw(ax: Axes, shown: Shown) -> None:
    image = np.asarray(shown.image).transpose(1, 2, 0)
    ax.imshow(image, interpolation="nearest")
    ax.set_axis_off()
    overlay = np.zeros((*image.shape[:2], 4))
    if shown.masks is not None:
        for number, mask in zip(shown.numbers, np.asarray(shown.masks), strict=True):
            overlay[mask.astype(bool)] = (*color(number), 0.45)
    for number in _present(shown):
        overlay[np.asarray(shown.classes) == number] = (*color(number), 0.55)
    if overlay.any():
        ax.imshow(overlay, interpolation="nearest")
    if shown.boxes is None:
        for line, text in enumerate(shown.labels):
            ax.text(0, -0.04 - 0.06 * line, text, transform=ax.transAxes, fontsize=8, va="top")
        return
    for text, number, box in zip(shown.labels, shown.numbers, np.asarray(shown.boxes).tolist(), strict=True):
        left, top, right, bottom = box
        # pixels are squares centered at integers
        corner, sides = (left - 0.5, top - 0.5), (right - left, bottom - top)
        ax.add_patch(Rectangle(corner, *sides, fill=False, edgecolor=color(number), linewidth=1.3))
        style = {"facecolor": color(number), "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
        ax.text(*corner, text, fontsize=6, color="black", va="bottom", bbox=style, clip_on=True)
