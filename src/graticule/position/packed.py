"""Several images in one row of tokens, each with the position of its own grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
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

    def __post_init__(self) -> None:
        if self.images < 1 or self.tokens < 1:
            raise ValueError(
                f"`images` and `tokens` of a segment must be at least 1, got {self.images} and {self.tokens}."
            )

    @property
    def length(self) -> int:
        """Number of tokens in the row."""
        return self.images * self.tokens


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The position of one layer for a row of images: linear layers see all tokens, attention one image.

    tokens: the fields that are added to the tokens of the row, (N, D); all others are None.
    segments: the images, in the order of the row.
    mask: of blocks of the row (`mask_of`), with which one kernel computes the attention of all images; None to compute
        it segment by segment.
    """

    tokens: LayerPosition
    segments: tuple[Segment, ...]
    mask: Any = None

    @classmethod
    def of(cls, segments: Sequence[Segment], mask: Any = None) -> PackedRow:
        """Join the positions of segments, which have the same fields.

        Raises:
            ValueError: if there are none, or a field needs the grid of an image, as a function of all its tokens.
        """
        if not segments:
            raise ValueError("`segments` must be at least one, got none.")
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
        return cls(LayerPosition(**added), tuple(segments), mask)

    def split(self, x: Tensor, axis: int) -> list[Tensor]:
        """Turn a row (1, ..., N, d), with N at `axis`, into the images of each segment, (images, ..., tokens, d)."""
        parts = x.split([segment.length for segment in self.segments], axis)
        return [
            part.unflatten(axis, (segment.images, segment.tokens)).movedim(axis - 1, 1).squeeze(0)
            for part, segment in zip(parts, self.segments, strict=True)
        ]

    def attend(
        self, parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor | None]], scale: float, kernel: Callable[..., Any]
    ) -> Tensor:
        """Mix the values of each image by one call of PyTorch's flex_attention, (1, h, N, d).

        Args:
            parts: queries, keys and values of each segment, (images, h, tokens, d), and its bias, (1 or images, h,
                tokens, tokens), or None.
            scale: of the products of queries and keys.
            kernel: `flex_attention`, or a compiled one.
        """
        q, k, v, biases = zip(*parts, strict=True)
        queries, keys, values = (self.join(each, -2) for each in (q, k, v))
        given = [bias for bias in biases if bias is not None]
        if not given:
            mixed: Tensor = kernel(queries, keys, values, block_mask=self.mask, scale=scale)
            return mixed
        table = torch.cat([bias.transpose(0, 1).flatten(1) for bias in given], 1)  # (h, all pairs)
        first, columns, rows = 0, [], []
        for segment, bias in zip(self.segments, given, strict=True):
            own = torch.arange(segment.images, device=table.device) % bias.shape[0]
            place = torch.arange(segment.tokens, device=table.device)
            columns.append(place.repeat(segment.images))
            rows.append((first + own[:, None] * len(place) ** 2 + place * len(place)).flatten())
            first += bias.shape[0] * len(place) ** 2
        image, column, row = _images(self.segments, table.device), torch.cat(columns), torch.cat(rows)

        def biased(score: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            pair = torch.where(image[query] == image[key], row[query] + column[key], 0)  # others are masked
            return score + table[head, pair]

        mixed = kernel(queries, keys, values, score_mod=biased, block_mask=self.mask, scale=scale)
        return mixed

    def join(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Turn the images of each segment, (images, ..., tokens, d), into a row (1, ..., N, d)."""
        rows = [part[None].movedim(1, axis - 1).flatten(axis - 1, axis) for part in parts]
        return torch.cat(rows, axis)


def mask_of(segments: Sequence[Segment], device: torch.device) -> Any:
    """Return flex_attention's mask of blocks, in which tokens of a row attend to those of their image."""
    from torch.nn.attention.flex_attention import create_block_mask  # takes a third of a second

    image = _images(segments, device)
    size = len(image)
    return create_block_mask(
        lambda _, __, query, key: image[query] == image[key], None, None, size, size, device=device
    )


def _images(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """Return the number of the image of each token of a row, (N,)."""
    ends = list(accumulate(segment.images for segment in segments))
    return torch.cat(
        [
            torch.arange(end - segment.images, end, device=device).repeat_interleave(segment.tokens)
            for segment, end in zip(segments, ends, strict=True)
        ]
    )
