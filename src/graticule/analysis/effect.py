"""Effect of a change of a model or of its images on the features of each layer, and on the predicted classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import Tensor

from graticule.analysis.similarity import Array
from graticule.external.images import Size
from graticule.external.view import Pass, nearest
from graticule.position.grid import Grid


@dataclass(frozen=True, eq=False)
class Effect:
    r"""The difference between the features of the same images before and after a change.

    change: relative to the spread of the features, (L, images),

    .. math:: c_l = \sqrt{\frac{\frac{1}{N} \sum_t \|F'_{l, t} - F_{l, t}\|^2}{E\, \|F_l - E F_l\|^2}}

        0 where nothing changes, :math:`\sqrt 2` where the features before and after are unrelated.

    cosine: of the features of a token before and after, mean over the tokens, (L, images).
    same: 1 where the top-1 class is unchanged, (images,); None for a model without a head.
    right, right_before: 1 where the top-1 class is the label, after and before; None without labels. For a model
        without a head, the class is the one of most nearest neighbors (`neighbors_right`).
    """

    name: str
    change: Array
    cosine: Array
    same: Array | None = None
    right: Array | None = None
    right_before: Array | None = None

    @cached_property
    def mean_change(self) -> Array:
        """The change of every layer, mean over images, (L,)."""
        return self.change.mean(1)

    @cached_property
    def change_error(self) -> Array:
        """The standard error of `mean_change` over images, (L,)."""
        return standard_error(self.change)

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """Top-1 accuracy after the change minus that before, in percent, and its standard error over images."""
        if self.right is None or self.right_before is None:
            return None
        difference = 100 * (self.right - self.right_before)
        return float(difference.mean()), float(standard_error(difference))

    @property
    def p_value(self) -> float | None:
        """The p value of McNemar's exact test of the accuracies before and after."""
        if self.right is None or self.right_before is None:
            return None
        lost = int(((self.right_before == 1) & (self.right == 0)).sum())
        won = int(((self.right_before == 0) & (self.right == 1)).sum())
        return float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0


class FeatureComparison:
    """Collects the effect of one change, batch by batch.

    Args:
        name: of the change.
        spreads: the mean square distance of the features of each layer from their mean.
        copies: whether patches after the change are copies of those before, with which they are compared.
    """

    def __init__(self, name: str, spreads: Sequence[float], copies: bool = False) -> None:
        self.name, self.spreads, self.copies = name, spreads, copies
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, before: Pass, after: Pass, labels: Tensor | None = None) -> None:
        """Add a batch; features on another grid are resampled to the grid of `before`, unless they are of copies."""
        changes, cosines = [], []
        pairs = zip(before.layers, after.layers, self.spreads, strict=True)
        for (old, grid), (new, other), spread in pairs:
            old, new = old.double(), new.double()
            old, new = (copied(old, grid, other), new) if self.copies else (old, resampled(new, other, grid))
            squares = (new - old).square().sum(-1).mean(-1)
            changes.append((squares / max(spread, torch.finfo(torch.float64).tiny)).sqrt())
            cosines.append(F.cosine_similarity(new, old, dim=-1).mean(-1))
        parts = {"change": torch.stack(changes, 1), "cosine": torch.stack(cosines, 1)}
        if before.logits is not None and after.logits is not None:
            first, second = before.logits.argmax(-1), after.logits.argmax(-1)
            parts["same"] = (first == second).double()
            if labels is not None:
                classes = labels.to(first.device)
                parts["right"], parts["right_before"] = (second == classes).double(), (first == classes).double()
        elif labels is not None:
            for name, (tokens, grid) in (("gallery", before.layers[-1]), ("queries", after.layers[-1])):
                parts[name] = grid.split(tokens)[1].double().mean(1)
            parts["labels"] = labels
        for name, part in parts.items():
            self.parts.setdefault(name, []).append(part.cpu())

    def effect(self) -> Effect:
        values = {name: torch.cat(parts) for name, parts in self.parts.items()}
        if "gallery" in values:
            gallery, queries, labels = (values.pop(name) for name in ("gallery", "queries", "labels"))
            values["right"] = neighbors_right(gallery, queries, labels).double()
            values["right_before"] = neighbors_right(gallery, gallery, labels).double()
        arrays = {name: value.numpy() for name, value in values.items()}
        return Effect(self.name, arrays.pop("change").T, arrays.pop("cosine").T, **arrays)


def neighbors_right(gallery: Tensor, queries: Tensor, labels: Tensor) -> Tensor:
    """Return whether each query (n, D) has the label of most of its 5 nearest images in `gallery` (n, D), (n,).

    Image i of the gallery is the same image as query i, and is left out. Features are centered by the gallery's mean,
    and compared by their cosine; votes are weighted by it.
    """
    mean = gallery.mean(0)
    similarity = F.normalize(queries - mean, dim=-1) @ F.normalize(gallery - mean, dim=-1).T
    near, index = similarity.fill_diagonal_(-torch.inf).topk(min(5, len(gallery) - 1))
    labels = labels.to(near.device)
    votes = near.new_zeros(len(queries), int(labels.max()) + 1)
    votes.scatter_add_(1, labels[index], near + 1 + 1e-9)  # never below 0, and an image with a vote is first
    return votes.argmax(1) == labels


def resampled(tokens: Tensor, grid: Grid, new: Grid) -> Tensor:
    """Resample the patches of tokens (B, N, D) to another grid, as `resize_images` does; prefix tokens are kept."""
    if grid.shape == new.shape:
        return tokens
    features = resize_images(grid.to_map(tokens), new.shape)
    return torch.cat([grid.split(tokens)[0], new.from_map(features)], 1)


def copied(tokens: Tensor, grid: Grid, new: Grid) -> Tensor:
    """Return, for each token of another grid, the token that it copies: the patch with its center."""
    ahead, patches = grid.split(tokens)
    return torch.cat([ahead, patches[:, nearest(Grid(*new.shape), grid).to(tokens.device)]], 1)


def resize_images(images: Tensor, size: Size) -> Tensor:
    """Resize images (B, C, height, width), bilinear with antialias, or videos, trilinear."""
    if images.ndim > 4:
        return F.interpolate(images, size, mode="trilinear")
    precise = images.to(torch.promote_types(images.dtype, torch.float32))  # half precision has no antialias on a CPU
    return F.interpolate(precise, size, mode="bilinear", antialias=True).to(images.dtype)


def standard_error(values: Array) -> Array:
    """Return the standard error of the mean over the last axis; NaN for one value."""
    count = values.shape[-1]
    error: Array = values.std(-1, ddof=1) / np.sqrt(count) if count > 1 else np.full(values.shape[:-1], np.nan)
    return error
