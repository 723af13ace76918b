"""Mixing encodings: the token-mixing weights of a gating unit, made from where tokens are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.displacement import Displacements
from graticule.grid import Grid, resize_map

#: How the matrix of the quadratic form is made from what is learned (PosMLP, Table 6).
Form = Literal["alpha", "gamma", "gamma_gamma_t"]


class MixingEncoding(nn.Module, ABC):
    """Makes the weights (groups, N, N) by which a gating unit mixes the N patches of a grid or window.

    Row i says what token i takes of every token j. Groups are groups of channels. It depends on parameters and
    grid alone, so it is computed once a forward pass and can be folded.
    """

    def __init__(self, grid: Grid, groups: int) -> None:
        super().__init__()
        if groups < 1:
            raise ValueError(f"`groups` must be at least 1, got {groups}.")
        if grid.prefix:
            raise ValueError(f"`grid` must have no prefix tokens where tokens are mixed, got {grid.prefix}.")
        self.grid = grid
        self.groups = groups

    @abstractmethod
    def forward(self, grid: Grid) -> Tensor:
        """Return the weights for `grid`, a grid or window, (groups, N, N)."""

    @abstractmethod
    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for, for good."""

    def displacements(self, grid: Grid) -> Displacements | None:
        """Return the table of displacements that the weights for `grid` come from; None if there is none."""
        return None

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, groups={self.groups}"


class DenseMixing(MixingEncoding):
    r"""A free number for every pair of tokens: gMLP's token layer, which knows nothing of near and far.

    .. math:: W_{ij}

    It starts near zero (std 1e-6), so that with a bias of one the unit starts as the identity. At another grid
    the matrix is resampled bicubically, over the keys and then over the queries, and scaled by N / N', so that
    a row keeps its sum.

    Reference: Pay Attention to MLPs (gMLP, Liu et al., 2021), section 2.1.
    """

    resampled = True

    def __init__(self, grid: Grid, std: float = 1e-6) -> None:
        super().__init__(grid, 1)
        self.std = std
        self.weight = nn.Parameter(torch.empty(grid.patches, grid.patches))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrix anew."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, grid: Grid) -> Tensor:
        """Return the matrix for `grid`, (1, N, N)."""
        return (self.weight if grid == self.grid else resize_pairs(self.weight, self.grid, grid))[None]

    def set_grid(self, grid: Grid) -> None:
        """Resample the matrix for `grid`."""
        with torch.no_grad():
            weight = self(grid)[0].clone()
        self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        self.grid = grid


class LearnableMixing(MixingEncoding):
    r"""LRPE and, with several groups, GLRPE: a free number for every displacement of two tokens.

    .. math:: W_{g, ij} = r_g[p_j - p_i]

    (2H - 1)(2W - 1) numbers a group; no softmax stands behind them. At another grid the table is resampled
    bicubically over the displacements.

    Reference: PosMLP (Wang et al., 2022), Eq. 11. Its appendix 4 counts 4 s N - 4 s sqrt(N) + 4 s numbers; by
    construction they are s (2 sqrt(N) - 1)^2 = 4 s N - 4 s sqrt(N) + s.
    """

    resampled = True

    def __init__(self, grid: Grid, groups: int = 1, std: float = 0.02) -> None:
        super().__init__(grid, groups)
        self.std = std
        rows = (2 * grid.height - 1) * (2 * grid.width - 1)
        self.relative_position_table = nn.Parameter(torch.empty(groups, rows))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the tables anew: a normal, cut at 2 (absolute)."""
        trunc_normal_(self.relative_position_table, std=self.std)

    def forward(self, grid: Grid) -> Tensor:
        """Return the weights for `grid`, (groups, N, N)."""
        return self.displacements(grid).matrix()

    def displacements(self, grid: Grid) -> Displacements:
        """Return the tables for `grid`."""
        old = (2 * self.grid.height - 1, 2 * self.grid.width - 1)
        table = self.relative_position_table.unflatten(-1, old)
        if grid.shape != self.grid.shape:
            table = resize_map(table, (2 * grid.height - 1, 2 * grid.width - 1))
        return Displacements(table, softmax=False)

    def set_grid(self, grid: Grid) -> None:
        """Resample the tables for `grid`."""
        learned = self.relative_position_table.requires_grad
        table = self.displacements(grid).table.detach().flatten(1).clone()
        self.relative_position_table = nn.Parameter(table, requires_grad=learned)
        self.grid = grid


class QuadraticMixing(MixingEncoding):
    r"""GQPE and, with several groups, GGQPE: a Gaussian around a learned displacement, six numbers a group.

    .. math:: W_{g, ij} = softmax_j(-\tfrac12 (\delta_{ij} - \Delta_g) M_g (\delta_{ij} - \Delta_g)^T), \quad
              \delta_{ij} = p_j - p_i = (\delta_x, \delta_y)

    x is the column and y the row. M is the matrix that stands in the quadratic form, the inverse of the
    covariance: small eigenvalues look wide. It is alpha I ('alpha'), Gamma ('gamma') or Gamma Gamma^T
    ('gamma_gamma_t', positive semi-definite: a row is largest at Delta, which 'gamma' does not promise). It is
    written here as PosMLP's Table 6 names the forms of its tilde Sigma, whose small eigenvalues "help query
    token attend more to other tokens" (appendix 3); Eq. 5's Sigma is its inverse.

    Nothing depends on the size of the grid: at another one the function is computed anew.

    It starts local, with the groups spread over directions and widths as the paper's Figure 1 (e) shows and its
    text does not say: Delta_g on a circle of one patch, at the golden angle from group to group (at 0 if it
    stands alone), and M_g = I / sigma_g^2 with sigma_g in geometric steps from half a patch to a quarter of the
    shorter side (one patch if it stands alone).

    Reference: PosMLP (Wang et al., 2022), Eq. 5-8, 12-13 and Table 6; Quadratic encoding of Cordonnier et al.
    (2020), which is the form 'alpha'.

    Args:
        grid: the grid or window that the initial widths are for.
        groups: s.
        form: what M is made of.
        shift: whether Delta is learned; it is frozen at 0 if not.
    """

    def __init__(self, grid: Grid, groups: int = 1, form: Form = "gamma_gamma_t", shift: bool = True) -> None:
        super().__init__(grid, groups)
        if form not in get_args(Form):
            raise ValueError(f"`form` must be one of {', '.join(get_args(Form))}, got {form!r}.")
        self.form = form
        self.shift = shift
        self.center = nn.Parameter(torch.empty(groups, 2), requires_grad=shift)
        self.matrix = nn.Parameter(torch.empty(groups) if form == "alpha" else torch.empty(groups, 2, 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set centres and matrices as they start."""
        group = torch.arange(self.groups, dtype=torch.float64)
        angle = group * torch.pi * (3 - 5**0.5)  # the golden angle: no two directions are near each other
        circle = torch.stack([angle.cos(), angle.sin()], -1) * float(self.groups > 1 and self.shift)
        widest = max(min(self.grid.shape) / 4, 0.5)
        share = group / max(self.groups - 1, 1)
        sigma = 0.5 * (widest / 0.5) ** share if self.groups > 1 else torch.ones(1, dtype=torch.float64)
        precision = sigma**-2
        self.center.copy_(circle)
        if self.form == "alpha":
            self.matrix.copy_(precision)
        else:
            diagonal = precision.sqrt() if self.form == "gamma_gamma_t" else precision
            self.matrix.copy_(torch.diag_embed(diagonal[:, None].expand(-1, 2)))

    def quadratic(self) -> Tensor:
        """Return M of every group, (groups, 2, 2), over (x, y)."""
        if self.form == "alpha":
            return self.matrix[:, None, None] * torch.eye(2, dtype=self.matrix.dtype, device=self.matrix.device)
        if self.form == "gamma":
            return self.matrix
        return (self.matrix[:, :, None] * self.matrix[:, None]).sum(-1)

    def logits(self, grid: Grid) -> Tensor:
        """Return the logit of every displacement on `grid`, (groups, 2H - 1, 2W - 1), never below float32."""
        wide = torch.promote_types(self.center.dtype, torch.float32)
        center, matrix = self.center.to(wide), self.quadratic().to(wide)
        y, x = (torch.arange(1 - side, side, device=center.device, dtype=wide) for side in grid.shape)
        place = torch.stack([x.expand(len(y), -1), y[:, None].expand(-1, len(x))], -1)  # (2H - 1, 2W - 1, 2)
        away = place.flatten(0, 1) - center[:, None]  # (groups, displacements, 2)
        # no matrix product, which a lower precision for those (autocast, TF32) would spoil
        along = away[..., :1] * matrix[:, None, 0] + away[..., 1:] * matrix[:, None, 1]
        return (along * away).sum(-1).mul(-0.5).unflatten(-1, place.shape[:2])

    def forward(self, grid: Grid) -> Tensor:
        """Return the weights for `grid`, (groups, N, N); rows sum to 1."""
        return self.displacements(grid).matrix().to(self.center.dtype)

    def displacements(self, grid: Grid) -> Displacements:
        """Return the logits for `grid`, behind which a softmax stands."""
        return Displacements(self.logits(grid), softmax=True)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that it is for; no parameter depends on it."""
        self.grid = grid

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form}, shift={self.shift}"


class MixingSum(MixingEncoding):
    """Two mixing encodings added: LRPE-M is a dense matrix and a table of displacements.

    Reference: PosMLP (Wang et al., 2022), Eq. 9-10.
    """

    def __init__(self, first: MixingEncoding, second: MixingEncoding) -> None:
        super().__init__(first.grid, max(first.groups, second.groups))
        self.first, self.second = first, second

    def forward(self, grid: Grid) -> Tensor:
        """Return the sum of both for `grid`, (groups, N, N)."""
        return self.first(grid) + self.second(grid)

    def set_grid(self, grid: Grid) -> None:
        """Pass `grid` on to both."""
        self.first.set_grid(grid)
        self.second.set_grid(grid)
        self.grid = grid


def resize_pairs(matrix: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resample a matrix over pairs of patches, (N, N) -> (N', N'), and scale it so that a row keeps its sum."""
    keys = resize_map(matrix.unflatten(1, old.shape), new.shape).flatten(1)  # (N, N')
    both = resize_map(keys.T.unflatten(1, old.shape), new.shape).flatten(1).T  # (N', N')
    return both * (old.patches / new.patches)
