"""Base class of mixing encodings, which make the token-mixing weights of a gating unit from the grid."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from graticule.checks import checked
from graticule.displacement import Displacements
from graticule.grid import Grid
from graticule.resampling import Resampler
from graticule.token_mlp import TokenMlp


class MixingEncoding(nn.Module, ABC):
    """Makes the weights (groups, N, N) with which a gating unit mixes the N patches of a grid or window.

    Row i contains the weights of all tokens j for token i. Groups are groups of channels: one if all channels are mixed
    by the same weights (a dense matrix, LRPE, GQPE). It depends on parameters and grid only, so it is computed once per
    forward pass and can be folded.
    """

    @checked
    def __init__(self, grid: Grid, groups: int) -> None:
        super().__init__()
        if groups < 1:
            raise ValueError(f"`groups` must be at least 1, got {groups}.")
        if grid.prefix:
            raise ValueError(f"`grid` must have no prefix tokens where tokens are mixed, got {grid.prefix}.")
        self.grid = grid
        self.groups = groups

    @abstractmethod
    def forward(self, grid: Grid) -> Tensor | TokenMlp:
        """Return the weights for `grid`, a grid or window, (groups, N, N), or an MLP over its patches."""

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the encoding; here no parameter depends on it."""
        self.grid = grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` of a checkpoint fit the parameter `name`; a value that cannot be is returned unchanged.

        `shape` is the (H, W) of the grid or window that the value is for, if the checkpoint records it.
        """
        return value

    def published_names(self) -> dict[str, str]:
        """Map names in timm's blocks to names of parameters here; '' is the bias of `MixingPosition`."""
        return {"mlp_channels.gate.proj.bias": ""}

    def displacements(self, grid: Grid) -> Displacements | None:
        """Return the table of displacements of the weights for `grid`; None if there is none."""
        return None

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, groups={self.groups}"


def resize_rows(rows: Tensor, old: Grid, new: Grid, resampler: Resampler) -> Tensor:
    """Resample maps of patches, (T, N) -> (T, N')."""
    return resampler(rows.unflatten(1, old.shape), new.shape).flatten(1)
