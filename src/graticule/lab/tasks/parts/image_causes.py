r"""The causes of a difference in accuracy between the size of the training and a larger one.

The difference is the sum of three parts; each is the effect of one change, made in this order
(`graticule.analysis.PASSES`): tokens (the same content on more tokens), content (the larger image: objects of a larger
scale, in more detail), and values (the position of the encoding for the larger grid instead of a repeated one). Four
controls change one thing of the last pass: the log N temperature, which makes attention as sharp as in training; tables
resampled bilinearly; content at the scale of training on a larger canvas; and the middle of the larger image, with as
many tokens as in training and their position in that image. If a table is resampled, `values` is the effect of its
resampler relative to repeated entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.analysis.effect import PASSES, check_larger, logits_of_passes
from graticule.backbones.base import Backbone
from graticule.lab.data.module import DataModule
from graticule.lab.training.validation import batch_results
from graticule.position.grid import Crop
from graticule.surgery.fold import unfold
from graticule.surgery.resize import with_resampler

Size = tuple[int, int]


def check_crop(size: Size, whole: Size) -> None:
    """Check that images of `whole` = (height, width) can be cropped to `size`, in pixels.

    Raises:
        ValueError: if a side of the crop is longer.
    """
    if size[0] > whole[0] or size[1] > whole[1]:
        raise ValueError(
            f"`sizes` of crops must be at most that of the training, {whole[0]} x {whole[1]}, on both sides, "
            f"got {size[0]} x {size[1]}; canvas keeps the scale of the content on larger images."
        )


def middle(model: nn.Module, size: Size, whole: Size) -> tuple[int, int]:
    """Return the corner (top, left), in pixels, of the middle part of `size` of an image of `whole`.

    It is at the corner of a patch of the model, so the patches of the part are patches of the image.
    """
    patch = model.coarsest_patch if isinstance(model, Backbone) else (1, 1)
    top, left = ((long - short) // 2 // step * step for long, short, step in zip(whole, size, patch, strict=True))
    return top, left


def crop_of(model: nn.Module, size: Size, whole: Size) -> Crop | None:
    """Return the middle part as the model receives it; None if its encoding cannot encode a part of an image."""
    if not isinstance(model, Backbone):
        return None
    grid = unfold(model).grid_at(whole)
    patch = (whole[0] // grid.height, whole[1] // grid.width)
    crop = Crop.of_pixels(whole, (*middle(model, size, whole), *size), patch)
    try:
        model.position(model.grid_at(size).cropped(crop))
    except ValueError:  # raised by the encoding
        return None
    return crop


class OnMiddle(nn.Module):
    """Applies a model to the middle part of images.

    Args:
        model: a model that takes images of the part, and `crop` if there is one.
        start: (top, left) of the part, in pixels.
        size: (height, width) of the part.
        crop: the part of the image that the model receives; None for a whole image.
    """

    def __init__(self, model: nn.Module, start: tuple[int, int], size: Size, crop: Crop | None) -> None:
        super().__init__()
        self.model, self.start, self.size, self.crop = model, start, size, crop

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images (B, C, height, width)."""
        (top, left), (height, width) = self.start, self.size
        part = images[..., top : top + height, left : left + width]
        logits: Tensor = self.model(part) if self.crop is None else self.model(part, self.crop)
        return logits


#: The parts of the difference, and the controls.
PARTS = PASSES[1:]
CONTROLS = ("log_n", "bilinear", "canvas", "crop")


@dataclass(frozen=True)
class Change:
    """A mean difference over images and its standard error: of top-1 in percent, and of the loss in nats."""

    top1: float
    top1_error: float
    loss: float
    loss_error: float


@dataclass(frozen=True)
class Causes:
    """The parts of the difference between the size of the training and `size`, and the effects of the controls.

    size: (height, width) in pixels.
    top1: accuracy at the size of the training and at `size`, in percent.
    parts: 'tokens', 'content' and 'values'; their sum is the whole difference.
    controls: those of 'log_n', 'bilinear', 'canvas' and 'crop' that apply to the model, as changes of the score at
        `size`.
    """

    size: Size
    top1: tuple[float, float]
    parts: dict[str, Change]
    controls: dict[str, Change]


@torch.inference_mode()
def size_causes(
    model: Any, data: DataModule, size: Size, *, device: torch.device | str = "cpu", progress: bool = True
) -> Causes:
    """Find the causes of the difference between the test images at the size of the training and at a larger one.

    Args:
        model: a backbone of one stage.
        data: the test images.
        size: (height, width) in pixels, each at least that of the training.
        device: the device of the model.
        progress: whether to show a bar.

    Raises:
        ValueError: for another model or size, before any work.
    """
    trained_at = data.size
    check_larger(model, trained_at, size)
    model = model.to(device).eval()
    bilinear = _bilinear(model)
    crop = crop_of(model, trained_at, size) if size != trained_at else None
    cropped = None if crop is None else OnMiddle(model, middle(model, trained_at, size), trained_at, crop)
    losses: dict[str, list[Tensor]] = {}
    right: dict[str, list[Tensor]] = {}
    loaders = [data.eval_dataloader(at) for at in (trained_at, size)] + [data.eval_dataloader(size, mode="canvas")]

    def compute(batch: Any) -> None:
        (images, labels), (larger, _), (canvas, _) = batch
        found = {**logits_of_passes(model, images, larger), "canvas": model(canvas)}
        if bilinear is not None:
            found["bilinear"] = bilinear(larger)
        if cropped is not None:
            found["crop"] = cropped(larger)
        for name, logits in found.items():
            losses.setdefault(name, []).append(F.cross_entropy(logits.double(), labels, reduction="none").cpu())
            right.setdefault(name, []).append((logits.argmax(-1) == labels).double().cpu() * 100)

    label = f"causes at {size[0]}x{size[1]}"
    for _ in batch_results(compute, zip(*loaders, strict=True), label, device, progress):
        pass
    whole = {name: (torch.cat(right[name]), torch.cat(losses[name])) for name in right}
    pairs = zip(PASSES[1:], PASSES[:-1], strict=True)
    return Causes(
        size,
        (float(whole["trained"][0].mean()), float(whole["values"][0].mean())),
        {name: _change(whole[name], whole[before]) for name, before in pairs},
        {name: _change(whole[name], whole["values"]) for name in CONTROLS if name in whole},
    )


def _change(after: Sequence[Tensor], before: Sequence[Tensor]) -> Change:
    """Return mean and standard error of the differences, of top-1 and of the loss."""
    return Change(*_moments([new - old for new, old in zip(after, before, strict=True)]))


def _moments(differences: Sequence[Tensor]) -> Iterator[float]:
    for values in differences:
        yield float(values.mean())
        yield float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")


def _bilinear(model: nn.Module) -> nn.Module | None:
    """Return a copy that resamples its tables bilinearly; None if it has none."""
    try:
        return with_resampler(model, "bilinear")
    except ValueError:
        return None
