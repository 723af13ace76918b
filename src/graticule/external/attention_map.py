"""Attention weights of one layer, and numbers that summarize them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graticule.position.grid import Grid
from graticule.system.files import write_arrays

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention weights of one layer, for every query and key.

    Args:
        layer: counted from 0 through all stages.
        weights: (B, heads, N, M), rows summing to 1. Where attention stays within windows, B counts windows.
        queries: grid of the N queries; with windows, the grid of a window.
        keys: grid of the M keys, which may be coarser.
        windows: (L, M), the tokens of each window of an image in the grid of the layer, -1 for padding; None if
            attention is over the whole grid.
    """

    layer: int
    weights: Array
    queries: Grid
    keys: Grid
    windows: NDArray[np.int64] | None = None

    @property
    def num_heads(self) -> int:
        return len(self.weights[0])

    def patches(self, head: int, image: int = 0) -> Array:
        """Return the weights between patches alone, (H * W, M'); rows sum to 1 minus the weights of prefix tokens."""
        return self.weights[image, head, self.queries.prefix :, self.keys.prefix :]

    def of_query(
        self, head: int, query: tuple[float, float], aspect: float, image: int = 0
    ) -> tuple[Array, tuple[int, int], tuple[int, ...]]:
        """Return the attention weights of one patch on the grid of the keys; NaN outside of its window.

        Args:
            head: counted from 0.
            query: its position in the image as shares of height and width, from 0 to 1.
            aspect: height of the image as a share of its width; the grid of layers with windows is inferred from it.
            image: counted from 0.

        Returns:
            The weights (H', W'), the query's (row, column), and the (H, W) of its grid.
        """
        shape = self.queries.shape
        if self.windows is not None:
            count = int(self.windows.max()) + 1
            rows = round(math.sqrt(count * aspect))
            shape = (rows, count // rows)
        row, column = (int(share * side) for share, side in zip(query, shape, strict=True))
        if self.windows is None:
            return self.patches(head, image)[row * shape[1] + column].reshape(self.keys.shape), (row, column), shape
        window, place = np.argwhere(self.windows == row * shape[1] + column)[0]
        tokens = self.windows[window]
        weights = self.patches(head, image * len(self.windows) + window)[place]
        values = np.full(shape[0] * shape[1], np.nan)
        values[tokens[tokens >= 0]] = weights[tokens >= 0]
        return values.reshape(shape), (row, column), shape

    def of_prefix(self, head: int, image: int = 0) -> Array:
        """Return the attention weights of the first prefix token, such as the class token, on the keys, (H', W').

        Raises:
            ValueError: if the layer has no prefix token.
        """
        if not self.queries.prefix:
            raise ValueError(f"`query` must be a patch in layer {self.layer}, which has no class token, got 'cls'.")
        return self.weights[image, head, 0, self.keys.prefix :].reshape(self.keys.shape)

    def distance(self, head: int, image: int = 0) -> float:
        """Return the mean distance that a query patch attends over, in patches of the queries' grid.

        Reference: An Image Is Worth 16x16 Words (Dosovitskiy et al., 2021), Figure 7, "attention distance".
        """
        weights = self.patches(head, image)
        return float((weights * self._distances()).sum() / weights.sum())

    def distances(self) -> Array:
        """Return `distance` of every image and head, (B, heads)."""
        weights = self.weights[..., self.queries.prefix :, self.keys.prefix :]
        far = np.einsum("bhnm,nm->bh", weights, self._distances())
        return far / weights.sum((-2, -1))

    def entropies(self) -> Array:
        r"""Return the mean entropy of the weights of a query patch, for every image and head, (B, heads), in nats.

        .. math:: -\sum_j a_{ij} \log a_{ij}

        It is 0 if a query attends to one key, and log M if it attends to all M keys alike.
        """
        weights = self.weights[..., self.queries.prefix :, :]
        logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
        return -(weights * logs).sum(-1).mean(-1)

    def prefix_shares(self) -> Array:
        """Return the share of a query patch's weights that is on prefix tokens, (B, heads)."""
        return self.weights[..., self.queries.prefix :, : self.keys.prefix].sum(-1).mean(-1)

    @property
    def uniform_distance(self) -> float:
        """`distance` of a head that attends to all patches alike."""
        return float(self._distances().mean())

    def _distances(self) -> Array:
        """Return the distance of every key from every query, (H * W, M'), in patches of the queries' grid."""
        scale = np.array(self.queries.shape) / np.array(self.keys.shape)
        here = self.queries.coordinates().double().numpy()
        there = (self.keys.coordinates().double().numpy() + 0.5) * scale - 0.5
        return np.linalg.norm(here[:, None] - there[None], axis=-1)


def save_attention(maps: Sequence[AttentionMap], path: str | Path) -> Path:
    """Write the weights of `maps` to `path` as .npz, one array per layer, named from `layer0`; returns the path."""
    return write_arrays(path, {f"layer{layer.layer}": layer.weights for layer in maps})
