"""Mixing encodings: the token-mixing weights of a gating unit, made from where tokens are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.checks import checked
from graticule.displacement import Displacements
from graticule.grid import BICUBIC, Grid, resize_map
from graticule.resampling import Resampler, build_resampler
from graticule.token_mlp import TokenMlp

#: How the quadratic form is made from what is learned (PosMLP, Table 6); `_released` is the authors' code where it
#: computes another function than the paper.
Form = Literal["alpha", "alpha_released", "gamma", "gamma_released", "gamma_gamma_t"]
#: Initial values of a quadratic encoding.
Start = Literal["released", "spread"]

#: Standard deviation of the noise that the authors' code adds to zero and to the identity.
_NOISE = 0.01


class MixingEncoding(nn.Module, ABC):
    """Makes the weights (groups, N, N) by which a gating unit mixes the N patches of a grid or window.

    Row i has the weights of all tokens j in token i. Groups are groups of channels: one where all channels are mixed
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
        """Make `grid` the one that the encoding is built for; here no parameter depends on it."""
        self.grid = grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` of a checkpoint fit the parameter `name`; what cannot be is returned as it is.

        `shape` is the (H, W) of the grid or window that the value is for, if the checkpoint says so.
        """
        return value

    def published_names(self) -> dict[str, str]:
        """Name in timm's blocks -> name of the parameter here; '' is the bias of `MixingPosition`."""
        return {"mlp_channels.gate.proj.bias": ""}

    def displacements(self, grid: Grid) -> Displacements | None:
        """Return the table of displacements that the weights for `grid` come from; None if there is none."""
        return None

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, groups={self.groups}"


class DenseMixing(MixingEncoding):
    r"""Holds a free number for every pair of tokens: gMLP's token layer, independent of their displacement.

    .. math:: W_{ij} \quad or \quad W_{g, ij}

    One matrix for all channels, or one for each of several `groups` of channels. It starts near zero (std 1e-6), so
    that with a bias of one the unit starts as the identity. In PosMLP's released code it starts as any linear layer
    does (std 0.02, with a bias of zero). At another grid the matrix is resampled by `resampler`, over the keys and then
    over the queries, and scaled by N / N', so that a row keeps its sum.

    Reference: Pay Attention to MLPs (gMLP, Liu et al., 2021), section 2.1.

    Args:
        grid: the grid that the matrices are for.
        std: standard deviation of the initial values.
        resampler: how the matrices are resampled at another grid.
        groups: number of groups with a matrix each; None for one matrix and no groups.
    """

    resampled = True

    @checked
    def __init__(self, grid: Grid, std: float = 1e-6, resampler: str = "bicubic", groups: int | None = None) -> None:
        super().__init__(grid, 1 if groups is None else groups)
        self.std = std
        self.resampler = build_resampler(resampler)
        several = () if groups is None else (groups,)
        self.weight = nn.Parameter(torch.empty(*several, grid.patches, grid.patches))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrix anew."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, grid: Grid) -> Tensor:
        """Return the matrices for `grid`, (groups, N, N)."""
        weight = self._at(grid)
        return weight if weight.ndim == 3 else weight[None]

    def set_grid(self, grid: Grid) -> None:
        """Resample the matrices for `grid`."""
        weight = self._at(grid).detach().clone()
        self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        self.grid = grid

    def _at(self, grid: Grid) -> Tensor:
        return self.weight if grid == self.grid else resize_pairs(self.weight, self.grid, grid, self.resampler)

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Resample matrices of another grid, (N', N') or (groups, N', N')."""
        if value.ndim != self.weight.ndim or value.shape[:-2] != self.weight.shape[:-2]:
            return value
        old = self.grid.alike(value.shape[-1], shape) if value.shape[-1] == value.shape[-2] else None
        if old is None or old.shape == self.grid.shape:
            return value
        return resize_pairs(value, old, self.grid, self.resampler)

    def published_names(self) -> dict[str, str]:
        """The matrix and the bias of timm's gMLP."""
        return {"mlp_channels.gate.proj.weight": "weight", **super().published_names()}


class LearnableMixing(MixingEncoding):
    r"""LRPE and, with several groups, GLRPE: a free number for every displacement of two tokens.

    .. math:: W_{g, ij} = r_g[p_j - p_i]

    (2H - 1)(2W - 1) numbers per group; no softmax is applied to them. At another grid the table is resampled
    by `resampler` over the displacements and scaled by N / N', so that a row keeps its sum (`resize_displacements`).

    Reference: PosMLP (Wang et al., 2022), Eq. 11. Its appendix 4 counts 4 s N - 4 s sqrt(N) + 4 s numbers; by
    construction they are s (2 sqrt(N) - 1)^2 = 4 s N - 4 s sqrt(N) + s. The authors' code indexes the table by
    p_i - p_j, which loading its checkpoints accounts for, and starts it at zero, because the loop that should draw
    it with std 0.02 finds no parameter; here it is drawn.

    Args:
        grid: the grid that the tables are for.
        groups: number of groups with a table each.
        std: standard deviation of the initial values.
        resampler: how the tables are resampled at another grid.
    """

    resampled = True
    holds = "displacements"

    @checked
    def __init__(self, grid: Grid, groups: int = 1, std: float = 0.02, resampler: str = "bicubic") -> None:
        super().__init__(grid, groups)
        self.std = std
        self.resampler = build_resampler(resampler, "displacements")
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
        table: Tensor = self.relative_position_table
        if not grid.has_shape(self.grid.shape):
            table = resize_displacements(table, self.grid, grid, self.resampler)
        return Displacements(table.unflatten(-1, (2 * grid.height - 1, -1)), softmax=False)

    def set_grid(self, grid: Grid) -> None:
        """Resample the tables for `grid`."""
        learned = self.relative_position_table.requires_grad
        table = self.displacements(grid).table.detach().flatten(1).clone()
        self.relative_position_table = nn.Parameter(table, requires_grad=learned)
        self.grid = grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Resample tables of another grid, (groups, (2H' - 1)(2W' - 1))."""
        if value.ndim != 2:
            return value
        sides = Grid(2 * self.grid.height - 1, 2 * self.grid.width - 1)
        old = sides.alike(value.shape[1], shape and (2 * shape[0] - 1, 2 * shape[1] - 1))
        if old is None or old.shape == sides.shape or not (old.height % 2 and old.width % 2):
            return value
        half = Grid((old.height + 1) // 2, (old.width + 1) // 2)
        return resize_displacements(value, half, self.grid, self.resampler)


class QuadraticMixing(MixingEncoding):
    r"""GQPE and, with several groups, GGQPE: a Gaussian around a learned displacement, six numbers per group.

    .. math:: W_{g, ij} = softmax_j\left(\delta_{ij}^T M_g \Delta_g - \tfrac12 \delta_{ij}^T M_g \delta_{ij}\right),
              \quad \delta_{ij} = p_j - p_i = (\delta_x, \delta_y)

    x is the column and y the row. For a symmetric M this is Eq. 5, :math:`-\tfrac12 (\delta - \Delta)^T M (\delta -
    \Delta)`, up to a number that the softmax cancels. M is in the exponent, so it is the inverse of Eq. 5's
    covariance, which is how Table 6, Eq. 16 and the authors' code use it: small eigenvalues look wide. The forms:

    - 'gamma_gamma_t' (default), M = Gamma Gamma^T: the same function in the paper and in the code. It is computed as
      :math:`z^T c - \tfrac12 |z|^2` with :math:`z = \Gamma^T \delta, c = \Gamma^T \Delta`, which no rounding makes
      indefinite.
    - 'gamma', M = Gamma, as Eq. 5 reads: only the symmetric part of Gamma matters, and a row need not be largest at
      Delta. (Eq. 7-8 keep M_12 alone in the mixed term, a third function where Gamma is not symmetric.)
    - 'gamma_released', M = Gamma, as the authors' code reads: the linear term is M Delta, so the antisymmetric part
      of Gamma moves the center. This is the row of Table 6.
    - 'alpha', M = alpha I, as the paper and Cordonnier et al. (2020) read.
    - 'alpha_released', as the authors' code reads: :math:`\alpha^2 \Delta^T \delta - \tfrac12 |\delta|^2`. The width
      is one patch whatever alpha is. This is the row of Table 6.

    The code counts y upwards (its delta is (x_j - x_i, y_i - y_j)); loading its checkpoints changes the signs.

    Nothing depends on the size of the grid: at another one the function is computed anew. Logits are computed in
    float32 at least, also under autocast.

    Reference: PosMLP (Wang et al., 2022), Eq. 5-8, 12-13 and Table 6, and its released code.

    Args:
        grid: the grid or window that the initial widths of 'spread' are for.
        groups: s.
        form: how M is made from the parameters.
        shift: whether Delta is learned; it is frozen at 0 if not.
        start: 'released', as the authors' code draws them: Delta from a normal of std 0.01, Gamma (or alpha) the
            identity and a normal of std 0.01, so all groups begin as nearly the same Gaussian of one patch; or
            'spread', which is ours: Delta on a circle of one patch, at the golden angle from group to group (at 0
            for a single group), and M = I / sigma^2 with sigma in geometric steps from half a patch to a quarter of
            the shorter side (one patch for a single group).
    """

    @checked
    def __init__(
        self,
        grid: Grid,
        groups: int = 1,
        form: Form = "gamma_gamma_t",
        shift: bool = True,
        start: Start = "released",
    ) -> None:
        super().__init__(grid, groups)
        if form not in get_args(Form):
            raise ValueError(f"`form` must be one of {', '.join(get_args(Form))}, got {form!r}.")
        if start not in get_args(Start):
            raise ValueError(f"`start` must be one of {', '.join(get_args(Start))}, got {start!r}.")
        self.form = form
        self.shift = shift
        self.start = start
        self.center = nn.Parameter(torch.empty(groups, 2), requires_grad=shift)
        self.matrix = nn.Parameter(torch.empty(groups) if self._isotropic else torch.empty(groups, 2, 2))
        self.reset_parameters()

    @property
    def _isotropic(self) -> bool:
        return self.form in ("alpha", "alpha_released")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set centers and matrices to their initial values."""
        if self.start == "spread":
            center, diagonal = self._spread()
        else:
            center, diagonal = torch.randn(self.groups, 2) * _NOISE, torch.ones(self.groups)
        self.center.copy_(center * float(self.shift))
        self.matrix.copy_(diagonal if self._isotropic else torch.diag_embed(diagonal[:, None].expand(-1, 2)))
        if self.start == "released":
            self.matrix.add_(torch.randn_like(self.matrix), alpha=_NOISE)

    def _spread(self) -> tuple[Tensor, Tensor]:
        """Return centers (groups, 2) and the diagonals of the matrices (groups,) over directions and widths."""
        group = torch.arange(self.groups, dtype=torch.float64)
        angle = group * torch.pi * (3 - 5**0.5)  # the golden angle: no two directions are near each other
        circle = torch.stack([angle.cos(), angle.sin()], -1) * float(self.groups > 1)
        widest = max(min(self.grid.shape) / 4, 0.5)
        share = group / max(self.groups - 1, 1)
        sigma = 0.5 * (widest / 0.5) ** share if self.groups > 1 else torch.ones(1, dtype=torch.float64)
        if self.form == "alpha_released":  # whose width is not learned
            return circle, torch.ones_like(sigma)
        return circle, 1 / sigma if self.form == "gamma_gamma_t" else sigma**-2

    def quadratic(self) -> Tensor:
        """Return M of every group, (groups, 2, 2), over (x, y), in float32 at least."""
        matrix = self.matrix.to(torch.promote_types(self.matrix.dtype, torch.float32))
        if self._isotropic:
            scale = torch.ones_like(matrix) if self.form == "alpha_released" else matrix
            return torch.diag_embed(scale[:, None].expand(-1, 2))
        return matrix if self.form != "gamma_gamma_t" else (matrix[:, :, None] * matrix[:, None]).sum(-1)

    def logits(self, grid: Grid) -> Tensor:
        """Return the logit of every displacement on `grid`, (groups, 2H - 1, 2W - 1), in float32 at least."""
        wide = torch.promote_types(self.center.dtype, torch.float32)
        center, matrix = self.center.to(wide), self.matrix.to(wide)
        y, x = (displacements.to(wide) for displacements in grid.displacements(center.device))
        # elementwise products of coordinates, which no autocast and no TF32 computes with fewer digits
        dy, dx = (each.flatten() for each in torch.meshgrid(y, x, indexing="ij"))  # (displacements,) each
        cx, cy = center[..., None].unbind(1)  # (groups, 1) each
        if self._isotropic:
            scale = matrix[:, None]
            width, pull = (1, scale * scale) if self.form == "alpha_released" else (scale, scale)
            logits = pull * (cx * dx + cy * dy) - width * (dx * dx + dy * dy) / 2
        elif self.form == "gamma_gamma_t":
            columns = matrix[..., None].unbind(2)  # of Gamma: (groups, 2, 1) each
            logits = dx.new_zeros(())
            for along_x, along_y in (column.unbind(1) for column in columns):
                z = along_x * dx + along_y * dy
                logits = logits + z * (along_x * cx + along_y * cy - z / 2)
        else:
            if self.form == "gamma":
                matrix = (matrix + matrix.mT) / 2
            (xx, xy), (yx, yy) = (row[..., None].unbind(1) for row in matrix.unbind(1))
            rx, ry = cx - dx / 2, cy - dy / 2
            logits = dx * (xx * rx + xy * ry) + dy * (yx * rx + yy * ry)
        table: Tensor = logits.unflatten(-1, (y.shape[0], x.shape[0]))
        return table

    def forward(self, grid: Grid) -> Tensor:
        """Return the weights for `grid`, (groups, N, N); rows sum to 1."""
        return self.displacements(grid).matrix().to(self.center.dtype)

    def displacements(self, grid: Grid) -> Displacements:
        """Return the logits for `grid`, to which a softmax is applied."""
        return Displacements(self.logits(grid), softmax=True)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form}, shift={self.shift}"


class MixingSum(MixingEncoding):
    """Adds two mixing encodings: LRPE-M is a dense matrix and a table of displacements.

    Reference: PosMLP (Wang et al., 2022), Eq. 9-10.
    """

    @checked
    def __init__(self, first: MixingEncoding, second: MixingEncoding) -> None:
        super().__init__(first.grid, max(first.groups, second.groups))
        self.first, self.second = first, second

    def forward(self, grid: Grid) -> Tensor:
        """Return the sum of both for `grid`, (groups, N, N)."""
        return cast("Tensor", self.first(grid)) + cast("Tensor", self.second(grid))

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Let the part that owns `name` fit it."""
        part, _, own = name.partition(".")
        return (self.first if part == "first" else self.second).fit(own, value, shape)

    def set_grid(self, grid: Grid) -> None:
        """Pass `grid` on to both."""
        self.first.set_grid(grid)
        self.second.set_grid(grid)
        self.grid = grid


class GlobalFilter(MixingEncoding):
    r"""Multiplies each 2-D frequency of the grid by a learned complex number: GFNet's global filter.

    .. math:: y = F^{-1}(K \odot F(x)), \quad W_{g, ij} = k_g[(p_i - p_j) \bmod (H, W)], \quad k = F^{-1}(K)

    That is a circular convolution whose kernel has the size of the grid: the weights depend on the displacement, and
    opposite borders are neighbors. H (W // 2 + 1) complex numbers per group of channels; in GFNet each channel is a
    group. At another grid their real and imaginary parts are resampled bicubically over the indices of the
    frequencies, with aligned corners, as in its code. Within part of a window the weights are cut.

    Reference: Global Filter Networks for Image Classification (GFNet, Rao et al., 2021), Eq. 5-6, and its code.

    Args:
        grid: the grid that it is built for.
        groups: s.
        std: standard deviation of the real and imaginary parts at the start.
    """

    resampled = True

    @checked
    def __init__(self, grid: Grid, groups: int = 1, std: float = 0.02) -> None:
        super().__init__(grid, groups)
        self.std = std
        self.complex_weight = nn.Parameter(torch.empty(grid.height, grid.width // 2 + 1, groups, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the filters anew."""
        nn.init.normal_(self.complex_weight, std=self.std)

    def forward(self, grid: Grid) -> Tensor:
        """Return the weights for `grid`, (groups, N, N)."""
        return self.displacements(grid).matrix()

    def displacements(self, grid: Grid) -> Displacements:
        """Return the kernel for `grid` by displacement, periodic."""
        weight = self._at(grid)
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        kernel = torch.fft.irfft2(torch.view_as_complex(wide.contiguous()).permute(2, 0, 1), s=grid.shape)
        table = kernel.flip(1, 2)  # k[-d] for the displacements d from (1 - H, 1 - W) to (0, 0)
        table = torch.cat([table, table[:, :-1]], 1)
        return Displacements(torch.cat([table, table[:, :, :-1]], 2).to(weight.dtype), softmax=False)

    def set_grid(self, grid: Grid) -> None:
        """Resample the filters for `grid`."""
        weight = self._at(grid).detach().clone()
        self.complex_weight = nn.Parameter(weight, requires_grad=self.complex_weight.requires_grad)
        self.grid = grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Resample filters of another grid, (H', W' // 2 + 1, groups, 2); without `shape` it is taken for a square."""
        if value.ndim != 4 or value.shape[2:] != self.complex_weight.shape[2:]:
            return value
        old = Grid(value.shape[0], value.shape[0]) if shape is None else Grid(*shape)
        fits = value.shape[:2] == (old.height, old.width // 2 + 1)
        return _resize_filters(value, self.grid) if fits and old.shape != self.grid.shape else value

    def published_names(self) -> dict[str, str]:
        """The name in GFNet's code."""
        return {"filter.complex_weight": "complex_weight", **super().published_names()}

    def _at(self, grid: Grid) -> Tensor:
        weight: Tensor = self.complex_weight
        return weight if grid.has_shape(self.grid.shape) else _resize_filters(weight, grid)


def _resize_filters(weight: Tensor, new: Grid) -> Tensor:
    """Resample filters (H, W // 2 + 1, groups, 2) for another grid."""
    maps = weight.flatten(2).permute(2, 0, 1)[None].to(torch.promote_types(weight.dtype, torch.float32))
    size = (new.height, new.width // 2 + 1)
    maps = F.interpolate(maps, size=size, mode="bicubic", align_corners=True)[0].to(weight.dtype)
    resized: Tensor = maps.permute(1, 2, 0).unflatten(2, (-1, 2)).contiguous()
    return resized


class MlpMixing(MixingEncoding):
    r"""Mixes tokens by an MLP over them, the same for each channel: MLP-Mixer's token-mixing MLP.

    .. math:: y = V\, GELU(U x + u)

    It has T hidden channels, `ratio` times D of the model, and is the one mixing encoding that is not linear. At
    another grid the maps that U takes in and V gives out are resampled by `resampler`, and U is scaled by N / N', so
    that its sums over the tokens keep their size.

    Reference: MLP-Mixer (Tolstikhin et al., 2021), Eq. 1; started as in timm.

    Args:
        grid: the grid or window that it is built for.
        dim: D.
        ratio: T / D.
        resampler: name of the resampler.
    """

    resampled = True

    @checked
    def __init__(self, grid: Grid, dim: int, ratio: float = 0.5, resampler: str = "bicubic") -> None:
        super().__init__(grid, 1)
        self.resampler = build_resampler(resampler)
        hidden = int(dim * ratio)
        if hidden < 1:
            raise ValueError(f"`ratio` must give at least one hidden channel, got {ratio} of {dim}.")
        self.fc1 = nn.Linear(grid.patches, hidden)
        self.fc2 = nn.Linear(hidden, grid.patches, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: Xavier uniform, and a bias of std 1e-6."""
        nn.init.xavier_uniform_(self.fc1.weight)
        nn.init.xavier_uniform_(self.fc2.weight)
        nn.init.normal_(self.fc1.bias, std=1e-6)

    def forward(self, grid: Grid) -> TokenMlp:
        """Return the MLP for `grid`."""
        first, second = self.fc1.weight, self.fc2.weight
        if not grid.has_shape(self.grid.shape):
            first, second = (_resize_rows(rows, self.grid, grid, self.resampler) for rows in (first, second.T))
            first, second = first * (self.grid.patches / grid.patches), second.T
        return TokenMlp(first, self.fc1.bias, second)

    def set_grid(self, grid: Grid) -> None:
        """Resample the weights for `grid`."""
        made = self(grid)
        for layer, weight in ((self.fc1, made.first), (self.fc2, made.second)):
            layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        self.fc1.in_features = self.fc2.out_features = grid.patches
        self.grid = grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Resample the weights of another grid, (T, N') or (N', T)."""
        if value.ndim != 2 or name not in ("fc1.weight", "fc2.weight"):
            return value
        rows = value if name == "fc1.weight" else value.T
        old = self.grid.alike(rows.shape[1], shape)
        if old is None or old.shape == self.grid.shape or len(rows) != len(self.fc1.bias):
            return value
        resized = _resize_rows(rows, old, self.grid, self.resampler)
        return resized * (old.patches / self.grid.patches) if name == "fc1.weight" else resized.T

    def published_names(self) -> dict[str, str]:
        """The names of timm's mixers."""
        own = {f"mlp_tokens.{name}": name for name in ("fc1.weight", "fc1.bias", "fc2.weight")}
        return {**own, "mlp_tokens.fc2.bias": ""}


def _resize_rows(rows: Tensor, old: Grid, new: Grid, resampler: Resampler) -> Tensor:
    """Resample maps of patches, (T, N) -> (T, N')."""
    return resize_map(rows.unflatten(1, old.shape), new.shape, resampler).flatten(1)


def resize_pairs(matrix: Tensor, old: Grid, new: Grid, resampler: Resampler = BICUBIC) -> Tensor:
    """Resample matrices over pairs of patches, (..., N, N) -> (..., N', N'), scaled so that a row keeps its sum."""
    count = old.patches
    keys = _resize_rows(matrix.reshape(-1, count), old, new, resampler).unflatten(0, (-1, count)).mT  # (groups, N', N)
    both = _resize_rows(keys.flatten(0, 1), old, new, resampler).unflatten(0, (-1, new.patches)).mT
    resized: Tensor = both.reshape(*matrix.shape[:-2], new.patches, new.patches) * (count / new.patches)
    return resized


def resize_displacements(table: Tensor, old: Grid, new: Grid, resampler: Resampler = BICUBIC) -> Tensor:
    """Resample tables of displacements, (groups, (2H - 1)(2W - 1)), and scale them so that a row keeps its sum."""
    maps = table.unflatten(1, (2 * old.height - 1, 2 * old.width - 1))
    resized = resize_map(maps, (2 * new.height - 1, 2 * new.width - 1), resampler).flatten(1)
    return resized * (old.patches / new.patches)
