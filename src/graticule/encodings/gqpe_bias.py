"""PosMLP's Gaussian around a learned displacement, as a bias on attention logits."""

from __future__ import annotations

from torch import Tensor

from graticule.encodings.forms.bias import PatchBias
from graticule.encodings.gqpe import Form, QuadraticMixing, Start
from graticule.position.grid import Grid
from graticule.position.position import register_encoding


@register_encoding("gqpe_bias")
class GqpeBias(PatchBias):
    r"""Adds a quadratic form of the displacement, six numbers per head, to the attention logits.

    .. math:: b_{h, i, j} = -\tfrac12 (\delta_{ij} - \Delta_h)^T M_h (\delta_{ij} - \Delta_h) + const_h, \quad
              \delta_{ij} = p_j - p_i

    With zero queries the attention weights of a head are those of GQPE. Forms and initial values are those of
    `QuadraticMixing`; the constant, which the softmax cancels, makes the bias of a patch to itself 0. Prefix
    tokens get no bias. Nothing depends on the size of the grid.

    Reference: PosMLP (Wang et al., 2022), Eq. 5, whose authors say that it also suits attention; in attention,
    Cordonnier et al. (2020).

    Args:
        grid: the grid or window that the initial widths of 'spread' are for.
        num_heads: h.
        form: parametrization of M.
        shift: whether Delta is learned; it is frozen at 0 if not.
        start: initial values, 'released' or 'spread'.
    """

    crops = True

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        form: Form = "gamma_gamma_t",
        shift: bool = True,
        start: Start = "spread",
    ) -> None:
        super().__init__()
        self.grid = grid
        self.num_heads = num_heads
        self.gaussian = QuadraticMixing(Grid(*grid.shape), num_heads, form, shift, start)

    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid`, (num_heads, H * W, H * W)."""
        logits = self.gaussian.logits(grid).flatten(1).to(self.gaussian.center.dtype)
        return grid.of_lags(logits).mT.contiguous()  # of key minus query

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the encoding; no parameter depends on it."""
        self.grid = grid
        self.gaussian.set_grid(Grid(*grid.shape))

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, num_heads={self.num_heads}"
