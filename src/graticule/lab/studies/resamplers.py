"""Comparison of resamplers by the features and scores of a model at sizes that it was not trained at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor
from torch.utils._pytree import tree_leaves

from graticule.external.traced_model import ResampledTables
from graticule.lab.studies.significance import paired_outcomes
from graticule.lab.studies.tables import size_text
from graticule.lab.terminal import bar as progress_bar
from graticule.position.resampling import RESAMPLERS
from graticule.registry.specs import Spec
from graticule.surgery.resize import resampled_modules, with_resampler
from graticule.system.files import write_json

Size = tuple[int, int]

#: Tried in addition to every name with its defaults; the last is that of DINOv2's released code.
_VARIANTS = (
    *("bicubic(antialias=False)", "bilinear(antialias=False)", "bicubic(antialias=False, align_corners=True)"),
    "bicubic(antialias=False, offset=0.1)",
)


@dataclass(frozen=True)
class ResamplerStudy:
    """Values of every image with every resampler, at every size.

    resamplers: those of the model.
    trained_at: (height, width) in pixels of the reference images.
    similarity: resampler -> size -> cosine of the features of every image at that size and at `trained_at`.
    correct: the same with 100 for a correct class and 0 for another one; empty without labels.
    same: resampler -> an earlier one that gives the same positions at every size, whose values it has.
    """

    resamplers: tuple[str, ...]
    trained_at: Size
    similarity: dict[str, dict[Size, list[float]]]
    correct: dict[str, dict[Size, list[float]]]
    same: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> list[Size]:
        """The sizes of the images."""
        return list(next(iter(self.similarity.values())))

    def rows(self) -> list[tuple[str, ...]]:
        """Return a header, then one row per resampler: means with standard errors over images at each size.

        '*' marks the best at a size, and those that do not differ from it in a paired t-test over images at 5 %,
        adjusted by Holm's method for all different resamplers of a column.
        """
        tables = [("cosine", self.similarity, 4)] + ([("top-1", self.correct, 1)] if self.correct else [])
        header = ["resampler", *(f"{what} at {size_text(size)}" for what, _, _ in tables for size in self.sizes)]
        columns = [_column(table, size, decimals, self.same) for _, table, decimals in tables for size in self.sizes]
        return [tuple(header), *((name, *(column[name] for column in columns)) for name in self.similarity)]

    def notes(self) -> list[str]:
        """Return notes that explain the table."""
        count = len(next(iter(self.similarity.values()))[self.sizes[0]])
        notes = [
            f"mean ± standard error over {count} images; cosine with the features at {size_text(self.trained_at)}; "
            f"the model has {', '.join(self.resamplers)}",
            "*: the best at that size, and those that do not differ from it in a paired t-test over images (5 %, Holm)",
        ]
        notes += [f"{name} is {other} at these sizes, by definition" for name, other in self.same.items()]
        for size in self.sizes:
            values = [by[size] for by in self.similarity.values()]
            if size != self.trained_at and all(value == values[0] for value in values):
                notes.append(f"at {size_text(size)} nothing is resampled: all give the same")
        return notes

    def record(self) -> dict[str, Any]:
        """Return the values of every image as plain values."""
        tables = {"cosine": self.similarity, "top1": self.correct}
        records = {
            what: {name: {size_text(size): values for size, values in by.items()} for name, by in table.items()}
            for what, table in tables.items()
            if table
        }
        return {"own": list(self.resamplers), "trained_at": list(self.trained_at), "same": self.same, **records}

    def write(self, path: Path) -> Path:
        """Write the values of every image as JSON; returns `path`."""
        return write_json(path, self.record())


def candidates() -> list[str]:
    """List the resamplers that are tried: every name with its defaults, and some with other options."""
    defaults = {name: [option.default for option in RESAMPLERS.options(name).values()] for name in RESAMPLERS}
    return [*(name for name, values in defaults.items() if Parameter.empty not in values), *_VARIANTS]


@torch.no_grad()
def try_resamplers(
    model: Any,
    images: Mapping[Size, Sequence[Tensor]],
    trained_at: Size,
    labels: Sequence[int] | None = None,
    *,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> ResamplerStudy:
    """Compare the pooled features of images at several sizes with those at the training size.

    Args:
        model: a backbone, or a model of another library as `ResampledTables`.
        images: size -> images (C, height, width); the same images at every size, and at `trained_at`.
        trained_at: (height, width), in pixels.
        labels: the classes of the images, in the order of the model's outputs; None if they are not known.
        batch_size: images per forward pass.
        device: device of the model.
        progress: whether to show a progress bar.

    Raises:
        ValueError: if the model resamples nothing.
    """
    sizes = [size for size in images if size != trained_at] or [trained_at]
    if isinstance(model, ResampledTables):
        resamplers: tuple[str, ...] = ("its own",)
        names = [name for name in candidates() if "positions" in RESAMPLERS[Spec.parse(name).name].takes]
        tried: dict[str, Any] = {"its own": model} | {name: model.with_resampler(name) for name in names}
        same: dict[str, str] = {}
    else:
        resamplers = tuple(dict.fromkeys(str(module.resampler) for module in resampled_modules(model)))
        tried = {name: changed for name in candidates() if (changed := with_resampler(model, name)) is not None}
        same = _equal_positions(tried, sizes)
    bar = progress_bar(total=1 + (len(tried) - len(same)) * len(sizes), unit="pass", wanted=progress)

    def outputs(network: Any, at: Size) -> tuple[Tensor, Tensor]:
        """Return the pooled features and logits of all images at a size."""
        network.to(device).eval()
        features, logits = [], []
        for start in range(0, len(images[at]), batch_size):
            batch = torch.stack(list(images[at][start : start + batch_size])).to(device)
            tokens = network.forward_features(batch)
            features.append(network.forward_head(tokens, pre_logits=True).double().cpu())
            if labels is not None:
                logits.append(network.forward_head(tokens).cpu())
        bar.update()
        return torch.cat(features), torch.cat(logits) if logits else torch.empty(0)

    reference, _ = outputs(model, trained_at)
    similarity: dict[str, dict[Size, list[float]]] = {name: {} for name in tried}
    correct: dict[str, dict[Size, list[float]]] = {name: {} for name in tried if labels is not None}
    for name, size in [(name, size) for name in tried if name not in same for size in sizes]:
        bar.set_description(name, refresh=False)
        features, logits = outputs(tried[name], size)
        similarity[name][size] = F.cosine_similarity(features, reference, dim=-1).tolist()
        if labels is not None:
            correct[name][size] = (100.0 * (logits.argmax(-1) == torch.tensor(labels))).tolist()
    for table in filter(None, (similarity, correct)):
        table.update({name: table[other] for name, other in same.items()})
    bar.close()
    return ResamplerStudy(resamplers, trained_at, similarity, correct, same)


def _equal_positions(tried: Mapping[str, Any], sizes: Sequence[Size]) -> dict[str, str]:
    """Map each resampler to an earlier one that gives the same positions at every size, bit for bit, if there is one.

    Positions that are functions of the tokens are not compared, and count as different.
    """
    leaves_of: dict[str, list[Any]] = {}
    same: dict[str, str] = {}
    for name, changed in tried.items():
        positions = [tuple(layer) for size in sizes for layer in changed.position(changed.grid_at(size))]
        leaves = [leaf for leaf in tree_leaves(positions) if leaf is not None]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            continue
        for other, known in leaves_of.items():
            if len(known) == len(leaves) and all(map(torch.equal, known, leaves)):
                same[name] = other
                break
        else:
            leaves_of[name] = leaves
    return same


def _column(
    table: Mapping[str, Mapping[Size, Sequence[float]]], size: Size, decimals: int, same: Mapping[str, str]
) -> dict[str, str]:
    """Return the cell of every resampler at a size."""
    values = {name: by[size] for name, by in table.items() if name not in same}
    best = max(values, key=lambda name: fmean(values[name]))
    others = [name for name in values if name != best]
    outcomes = dict(zip(others, paired_outcomes([(values[name], values[best]) for name in others]), strict=True))
    cells = {}
    for name, of_images in values.items():
        error = stats.sem(of_images) if len(of_images) > 1 else math.nan
        p = outcomes[name].adjusted if name in outcomes else None
        # without a test, as when all differences are equal, only equal means count as equal
        alike = fmean(of_images) == fmean(values[best]) if p is None else p >= 0.05
        cells[name] = f"{fmean(of_images):.{decimals}f} ± {error:.{decimals}f}{'*' if alike else ' '}"
    return {name: cells[same.get(name, name)] for name in table}
