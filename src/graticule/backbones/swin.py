"""Swin Transformer from timm's blocks, as a pyramid that takes PEGs between its blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock, WindowAttention
from torch import Tensor, nn

from graticule.backbones.pyramid import Pyramid
from graticule.grid import Grid
from graticule.joining import LayerPosition
from graticule.position import PositionBuilder


class SwinTransformer(Pyramid):
    """Shifted windows with a relative position bias of their own; what is told beside it acts on the tokens.

    With PEG behind the first block of every stage and global average pooling it is Swin + PEG + GAP of CPVT's
    Table 15. The names of the parameters are timm's; its head's (`head.fc`) is taken by `load_state_dict`.

    A window is never larger than the grid that a stage is built for, and a stage of one window does not shift
    it, at another size neither: that is timm's, and the published weights'.

    Reference: Swin Transformer (Liu et al., 2021); with PEG, CPVT (Chu et al., 2023), appendix B.5.

    Args:
        position: builds the position of a stage, beside the windows' own bias.
        img_size: pixels, a side or (height, width), multiples of 8 patches.
        patch_size: pixels, of the first stage.
        in_chans: channels of the image.
        num_classes: 0 for no head.
        global_pool: 'avg' or '' (none); there is no class token.
        embed_dim: D of the first stage; it doubles from stage to stage.
        depths: blocks of each stage.
        num_heads: h of each stage.
        window_size: patches, a side.
        mlp_ratio: hidden channels of the MLPs, as a multiple of D.
        qkv_bias: whether the projections have a bias.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout on the tokens that enter a stage.
        proj_drop_rate: dropout on the outputs of attention and MLP.
        attn_drop_rate: dropout on attention weights.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        norm_layer: builds a norm from D.
    """

    takes = frozenset({"pre", "before", "after"})
    stage_lists = "layers"

    def __init__(
        self,
        position: PositionBuilder,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: Callable[[int], nn.Module] | None = None,
    ) -> None:
        norm: Any = norm_layer or nn.LayerNorm
        if window_size < 1:
            raise ValueError(f"`window_size` must be at least 1, got {window_size}.")
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"`drop_path_rate` must be in [0, 1), got {drop_path_rate}.")
        dims = [embed_dim << stage for stage in range(len(depths))]
        super().__init__(
            position,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dims=dims,
            depths=depths,
            num_heads=num_heads,
            prefix=0,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            norm_layer=norm,
        )
        self.patch_embed = PatchEmbed(None, patch_size, in_chans, embed_dim, norm_layer=norm, strict_img_size=False)
        rates = iter(torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist())
        self.layers = nn.ModuleList()
        for stage, (dim, at) in enumerate(zip(dims, self.grid.pyramid(len(depths)), strict=True)):
            layer: Any = nn.Module()
            layer.downsample = PatchMerging(dims[stage - 1], dim, norm) if stage else nn.Identity()
            layer.blocks = nn.ModuleList(
                _WindowBlock(
                    dim,
                    at.shape,
                    num_heads[stage],
                    window_size=window_size,
                    shift_size=window_size // 2 if index % 2 else 0,
                    dynamic_mask=True,
                    mlp_ratio=mlp_ratio,
                    qkv_bias=qkv_bias,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    drop_path=next(rates),
                    norm_layer=norm,
                )
                for index in range(depths[stage])
            )
            self.layers.append(layer)
        self.init_weights()

    def embed(self, stage: int, x: Tensor) -> Tensor:
        """Cut images into patches, or merge those of the map of the stage before; tokens (B, N, D)."""
        if stage == 0:
            return self.patch_embed(x)
        merge: Any = self.layers[stage]
        return merge.downsample(x.permute(0, 2, 3, 1)).flatten(1, 2)

    def block(self, stage: int, index: int) -> Any:
        """Return a block of a stage."""
        layer: Any = self.layers[stage]
        return partial(_on_tokens, layer.blocks[index])

    def _block_name(self, stage: int) -> str:
        return f"layers.{stage}.blocks.{self.depths[stage] - 1}"

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of all that says where tokens are, the windows' bias tables included."""
        tables = {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}
        return super().no_weight_decay() | tables

    def own_name(self, published: str) -> str:
        """Return our name of a parameter of timm's."""
        return re.sub(r"^head\.fc\.", "head.", published)

    def published_name(self, own: str) -> str:
        """Return the name of a parameter in timm."""
        return re.sub(r"^head\.", "head.fc.", own)


class _WindowAttention(WindowAttention):
    """timm's attention within windows, which can also say its weights."""

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the attention weights of windows x: (B * windows, M, D), (B * windows, h, M, M)."""
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B * windows, h, M, d)
        logits = q * self.scale @ k.transpose(-2, -1) + self._get_rel_pos_bias()
        if mask is not None:  # (windows, M, M)
            logits = (logits.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        return logits.softmax(-1)


class _WindowBlock(SwinTransformerBlock):
    """timm's block, with an attention that can say its weights."""

    def __init__(self, dim: int, grid: tuple[int, int], num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, grid, num_heads, **kwargs)
        self.attn = _WindowAttention(
            dim,
            num_heads,
            window_size=self.window_size,
            qkv_bias=kwargs["qkv_bias"],
            attn_drop=kwargs["attn_drop"],
            proj_drop=kwargs["proj_drop"],
        )


def _on_tokens(block: nn.Module, x: Tensor, position: LayerPosition, grid: Grid) -> Tensor:
    """Run a block of timm's, which takes a map of channels last, on tokens x: (B, N, D) of `grid`."""
    return block(x.unflatten(1, grid.shape)).flatten(1, 2)
