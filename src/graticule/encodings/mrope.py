"""The rotary encoding of multimodal models: time, row and column share the channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from graticule.encodings.forms.coordinates import Coordinates, Noise
from graticule.encodings.forms.rotary import FixedRotary, check_head_dim, geometric
from graticule.encodings.forms.scaling import Scaling
from graticule.position.grid import Grid
from graticule.position.places import Points
from graticule.position.position import register_encoding
from graticule.registry.checks import check
from graticule.registry.fields import Bounded, Positive


@register_encoding("mrope")
class Mrope(FixedRotary):
    r"""Assigns each frequency of a 1-D rotary encoding to time, row or column; an image has one time, 0.

    .. math:: \theta_{p, k} = p_{a(k)}\, T^{-2k / d}, \quad p = (t, y, x), \quad k < d / 2

    Interleaved, the axes a alternate, t, h, w, t, ...; a row has its frequencies below 3 `sections[1]`, a
    column those below 3 `sections[2]`, and all others belong to time. Chunked, the first `sections[0]` frequencies
    belong to time, the next ones to the row, then to the column. Pairs are (i, i + d / 2). In a text
    the three coordinates of a token are its index; `get_rope_index` gives the coordinates of texts, images and videos
    in a row. Prefix tokens are not rotated.

    Reference: Qwen2-VL (Wang et al., 2024), section 2.1, chunked; Qwen3-VL (Bai et al., 2025), interleaved.

    Args:
        head_dim: d, a multiple of 2, at least 6.
        sections: number of frequencies of (time, row, column); by default all that interleaving assigns to each.
        arrangement: order of the axes, 'interleaved' or 'chunked'.
        base: T.
        coordinates: the coordinates of patches.
        noise: noise of the coordinates in training.
        scaling: scaling of the frequencies at other grids.
    """

    series = "shared"

    def __init__(
        self,
        grid: Grid,
        head_dim: Bounded,
        sections: tuple[int, int, int] | None = None,
        arrangement: Literal["interleaved", "chunked"] = "interleaved",
        base: Positive = 10_000.0,
        coordinates: Coordinates = Coordinates(),  # noqa: B008
        noise: Noise = Noise(),  # noqa: B008
        scaling: Scaling = Scaling(),  # noqa: B008
    ) -> None:
        check_head_dim(head_dim, 2, "pairs of channels")
        if len(grid.shape) > 3:
            raise ValueError(f"`grid` must have time, rows and columns at most with mrope, got {len(grid.shape)} axes.")
        if head_dim < 6:
            raise ValueError(f"`head_dim` must be at least 6 with mrope (a pair for each axis), got {head_dim}.")
        if sections is not None and min(sections) < 0:
            raise ValueError(f"`sections` must not be negative, got {sections}.")
        if arrangement == "chunked" and (sections is None or sum(sections) != head_dim // 2):
            raise ValueError(
                f"`sections` must be three numbers of sum head_dim / 2 = {head_dim // 2} with arrangement 'chunked', "
                f"got {sections}."
            )
        self.head_dim, self.base = head_dim, base
        self.sections, self.arrangement = sections, arrangement
        super().__init__(grid, coordinates, noise, scaling, "half")

    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors (f^t, f^y, f^x), (d / 2, axes), float64; without time its vectors are zero."""
        count = self.head_dim // 2
        index = torch.arange(count, device=device)
        _, rows, columns = self.sections or (count, count, count)
        if self.arrangement == "interleaved":
            row, column = (index % 3 == 1) & (index < 3 * rows), (index % 3 == 2) & (index < 3 * columns)
        else:
            row, column = (count - rows - columns <= index) & (index < count - columns), index >= count - columns
        owned = torch.stack([~(row | column), row, column], -1)[:, 3 - len(self.grid.shape) :]
        owned = owned if self.grid.ndim > 1 else torch.ones_like(owned)
        return owned * geometric(self.base, count, device)[:, None]


def get_rope_index(parts: Sequence[Grid], overlap: bool = False) -> Points:
    """Return the coordinates (time, row, column) of the tokens of texts, images and videos in a row, for `mrope`.

    A text token has its index as all three coordinates. Each part begins after the largest coordinate before it. The
    distance between frames is the video's `spacing`, rounded down: tokens per second times seconds per frame in
    Qwen2.5-VL. In Qwen3-VL each frame is an image, after a text with its time. Reference: Qwen2-VL (Wang et al., 2024),
    section 2.1.

    Args:
        parts: the tokens of each, after merging: `Grid(n)` of a text, `Grid(H, W)`, `Grid(T, H, W)` of a video.
        overlap: whether the part after a video begins after its rows and columns, although its time may be longer, as
            transformers 5 has it, against the released code.

    Example:
        >>> get_rope_index([Grid(2), Grid(1, 2), Grid(1)]).places.tolist()
        [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [4, 4, 4]]
    """
    grids = isinstance(parts, Sequence) and all(isinstance(part, Grid) for part in parts)
    check("overlap", overlap, bool)
    if not grids or not parts or any(part.ndim > 3 or part.prefix or part.crop for part in parts):
        raise ValueError(f"`parts` must be grids of one to three axes, without prefix tokens and crops, got {parts}.")
    start, places = 0, []
    for part in parts:
        index = part.coordinates().double().floor().long()
        index = index.expand(-1, 3) if part.ndim == 1 else F.pad(index, (3 - part.ndim, 0))
        places.append(index + start)
        lengths = [int((side - 1) * step) + 1 for side, step in zip(part.shape, part.spacing or [1] * 3, strict=False)]
        start += max(lengths[1:] if overlap and part.ndim == 3 else lengths)
    return Points(torch.cat(places))
