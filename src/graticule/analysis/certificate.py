"""Certificates of a removal of position: what is left of it, and what is lost of content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.analysis.effect import resize_images
from graticule.analysis.probe import labels_of
from graticule.analysis.share import (
    Estimate,
    ShareSums,
    additive_basis,
    check_images,
    different_images,
    mean_estimate,
    proportion_estimate,
)
from graticule.analysis.similarity import Array
from graticule.external.debiased import FEATURES, Debiased, Eraser, Subtraction, layer_patches
from graticule.external.images import Size, evaluating
from graticule.external.traced_model import view_of
from graticule.external.view import split_features, unpooled
from graticule.position.grid import Grid
from graticule.registry.checks import checked
from graticule.registry.fields import Count
from graticule.system.tables import PrintedTable

#: Neighbors of the probes, and the largest number of patches of an image among which they are searched.
_NEIGHBORS, _PATCHES = 10, 400
#: A match is correct within this share of the longer side of the grid (PCK@0.10), and at the nearest patch.
_TOLERANCE, _NEAREST = 0.1, 0.75
#: The side of a crop, as a share of the image.
_CROP = 0.75


@dataclass(frozen=True, eq=False, repr=False)
class DebiasCertificate(PrintedTable):
    """Report of a removal, measured on images that it was not fitted on; pairs are (before, after).

    Intervals are of 95 % over images. All numbers are of the model's features.

    method: the method.
    components: the number of directions that are removed ('leace', 'blank'), or of the low-rank part of the table that
        is subtracted, in addition to rows and columns ('mean'); None if nothing is removed.
    images: number of images.
    total: number of images, including those that were not held out; None if all were measured.
    share: the share of the variance that position explains (`position_share`).
    place: R2 of row and column that are predicted by the mean place of the 10 nearest patches of other images (at
        most a quarter of them), in cosine; `place_chance` is for random patches.
    match: the share of patches whose nearest patch in a shifted or cropped copy of their image is the true one (within
        a tenth of the longer side); `match_chance` is for random patches, `match_change` is after minus before.
    content: the variance that position does not explain, after as a share of that before; None where a table is
        subtracted, which keeps all of it by construction.
    labels: accuracy of the 10 nearest images, or patches of other images, of their labels; None without labels.
    """

    method: str
    components: int | None
    images: int
    share: tuple[Estimate, Estimate]
    place: tuple[Estimate, Estimate]
    place_chance: float
    match: tuple[Estimate, Estimate]
    match_change: Estimate
    match_chance: float
    content: Estimate | None
    labels: tuple[Estimate, Estimate] | None = None
    total: int | None = None

    @property
    def nothing(self) -> bool:
        return self.components is None

    @property
    def heading(self) -> str:
        what = "nothing to remove" if self.nothing else f"{self.method}, {self.components} components"
        count = f"{self.images} of {self.total} images, held out" if self.total else f"{self.images} images"
        return f"{what}; {count}; intervals of 95 %"

    def summary(self) -> list[tuple[str, ...]]:
        """Return rows for a table: a header, then every measure."""
        pairs = [
            ("share of position (%)", self.share, 100, "0"),
            ("patch location from kNN (R²)", self.place, 1, f"{self.place_chance:.2f}"),
            ("correspondence under shift and crop (%)", self.match, 100, f"{100 * self.match_chance:.1f}"),
        ]
        if self.labels is not None:
            pairs.append(("labels from kNN (%)", self.labels, 100, ""))
        rows: list[tuple[str, ...]] = [("measure", "before", "after", "chance")]
        for name, (before, after), scale, chance in pairs:
            decimals = 1 if scale == 100 else 2
            rows.append((name, before.text(None, scale, decimals), after.text(None, scale, decimals), chance))
        if self.content is not None:
            rows.append(("content kept (%)", "100", self.content.text(), ""))
        return rows


class PlaceReader:
    """Reads the patches of the features and of chosen layers of images, (n, H * W, D) each, in float32 on the CPU."""

    def __init__(self, model: nn.Module, size: Size, layers: Sequence[int], grid: Grid, batch_size: int) -> None:
        self.model, self.size, self.layers, self.batch_size = model, size, layers, batch_size
        self.grids = [grid]
        if layers:
            depths = view_of(model, size).grids(size)
            if wrong := [layer for layer in layers if not 0 <= layer < len(depths)]:
                raise ValueError(f"`layers` must be from 0 to {len(depths) - 1}, got {wrong[0]}.")
            self.grids += [Grid(*depths[layer].shape) for layer in layers]

    def __call__(self, images: Tensor) -> list[Tensor]:
        weight = next(self.model.parameters())
        parts: list[list[Tensor]] = []
        with evaluating(self.model):
            for batch in images.split(self.batch_size):
                x = batch.to(weight.device, weight.dtype)
                try:
                    features = unpooled(self.model, x)
                except (AssertionError, RuntimeError) as error:  # raised by models for a wrong size
                    reason = str(error).strip().partition("\n")[0]
                    raise ValueError(
                        f"`images` must have a size that the model takes, got {self.size[0]} x {self.size[1]}: {reason}"
                    ) from error
                patches = [split_features(features, self.grids[0])[1], *layer_patches(self.model, x, self.layers)]
                parts.append([layer.float().cpu() for layer in patches])
        return [torch.cat(batches) for batches in zip(*parts, strict=True)]


@checked
def certify(
    debiased: Debiased, images: Tensor, labels: Tensor | None = None, batch_size: Count = 16
) -> DebiasCertificate:
    """Measure what is left of position, and what is lost of content, in the features of a debiased model.

    Args:
        debiased: the model.
        images: preprocessed images (B, C, height, width), at least three that differ; others than it was fitted on.
            Repeated images are left out, with a warning.
        labels: classes of the images (B,), or of their patches (B, H * W), -1 for unknown.
        batch_size: images per forward pass.

    Raises:
        ValueError: if the images cannot be used.
    """
    check_images(images, 3)
    chosen = different_images(images)
    images, labels = images[chosen], None if labels is None else labels[chosen]
    check_images(images, 3)
    grid = debiased.grid_of(images)
    size = (images.shape[-2], images.shape[-1])
    read = PlaceReader(debiased.backbone, size, [], grid, batch_size)
    removal = dict(debiased.removals.items()).get(FEATURES)

    def read_both(images: Tensor) -> tuple[Tensor, Tensor]:
        patches = read(images)[0]
        if removal is None:
            return patches, patches
        device = next(debiased.parameters()).device
        with torch.no_grad():
            return patches, removal(patches.to(device), grid).float().cpu()

    def estimate_both(
        estimate: Callable[[Array], Estimate], measure: Any, *arguments: Any
    ) -> tuple[Estimate, Estimate]:
        first, second = (estimate(measure(patches, *arguments)) for patches in (before, after))
        return first, second

    before, after = read_both(images)
    matches: list[tuple[Tensor, ...]] = []
    chances = []
    for changed, place in _copies(images, grid):
        limit = max(_TOLERANCE * max(grid.shape), _NEAREST)
        near = torch.cdist(place, _places(grid)) <= limit
        chances.append(float(near.double().mean()))
        pairs = zip(read_both(changed), (before, after), strict=True)
        matches.append(tuple(_matched(copied, patches, near) for copied, patches in pairs))
    first, second = (torch.stack(copies).mean(0).numpy() for copies in zip(*matches, strict=True))
    components = None
    if isinstance(removal, Eraser):
        components = removal.read.shape[1]
    elif isinstance(removal, Subtraction):
        components = _rank(removal.table, grid)
    return DebiasCertificate(
        method=debiased.method,
        components=components,
        images=len(images),
        share=(ShareSums(grid).add(before).shares()["total"], ShareSums(grid).add(after).shares()["total"]),
        place=estimate_both(mean_estimate, _located, grid),
        place_chance=-1 / _count((len(images) - 1) * grid.patches),
        match=(proportion_estimate(first), proportion_estimate(second)),
        match_change=mean_estimate(second - first),
        match_chance=float(np.mean(chances)),
        content=_ratio(_content(before), _content(after)) if isinstance(removal, Eraser) else None,
        labels=None if labels is None else estimate_both(proportion_estimate, _by_neighbors, labels),
    )


def _rank(table: Tensor, grid: Grid) -> int:
    """Return the rank of a table (H, W, D) after a function of the row and one of the column are subtracted."""
    if tuple(table.shape[:2]) != grid.shape:
        grid = Grid(table.shape[0], table.shape[1])
    basis = additive_basis(grid)
    flat = table.double().cpu().flatten(0, 1)
    rest = flat - basis @ (basis.T @ flat)
    values = torch.linalg.svdvals(rest - rest.mean(0))
    return int((values > 1e-5 * torch.linalg.svdvals(flat)[0]).sum())


def _content(patches: Tensor) -> Array:
    """Return the variance of each image that the mean of each position over the other images does not explain."""
    x = patches.double() - patches.double().mean(1, keepdim=True)
    n = len(x)
    others = (x.sum(0) - x) / (n - 1)
    return ((x - others).square().sum(-1).mean(-1) * (n - 1) / n).numpy()


def _ratio(before: Array, after: Array) -> Estimate:
    """Return the ratio of the means after and before of images (n,), by the delta method."""
    ratio = after.mean() / before.mean()
    value, low, high = mean_estimate((after - ratio * before) / before.mean())
    return Estimate(ratio + value, ratio + low, ratio + high)


def _places(grid: Grid) -> Tensor:
    return Grid(*grid.shape).coordinates().double()


def _copies(images: Tensor, grid: Grid) -> list[tuple[Tensor, Tensor]]:
    """Return shifted and cropped copies of images, and the place in the image of each patch of a copy, (H * W, 2).

    The shift is by a quarter of each side; what leaves on one side enters on the other. Crops are of two corners, of
    three quarters of the sides, enlarged to the size of the image.
    """
    height, width = images.shape[-2:]
    sides = torch.tensor(grid.shape, dtype=torch.float64)
    places = _places(grid)
    step = [side // 4 for side in grid.shape]
    pixels = [move * length // side for move, length, side in zip(step, (height, width), grid.shape, strict=True)]
    copies = [(images.roll(pixels, (-2, -1)), (places - torch.tensor(step)) % sides)]
    inner = round(height * _CROP), round(width * _CROP)
    shares = torch.tensor([inner[0] / height, inner[1] / width], dtype=torch.float64)
    for top, left in ((0, 0), (height - inner[0], width - inner[1])):
        part = images[..., top : top + inner[0], left : left + inner[1]]
        start = torch.tensor([top / height, left / width], dtype=torch.float64) * sides
        place = start + (places + 0.5) * shares - 0.5
        copies.append((resize_images(part, (height, width)), place))
    return copies


def _matched(copies: Tensor, patches: Tensor, near: Tensor) -> Tensor:
    """Return the share of the patches of each copy whose nearest patch in its image is one of `near`, (n,)."""
    similarity = F.normalize(copies, dim=-1) @ F.normalize(patches, dim=-1).mT
    return near[torch.arange(len(near)), similarity.argmax(-1)].double().mean(-1)


def _count(others: int) -> int:
    return max(1, min(_NEIGHBORS, others // 4))


def _neighbors(patches: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the chosen patches, (m,), and for each image the images and patches of their nearest in other images.

    Images and indices among the chosen patches are (m, k) each.
    """
    step = -(-patches.shape[1] // _PATCHES)
    step += step > 1 and step % 2 == 0  # so that not all chosen patches are in the same columns
    chosen = torch.arange(0, patches.shape[1], step)
    unit = F.normalize(patches[:, chosen], dim=-1)
    n, m = unit.shape[:2]
    flat = unit.flatten(0, 1)
    neighbors = []
    for index, image in enumerate(unit):
        similarity = image @ flat.T
        similarity[:, index * m : (index + 1) * m] = -torch.inf
        nearest = similarity.topk(_count((n - 1) * m), 1).indices
        neighbors.append((nearest // m, nearest % m))
    return chosen, neighbors


def _located(patches: Tensor, grid: Grid) -> Array:
    """Return R2 of the places that the nearest patches of other images predict, of each image, (n,)."""
    labels = labels_of(grid)
    labels = labels[:, labels.abs().sum(0) > 0]
    chosen, nearest = _neighbors(patches)
    truth = labels[chosen]
    spread = (truth - truth.mean(0)).square().mean(0)
    errors = [(truth[other].mean(1) - truth).square().mean(0) for _, other in nearest]
    return np.array([float((1 - error / spread).mean()) for error in errors])


def _by_neighbors(patches: Tensor, labels: Tensor) -> Array:
    """Return the accuracy of the labels that most of the nearest have, of each image, (n,)."""
    if labels.ndim == 1:
        patches, labels = patches.mean(1, keepdim=True), labels[:, None]
    if labels.shape != patches.shape[:2]:
        raise ValueError(f"`labels` must be (B,) or (B, {patches.shape[1]}), one per patch, got {tuple(labels.shape)}.")
    chosen, nearest = _neighbors(patches)
    known = labels[:, chosen].long()
    classes = int(known.max()) + 1
    right = []
    for truth, (image, patch) in zip(known, nearest, strict=True):
        votes = F.one_hot(known[image, patch].clamp_min(-1) + 1, classes + 1).sum(1)[:, 1:]
        right.append(float((votes.argmax(1) == truth)[truth >= 0].double().mean()))
    return np.array(right)
