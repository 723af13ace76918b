"""The decoders of Segmenter: a linear layer per patch, and the mask transformer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.backbones.token_model import init_linear
from graticule.dense.decoders import Decoder, register_decoder
from graticule.layers.block import Block
from graticule.registry.checks import checked


@register_decoder("segmenter_linear")
class LinearDecoder(Decoder):
    """Classifies each patch by a linear layer.

    Reference: Segmenter (Strudel et al., 2021), section 3.2.
    """

    plain_neck = None
    tokens = True

    @checked
    def __init__(self, inputs: Sequence[int], strides: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(inputs[-1], num_classes)
        init_linear(self.head)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) of the last map."""
        logits: Tensor = self.head(maps[-1].movedim(1, -1))
        return logits.movedim(-1, 1)


@register_decoder("segmenter_mask")
class MaskTransformer(Decoder):
    r"""Appends one learned token per class to the patches, applies blocks to all, and compares patches with classes.

    .. math:: logits = LN(\hat{z} W_p \cdot \hat{c} W_c), \quad \hat{z}, \hat{c}: \text{after the blocks, of length 1}

    The blocks add no position information. All norms have an epsilon of 1e-5, as in Segmenter's code.

    Reference: Segmenter (Strudel et al., 2021), section 3.2.

    Args:
        inputs: channels of the maps, of which the last is decoded.
        strides: their pixels per cell.
        num_classes: number of classes.
        depth: number of blocks.
        dim: channels of the blocks; those of the map by default.
        num_heads: h; one per 64 channels by default.
        mlp_ratio: hidden channels of the MLPs, as a multiple of `dim`.
        drop: dropout on the outputs of attention and MLP and on attention weights.
        drop_path: stochastic depth of the last block; it grows linearly from 0 at the first.
    """

    plain_neck = None
    tokens = True

    @checked
    def __init__(
        self,
        inputs: Sequence[int],
        strides: Sequence[int],
        num_classes: int,
        depth: int = 2,
        dim: int | None = None,
        num_heads: int | None = None,
        mlp_ratio: float = 4.0,
        drop: float = 0.1,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        dim = inputs[-1] if dim is None else dim
        num_heads = max(1, dim // 64) if num_heads is None else num_heads
        norm = partial(nn.LayerNorm, eps=1e-5)
        rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()
        self.num_classes = num_classes
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, mlp_ratio, proj_drop=drop, attn_drop=drop, drop_path=rate, norm_layer=norm)
            for rate in rates
        )
        self.cls_emb = nn.Parameter(torch.empty(1, num_classes, dim))
        self.proj_dec = nn.Linear(inputs[-1], dim)
        self.proj_patch = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.proj_classes = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.decoder_norm = norm(dim)
        self.mask_norm = norm(num_classes)
        self.apply(init_linear)
        trunc_normal_(self.cls_emb, std=0.02)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return logits (B, num_classes, H, W) of the last map."""
        last = maps[-1]
        x = self.proj_dec(last.flatten(2).transpose(1, 2))
        x = torch.cat([x, self.cls_emb.expand(x.shape[0], -1, -1)], 1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_norm(x)
        patches = x[:, : -self.num_classes] @ self.proj_patch
        classes = x[:, -self.num_classes :] @ self.proj_classes
        patches, classes = (y / y.norm(dim=-1, keepdim=True) for y in (patches, classes))
        logits: Tensor = self.mask_norm(patches @ classes.mT)
        out: Tensor = logits.transpose(1, 2).unflatten(-1, last.shape[-2:])
        return out
