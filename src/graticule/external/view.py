"""Interface of the analyses to a model: tokens and grid after each layer, and views of it with another position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graticule.external.attention_map import AttentionMap
from graticule.external.images import Size, by_image, call, evaluating
from graticule.position.grid import Grid
from graticule.position.places import by, ravel

#: From the index of a layer, its tokens (B, N, D) and their grid, to the tokens that replace them.
Edit = Callable[[int, Tensor, Grid], Tensor]


class Unavailable(ValueError):
    """An analysis is not possible, as the model lacks a part or its structure is not known; the message says why."""


@dataclass(frozen=True)
class Pass:
    """Result of a forward pass: tokens (B, N, D) and grid after each layer, and logits (B, classes) if any."""

    layers: list[tuple[Tensor, Grid]]
    logits: Tensor | None


class ModelView(ABC):
    """A model of images, observed in evaluation mode. The model is not changed.

    model: the model.
    img_size: (height, width) in pixels of the images that its position is made for.
    debiased: the `Debiased` model around it, which removes position from its features; None without one.
    """

    model: nn.Module
    img_size: Size
    debiased: Any = None

    @abstractmethod
    def run(self, images: Tensor, edit: Edit | None = None) -> Pass:
        """Compute all layers on images (B, C, height, width); `edit` may replace the tokens after each layer."""

    @abstractmethod
    def patch_embeddings(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Return the embedded patches before any position information, (B, H * W, D), and their grid."""

    @abstractmethod
    def grids(self, img_size: Size) -> list[Grid]:
        """Return the grid after each layer, for images of `img_size`, or raise `ValueError`."""

    @abstractmethod
    def resized_to(self, img_size: Size) -> ModelView:
        """Return a view that takes images of another size, or raise `ValueError`."""

    # The views and the attention below raise `Unavailable` where a model has none

    @abstractmethod
    def without_position(self) -> ModelView:
        """Return a view of the model without any position information."""

    @abstractmethod
    def shuffled(self, seed: int = 0) -> ModelView:
        """Return a view of the model in which each patch has the position of another one, the same in all layers."""

    @abstractmethod
    def with_position_of(self, other: Any) -> ModelView:
        """Return a view in which each patch has the position of the nearest patch in a view at another size."""

    @abstractmethod
    def attention(self, images: Tensor, layers: Sequence[int] | None = None) -> list[AttentionMap]:
        """Compute the attention weights of chosen layers, all by default."""

    def features(self, images: Tensor, layers: Sequence[tuple[Tensor, Grid]]) -> Tensor:
        """Return the patches of the model's features, which it pools or returns, (B, H * W, D).

        Args:
            images: (B, C, height, width).
            layers: the tokens and grids that `run` returned for them.

        Raises:
            Unavailable: if the model does not return them.
        """
        with evaluating(self.model):
            return self.patches_of(unpooled(self.model, images), layers[-1][1])

    def patches_of(self, features: Tensor, grid: Grid) -> Tensor:
        """Return the patches of the features, without what `debiased` removes."""
        patches = split_features(features, grid)[1]
        return patches if self.debiased is None else self.debiased.remove("features", patches, Grid(*grid.shape))

    @property
    @abstractmethod
    def position_parameters(self) -> dict[str, int]:
        """Map each part of the position information to the number of its parameters."""

    def variants(self) -> dict[str, Callable[[Tensor], object]]:
        """Return forward passes to be timed: 'computed' (the unchanged model), 'without', and 'folded' if possible."""
        raise Unavailable(f"{type(self.model).__name__} of another library cannot be run without its position")

    @property
    def depth(self) -> int:
        return len(self.grids(self.img_size))

    @property
    def coarsest_patch(self) -> Size:
        """(height, width) in pixels of a patch of the last layer."""
        last = self.grids(self.img_size)[-1]
        return tuple(side // count for side, count in zip(self.img_size, last.shape, strict=True))


def unpooled(model: nn.Module, images: Tensor) -> Tensor:
    """Return the features of a model before it pools them, as tokens (B, N, D) or as a map with channels first or last.

    `forward_features` returns them, as in timm, or they are the `last_hidden_state` of a transformers model.

    Raises:
        Unavailable: if the model returns no such features.
    """
    forward = getattr(model, "forward_features", None)
    features = call(model, images) if forward is None else forward(images)
    batch = images.shape[0]  # `len` would be a constant in an exported program
    base = getattr(model, "base_model", None)
    if isinstance(features, Mapping) and "last_hidden_state" not in features and isinstance(base, nn.Module):
        features = call(base, images)  # without its head
    features = getattr(features, "last_hidden_state", features)
    if isinstance(features, Tensor):
        features = by_image(features, batch)
    if not isinstance(features, Tensor) or features.ndim not in (3, 4):
        raise Unavailable(f"{type(model).__name__} returns no features of patches")
    return features


def split_features(features: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Split features as `unpooled` returns them into prefix tokens (B, n, D) and patches (B, H * W, D).

    Raises:
        Unavailable: if they are not for `grid`.
    """
    if features.ndim == 4:
        if tuple(features.shape[1:3]) == grid.shape:
            return features[:, 0, :0], features.flatten(1, 2)
        if tuple(features.shape[2:]) == grid.shape:
            return features.new_empty(features.shape[0], 0, features.shape[1]), features.flatten(2).mT
    elif features.shape[1] >= grid.patches:
        prefix, patches = features.tensor_split([features.shape[1] - grid.patches], 1)
        return prefix, patches
    raise Unavailable(f"features {tuple(features.shape)} are not for {by(grid.shape)} patches")


def permutation(patches: int, seed: int) -> Tensor:
    """Return a random permutation of `patches` patches, (patches,), determined by `seed`."""
    return torch.randperm(patches, generator=torch.Generator().manual_seed(seed))


def nearest(grid: Grid, other: Grid) -> Tensor:
    """Return the index of the patch of `other` that has the center of each patch of `grid`, (H * W,).

    Both cover the same rectangle. On a smaller grid, several patches have the same one.
    """
    places = map(nearest_of_axis, grid.shape, other.shape)
    return ravel(torch.meshgrid(*places, indexing="ij"), other.shape).flatten()


def nearest_of_axis(count: int, other: int) -> Tensor:
    """Return the index of the one of `other` patches that has the center of each of `count` patches, (count,)."""
    return ((torch.arange(count) + 0.5) * other / count).long()


def chosen_layers(layers: Sequence[int] | None, depth: int) -> list[int]:
    """Return the chosen layers, all by default.

    Raises:
        ValueError: if there are no such layers.
    """
    chosen = list(range(depth)) if layers is None else list(layers)
    for layer in chosen:
        if not 0 <= layer < depth:
            raise ValueError(f"`layers` must be from 0 to {depth - 1}, got {layer}.")
    return chosen
