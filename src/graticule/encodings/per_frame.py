"""The position of an image in each frame of a film, and a learned table of time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graticule.encodings.build import build_position
from graticule.position.bias import LowRank
from graticule.position.grid import Crop, Grid
from graticule.position.joining import Joining
from graticule.position.layer import OF_PAIRS, LayerPosition
from graticule.position.position import Encoding, Position, Site, register_encoding
from graticule.position.tokens import Frames
from graticule.system.symbolic import as_tensor, holds


@register_encoding("per_frame")
class PerFrame(Encoding):
    r"""Gives each frame of a film the position of an image, and each frame a learned vector of its time.

    .. math:: p_{(t, y, x)} = p_{(y, x)}, \quad x_0 \to x_0 + \tau_t, \quad
              \text{logits of prefix keys} \to \text{logits} + \ln T

    Any encoding and joining of images can be `of` the frames. It needs no parameters but theirs and :math:`\tau`, (T,
    D), which starts at zero. In attention each patch stands T times in the sum of a softmax, but a prefix token stands
    once, so :math:`\ln T` is added to its logits; weights that mix tokens, and positional attention, are divided by T.
    So with :math:`\tau = 0` a film of one repeated image has exactly the features of the image, and
    `graticule.resize(model, (T, H, W))` makes a model of films of a trained model of images. More generally the first
    axis of a grid is the time: the frames of an image are its rows.

    Reference: the weights of images are inflated as in Quo Vadis, Action Recognition? (I3D, Carreira and Zisserman,
    2017); space and time apart as in Is Space-Time Attention All You Need? (TimeSformer, Bertasius et al., 2021).

    Args:
        of: the encoding of an image, as text, such as 'learnable + relative_bias'.
        joined: its joining, such as 'lape'.
        time: whether there is a vector for each frame; it is resampled for another number of frames.
    """

    layered = False
    crops = True

    @classmethod
    def position(
        cls,
        site: Site,
        joining: Joining,
        *,
        of: str = "learnable",
        joined: str = "default",
        time: bool = True,
        **options: Any,
    ) -> Position:
        """Build the position of an image, and the table of time."""
        if site.grid.ndim < 2:
            raise ValueError(f"`grid` must have 2 axes at least with per_frame, the first for time, got {site.grid}.")
        if (site.grid.windows or site.merged or not site.absolute) and not site.grid.kept:
            raise ValueError(
                "`encoding` must not be per_frame with windows, or where stages of a pyramid share tables, unless its "
                "stages keep the frames; give another encoding, or take a model without them."
            )
        sizes: dict[str, Any] = {"dim": site.dim, "depth": site.depth, "num_heads": site.num_heads}
        within = {"causal": site.causal, "absolute": site.absolute, "merged": site.merged}
        image = build_position(_frame(site.grid), encoding=of, joining=joined, **sizes, **within)
        return FilmPosition(image, site.grid, site.dim if time and site.absolute else None)


class FilmPosition(Position):
    """The position of an image in each frame of a film, and a table of time.

    Args:
        image: the position of an image.
        grid: of the film.
        dim: D of the table of time; None for no table.
    """

    exempt = (
        "one_frame, permutation: the first axis is that of time, also of an image",
        "crop: prefix tokens weigh as much as all frames",
    )

    def __init__(self, image: Position, grid: Grid, dim: int | None) -> None:
        super().__init__()
        self.image = image
        self.time: Position | None = None
        if dim is not None:
            self.time = build_position(Grid(grid.shape[0]), dim=dim, depth=1, num_heads=1)
            for table in self.time.parameters():
                nn.init.zeros_(table)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of each layer for `grid`."""
        return self.stage(grid, None)[0]

    def stage(self, grid: Grid, table: Tensor | None) -> tuple[list[LayerPosition], Tensor | None]:
        """Return the same for a stage of a pyramid, and the table for the next stage, the same in each frame."""
        if not isinstance(grid, Grid):
            raise ValueError("`grid` must be a Grid with per_frame, whose frames are images, got Points.")
        frame = _frame(grid)
        of_image, last = self.image.stage(frame, None if table is None else table[: frame.tokens])
        frames = Frames(grid.shape[0], frame.patches, grid.prefix)
        within = Frames(grid.within.shape[0], frame.within.patches, grid.prefix)
        given = [_in_frames(each, frames, within) for each in of_image]
        if self.time is not None:
            table = self.time(_time(grid))[0].pre.repeat_interleave(frame.patches, 0)
            given[0] = given[0].merge(LayerPosition(pre=grid.with_prefix_rows(table)))
        if grid.prefix and not holds(grid.shape[0] == 1):
            weight = LayerPosition(bias=self._prefix_weight(grid))
            given = [each.merge(weight) for each in given]
        return given, None if last is None else frames.rows(last)

    def _prefix_weight(self, grid: Grid) -> LowRank:
        """Return ln T for the keys of prefix tokens, 0 for the others, as a product of one channel."""
        held = (each for each in (*self.parameters(), *self.buffers()) if each.is_floating_point())
        like = next(held, None)
        like = torch.zeros(()) if like is None else like
        like = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))
        logarithm = as_tensor([grid.shape[0]], like.double()).log().to(like.dtype)
        keys = torch.cat([logarithm.expand(grid.prefix), like.expand(grid.patches)])[None, :, None]
        return LowRank(torch.ones_like(keys), keys)

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the image's position, and resample the table of time."""
        self.image.set_grid(_frame(grid))
        if self.time is not None:
            self.time.set_grid(_time(grid))


def _in_frames(position: LayerPosition, frames: Frames, within: Frames) -> LayerPosition:
    """Return the position of a film: the fields of tokens in all `frames`, those of pairs in those of a window."""
    if frames == within:
        return position.take(frames)
    tokens = position._replace(**dict.fromkeys(OF_PAIRS))
    pairs = LayerPosition(**{field: getattr(position, field) for field in OF_PAIRS})
    return tokens.take(frames).merge(pairs.take(within))


def _frame(grid: Grid) -> Grid:
    """Return the grid of a frame, with the prefix tokens."""
    crop = grid.crop and Crop(grid.crop.whole[1:], (*grid.crop.starts[1:], *grid.crop.sizes[1:]))
    windows, spacing = [window[1:] for window in grid.windows], grid.spacing and grid.spacing[1:]
    return Grid(*grid.shape[1:], prefix=grid.prefix, crop=crop, spacing=spacing, windows=windows)


def _time(grid: Grid) -> Grid:
    """Return the grid of the frames."""
    crop = grid.crop and Crop(grid.crop.whole[:1], (grid.crop.starts[0], grid.crop.sizes[0]))
    return Grid(grid.shape[0], crop=crop)
