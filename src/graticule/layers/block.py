"""The pre-norm transformer block, which gets position as a `LayerPosition`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar, cast

import torch
from timm.layers import DropPath, LayerScale, Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from graticule.layers.attention import Attention
from graticule.position.layer import LayerPosition
from graticule.registry.checks import checked, known_name
from graticule.registry.fields import Channels, Ratio, ShareBelowOne, SmallCount


@register_notrace_module  # torch.fx records the call as one node, because it depends on the position
class Block(nn.Module):
    r"""Attention, then an MLP, each after a norm and with a residual connection.

    .. math:: x' = x + MSA(LN(x) + p), \quad x'' = x' + MLP(LN(x'))

    where p is `after_norm` of the layer's position, if any. LayerScale multiplies the output of each branch by a number
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
    takes: ClassVar[frozenset[str]] = Attention.takes | {"after_norm"}
    #: Whether it reads the residual stream through `norm1` and `norm2` only, and adds `after_norm` after the first.
    pre_norm: ClassVar[bool] = True

    @checked
    def __init__(
        self,
        dim: Channels,
        num_heads: SmallCount,
        mlp_ratio: Ratio = 4.0,
        qkv_bias: bool = True,
        proj_drop: ShareBelowOne = 0.0,
        attn_drop: ShareBelowOne = 0.0,
        drop_path: ShareBelowOne = 0.0,
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
        x = x + self.drop_path1(self.ls1(self.attn(position.add_after_norm(self.norm1(x)), position, *where)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


@register_notrace_module
class PostNormBlock(Block):
    r"""Attention, then an MLP, each with a norm of its output and a residual connection.

    .. math:: x' = x + LN(MSA(x + p)), \quad x'' = x' + LN(MLP(x'))

    where p is `after_norm` of the layer's position, if any. `init_values` is the initial value of the weights of the
    norms; there is no LayerScale.

    Reference: Swin Transformer V2 (Liu et al., 2022), section 3.2; timm's `res-post-norm` models and EVA-02-E.
    """

    pre_norm = False

    def __init__(self, *args: Any, init_values: float | tuple[float, float] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if init_values:
            scales = init_values if isinstance(init_values, tuple) else (init_values, init_values)
            for norm, scale in zip((self.norm1, self.norm2), scales, strict=True):
                nn.init.constant_(cast("Tensor", norm.weight), scale)

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Map tokens x: (B, N, D) to (B, N, D)."""
        x = x + self.drop_path1(self.norm1(self.attn(position.add_after_norm(x), position, *where)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


@register_notrace_module
class ParallelBlock(Block):
    r"""Attention and an MLP in parallel, on the same normalized tokens.

    .. math:: x' = x + MSA(LN(x) + p) + MLP(LN(x))

    where p is `after_norm` of the layer's position, if any. There is one norm, one LayerScale and one stochastic depth.

    Reference: Scaling Vision Transformers to 22 Billion Parameters (Dehghani et al., 2023), section 2.
    """

    pre_norm = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.norm2, self.ls2, self.drop_path2

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Map tokens x: (B, N, D) to (B, N, D)."""
        y = self.norm1(x)
        return x + self.drop_path1(self.ls1(self.attn(position.add_after_norm(y), position, *where) + self.mlp(y)))


@register_notrace_module
class AttentionDropPathBlock(Block):
    """A block whose stochastic depth drops the attention alone, never the MLP.

    Reference: transformers' Swin, otherwise as Swin Transformer (Liu et al., 2021), whose code drops both.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drop_path2 = nn.Identity()


class _Branch(nn.Module):
    """A norm, a module, LayerScale and stochastic depth."""

    def __init__(self, norm: nn.Module, kind: str, module: nn.Module, scale: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm = norm
        self.kind = kind
        self.add_module(kind, module)
        self.ls = scale
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, position: LayerPosition | None = None, *where: Any) -> Tensor:
        """Compute the term that the branch adds to x: (B, N, D); `position` is for an attention."""
        y = self.norm(x)
        if position is None:
            y = self.get_submodule(self.kind)(y)
        else:
            y = self.get_submodule(self.kind)(position.add_after_norm(y), position, *where)
        return self.drop_path(self.ls(y))


@register_notrace_module
class ParallelBranchesBlock(nn.Module):
    r"""Several attentions in parallel, then as many MLPs, each with its own norm and LayerScale.

    .. math:: x' = x + \sum_i MSA_i(LN_i(x) + p), \quad x'' = x' + \sum_i MLP_i(LN'_i(x'))

    where p is `after_norm` of the layer's position, if any; all attentions have the same position. The arguments are
    as in `Block`.

    Reference: Three Things Everyone Should Know about Vision Transformers (Touvron et al., 2022), Eq. 3.

    Args:
        branches: number of attentions, and of MLPs.
    """

    def __init__(self, *args: Any, branches: int = 2, drop_path: float = 0.0, **kwargs: Any) -> None:
        super().__init__()
        self.attns, self.ffns = nn.ModuleList(), nn.ModuleList()
        first = Block(*args, **kwargs)
        for block in [first, *(deepcopy(first) for _ in range(branches - 1))]:  # the weights are drawn by the backbone
            self.attns.append(_Branch(block.norm1, "attn", block.attn, block.ls1, drop_path))
            self.ffns.append(_Branch(block.norm2, "mlp", block.mlp, block.ls2, drop_path))

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Map tokens x: (B, N, D) to (B, N, D)."""
        x = x + torch.stack([branch(x, position, *where) for branch in self.attns]).sum(0)
        return x + torch.stack([branch(x) for branch in self.ffns]).sum(0)


#: Blocks of a transformer by name.
BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "pre_norm": Block,
    "attention_drop_path": AttentionDropPathBlock,
    "post_norm": PostNormBlock,
    "parallel": ParallelBlock,
    "parallel_branches": ParallelBranchesBlock,
}


def block_layer_of(block_layer: str | Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return the builder of a block: a callable unchanged, or the one of a name."""
    return BLOCKS[known_name("block_layer", block_layer, BLOCKS)] if isinstance(block_layer, str) else block_layer
