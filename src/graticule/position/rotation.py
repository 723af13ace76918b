"""Rotations of queries and keys by their position, for the field `LayerPosition.rotary`."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor
from torch.nn import functional as F

from graticule.system.symbolic import without_autocast


class Rotation(Protocol):
    """Transforms queries and keys by their positions; a `NamedTuple` of tensors, so that it can be folded."""

    @property
    def channels(self) -> int | None:
        """Number of channels per head that it returns; None if it is unchanged."""

    def __call__(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Transform queries and keys, (B, h, N, d) each, in their own dtype."""

    def take(self, tokens: Index) -> Rotation:
        """Return the rotation of the tokens of these indices, (n,) or (B, n), or of a slice of them."""


#: Indices of tokens, (n,) or (B, n), or a slice of them with a start and a stop.
Index = Tensor | slice


def select(table: Tensor, index: Index, axis: int, heads: bool = False) -> Tensor:
    """Return the entries of a table at an index (n,) along `axis`; at (B, n), with a first axis for the samples.

    With `heads`, the second axis is then for heads, also if the table has none. Entries of a slice are a view.
    """
    if isinstance(index, slice):
        return table.narrow(axis, index.start, index.stop - index.start)
    picked: Tensor = table.index_select(axis, index.flatten().to(table.device))
    if index.ndim == 1:
        return picked
    picked = picked.unflatten(axis, index.shape).movedim(axis - 1, 0)
    return picked[:, None] if heads and table.ndim == -axis else picked


class PairRotation(NamedTuple):
    """Rotates pairs of channels of each token by its angles.

    table: (N, 2d) or (h, N, 2d): the sine of the angle that each of the d channels is rotated by, then the cosine.
    half: whether channel i forms a pair with i + d / 2 instead of its neighbor.
    parts: numbers of channels of each part, if with `half` the pairs are those within a part.
    """

    table: Tensor
    half: bool = False
    parts: tuple[int, ...] = ()

    @property
    def channels(self) -> int | None:
        return None

    def __call__(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, (B, h, N, d) each; computed in the wider dtype of tokens and table."""
        return self._rotated(queries), self._rotated(keys)

    def _rotated(self, x: Tensor) -> Tensor:
        rotated: Tensor
        if len(self.parts) > 1:
            halves = (part.chunk(2, -1) for part in x.split(self.parts, -1))
            turned = torch.cat([channels for first, second in halves for channels in (-second, first)], -1)
            sines, cosines = self.table.chunk(2, -1)
            rotated = x * cosines + turned * sines
        else:
            rotated = apply_rot_embed_cat(x, self.table, half=self.half)
        return rotated.type_as(x)

    def take(self, tokens: Index) -> PairRotation:
        return self._replace(table=select(self.table, tokens, -2, heads=True))


class BlockRotation(NamedTuple):
    """Rotates blocks of channels by an orthogonal matrix each.

    matrices: (h, N, d / b, b, b), where b is the number of channels of a block.
    """

    matrices: Tensor

    @property
    def channels(self) -> int | None:
        return None

    def __call__(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply each block of queries and keys, (B, h, N, d) each, by its matrix."""
        return self._rotated(queries), self._rotated(keys)

    def _rotated(self, x: Tensor) -> Tensor:
        # autocast would round the matrices
        with without_autocast(x):
            blocks = x.unflatten(-1, self.matrices.shape[-3:-1])[..., None]  # (B, h, N, d / b, b, 1)
            rotated: Tensor = self.matrices @ blocks.to(self.matrices.dtype)
            return rotated.squeeze(-1).flatten(-2).type_as(x)

    def take(self, tokens: Index) -> BlockRotation:
        return self._replace(matrices=select(self.matrices, tokens, -4))


class PolarRotation(NamedTuple):
    r"""Makes softplus of each channel a magnitude, whose angle depends on the position only.

    The channels double: :math:`\mu \cos \theta` of all, then :math:`\mu \sin \theta`.

    queries: (N, 2d): sines, then cosines, of the angles of the queries' channels.
    keys: (h, N, 2d): the same for the keys.
    """

    queries: Tensor
    keys: Tensor

    @property
    def channels(self) -> int | None:
        """2d."""
        return self.queries.shape[-1]

    def __call__(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (B, h, N, d) each, as (B, h, N, 2d)."""
        return _polar(queries, self.queries), _polar(keys, self.keys)

    def take(self, tokens: Index) -> PolarRotation:
        return PolarRotation(select(self.queries, tokens, -2, heads=True), select(self.keys, tokens, -2))


def _polar(x: Tensor, table: Tensor) -> Tensor:
    sines, cosines = table.chunk(2, -1)
    magnitudes = F.softplus(x.to(table.dtype))
    return torch.cat([magnitudes * cosines, magnitudes * sines], -1).type_as(x)


class PatchRotation(NamedTuple):
    """Rotates all tokens but the first `prefix`.

    rotation: the rotation of the other tokens.
    prefix: number of tokens that are not rotated.
    """

    rotation: Rotation
    prefix: int

    @property
    def channels(self) -> int | None:
        """None: the number is unchanged."""
        return None

    def __call__(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, (B, h, N, d) each."""
        if self.rotation.channels is not None:
            raise ValueError(
                "`rotary` must keep the number of channels if some tokens have no position, got one that doubles it."
            )
        rotated = self.rotation(queries[..., self.prefix :, :], keys[..., self.prefix :, :])
        both = zip((queries, keys), rotated, strict=True)
        first, second = (torch.cat([x[..., : self.prefix, :], y], -2) for x, y in both)
        return first, second

    def take(self, tokens: Index) -> PatchRotation:
        """Return the rotation of the tokens with these indices, (n,) or (B, n); the prefix must come first."""
        if isinstance(tokens, slice):
            patches = slice(*(max(end - self.prefix, 0) for end in (tokens.start, tokens.stop)))
            return PatchRotation(self.rotation.take(patches), max(self.prefix - tokens.start, 0))
        return PatchRotation(self.rotation.take(tokens[..., self.prefix :] - self.prefix), self.prefix)


def saves_inputs(rotation: Rotation) -> bool:
    """Return whether autograd needs queries and keys before the rotation: for learned angles, and for PoPE."""
    if isinstance(rotation, PatchRotation):
        return saves_inputs(rotation.rotation)
    parts: Any = rotation
    return isinstance(rotation, PolarRotation) or any(isinstance(x, Tensor) and x.requires_grad for x in parts)
