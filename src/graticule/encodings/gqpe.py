"""GQPE: a Gaussian around a learned displacement, which mixes tokens, or as a bias on attention logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import PatchBias
from graticule.encodings.forms.coordinates import spread_directions
from graticule.encodings.forms.mixing import MixingEncoding, TokenMixing
from graticule.position.displacement import Displacements
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.registry.fields import SmallCount

#: The ways to parametrize the quadratic form (PosMLP, Table 6); `_released` is the authors' code if it differs from the
#: paper.
Form = Literal["alpha", "alpha_released", "gamma", "gamma_released", "gamma_gamma_t"]
#: Initial values of a quadratic encoding.
Start = Literal["released", "spread"]

#: Standard deviation of the noise that the authors' code adds to the initial zero and identity.
_NOISE = 0.01


class QuadraticMixing(MixingEncoding):
    r"""GQPE and, with several groups, GGQPE: a Gaussian around a learned displacement, six numbers per group.

    .. math:: W_{g, ij} = softmax_j\left(\delta_{ij}^T M_g \Delta_g - \tfrac12 \delta_{ij}^T M_g \delta_{ij}\right),
              \quad \delta_{ij} = p_j - p_i = (\delta_x, \delta_y)

    x is the column and y the row; on more axes, or one, the last axis is the first here, too. For a symmetric M this is
    Eq. 5, :math:`-\tfrac12 (\delta - \Delta)^T M (\delta - \Delta)`, up to a constant that the softmax cancels. M is in
    the exponent, so it is the inverse of Eq. 5's covariance, which is how Table 6, Eq. 16 and the authors' code use it:
    small eigenvalues give wide Gaussians. The forms:

    - 'gamma_gamma_t' (default), M = Gamma Gamma^T: the same function in the paper and in the code. It is computed as
      :math:`z^T c - \tfrac12 |z|^2` with :math:`z = \Gamma^T \delta, c = \Gamma^T \Delta`, which no rounding makes
      indefinite.
    - 'gamma', M = Gamma, as Eq. 5 reads: only the symmetric part of Gamma matters, and the maximum of a row need not be
      at Delta. (Eq. 7-8 keep M_12 alone in the mixed term, a third function where Gamma is not symmetric.)
    - 'gamma_released', M = Gamma, as the authors' code reads: the linear term is M Delta, so the antisymmetric part
      of Gamma moves the center. This is the row of Table 6.
    - 'alpha', M = alpha I, as the paper and Cordonnier et al. (2020) read.
    - 'alpha_released', as the authors' code reads: :math:`\alpha^2 \Delta^T \delta - \tfrac12 |\delta|^2`. The width
      is one patch whatever alpha is. This is the row of Table 6.

    The code counts y upwards (its delta is (x_j - x_i, y_i - y_j)); loading its checkpoints changes the signs.

    Nothing depends on the size of the grid: at another grid the function is computed again. Logits are computed in
    float32 at least, also under autocast.

    Reference: PosMLP (Wang et al., 2022), Eq. 5-8, 12-13 and Table 6, and its released code.

    Args:
        grid: the grid or window that the initial widths of 'spread' are for.
        groups: number of groups s.
        form: parametrization of M.
        shift: whether Delta is learned; it is frozen at 0 if not.
        start: 'released', as in the authors' code: Delta from a normal of std 0.01, Gamma (or alpha) the
            identity and a normal of std 0.01, so all groups start as almost the same Gaussian with a width of one
            patch; or 'spread', which is ours: Delta on a circle of one patch, at the golden angle from group to group
            (at 0 for a single group), and M = I / sigma^2 with sigma in geometric steps from half a patch to a quarter
            of the shorter side (one patch for a single group).
    """

    def __init__(
        self,
        grid: Grid,
        groups: SmallCount = 1,
        form: Form = "gamma_gamma_t",
        shift: bool = True,
        start: Start = "released",
    ) -> None:
        super().__init__(grid, groups)
        self.form = form
        self.shift = shift
        self.start = start
        self.axes = len(grid.shape)
        self.center = nn.Parameter(torch.empty(groups, self.axes), requires_grad=shift)
        matrix = () if self._isotropic else (self.axes, self.axes)
        self.matrix = nn.Parameter(torch.empty(groups, *matrix))
        self.reset_parameters()

    @property
    def _isotropic(self) -> bool:
        return self.form in ("alpha", "alpha_released")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.start == "spread":
            center, diagonal = self._spread()
        else:
            center, diagonal = torch.randn(self.groups, self.axes) * _NOISE, torch.ones(self.groups)
        self.center.copy_(center * float(self.shift))
        self.matrix.copy_(diagonal if self._isotropic else torch.diag_embed(diagonal[:, None].expand(-1, self.axes)))
        if self.start == "released":
            self.matrix.add_(torch.randn_like(self.matrix), alpha=_NOISE)

    def _spread(self) -> tuple[Tensor, Tensor]:
        """Return centers (groups, 2) and the diagonals of the matrices (groups,) over directions and widths."""
        group = torch.arange(self.groups, dtype=torch.float64)
        angle = group * torch.pi * (3 - 5**0.5)  # the golden angle: no two directions are close
        circle = torch.stack([angle.cos(), angle.sin()], -1) if self.axes == 2 else spread_directions(group, self.axes)
        circle = circle * float(self.groups > 1)
        widest = max(min(self.grid.shape) / 4, 0.5)
        share = group / max(self.groups - 1, 1)
        sigma = 0.5 * (widest / 0.5) ** share if self.groups > 1 else torch.ones(1, dtype=torch.float64)
        if self.form == "alpha_released":  # its width is not learned
            return circle, torch.ones_like(sigma)
        return circle, 1 / sigma if self.form == "gamma_gamma_t" else sigma**-2

    def quadratic(self) -> Tensor:
        """Return M of every group, (groups, axes, axes), over (x, y), in float32 at least."""
        matrix = self.matrix.to(torch.promote_types(self.matrix.dtype, torch.float32))
        if self._isotropic:
            scale = torch.ones_like(matrix) if self.form == "alpha_released" else matrix
            return torch.diag_embed(scale[:, None].expand(-1, self.axes))
        return matrix if self.form != "gamma_gamma_t" else (matrix[:, :, None] * matrix[:, None]).sum(-1)

    def logits(self, grid: Grid) -> Tensor:
        """Return the logit of every displacement on `grid`, (groups, 2H - 1, 2W - 1), in float32 at least."""
        wide = torch.promote_types(self.center.dtype, torch.float32)
        center, matrix = self.center.to(wide), self.matrix.to(wide)
        # elementwise products of coordinates, whose precision autocast and TF32 do not reduce
        offsets = grid.unique_offsets(center.device).to(wide)
        delta = offsets.flatten(0, -2).unbind(-1)[::-1]  # (x, y): (displacements,) each
        at = center[..., None].unbind(1)  # (groups, 1) each
        if self._isotropic:
            scale = matrix[:, None]
            width, pull = (1, scale * scale) if self.form == "alpha_released" else (scale, scale)
            logits = pull * _dot(at, delta) - width * _dot(delta, delta) / 2
        elif self.form == "gamma_gamma_t":
            columns = matrix[..., None].unbind(2)  # of Gamma: (groups, axes, 1) each
            logits = delta[0].new_zeros(())
            for along in (column.unbind(1) for column in columns):
                z = _dot(along, delta)
                logits = logits + z * (_dot(along, at) - z / 2)
        else:
            if self.form == "gamma":
                matrix = (matrix + matrix.mT) / 2
            rest = [place - offset / 2 for place, offset in zip(at, delta, strict=True)]
            rows = [row[..., None].unbind(1) for row in matrix.unbind(1)]
            logits = _dot(delta, [_dot(row, rest) for row in rows])
        return logits.unflatten(-1, offsets.shape[:-1])

    def forward(self, grid: Grid) -> Tensor:
        """Return the weights for `grid`, (groups, N, N); rows sum to 1."""
        return self.displacements(grid).matrix().to(self.center.dtype)

    def displacements(self, grid: Grid) -> Displacements:
        """Return the logits for `grid`, to which a softmax is applied."""
        return Displacements(self.logits(grid), softmax=True)


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    products = [a * b for a, b in zip(first, second, strict=True)]
    return sum(products[1:], products[0])


@register_encoding("gqpe")
class Gqpe(TokenMixing, QuadraticMixing):
    """Mixes tokens by a Gaussian around one learned displacement."""

    softmax = True

    @classmethod
    def default_bias(cls, options: Mapping[str, Any]) -> float:
        """Return 1 if groups start spread over directions and widths, 0 if they start as in PosMLP's code."""
        return float(options.get("start") == "spread")


@register_encoding("ggqpe")
class Ggqpe(Gqpe):
    """Mixes tokens by a Gaussian around one learned displacement per group of channels."""

    grouped = True


@register_encoding("gqpe_bias")
class GqpeBias(PatchBias):
    r"""Adds a quadratic form of the displacement, six numbers per head, to the attention logits.

    .. math:: b_{h, i, j} = -\tfrac12 (\delta_{ij} - \Delta_h)^T M_h (\delta_{ij} - \Delta_h) + const_h, \quad
              \delta_{ij} = p_j - p_i

    With zero queries the attention weights of a head equal GQPE's. Forms and initial values are as in
    `QuadraticMixing`; the constant, which the softmax cancels, makes the bias of a patch to itself 0. Prefix
    tokens get no bias. Nothing depends on the size of the grid.

    Reference: PosMLP (Wang et al., 2022), Eq. 5, whose authors say that it also suits attention; in attention,
    Cordonnier et al. (2020).

    Args:
        grid: the grid or window that the initial widths of 'spread' are for.
        form: parametrization of M.
        shift: whether Delta is learned; it is frozen at 0 if not.
        start: initial values, 'released' or 'spread'.
    """

    crops = True

    def __init__(
        self,
        grid: Grid,
        num_heads: SmallCount,
        form: Form = "gamma_gamma_t",
        shift: bool = True,
        start: Start = "spread",
    ) -> None:
        super().__init__(grid, num_heads)
        self.gaussian = QuadraticMixing(Grid(*grid.shape), num_heads, form, shift, start)

    def patch_bias(self, grid: Grid) -> Tensor:
        logits = self.gaussian.logits(grid).flatten(1).to(self.gaussian.center.dtype)
        return grid.expand_offsets(logits).mT.contiguous()  # of key minus query
