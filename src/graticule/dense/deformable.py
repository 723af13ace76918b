r"""Multi-scale deformable attention in plain PyTorch: one weighted gather over all levels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.layers.attention import Attention
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.windows import Windows
from graticule.system.symbolic import as_tensor


def deformable_sample(value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    r"""Return the weighted sums of values sampled at locations on maps of several levels, (B, Q, h * d).

    .. math:: y_{q h} = \sum_{l p} A_{q h l p} \, V_{h l}(\phi_{q h l p})

    V is interpolated between the four nearest cells, which are zero outside the map; cell i of n has its center at
    (i + 1/2) / n. So each output is one weighted sum of 4 L P rows of the values, which `embedding_bag` computes
    without storing the samples.

    Args:
        value: (B, S, h, d), the cells of all levels, level by level and row by row.
        shapes: (H, W) of each of the L levels; S = sum of H * W.
        locations: (B, Q, h, L, P, 2), (x, y), in [0, 1] within the map; other values are allowed.
        weights: (B, Q, h, L, P).
    """
    batch, cells, heads, dim = value.shape
    queries = locations.shape[1]
    sides = _sides(shapes, locations)[:, None]  # (L, 1, 2)
    at = locations * sides - 0.5
    low = at.floor()
    high_share = at - low
    corners, shares = [], []
    for dy in (0, 1):
        for dx in (0, 1):
            x, y = low[..., 0] + dx, low[..., 1] + dy
            inside = (x >= 0) & (x < sides[..., 0]) & (y >= 0) & (y < sides[..., 1])
            share_x = high_share[..., 0] if dx else 1 - high_share[..., 0]
            share_y = high_share[..., 1] if dy else 1 - high_share[..., 1]
            corners.append(torch.where(inside, y * sides[..., 0] + x, 0))
            shares.append(torch.where(inside, share_x * share_y * weights, 0))
    starts = [sum(height * width for height, width in shapes[:level]) for level in range(len(shapes))]
    index = torch.stack(corners, -1).int()  # (B, Q, h, L, P, 4)
    index = index + as_tensor(starts, index)[:, None, None]
    image = torch.arange(batch, device=index.device, dtype=torch.int32)[:, None, None, None, None, None]
    head = torch.arange(heads, device=index.device, dtype=torch.int32)[:, None, None, None]
    index = (image * cells + index) * heads + head
    mixed = F.embedding_bag(
        index.reshape(batch * queries * heads, -1),
        value.reshape(-1, dim),
        mode="sum",
        per_sample_weights=torch.stack(shares, -1).reshape(batch * queries * heads, -1).to(value.dtype),
    )
    return mixed.reshape(batch, queries, heads * dim)


class DeformableAttention(nn.Module):
    r"""Each query attends to a few points per level, whose offsets and weights it predicts.

    .. math:: \phi_{q h l p} = r_q + \Delta_{q h l p} / (W_l, H_l), \quad A_q = softmax_{l p}(W_A z_q)

    Offsets are in cells of their level. Names are from Deformable DETR's code, whose CUDA operator computes
    `deformable_sample`. References are points, and all cells are sampled: the boxes of that model's decoder (references
    of four numbers) and its mask of padded cells are not supported, since no head here has such a decoder.

    Reference: Deformable DETR (Zhu et al., 2021), Eq. 3.

    Args:
        dim: D.
        levels: L.
        num_heads: h.
        points: P.
        ratio: channels of the values, as a multiple of D.
    """

    def __init__(self, dim: int, levels: int, num_heads: int, points: int = 4, ratio: float = 1.0) -> None:
        super().__init__()
        inner = int(dim * ratio)
        if inner % num_heads or not inner:
            raise ValueError(f"`heads` must divide the {inner} channels of deformable attention, got {num_heads}.")
        self.levels, self.num_heads, self.points = levels, num_heads, points
        self.sampling_offsets = nn.Linear(dim, num_heads * levels * points * 2)
        self.attention_weights = nn.Linear(dim, num_heads * levels * points)
        self.value_proj = nn.Linear(dim, inner)
        self.output_proj = nn.Linear(inner, dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize point p of each head p + 1 cells away from the query, with one direction per head.

        The directions have equal angles and end on a square; all attention weights are equal.
        """
        for layer in (self.sampling_offsets, self.attention_weights):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        angles = torch.arange(self.num_heads) * (2 * math.pi / self.num_heads)
        direction = torch.stack([angles.cos(), angles.sin()], -1)
        direction = direction / direction.abs().amax(-1, keepdim=True)  # (h, 2)
        far = torch.arange(1, self.points + 1)[:, None]
        offsets = (direction[:, None, None] * far).expand(-1, self.levels, -1, -1)
        self.sampling_offsets.bias.copy_(offsets.flatten())
        for layer in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, query: Tensor, reference: Tensor, value: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """Return the outputs of the queries, (B, Q, D).

        Args:
            query: (B, Q, D).
            reference: (B or 1, Q, L or 1, 2), the (x, y) of each query on each level, in [0, 1].
            value: (B, S, D), the cells of all levels.
            shapes: (H, W) of each level.
        """
        if reference.shape[-1] != 2:
            raise ValueError(
                f"`reference` must be the (x, y) of each query; boxes are not supported, got {reference.shape[-1]} "
                "numbers."
            )
        locations, weights = self.points_of(query, reference, shapes)
        values = self.value_proj(value).unflatten(-1, (self.num_heads, -1))
        return self.output_proj(deformable_sample(values, shapes, locations, weights))

    def points_of(self, query: Tensor, reference: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return the locations that each query samples, (B, Q, h, L, P, 2), and their weights, (B, Q, h, L, P)."""
        sizes = (self.num_heads, self.levels, self.points)
        offsets = self.sampling_offsets(query).unflatten(-1, (*sizes, 2)).to(reference.dtype)
        weights = self.attention_weights(query).unflatten(-1, (self.num_heads, -1)).softmax(-1).unflatten(-1, sizes[1:])
        return reference[:, :, None, :, None] + offsets / _sides(shapes, reference)[:, None], weights


def _sides(shapes: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
    """Return (W, H) of maps of (H, W), (L, 2), without a copy from the host."""
    return as_tensor([side for height, width in shapes for side in (width, height)], like).view(-1, 2)


def cell_centers(shapes: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
    """Return the (x, y) of the centers of all cells of maps of (H, W), in [0, 1], (1, S, 1, 2).

    They are at least float32, since neighboring cells can be equal in 16 bits.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    centers = []
    for height, width in shapes:
        y = (torch.arange(height, device=like.device, dtype=dtype) + 0.5) / height
        x = (torch.arange(width, device=like.device, dtype=dtype) + 0.5) / width
        y, x = torch.meshgrid(y, x, indexing="ij")
        centers.append(torch.stack([x, y], -1).flatten(0, 1))
    return torch.cat(centers)[None, :, None]


class WindowedAttention(Attention):
    """Attends within square windows of the grid, with the layer's position on the whole grid.

    Queries, keys and values are computed for the whole grid, including position, and then split into windows; of a
    bias, a window gets the pairs of its own tokens. So each encoding means the same as in attention to all tokens.
    Windows begin at the top left; those that extend beyond the grid have zeros as keys and values, which are attended
    to, as in ViT-Adapter's code.

    Args:
        attention: the attention that it replaces, whose parts and options it keeps.
        window: side of a window, in patches.
    """

    def __init__(self, attention: Attention, window: int) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(attention.__dict__)
        self.window = window

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, N, D) of the grid `where` into (B, N, D)."""
        (grid,) = where
        check_windowed(position)
        q, k, v, bias = self._project(x, position)
        q, k, v = (self._cut(tokens, grid) for tokens in (q, k, v))
        bias = None if bias is None else self._cut_bias(bias, grid, len(x))
        mixed = self._join(self._mix(q, k, v, bias, LayerPosition()), grid, len(x))
        return self.proj_drop(self.proj(self.norm(mixed.transpose(1, 2).flatten(2))))

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Compute the attention weights between all tokens, (B, h, N, N), zero across windows.

        Rows of a window that extends beyond the grid sum to less than 1: the rest is on the zeros.
        """
        (grid,) = where
        q, k, _, bias = self._project(x, position)
        logits = self._cut(q, grid) * self.scale @ self._cut(k, grid).mT
        if bias is not None:
            logits = logits + self._cut_bias(bias, grid, len(x))
        index = self._windows(grid).tokens(x.device)  # (L, n), -1 beyond the grid
        inner = logits.softmax(-1).unflatten(0, (len(x), -1)).permute(0, 2, 1, 3, 4)  # (B, h, L, n, n)
        rows, columns = (
            index[:, :, None].expand(-1, -1, index.shape[1]),
            index[:, None].expand(-1, index.shape[1], -1),
        )
        inside = (rows >= 0) & (columns >= 0)
        out: Tensor = inner.new_zeros(*inner.shape[:2], grid.patches, grid.patches)
        out[..., rows[inside], columns[inside]] = inner[..., inside]
        return out

    def _windows(self, grid: Grid) -> Windows:
        return Windows(grid, Grid(self.window, self.window))

    def _cut(self, x: Tensor, grid: Grid) -> Tensor:
        """Split (B, h, N, d) into windows, (B * L, h, n, d), zero beyond the grid."""
        cut = self._windows(grid).cut(x.flatten(0, 1)).unflatten(0, (*x.shape[:2], -1))  # (B, h, L, n, d)
        return cut.transpose(1, 2).flatten(0, 1)

    def _join(self, x: Tensor, grid: Grid, batch: int) -> Tensor:
        """Join windows (B * L, h, n, d) to (B, h, N, d)."""
        windows = x.unflatten(0, (batch, -1)).transpose(1, 2)  # (B, h, L, n, d)
        tokens = self._windows(grid).join(windows.flatten(0, 2), batch * self.num_heads)
        return tokens.unflatten(0, (batch, -1))

    def _cut_bias(self, bias: Tensor, grid: Grid, batch: int) -> Tensor:
        """Return the bias of the pairs of each window, (B * L, h, n, n), from (B, h, N, N) or (h, N, N)."""
        index = self._windows(grid).tokens(bias.device)
        within = (index >= 0).to(bias.dtype)
        pairs = bias[..., index.clamp(0)[:, :, None], index.clamp(0)[:, None]]  # (..., h, L, n, n)
        pairs = pairs * within[:, :, None] * within[:, None]
        windows = pairs.transpose(-4, -3).expand(batch, -1, -1, -1, -1).flatten(0, 1)
        return windows


def check_windowed(position: LayerPosition) -> None:
    """Check that the position of a layer supports windowed attention."""
    if position.value_bias is not None or position.positional is not None:
        raise ValueError(
            "`window` must be 0 for encodings of all pairs of tokens, got one of those that add to the mixed "
            "values or blend attention weights (iRPE on values, GPSA)."
        )
