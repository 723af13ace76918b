"""What turns an image into tokens: patches, CCT's convolutions, T2T's soft splits, CeiT's image-to-tokens."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed
from timm.layers.helpers import to_2tuple
from timm.models import register_notrace_module
from torch import Tensor, nn

from graticule.grid import Grid


class Patches(PatchEmbed):
    """Patches cut without overlap, each through a linear layer: timm's, with the grid of an image."""

    def __init__(self, img_size: tuple[int, int], patch_size: tuple[int, int], in_chans: int, embed_dim: int) -> None:
        patch_grid(img_size, patch_size)  # refuses what does not fit with its own message
        square: Any = patch_size  # timm annotates an int and takes both sides
        super().__init__(img_size, square, in_chans, embed_dim, strict_img_size=False)

    @property
    def reduction(self) -> tuple[int, int]:
        """(height, width) in pixels of what a token stands for."""
        height, width = self.patch_size
        return height, width

    def grid(self, image: tuple[int, int], prefix: int = 0) -> Grid:
        """Return the grid of an image of (height, width) pixels, multiples of the patch."""
        return patch_grid(image, self.reduction, prefix)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Make another image or patch size the one that position information is held for."""
        image = to_2tuple(self.img_size if img_size is None else img_size)
        patch_grid(image, to_2tuple(self.patch_size if patch_size is None else patch_size))
        super().set_input_size(img_size=image, patch_size=None if patch_size is None else to_2tuple(patch_size))


class Tokenizer(nn.Module, ABC):
    """Turns images (B, C, height, width) into tokens (B, N, D), row by row.

    Args:
        img_size: (height, width) in pixels, which position information is held for.
        patch_size: (height, width) of a patch, as the tokenizer defines it.
    """

    def __init__(self, img_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        super().__init__()
        self.img_size = img_size
        self.patch_size = patch_size

    @property
    @abstractmethod
    def reduction(self) -> tuple[int, int]:
        """(height, width) in pixels of what a token stands for."""

    def grid(self, image: tuple[int, int], prefix: int = 0) -> Grid:
        """Return the grid of an image of (height, width) pixels.

        Raises:
            ValueError: if they are not multiples of what a token stands for.
        """
        return patch_grid(image, self.reduction, prefix)

    def set_input_size(self, img_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        """Make another image size the one that position information is held for."""
        if patch_size != self.patch_size:
            raise ValueError(
                f"`patch_size` must stay {self.patch_size[0]} x {self.patch_size[1]} in {type(self).__name__}, "
                f"got {patch_size[0]} x {patch_size[1]}."
            )
        self.grid(img_size)
        self.img_size = img_size


def patch_grid(image: tuple[int, int], patch: tuple[int, int], prefix: int = 0, step: int = 1) -> Grid:
    """Return the grid of an image of (height, width) pixels that has `step` tokens for each side of a `patch`.

    Raises:
        ValueError: if a side of the image is not a multiple of the patch's.
    """
    coarse = Grid.of_image(image, patch)
    return Grid(coarse.height * step, coarse.width * step, prefix)


torch.fx.wrap("patch_grid")  # it compares sizes, so torch.fx records the call as one node


class ConvolutionalTokenizer(Tokenizer):
    """CCT's: convolutions without bias, each followed by a ReLU and a max pooling.

    Any image goes in that leaves at least one token; as in its code, nothing must be a multiple of anything.

    Reference: Escaping the Big Data Paradigm with Compact Transformers (Hassani et al., 2021), section 3.

    Args:
        img_size: (height, width) in pixels.
        patch_size: kernel of the convolutions, (side, side).
        in_chans: channels of the image.
        embed_dim: D, channels of the last convolution.
        layers: number of convolutions; those before the last have 64 channels.
        stride: of the convolutions; max(1, kernel // 2 - 1) by default, as in its code.
        padding: of the convolutions; max(1, kernel // 2) by default.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        layers: int = 1,
        stride: int | None = None,
        padding: int | None = None,
    ) -> None:
        super().__init__(img_size, patch_size)
        kernel = max(patch_size)
        if patch_size[0] != patch_size[1] or layers < 1:
            raise ValueError(f"`patch_size` must be square and `layers` at least 1, got {patch_size} and {layers}.")
        self.kernel = kernel
        self.stride = max(1, kernel // 2 - 1) if stride is None else stride
        self.padding = max(1, kernel // 2) if padding is None else padding
        channels = [in_chans, *[64] * (layers - 1), embed_dim]
        self.conv_layers = nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv2d(before, after, kernel, self.stride, self.padding, bias=False),
                    nn.ReLU(),
                    nn.MaxPool2d(3, 2, 1),
                )
                for before, after in itertools.pairwise(channels)
            ]
        )
        for layer in self.conv_layers:
            assert isinstance(layer, nn.Sequential) and isinstance(layer[0], nn.Conv2d)
            nn.init.kaiming_normal_(layer[0].weight)

    @property
    def reduction(self) -> tuple[int, int]:
        """(height, width) in pixels of what a token stands for."""
        return to_2tuple((2 * self.stride) ** len(self.conv_layers))

    def grid(self, image: tuple[int, int], prefix: int = 0) -> Grid:
        """Return the grid of an image of (height, width) pixels.

        Raises:
            ValueError: if the convolutions leave nothing of it.
        """
        return convolved_grid(image, len(self.conv_layers), (self.kernel, self.stride, self.padding), prefix)

    def forward(self, x: Tensor) -> Tensor:
        """Take images (B, C, height, width) to tokens (B, N, D)."""
        return self.conv_layers(x).flatten(2).transpose(1, 2)


def convolved_grid(image: tuple[int, int], layers: int, convolution: tuple[int, int, int], prefix: int = 0) -> Grid:
    """Return the grid that convolutions of (kernel, stride, padding), each with a max pooling, make of an image.

    Raises:
        ValueError: if nothing is left of it.
    """
    sides = list(image)
    for kernel, stride, padding in [convolution, (3, 2, 1)] * layers:
        sides = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
    if min(sides) < 1:
        raise ValueError(f"`img_size` must be large enough for one token, got {image[0]} x {image[1]}.")
    return Grid(sides[0], sides[1], prefix)


torch.fx.wrap("convolved_grid")  # it compares sizes, so torch.fx records the call as one node


class ImageToTokens(Tokenizer):
    """CeiT's: a convolution of stride 2, batch norm and max pooling, then patches of the map that they leave.

    Reference: Incorporating Convolution Designs into Visual Transformers (CeiT, Yuan et al., 2021), section 3.2.

    Args:
        img_size: (height, width) in pixels.
        patch_size: of the map, which is a quarter of the image a side.
        in_chans: channels of the image.
        embed_dim: D.
        channels: of the map.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        channels: int = 64,
    ) -> None:
        super().__init__(img_size, patch_size)
        self.conv = nn.Conv2d(in_chans, channels, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.proj = nn.Conv2d(channels, embed_dim, patch_size, patch_size)

    @property
    def reduction(self) -> tuple[int, int]:
        """(height, width) in pixels of what a token stands for."""
        return 4 * self.patch_size[0], 4 * self.patch_size[1]

    def forward(self, x: Tensor) -> Tensor:
        """Take images (B, C, height, width) to tokens (B, N, D)."""
        return self.proj(self.maxpool(self.bn(self.conv(x)))).flatten(2).transpose(1, 2)


class TokensToToken(Tokenizer):
    """T2T-ViT's: three soft splits, and a small transformer on the tokens of the first two.

    A soft split lays overlapping windows side by side as tokens: 7 x 7 every 4 pixels, then twice 3 x 3 every 2.

    Reference: Tokens-to-Token ViT (Yuan et al., 2021), section 3.1.

    Args:
        img_size: (height, width) in pixels, multiples of 16.
        patch_size: 16 x 16, what a token stands for.
        in_chans: channels of the image.
        embed_dim: D.
        token_dim: channels of the tokens between the splits.
        tokens_type: 'performer' or 'transformer', what the two small transformers are.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        token_dim: int = 64,
        tokens_type: Literal["performer", "transformer"] = "performer",
    ) -> None:
        super().__init__(img_size, patch_size)
        if tokens_type not in ("performer", "transformer"):
            raise ValueError(f"`tokens_type` must be 'performer' or 'transformer', got {tokens_type!r}.")
        if patch_size != (16, 16):
            raise ValueError(f"`patch_size` must be 16, which the three splits make, got {patch_size}.")
        kind = TokenPerformer if tokens_type == "performer" else TokenTransformer
        self.attention1 = kind(in_chans * 7 * 7, token_dim)
        self.attention2 = kind(token_dim * 3 * 3, token_dim)
        self.project = nn.Linear(token_dim * 3 * 3, embed_dim)

    @property
    def reduction(self) -> tuple[int, int]:
        """(height, width) in pixels of what a token stands for."""
        return 16, 16

    def forward(self, x: Tensor) -> Tensor:
        """Take images (B, C, height, width) to tokens (B, N, D)."""
        sides = (x.shape[-2] // 4, x.shape[-1] // 4)
        x = self.attention1(F.unfold(x, 7, stride=4, padding=2).transpose(1, 2))
        x = self.attention2(_split(x, sides))
        return self.project(_split(x, (sides[0] // 2, sides[1] // 2)))


def _split(x: Tensor, sides: Sequence[int]) -> Tensor:
    """Lay 3 x 3 windows of tokens x: (B, N, C), every 2, side by side: (B, N / 4, 9C)."""
    maps = x.transpose(1, 2).unflatten(-1, tuple(sides))
    return F.unfold(maps, 3, stride=2, padding=1).transpose(1, 2)


class TokenTransformer(nn.Module):
    """A transformer layer of one head whose tokens come out narrower; the values are the shortcut.

    The logits are scaled by the channels that come in, not by those of a head, as in its code.

    Reference: Tokens-to-Token ViT (Yuan et al., 2021), Eq. 1.
    """

    def __init__(self, dim: int, token_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(dim, 3 * token_dim, bias=False), "proj": nn.Linear(token_dim, token_dim)}
        )
        self.norm2 = nn.LayerNorm(token_dim)
        self.mlp = Mlp(token_dim, token_dim)
        self.scale = dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """Take x: (B, N, C) to (B, N, token_dim)."""
        q, k, v = self.attn["qkv"](self.norm1(x)).unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        x = (v + self.attn["proj"](y)).squeeze(1)
        return x + self.mlp(self.norm2(x))


@register_notrace_module  # torch.fx records the call as one node: autocast depends on the device
class TokenPerformer(nn.Module):
    r"""As `TokenTransformer`, with attention that is linear in N by positive random features.

    .. math:: \phi(x) = e^{w x - |x|^2 / 2} / \sqrt m, \quad
              y_i = \frac{\phi(q_i)^T \sum_j \phi(k_j) v_j^T}{\phi(q_i)^T \sum_j \phi(k_j) + 10^{-8}}

    The m = C / 2 features w are orthogonal, drawn once and not learned. Never below float32.

    Reference: Rethinking Attention with Performers (Choromanski et al., 2021), as T2T-ViT uses it.
    """

    def __init__(self, dim: int, token_dim: int, drop: float = 0.1) -> None:
        super().__init__()
        self.kqv = nn.Linear(dim, 3 * token_dim)
        self.dp = nn.Dropout(drop)
        self.proj = nn.Linear(token_dim, token_dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(token_dim)
        self.mlp = nn.Sequential(
            nn.Linear(token_dim, token_dim), nn.GELU(), nn.Linear(token_dim, token_dim), nn.Dropout(drop)
        )
        self.features = token_dim // 2
        self.w = nn.Parameter(torch.empty(self.features, token_dim), requires_grad=False)
        nn.init.orthogonal_(self.w, math.sqrt(self.features))

    def forward(self, x: Tensor) -> Tensor:
        """Take x: (B, N, C) to (B, N, token_dim)."""
        k, q, v = self.kqv(self.norm1(x)).chunk(3, -1)
        x = v + self.dp(self.proj(self._attend(q, k, v).to(v.dtype)))
        return x + self.mlp(self.norm2(x))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind = q.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            wide = torch.promote_types(self.w.dtype, torch.float32)
            keys, queries = self._features(k.to(wide)), self._features(q.to(wide))  # (B, N, m)
            told = keys.transpose(1, 2) @ v.to(wide)  # (B, m, token_dim)
            total = queries @ keys.sum(1).unsqueeze(-1)  # (B, N, 1)
            return queries @ told / (total + 1e-8)

    def _features(self, x: Tensor) -> Tensor:
        return (x @ self.w.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(self.features)
