"""Probes: coordinates of a patch, such as row and column, from the features of each layer, and classes of images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.analysis.effect import neighbors_right, standard_error
from graticule.analysis.similarity import Array
from graticule.external.debiased import Eraser
from graticule.position.grid import Grid
from graticule.registry.checks import checked

#: Penalties of the ridge regression that are tried, as shares of the variance of a feature; all features are scaled to
#: variance 1. The largest makes the prediction nearly constant, for features without information about position.
RIDGES = (1e-4, 1e-2, 1.0, 100.0)
#: A label, from -1 to 1, whose variance is below this is constant.
_CONSTANT = 1e-12


@dataclass(frozen=True, eq=False)
class Probe:
    """Accuracy of a linear map from the features of a layer to the coordinates of their patch, such as row and column.

    r2: (folds, axes), the share of the variance of row and column that is explained on held-out images; NaN if there is
        only one row or column.
    control: (folds, axes), the same for labels that were shuffled over the patches of each image.
    examples: total number of patches.
    channels: number of channels of the features.
    """

    r2: Array
    control: Array
    examples: int
    channels: int

    @cached_property
    def mean(self) -> Array:
        """R2 of row and column, mean over folds, (axes,)."""
        return self.r2.mean(0)

    @cached_property
    def error(self) -> Array:
        """The standard error of `mean` over folds, (axes,)."""
        return standard_error(self.r2.T)

    @cached_property
    def control_mean(self) -> Array:
        """R2 of the shuffled labels, mean over folds, (axes,)."""
        return self.control.mean(0)

    @cached_property
    def control_error(self) -> Array:
        """The standard error of `control_mean` over folds, (axes,)."""
        return standard_error(self.control.T)


class PositionSums:
    """Sums over patches from which the probe of one layer is fitted, and its directions are removed, in closed form.

    Images are added batch by batch, so features are not stored; sums are in float64. Image i belongs to fold i modulo
    `folds`.

    Args:
        grid: the grid of the patches.
        channels: D.
        folds: number of parts that the images are split into.
        seed: of the shuffling of the control's labels, which differs between images.
    """

    def __init__(self, grid: Grid, channels: int, folds: int = 5, seed: int = 0) -> None:
        if folds < 2:
            raise ValueError(f"`folds` must be at least 2, got {folds}.")
        self.grid = grid
        self.labels = labels_of(grid)
        self.generator = torch.Generator().manual_seed(seed)
        self.images = 0
        self.known = 2 * len(grid.shape)  # row and column, also of the control
        size = channels + self.known
        self.shift: Tensor | None = None  # near the mean of the features, so that no variance is a rounding error
        self.count = torch.zeros(folds, dtype=torch.float64)
        self.sums = torch.zeros(folds, size, dtype=torch.float64)
        self.products = torch.zeros(folds, size, size, dtype=torch.float64)

    def add(self, features: Tensor) -> Self:
        """Add the features (B, H * W, D) of further images."""
        folds = len(self.count)
        for patches in features.detach().cpu().double():
            if self.shift is None:
                self.shift = patches.mean(0)
            order = torch.randperm(self.grid.patches, generator=self.generator)
            both = torch.cat([patches - self.shift, self.labels, self.labels[order]], 1)
            fold = self.images % folds
            self.count[fold] += len(both)
            self.sums[fold] += both.sum(0)
            self.products[fold] += both.T @ both
            self.images += 1
        return self

    def probe(self) -> Probe:
        """Fit and score by cross-validation: each fold is scored by a fit on the others.

        The penalty is chosen for each label on one of the fitted folds.
        """
        folds = len(self.count)
        if self.images < folds:
            raise ValueError(f"`images` must be at least as many as folds, {folds}, got {self.images}.")
        scores = torch.empty(folds, self.known, dtype=torch.float64)
        for fold in range(folds):
            others = [other for other in range(folds) if other != fold]
            tried = others[fold % len(others)]
            fitted = [other for other in others if other != tried] or others
            trials = torch.stack([self._score(fitted, tried, (ridge,) * self.known) for ridge in RIDGES])
            best = [RIDGES[index] for index in trials.nan_to_num(-torch.inf).argmax(0)]
            scores[fold] = self._score(others, fold, best)
        r2, axes = scores.numpy(), self.known // 2
        return Probe(r2[:, :axes], r2[:, axes:], int(self.count.sum()), self.sums.shape[1] - self.known)

    def _score(self, fitted: Iterable[int], fold: int, ridges: Sequence[float]) -> Tensor:
        """Return R2 of the labels on a fold, (labels,), fitted on other folds; NaN for a constant label."""
        mean, covariance = self._moments(fitted)
        weights, labels = _ridge(covariance, ridges), self.known  # (D, labels)
        # the mean square error of the fold, from its second moments about the mean of the fit
        count, sums, products = self.count[fold], self.sums[fold], self.products[fold]
        cross = torch.outer(sums, mean)
        about = (products - cross - cross.T) / count + torch.outer(mean, mean)
        features, label = about[:-labels, :-labels], about[:-labels, -labels:]
        explained = 2 * (weights * label).sum(0) - (weights * (features @ weights)).sum(0)
        error = about.diagonal()[-labels:] - explained
        spread = (products.diagonal() / count - (sums / count).square())[-labels:]
        constant = spread <= _CONSTANT
        return (1 - error / spread.clamp_min(_CONSTANT)).masked_fill(constant, torch.nan)

    def spread(self) -> float:
        """Return the mean square distance of the features from their mean."""
        _, covariance = self._moments(range(len(self.count)))
        return float(covariance.diagonal()[: -self.known].sum())

    def eraser(self, control: bool = False) -> Eraser:
        """Return an eraser of the directions of row and column, or of the control's labels."""
        mean, covariance = self._moments(range(len(self.count)))
        labels, axes = self.known, self.known // 2
        chosen = slice(-axes, None) if control else slice(-labels, -axes)
        label = covariance[:-labels, -labels:][:, chosen]  # (D, axes), covariance of the features with row and column
        varied = covariance.diagonal()[-labels:][chosen] > _CONSTANT
        read = _ridge(covariance, (RIDGES[0],) * labels)[:, chosen][:, varied]
        label = label[:, varied]
        write = label @ torch.linalg.pinv(read.T @ label, hermitian=True) if varied.any() else label
        return Eraser(mean[:-labels] if self.shift is None else mean[:-labels] + self.shift, read, write)

    def _moments(self, folds: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of features and labels over some folds."""
        chosen = list(folds)
        count = self.count[chosen].sum()
        mean = self.sums[chosen].sum(0) / count
        return mean, self.products[chosen].sum(0) / count - torch.outer(mean, mean)


def labels_of(grid: Grid) -> Tensor:
    """Return the coordinates of each patch, (H * W, 2) in an image, from -1 to 1; 0 on an axis of one patch."""
    sides = torch.tensor(grid.shape, dtype=torch.float64)
    places = Grid(*grid.shape).coordinates().double()
    return (2 * places - (sides - 1)) / (sides - 1).clamp_min(1)


def _ridge(covariance: Tensor, ridges: Sequence[float]) -> Tensor:
    """Return the weights (D, labels) of the regression of the last variables, with one penalty for each."""
    labels = len(ridges)
    features, label = covariance[:-labels, :-labels], covariance[:-labels, -labels:]
    scale = features.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 1e-9 * scale.max(), scale, torch.inf)  # a constant feature is not used
    correlation, moments = features / scale[:, None] / scale, label / scale[:, None]
    weights = torch.empty_like(label)
    for ridge in set(ridges):
        chosen = [index for index, penalty in enumerate(ridges) if penalty == ridge]
        factor = torch.linalg.cholesky(correlation + ridge * torch.eye(len(scale), dtype=torch.float64))
        weights[:, chosen] = torch.cholesky_solve(moments[:, chosen], factor) / scale[:, None]
    return weights


#: Penalties of the ridge regression that are tried, as shares of the mean square of the features.
_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
#: Number of folds: each part of the images is predicted from the others.
_FOLDS = 5


@torch.no_grad()
def pooled_features(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the input of the classifier for each image, (n, D) in float64, and the labels, (n,).

    A model without timm's `forward_features` and `forward_head` gives its output; tokens are averaged.

    Args:
        model: in evaluation mode.
        batches: images (B, C, height, width) and labels (B,).
    """
    host: Any = model
    headed = hasattr(model, "forward_features") and hasattr(model, "forward_head")
    features, labels = [], []
    for images, classes in batches:
        out = host.forward_head(host.forward_features(images), pre_logits=True) if headed else host(images)
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor) or out.ndim not in (2, 3):
            raise ValueError(f"`model` must return a vector or tokens for each image, got {type(out).__name__}.")
        features.append((out if out.ndim == 2 else out.mean(1)).double().cpu())
        labels.append(classes)
    return torch.cat(features), torch.cat(labels)


@checked
def probe_classes(features: Tensor, labels: Tensor, probe: Literal["knn", "ridge"] = "knn") -> Tensor:
    """Return whether the class of each image is predicted from the features of the others, (n,).

    knn: most of the 5 nearest other images, weighted by the cosine (`neighbors_right`). ridge: a linear map, fitted by
    ridge regression of one-hot labels on four fifths of the images; its penalty is chosen there by the leave-one-out
    error. Features are standardized by the images that are fitted.

    Args:
        features: (n, D).
        labels: (n,), from 0.
        probe: knn or ridge.

    Raises:
        ValueError: for fewer than ten images, one class, or features that are not finite or all alike.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1] or len(labels) < 2 * _FOLDS:
        raise ValueError(
            f"`features` must be (n, D) with n labels and at least {2 * _FOLDS} images, got {tuple(features.shape)} "
            f"and {tuple(labels.shape)}."
        )
    if int(labels.min()) < 0 or len(labels.unique()) < 2:
        raise ValueError(f"`labels` must be of two classes or more, from 0, got {len(labels.unique())}.")
    features = features.double()
    if not features.isfinite().all() or not float(features.std(0).max()):
        raise ValueError(
            f"`features` must be finite and must differ between images, got values from {float(features.min()):.3g} to "
            f"{float(features.max()):.3g}."
        )
    if probe == "knn":
        return neighbors_right(features, features, labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    right = torch.zeros(len(labels), dtype=torch.bool)
    targets = F.one_hot(labels.long()).double()
    for fold in range(_FOLDS):
        inside = torch.zeros(len(labels), dtype=torch.bool)
        inside[order[fold::_FOLDS]] = True
        right[inside] = _fit_ridge(features[~inside], targets[~inside], features[inside]).argmax(1) == labels[inside]
    return right


def _fit_ridge(features: Tensor, targets: Tensor, queries: Tensor) -> Tensor:
    """Return the predictions (m, classes) for queries (m, D) of the map with the lowest leave-one-out error."""
    mean, scale = features.mean(0), features.std(0).clamp(min=1e-12)
    x, center = (features - mean) / scale, targets.mean(0)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    projected, best, weights = left.T @ (targets - center), float("inf"), None
    for penalty in _PENALTIES:
        shrunk = values.square() / (values.square() + penalty * len(x))
        rest = targets - center - left @ (shrunk[:, None] * projected)
        error = float((rest / (1 - (left.square() @ shrunk))[:, None].clamp(min=1e-9)).square().mean())
        if error < best:
            best, weights = error, right.T @ ((shrunk / values.clamp(min=1e-12))[:, None] * projected)
    assert weights is not None
    return (queries - mean) / scale @ weights + center
