"""The pre-norm transformer block, which gets position as a `LayerPosition`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from timm.layers import DropPath, LayerScale, Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from graticule.checks import checked
from graticule.layer_position import LayerPosition
from graticule.layers.attention import Attention


@register_notrace_module  # torch.fx records the call as one node, because it depends on the position
class Block(nn.Module):
    r"""Attention, then an MLP, each after a norm and with a residual connection.

    .. math:: x' = x + MSA(LN(x) + p), \quad x'' = x' + MLP(LN(x'))

    where p is `inner` of the layer's position, if any. LayerScale multiplies the output of each branch by one number
    per channel.

    Reference: ViT (Dosovitskiy et al., 2021), Eq. 2-3; with p, LaPE (Yu et al., 2023), Eq. 9; LayerScale, CaiT (Touvron
    et al., 2021), Eq. 5.

    Args:
        dim: D.
        num_heads: h.
        mlp_ratio: hidden channels of the MLP, as a multiple of D.
        qkv_bias: whether queries, keys and values have a bias.
        proj_drop: dropout rate on the outputs of attention and MLP.
        attn_drop: dropout rate on the attention weights.
        drop_path: stochastic depth rate.
        norm_layer: builds a norm from D.
        act_layer: the MLP's activation.
        attn: the attention; `Attention` by default.
        mlp: a module that replaces the MLP.
        init_values: initial value of LayerScale, or one each for attention and MLP; 0 or None for no LayerScale.
    """

    #: The fields of `LayerPosition` that it uses, with the default attention.
    takes: ClassVar[frozenset[str]] = Attention.takes | {"inner"}

    @checked
    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_layer: Callable[[int], nn.Module] = nn.LayerNorm,
        act_layer: type[nn.Module] = nn.GELU,
        attn: nn.Module | None = None,
        mlp: nn.Module | None = None,
        init_values: float | tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        scales = init_values if isinstance(init_values, tuple) else (init_values, init_values)
        self.norm1 = norm_layer(dim)
        self.attn = attn or Attention(dim, num_heads, qkv_bias, attn_drop, proj_drop)
        self.ls1, self.ls2 = (LayerScale(dim, scale) if scale else nn.Identity() for scale in scales)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = mlp or Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Map tokens x: (B, N, D) to (B, N, D); the backbone applies the fields of `position` for the residual stream.

        `where` is passed to the attention: the grid, or the cache of a text.
        """
        x = x + self.drop_path1(self.ls1(self.attn(position.inside(self.norm1(x)), position, *where)))
        out: Tensor = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return out
