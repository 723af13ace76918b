"""Down-sampling by convolutions that overlap: the stem and the merging of PosMLP, and their linear alternatives."""

from __future__ import annotations

from timm.layers import PatchEmbed
from torch import Tensor, nn


class ConvPatchEmbed(nn.Module):
    """Three 3 x 3 convolutions from an image to tokens of patches of 4, each with batch norm, ReLU between them.

    Strides 2, 2 and 1, channels C / 2, C / 2 and C. The paper draws three convolutions and gives neither: with
    these the multiply-adds of its Tables 3 and 10 come out (5.09 G against 5.10 for gMLP + ConvLHS).

    Reference: PosMLP (Wang et al., 2022), section 4.2, Figure 2 (b).
    """

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.proj = nn.Sequential(
            nn.Conv2d(in_chans, half, 3, 2, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, 2, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, dim, 3, 1, 1, bias=False),
            nn.BatchNorm2d(dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Take images (B, C, height, width) to tokens (B, N, D)."""
        return self.proj(x).flatten(2).transpose(1, 2)


class ConvPatchMerging(nn.Module):
    """A depth-wise 3 x 3 convolution of stride 2, two channels out for each one in.

    Reference: PosMLP (Wang et al., 2022), section 4.2, Figure 2 (c).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(dim, 2 * dim, 3, 2, 1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        """Take a map (B, D, H, W) to tokens (B, N / 4, 2D)."""
        return self.proj(x).flatten(2).transpose(1, 2)


class LinearPatchMerging(nn.Module):
    """Four neighbours side by side, then a linear layer from 4D to 2D channels.

    Reference: PosMLP (Wang et al., 2022), Table 10, "Linear"; Swin Transformer (Liu et al., 2021), without its norm.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(dim, 2 * dim, 2, 2, bias=False)  # the same as a linear layer on four neighbours

    def forward(self, x: Tensor) -> Tensor:
        """Take a map (B, D, H, W) to tokens (B, N / 4, 2D)."""
        return self.proj(x).flatten(2).transpose(1, 2)


def linear_patch_embed(in_chans: int, dim: int) -> PatchEmbed:
    """Build the linear alternative to `ConvPatchEmbed`: patches of 4, cut without overlap."""
    return PatchEmbed(None, 4, in_chans, dim, strict_img_size=False)
