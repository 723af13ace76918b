"""Probes of classes: how well labels can be read from frozen features, one vector per image."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.analysis.effect import neighbors_right
from graticule.registry.checks import checked

#: Penalties of the ridge regression that are tried, as shares of the mean square of the features.
_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
#: Parts of the images, each of which is predicted from the others.
_FOLDS = 5


@torch.no_grad()
def pooled_features(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the input of the classifier for each image, (n, D) in float64, and the labels, (n,).

    A model without timm's `forward_features` and `forward_head` gives its output; tokens are averaged.

    Args:
        model: in evaluation mode.
        batches: images (B, C, height, width) and labels (B,).
    """
    found, labels = [], []
    for images, given in batches:
        held: Any = model
        if hasattr(model, "forward_features") and hasattr(model, "forward_head"):
            out = held.forward_head(held.forward_features(images), pre_logits=True)
        else:
            out = held(images)
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor) or out.ndim not in (2, 3):
            raise ValueError(f"`model` must return a vector or tokens for each image, got {type(out).__name__}.")
        found.append((out if out.ndim == 2 else out.mean(1)).double().cpu())
        labels.append(given)
    return torch.cat(found), torch.cat(labels)


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
        held = torch.zeros(len(labels), dtype=torch.bool)
        held[order[fold::_FOLDS]] = True
        right[held] = _ridge(features[~held], targets[~held], features[held]).argmax(1) == labels[held]
    return right


def _ridge(features: Tensor, targets: Tensor, queries: Tensor) -> Tensor:
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
    predictions: Tensor = (queries - mean) / scale @ weights + center
    return predictions
