"""Several images in one row of tokens, each with the position of its own grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graticule.position.layer import OF_PAIRS, LayerPosition

#: The fields of tokens, which are added to each token of the row.
OF_TOKENS = ("pre", "inner", "queries_keys")


@dataclass(frozen=True, eq=False)
class Segment:
    """Neighboring images of a row that have the same grid.

    images: their number.
    tokens: N, the tokens of each.
    position: of one layer, for their grid.
    """

    images: int
    tokens: int
    position: LayerPosition

    @property
    def length(self) -> int:
        """Number of tokens in the row."""
        return self.images * self.tokens


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The position of one layer for a row of images: linear layers see all tokens, attention one image.

    tokens: the fields that are added to the tokens of the row, (N, D); all others are None.
    segments: the images, in the order of the row.
    """

    tokens: LayerPosition
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> PackedRow:
        """Join the positions of segments, which have the same fields.

        Raises:
            ValueError: if a field needs the grid of an image, as a function of all its tokens.
        """
        first = segments[0].position
        given = [field for field, value in zip(first._fields, first, strict=True) if value is not None]
        for field in given:
            if field not in OF_TOKENS and field not in OF_PAIRS:
                raise ValueError(f"`{field}` must be None in a row of several images: it needs the grid of each.")
        added: dict[str, Any] = {
            field: torch.cat([getattr(one.position, field).repeat(one.images, 1) for one in segments])
            for field in given
            if field in OF_TOKENS
        }
        return cls(LayerPosition(**added), tuple(segments))

    def split(self, x: Tensor, axis: int) -> list[Tensor]:
        """Turn a row (1, ..., N, d), with N at `axis`, into the images of each segment, (images, ..., tokens, d)."""
        parts = x.split([segment.length for segment in self.segments], axis)
        return [
            part.unflatten(axis, (segment.images, segment.tokens)).movedim(axis - 1, 1).squeeze(0)
            for part, segment in zip(parts, self.segments, strict=True)
        ]

    def join(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Turn the images of each segment, (images, ..., tokens, d), into a row (1, ..., N, d)."""
        rows = [part[None].movedim(1, axis - 1).flatten(axis - 1, axis) for part in parts]
        return torch.cat(rows, axis)
