"""Sampling in PosMLP: patch embedding of an image, and merging of patches between stages."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

#: The norm after a convolution: over the batch for each channel, or over the channels of each position.
ConvNorm = Literal["batch", "layer"]


class ConvPatchEmbed(nn.Module):
    """A patch embedding for patches of 4: three convolutions, each followed by a norm, with GELU between them.

    3 x 3 of stride 2 to C / 2 channels, 3 x 3 of stride 2 to C, and 1 x 1; the paper draws three convolutions, and
    everything else is as in the released code.

    Reference: PosMLP (Wang et al., 2022), section 4.2, Figure 2 (b).

    Args:
        in_chans: channels of the image.
        dim: C.
        norm: 'batch' for BatchNorm, 'layer' for LayerNorm.
        act_layer: the activation.
    """

    def __init__(self, in_chans: int, dim: int, norm: ConvNorm = "batch", act_layer: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        half = dim // 2
        self.projs = nn.ModuleList(
            [
                nn.Conv2d(in_chans, half, 3, stride=2, padding=1),
                nn.Conv2d(half, dim, 3, stride=2, padding=1),
                nn.Conv2d(dim, dim, 1),
            ]
        )
        self.norms = nn.ModuleList(_norm(norm, channels) for channels in (half, dim, dim))
        self.act = act_layer()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, height, width) to tokens (B, N, D)."""
        last = len(self.projs) - 1
        for layer, (proj, norm) in enumerate(zip(self.projs, self.norms, strict=True)):
            x = _normalized(norm, proj(x))
            x = x if layer == last else self.act(x)
        return x.flatten(2).transpose(1, 2)


class LinearPatchEmbed(nn.Module):
    """A patch embedding for patches of 4 without overlap: a linear layer and the LayerNorm of the released code.

    Reference: PosMLP (Wang et al., 2022), Table 10, "PE Linear".
    """

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, 4, stride=4)
        self.norm = nn.LayerNorm(dim)  # eps is 1e-5, whatever the model's is, as in the released code

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, height, width) to tokens (B, N, D)."""
        out: Tensor = self.norm(self.proj(x).flatten(2).transpose(1, 2))
        return out


class ConvPatchMerging(nn.Module):
    """A patch merging: a 3 x 3 convolution of stride 2, by default to twice the channels, followed by a norm.

    Reference: PosMLP (Wang et al., 2022), section 4.2, Figure 2 (c); the norm is that of the released code.

    Args:
        dim: D.
        out_dim: D'; a multiple of D if `depthwise`.
        norm: 'layer' for LayerNorm, 'batch' for BatchNorm.
        depthwise: D' / D output channels per input channel, two in the paper; if False, a dense convolution.
    """

    def __init__(self, dim: int, out_dim: int, norm: ConvNorm = "layer", depthwise: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, out_dim, 3, stride=2, padding=1, groups=dim if depthwise else 1)
        self.norm = _norm(norm, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map a map (B, D, H, W) to tokens (B, N / 4, D')."""
        return _normalized(self.norm, self.conv(x)).flatten(2).transpose(1, 2)


class LinearPatchMerging(nn.Module):
    """A patch merging that concatenates four neighbors, normalizes them and maps 4D channels to 2D.

    The order of the neighbors is (even row, even column), (odd, even), (even, odd), (odd, odd).

    Reference: PosMLP (Wang et al., 2022), Table 10, "PM Linear"; Swin Transformer (Liu et al., 2021).
    """

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=1e-6)
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map a map (B, D, H, W) to tokens (B, N / 4, 2D)."""
        x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (B, D, H / 2, 2, W / 2, 2)
        out: Tensor = self.reduction(self.norm(x.permute(0, 2, 4, 5, 3, 1).flatten(3).flatten(1, 2)))
        return out


def _norm(kind: ConvNorm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-6) if kind == "batch" else nn.LayerNorm(channels, eps=1e-6)


def _normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalize a map (B, D, H, W)."""
    if isinstance(norm, nn.LayerNorm):
        out: Tensor = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    else:
        out = norm(x)
    return out
