"""gMLP's dense matrix: one learned number per pair of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graticule.encodings.forms.mixing import MixingEncoding, TokenMixing
from graticule.encodings.gqpe import QuadraticMixing
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.position.resampling import BICUBIC, Resampler, build_resampler, resize_rows
from graticule.registry.fields import NotNegative, SmallCount


class DenseMixing(MixingEncoding):
    r"""Learns one number per pair of tokens, independent of displacements: gMLP's token layer.

    .. math:: W_{ij} \quad or \quad W_{g, ij}

    There is one matrix for all channels, or one per group with `groups`. It starts near zero (std 1e-6), so that with a
    bias of 1 the unit starts as the identity. In PosMLP's released code it is initialized as other linear layers are
    (std 0.02, with a bias of 0). At another grid the matrix is resampled by `resampler`, over the keys and then over
    the queries, and scaled by N / N', so that a row keeps its sum.

    Reference: Pay Attention to MLPs (gMLP, Liu et al., 2021), section 2.1.

    Args:
        std: standard deviation of the initial values.
        resampler: resampler of the matrices for another grid.
        groups: number of groups, each with a matrix; None for one matrix without an axis of groups.
        gaussian: whether the Gaussians that `gqpe` and `ggqpe` start with are added to the initial values, which is
            ours: the unit then starts as theirs, and differs from it in what is learned alone.
    """

    resampled = True

    def __init__(
        self,
        grid: Grid,
        std: NotNegative = 1e-6,
        resampler: str = "bicubic",
        groups: SmallCount | None = None,
        gaussian: bool = False,
    ) -> None:
        super().__init__(grid, 1 if groups is None else groups)
        self.std = std
        self.gaussian = gaussian
        self.resampler = build_resampler(resampler)
        several = () if groups is None else (groups,)
        self.weight = nn.Parameter(torch.empty(*several, grid.patches, grid.patches))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.gaussian:
            self.weight.add_(QuadraticMixing(self.grid, self.groups)(self.grid).view_as(self.weight))

    def forward(self, grid: Grid) -> Tensor:
        """Return the matrices for `grid`, (groups, N, N)."""
        weight = self.at_grid("weight", grid)
        return weight if weight.ndim == 3 else weight[None]

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid of matrices, (N', N') or (groups, N', N')."""
        count = value.shape[-1] if value.ndim else 0
        fits = value.shape == (*self.weight.shape[:-2], count, count)
        return self.grid.infer_grid(count, shape) if fits else None

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        return resize_pairs(value, old, new, self.resampler)

    def published_names(self) -> dict[str, str]:
        """Return the names of the matrix and the bias in timm's gMLP."""
        return {"mlp_channels.gate.proj.weight": "weight", **super().published_names()}


def resize_pairs(matrix: Tensor, old: Grid, new: Grid, resampler: Resampler = BICUBIC) -> Tensor:
    """Resample matrices over pairs of patches, (..., N, N) -> (..., N', N'), scaled so that a row keeps its sum."""
    count = old.patches
    sides = old.shape, new.shape
    keys = resize_rows(matrix.reshape(-1, count), *sides, resampler).unflatten(0, (-1, count)).mT  # (groups, N', N)
    both = resize_rows(keys.flatten(0, 1), *sides, resampler).unflatten(0, (-1, new.patches)).mT
    return both.reshape(*matrix.shape[:-2], new.patches, new.patches) * (count / new.patches)


@register_encoding("sgu")
class Sgu(TokenMixing, DenseMixing):
    """Mixes tokens by one learned number per pair of tokens, a dense matrix."""

    @classmethod
    def default_bias(cls, options: Mapping[str, Any]) -> float:
        """Return 1: with weights near zero the unit starts as the identity, as in gMLP; 0 if it starts as GQPE's."""
        return float(not options.get("gaussian", False))


@register_encoding("gsgu")
class Gsgu(Sgu):
    """Mixes tokens by one learned number per pair of tokens and group of channels, dense matrices.

    It has the groups of `glrpe` and `ggqpe` and, like `sgu`, ignores displacements. So it separates the contributions
    of groups and of relative positions to the difference between those and `sgu`.
    """

    grouped = True
