"""The parts of ViT-Adapter: a spatial prior, injectors into the tokens, and extractors from them."""

from __future__ import annotations

from functools import partial

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from graticule.dense.deformable import DeformableAttention

Shapes = list[tuple[int, int]]
_norm = partial(nn.LayerNorm, eps=1e-6)


class SpatialPrior(nn.Module):
    """Computes maps of strides 4, 8, 16 and 32 from images by convolutions, all with the channels of the ViT.

    Reference: ViT-Adapter (Chen et al., 2023), section 3.2; the names are those of its code.

    Args:
        in_chans: channels of the images.
        width: channels of the stem.
        dim: D.
        first: with 1, the finest map keeps the channels of the stem.
    """

    def __init__(self, in_chans: int, width: int, dim: int, first: int = 0) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_conv(in_chans, width, 2), *_conv(width, width), *_conv(width, width), nn.MaxPool2d(3, 2, 1)
        )
        self.conv2 = nn.Sequential(*_conv(width, 2 * width, 2))
        self.conv3 = nn.Sequential(*_conv(2 * width, 4 * width, 2))
        self.conv4 = nn.Sequential(*_conv(4 * width, 4 * width, 2))
        self.fc1 = nn.Identity() if first else nn.Conv2d(width, dim, 1)
        self.fc2 = nn.Conv2d(2 * width, dim, 1)
        self.fc3 = nn.Conv2d(4 * width, dim, 1)
        self.fc4 = nn.Conv2d(4 * width, dim, 1)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the four maps (B, D, H, W) of images (B, C, height, width)."""
        c1 = self.stem(images)
        c2 = self.conv2(c1)
        c3 = self.conv3(c2)
        c4 = self.conv4(c3)
        return [self.fc1(c1), self.fc2(c2), self.fc3(c3), self.fc4(c4)]


def _conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class DepthwiseOfLevels(nn.Module):
    """Applies one depth-wise 3 x 3 convolution to each of several maps, given as tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, shapes: Shapes) -> Tensor:
        """Map tokens (B, S, D) of maps of (H, W) to (B, S, D)."""
        parts = x.split([height * width for height, width in shapes], 1)
        maps = (part.transpose(1, 2).unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))
        return torch.cat([self.dwconv(one.contiguous()).flatten(2).transpose(1, 2) for one in maps], 1)


class ConvolutionalMlp(nn.Module):
    """An MLP with a depth-wise convolution before its activation."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = DepthwiseOfLevels(hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, shapes: Shapes) -> Tensor:
        """Map tokens (B, S, D) of maps of (H, W) to (B, S, D)."""
        out: Tensor = self.fc2(self.act(self.dwconv(self.fc1(x), shapes)))
        return out


class Injector(nn.Module):
    r"""Attention of the tokens of the ViT to the spatial features.

    .. math:: x' = x + \gamma \, attention(LN(x), LN(c))

    gamma is initialized to zero, so a pretrained ViT is unchanged at first.
    """

    def __init__(self, dim: int, levels: int, num_heads: int, points: int, ratio: float) -> None:
        super().__init__()
        self.query_norm = _norm(dim)
        self.feat_norm = _norm(dim)
        self.attn = DeformableAttention(dim, levels, num_heads, points, ratio)
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, at: Tensor, spatial: Tensor, shapes: Shapes) -> Tensor:
        """Map tokens x: (B, N, D) at `at` (1, N, 1, 2) to (B, N, D); `spatial` is (B, S, D) of maps of (H, W)."""
        out: Tensor = x + self.gamma * self.attn(self.query_norm(x), at, self.feat_norm(spatial), shapes)
        return out


class Extractor(nn.Module):
    r"""Attention of the spatial features to the tokens of the ViT.

    .. math:: c' = c + attention(LN(c), LN(x)), \quad c'' = c' + MLP(LN(c'))
    """

    def __init__(
        self, dim: int, num_heads: int, points: int, ratio: float, mlp_ratio: float, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.query_norm = _norm(dim)
        self.feat_norm = _norm(dim)
        self.attn = DeformableAttention(dim, 1, num_heads, points, ratio)
        self.ffn = ConvolutionalMlp(dim, int(dim * mlp_ratio))
        self.ffn_norm = _norm(dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, spatial: Tensor, at: Tensor, x: Tensor, grid: tuple[int, int], shapes: Shapes) -> Tensor:
        """Map spatial features (B, S, D) at `at` (1, S, 1, 2) to (B, S, D); x: (B, H * W, D), the tokens."""
        spatial = spatial + self.attn(self.query_norm(spatial), at, self.feat_norm(x), [grid])
        out: Tensor = spatial + self.drop_path(self.ffn(self.ffn_norm(spatial), shapes))
        return out


class Interaction(nn.Module):
    """An injector before some blocks of the ViT and an extractor after them; the last has two more extractors."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        points: int,
        ratio: float,
        mlp_ratio: float,
        drop_path: float,
        last: bool,
    ) -> None:
        super().__init__()
        self.injector = Injector(dim, 3, num_heads, points, ratio)
        self.extractor = Extractor(dim, num_heads, points, ratio, mlp_ratio, drop_path)
        self.extra_extractors = nn.ModuleList(
            Extractor(dim, num_heads, points, ratio, mlp_ratio, drop_path) for _ in range(2 if last else 0)
        )

    def extract(self, spatial: Tensor, at: Tensor, x: Tensor, grid: tuple[int, int], shapes: Shapes) -> Tensor:
        """Return the spatial features (B, S, D) after all extractors."""
        for extractor in (self.extractor, *self.extra_extractors):
            spatial = extractor(spatial, at, x, grid, shapes)
        return spatial
