"""The block of MViTv2: attention among tokens that convolutions have pooled, and a pooled residual connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from timm.layers import DropPath, Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from graticule.encodings.forms.pooled import Pooling
from graticule.layers.attention import Attention
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.registry.checks import checked


@register_notrace_module  # torch.fx records the call as one node: the computation depends on the position
class PoolingBlock(nn.Module):
    """Attention with pooling, then an MLP, each after a norm and with a residual connection.

    Where the channels change, the residual connection is a projection of the normalized tokens, not of the tokens, as
    in the released code; where queries have a stride, it is max-pooled.

    Reference: MViTv2 (Li et al., 2022), Figure 2.

    Args:
        dim: D of the input tokens.
        dim_out: D of the output tokens.
        num_heads: h.
        pooling: the strides of queries and of keys.
        mlp_ratio: hidden channels of the MLP, as a multiple of its input channels.
        qkv_bias: whether queries, keys and values have a bias.
        residual_pooling: whether pooled queries are added to the output of attention.
        proj_drop: dropout rate on the outputs of attention and MLP.
        attn_drop: dropout rate on the attention weights.
        drop_path: stochastic depth rate.
        norm_layer: builds a norm from D.
        expand_attn: if True, attention changes the channels to `dim_out`; otherwise, the MLP does.
    """

    @checked
    def __init__(
        self,
        dim: int,
        dim_out: int,
        num_heads: int,
        pooling: Pooling,
        mlp_ratio: float,
        qkv_bias: bool,
        residual_pooling: bool,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
        norm_layer: Callable[[int], nn.Module],
        expand_attn: bool = True,
    ) -> None:
        super().__init__()
        inner = dim_out if expand_attn else dim
        self.norm1 = norm_layer(dim)
        self.shortcut_proj_attn = nn.Linear(dim, inner) if dim != inner else None
        stride = pooling.queries
        self.shortcut_pool_attn = nn.MaxPool2d(stride + 1, stride, stride // 2) if stride > 1 else None
        self.attn = PoolingAttention(
            dim, inner, num_heads, pooling, qkv_bias, residual_pooling, attn_drop, proj_drop, norm_layer
        )
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm_layer(inner)
        self.shortcut_proj_mlp = nn.Linear(inner, dim_out) if inner != dim_out else None
        self.mlp = Mlp(inner, int(inner * mlp_ratio), dim_out, drop=proj_drop)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, position: LayerPosition, grid: Grid) -> Tensor:
        """Map tokens x: (B, N, D) of `grid` to (B, N', D'), on a grid of half the sides if queries have a stride."""
        y = self.norm1(x)
        short = self.residual(x, y, grid)
        x = short + self.drop_path1(self.attn(position.inside(y), position, grid))
        y = self.norm2(x)
        out: Tensor = (x if self.shortcut_proj_mlp is None else self.shortcut_proj_mlp(y)) + self.drop_path2(
            self.mlp(y)
        )
        return out

    def residual(self, x: Tensor, normalized: Tensor, grid: Grid) -> Tensor:
        """Apply the residual connection to tokens (B, N, D) of `grid`: (B, N', D')."""
        x = x if self.shortcut_proj_attn is None else self.shortcut_proj_attn(normalized)
        if self.shortcut_pool_attn is None:
            return x
        pooled = grid.from_map(self.shortcut_pool_attn(grid.to_map(x)))
        return torch.cat([grid.split(x)[0], pooled], 1) if grid.prefix else pooled.contiguous()


class PoolingAttention(Attention):
    r"""Attention among tokens pooled by a depth-wise convolution, with separate strides for queries and keys.

    .. math:: softmax(q k^T / \sqrt d + bias) v + q, \quad q, k, v = LN(conv(W x))

    Prefix tokens are not convolved. The bias is (h, N', M), between pooled tokens. A scale or a rotation of the queries
    changes only the logits: the queries that are added to the output have neither.

    Reference: MViTv2 (Li et al., 2022), Eq. 1-5.

    Args:
        dim: D of the input tokens.
        dim_out: D of the output tokens, a multiple of `num_heads`.
        num_heads: h.
        pooling: the strides of queries and of keys.
        qkv_bias: whether queries, keys and values have a bias.
        residual_pooling: whether the pooled queries are added to the output.
        attn_drop: dropout rate on the attention weights.
        proj_drop: dropout rate on the output.
        norm_layer: builds a norm from the channels of a head.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        num_heads: int,
        pooling: Pooling,
        qkv_bias: bool,
        residual_pooling: bool,
        attn_drop: float,
        proj_drop: float,
        norm_layer: Callable[[int], nn.Module],
    ) -> None:
        qkv = nn.Linear(dim, 3 * dim_out, bias=qkv_bias)
        super().__init__(dim_out, num_heads, attn_drop=attn_drop, proj_drop=proj_drop, qkv=qkv)
        self.residual_pooling = residual_pooling
        strides: Mapping[str, int] = {"q": pooling.queries, "k": pooling.keys, "v": pooling.keys}
        for name, stride in strides.items():
            d = self.head_dim
            setattr(self, f"pool_{name}", nn.Conv2d(d, d, 3, stride, 1, groups=d, bias=False))
            setattr(self, f"norm_{name}", norm_layer(d))
        self.pooling = pooling

    def seen_grids(self, grid: Grid) -> tuple[Grid, Grid]:
        """Return the grids of queries and of keys for tokens of `grid`."""
        return grid.pooled(self.pooling.queries), grid.pooled(self.pooling.keys)

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, N, D) of the grid `where` into (B, N', D')."""
        q, k, v, of_q = self._pooled(x, position, *where)
        mixed = self._attend(*self._positioned(q, k, v, of_q, position), position)
        return self._output(mixed + q if self.residual_pooling else mixed)

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Compute the attention weights, which `forward` never stores, (B, h, N', M), rows summing to 1."""
        q, k, _, bias = self._positioned(*self._pooled(x, position, *where), position)
        return self._weights(q, k, bias, position)

    def _pooled(self, x: Tensor, position: LayerPosition, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return pooled queries (B, h, N', d), keys and values (B, h, M, d), and the input of the query projection."""
        q, k, v, of_q = self._projected(x, position)
        return self._pool("q", q, grid), self._pool("k", k, grid), self._pool("v", v, grid), of_q

    def _pool(self, name: str, x: Tensor, grid: Grid) -> Tensor:
        """Convolve and normalize x: (B, h, N, d) of `grid`, to (B, h, N', d)."""
        convolution, norm = getattr(self, f"pool_{name}"), getattr(self, f"norm_{name}")
        prefix, patches = grid.split(x)
        features = convolution(patches.flatten(0, 1).transpose(1, 2).unflatten(-1, grid.shape))  # (B * h, d, H', W')
        patches = features.flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])
        y: Tensor = norm(torch.cat([prefix, patches], 2) if grid.prefix else patches)
        return y
