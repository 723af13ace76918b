"""Swin's relative bias: a learnable table of the offsets of two patches, with rows for the class token as in BEiT."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import PatchBias
from graticule.position.grid import Grid
from graticule.position.position import init_table, register_encoding
from graticule.position.resampling import build_resampler
from graticule.registry.fields import NotNegative, SmallCount

#: Numbers per head for prefix tokens: prefix to patch, patch to prefix, prefix to prefix (query to key).
_PREFIX_ROWS = 3


@register_encoding("relative_bias")
class RelativeBias(PatchBias):
    r"""Adds one learned number per head and offset of two patches, of (2H-1)(2W-1) offsets, to the logits.

    .. math:: b_{h, i, j} = T_h[p_i - p_j]

    Prefix tokens get no bias, neither as queries nor as keys, unless `prefix_rows`: then the table has three more
    rows, for the class token as query, as key, and as both, as in BEiT. Several prefix tokens share them. At another
    grid the table is resampled over the offsets by `resampler`; these rows are unchanged. Tables of MaxViT and CoAtNet,
    (heads, 2H-1, 2W-1) by key minus query, are converted to this form when they are loaded.

    Reference: Swin Transformer (Liu et al., 2021), Eq. 4; in a ViT as in LaPE's released code (2D_RPE), where the table
    starts at 0 (`std=0`), as in BEiT's; with `prefix_rows` BEiT (Bao et al., 2022), and timm's `vit_relpos` models.

    Args:
        prefix_rows: whether prefix tokens have a learned bias; `grid` must have at least one.
        resampler: resampler of the table for another grid; BEiT's code uses 'geometric'.
        std: standard deviation of the initial values; Swin has 0.02, and LaPE's released code 0. LaPE's norm turns
            any other start into noise of a spread of about 1.
    """

    resampled = True
    table_kind = "displacements"
    crops = True

    def __init__(
        self,
        grid: Grid,
        num_heads: SmallCount,
        prefix_rows: bool = False,
        resampler: str = "bicubic",
        std: NotNegative = 0.02,
    ) -> None:
        super().__init__(grid, num_heads)
        if prefix_rows and not grid.prefix:
            raise ValueError("`prefix_rows` must be False where there is no prefix token, got True.")
        self.prefix_rows = prefix_rows
        self.resampler = build_resampler(resampler, "displacements")
        self.std = std
        rows = math.prod(grid.table) + _PREFIX_ROWS * prefix_rows
        self.relative_position_bias_table = nn.Parameter(torch.empty(rows, num_heads))
        self.index: Tensor
        self.init_non_persistent_buffers()
        self.reset_parameters()

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"index": self.grid.offset_index(device)}

    def reset_parameters(self) -> None:
        """Initialize the table: a normal of `std`, truncated at 2 (absolute)."""
        init_table(self.relative_position_bias_table, self.std)

    def patch_bias(self, grid: Grid) -> Tensor:
        if grid.has_shape(self.grid.shape) and grid.crop is None:
            table, index = self.relative_position_bias_table.view(-1, self.num_heads), self.index
        else:
            table = self.resample("", self.relative_position_bias_table, self.grid, grid.image_grid)
            maps = self._split(table)[0].T.unflatten(-1, grid.image_grid.table)
            table, index = grid.cut_displacements(maps).flatten(1).T, grid.offset_index(self.index.device)
        # index_select and its backward pass are several times as fast as indexing here
        return table.T.index_select(1, index.flatten()).unflatten(1, index.shape)

    def with_prefix(self, bias: Tensor, grid: Grid) -> Tensor:
        """Prepend rows and columns for the prefix tokens to a bias of the patches: (heads, N, N)."""
        if not self.prefix_rows:
            return super().with_prefix(bias, grid)
        to_patch, from_patch, within = self.relative_position_bias_table[-_PREFIX_ROWS:, :, None, None].to(bias.dtype)
        count = grid.prefix
        above = torch.cat([within.expand(-1, count, count), to_patch.expand(-1, count, grid.patches)], 2)
        left = from_patch.expand(-1, grid.patches, count)
        return torch.cat([above, torch.cat([left, bias], 2)], 1)

    def fit_parameter(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Make a table of a checkpoint fit; a table of MaxViT, (heads, 2H'-1, 2W'-1), is converted."""
        if value.ndim == 3 and value.shape[0] == self.num_heads and not self.prefix_rows:
            shape = (value.shape[1] + 1) // 2, (value.shape[2] + 1) // 2
            value = value.flip(1, 2).flatten(1).T
        return super().fit_parameter(name, value, shape)

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid or window of a table, ((2H'-1)(2W'-1), heads), with rows for prefix tokens."""
        fits = value.ndim == 2 and value.shape[1] == self.num_heads
        return self.grid.infer_grid_from_offsets(len(self._split(value)[0]), shape) if fits else None

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample a table, ((2H'-1)(2W'-1), heads); rows for prefix tokens are unchanged."""
        patches, prefix = self._split(value)
        return torch.cat([self.resampler(patches.T.unflatten(1, old.table), new.table).flatten(1).T, prefix])

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the table in timm's `vit_relpos` models and in Swin and BEiT."""
        return f"rel_pos.{name}", name

    def _split(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Split a table into rows for offsets and rows for prefix tokens."""
        rows = table.shape[0] - _PREFIX_ROWS * self.prefix_rows
        return table[:rows], table[rows:]


@register_encoding("shared_relative_bias")
class SharedRelativeBias(RelativeBias):
    """Shares one table of `relative_bias` among all layers, as CPVT's Table 8 counts: 37,824 + 3 * 27 * 27 = 40,011.

    BEiT can share its table as well, with `prefix_rows`.
    """

    joinable_as = None
    shared = True
