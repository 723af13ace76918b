"""Accuracy and cost at any image size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.data import RealLabelsImagenet
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.external.traced_model import view_of
from graticule.lab.data.module import DataModule
from graticule.lab.data.transforms import Mode
from graticule.lab.tasks.options import ImageOptions
from graticule.lab.training.cost import count_multiply_adds, inference_cost
from graticule.lab.training.results import Evaluated, Evaluation, show
from graticule.lab.training.validation import Sums, batch_results
from graticule.registry.checks import parse_sizes, printable
from graticule.registry.fields import Whole, read_typed
from graticule.surgery.fold import fold, unfold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Size = tuple[int, int]


@dataclass(frozen=True)
class Score:
    """Scores and cost of a model at one size.

    top1, top5: percent (top-5 only with more than 5 classes); loss: nats; images: number of scored images.
    multiply_adds: of one image (`count_multiply_adds`).
    images_per_second, memory: of inference only, on batches of `batch` images; memory in bytes per image (`Cost`);
        None if not measured.
    real: percent of the images with ImageNet-ReaL labels whose top-1 is one of them; None without these labels.
    """

    size: Size
    top1: float
    top5: float | None
    loss: float
    images: int
    batch: int | None = None
    images_per_second: float | None = None
    memory: float | None = None
    real: float | None = None
    multiply_adds: int | None = None


def check_sizes(model: nn.Module, sizes: Iterable[Size]) -> None:
    """Check that a model accepts images of `sizes` = (height, width), in pixels."""
    for size in sizes:
        view_of(model).resized_to(size)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    data: DataModule,
    sizes: Iterable[Size],
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
    mode: Mode = "zoom",
    measure_cost: bool = True,
    real: Path | None = None,
) -> list[Score]:
    """Score `model` on the test images at each of `sizes` = (height, width), in pixels.

    With `mode` zoom the images are scaled to each size; with canvas they keep the scale of training on a larger canvas
    (`DataModule.eval_dataloader`).

    Position information is resampled or computed for each size, as defined by each encoding, and folded into constants
    unless it depends on the image; the model is unchanged afterwards. Speed and memory are measured in the forward pass
    of a full batch, without reading; measuring them takes half a second per size. `real` is the path of the labels of
    `Score.real` (`read_real`).

    Raises:
        ValueError: for a size that is not a multiple of the patch, before any work.
    """
    sizes = list(sizes)
    check_sizes(model, sizes)
    was_training = model.training
    model.to(device)
    data.to(torch.device(device))
    scores = []
    counts = {}
    for size in sizes if measure_cost else ():
        sized = model.eval() if isinstance(model, Backbone) else _at(model.eval(), size)
        counts[size] = count_multiply_adds(sized, torch.empty(1, data.info.channels, *size))
    loaders = {size: data.eval_dataloader(size, mode=mode) for size in dict.fromkeys(sizes)}
    try:
        for size in sizes:
            sized = _at(model, size).to(device).eval()
            sums, first = Sums(), None
            real_labels = None if real is None else read_real(real, data)
            compute, label = lambda batch, sized=sized: sized(batch[0]), "x".join(map(str, size))
            for (images, labels), logits in batch_results(compute, loaders[size], label, device, progress):
                first = images if first is None else first
                sums.add(image_scores(logits, labels, top5=data.info.num_classes > 5))
                if real_labels is not None:
                    real_labels.add_result(logits)
            assert first is not None  # `data` raises if there are no test images
            means = sums.means()
            score = Score(
                size=size,
                top1=means["top1"],
                top5=means.get("top5"),
                loss=means["loss"],
                images=sums.count,
                real=None if real_labels is None else real_labels.get_accuracy(1),
                multiply_adds=counts.get(size),
            )
            cost = dataclasses.asdict(inference_cost(sized, first)) if measure_cost else {}
            scores.append(dataclasses.replace(score, **cost))
    finally:
        unfold(model).train(was_training)
    return scores


def image_scores(logits: Tensor, labels: Tensor, top5: bool = False) -> dict[str, Tensor]:
    """Return the loss and the scores of images, (B,) each: 100 if the label is among the highest logits, else 0.

    Args:
        logits: (B, classes).
        labels: (B,).
        top5: whether also the five highest logits are looked at.
    """
    scores = {"loss": F.cross_entropy(logits.float(), labels, reduction="none")}
    scores["top1"] = 100 * (logits.argmax(-1) == labels)
    if top5:
        scores["top5"] = 100 * (logits.topk(5).indices == labels[:, None]).any(-1)
    return scores


def read_real(path: Path, data: DataModule) -> Any:
    """Read the ImageNet-ReaL labels of ImageNet's validation set; returns timm's score of outputs in the images' order.

    The file has a list of labels for each of ILSVRC2012_val_00000001.JPEG, ...; images without labels do not count. The
    path `timm` stands for the copy in timm.

    Reference: Are we done with ImageNet? (Beyer et al., 2020).
    """
    source, names = None if path == Path("timm") else path, [file.name for file in data.test_files()]
    try:
        count = 50_000 if source is None else len(read_typed(source, list[list[Whole]]))
    except (OSError, ValueError) as error:
        raise ValueError(f"`real` must be timm, or the file real.json of ImageNet-ReaL: {error}") from None
    if len(names) != count or set(names) != {f"ILSVRC2012_val_{number + 1:08}.JPEG" for number in range(count)}:
        raise ValueError(
            f"`real` must have labels for exactly the test images, ILSVRC2012_val_00000001.JPEG to {count:08}, got "
            f"{len(names):,} images in files{printable(f' such as {names[0]}') if names else ''}."
        )
    real = RealLabelsImagenet(names, source, topk=(1,))
    pairs = [(label, real.real_labels[name]) for label, name in zip(data.test_labels(), names, strict=True)]
    contained = [label in labels for label, labels in pairs if labels]
    if sum(contained) * 2 <= len(contained):
        raise ValueError(
            f"`real` must have labels in the order of the model's classes, got {path}, which has the class of "
            f"{sum(contained):,} of {len(contained):,} images among their labels."
        )
    return real


def _at(model: nn.Module, size: Size) -> nn.Module:
    """Return a backbone of this library folded for a size, or a copy of another model for it."""
    return fold(model, size) if isinstance(model, Backbone) else view_of(model).resized_to(size).model


class ImageEvaluation(ImageOptions, Evaluation["Score"]):
    """Accuracy and cost at several sizes of the images."""

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check the sizes, and the file of labels."""
        check_sizes(model, self._sizes(task))
        if self.real is not None:
            read_real(self.real, data)

    def scores(self, task: Any, model: Any, data: Any, *, device: str) -> list[Score]:
        return evaluate(model, data, self._sizes(task), device=device, mode=self.mode, real=self.real)

    def rows(self, run: Evaluated[Score]) -> Iterator[dict[str, str]]:
        """Yield a row for each size, with the difference from the training size."""
        trained = run.recipe.img_size
        reference = next((score.top1 for score in run.scores if score.size == trained), run.measured)
        for score in run.scores:
            yield {
                "size": "x".join(map(str, score.size)) + " *" * (score.size == trained),
                "top-1 (%)": f"{score.top1:.2f}",
                "change": show(None if reference is None else score.top1 - reference, "+.2f"),
                "top-5 (%)": show(score.top5),
                **({} if score.real is None else {"ReaL (%)": f"{score.real:.2f}"}),
                "loss": f"{score.loss:.3f}",
                "images": f"{score.images:,}",
                "multiply-adds": show_multiply_adds(score.multiply_adds),
                "images/s": show(score.images_per_second, ",.0f"),
                **({} if score.memory is None else {"MB/image": show(score.memory / 1e6)}),
            }

    def notes(self, evaluated: Sequence[Evaluated[Score]]) -> list[str]:
        """Explain the cost and the canvas."""
        has_memory = any(score.memory is not None for run in evaluated for score in run.scores)
        measured = "speed and peak memory are" if has_memory else "speed is"  # memory is measured on GPUs alone
        notes = [f"{measured} of the forward pass only"]
        if self.mode == "canvas":
            notes.append("canvas: the content keeps its scale, at a random position in the image")
        return notes

    def records(self, evaluated: Sequence[Evaluated[Score]]) -> list[dict[str, Any]]:
        return [{"run": record.pop("run"), "mode": self.mode, **record} for record in super().records(evaluated)]

    def figure(self, evaluated: Sequence[Evaluated[Score]]) -> Figure:
        """Plot accuracy against size."""
        from graticule.lab.figures.scores import resolution_plot

        curves = {run.label: {score.size: [score.top1] for score in run.scores} for run in evaluated}
        return resolution_plot(curves, trained_at=evaluated[0].recipe.img_size)

    def _sizes(self, task: Any) -> list[tuple[int, int]]:
        return parse_sizes(self.sizes) or [task.recipe.img_size]


def show_multiply_adds(count: int | None) -> str:
    """Return a number of multiply-adds for a table, a dash if it is not known."""
    if count is None:
        return "-"
    return f"{count / 1e9:.2f} G" if count >= 1e8 else f"{count / 1e6:.2f} M"
