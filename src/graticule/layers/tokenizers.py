"""Tokenizers of images: patches, and the interface of other tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.layers.helpers import to_2tuple
from torch import nn

from graticule.position.grid import Grid


class Patches(PatchEmbed):
    """Non-overlapping patches, each mapped by a linear layer: timm's `PatchEmbed`, with the grid of an image.

    Args:
        img_size: (height, width) in pixels.
        patch_size: (height, width) in pixels.
        in_chans: channels of the image.
        embed_dim: D.
        bias: whether the linear layer has a bias.
        norm_layer: builds a norm of the patches from D; None for no norm.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        bias: bool = True,
        norm_layer: Callable[[int], nn.Module] | None = None,
    ) -> None:
        patch_grid(img_size, patch_size)  # raises for sizes that do not fit
        square: Any = patch_size  # timm annotates an int and accepts both sides
        super().__init__(img_size, square, in_chans, embed_dim, norm_layer, bias=bias, strict_img_size=False)

    @property
    def reduction(self) -> tuple[int, int]:
        """(height, width) of the patch of a token, in pixels."""
        height, width = self.patch_size
        return height, width

    def grid(self, image: tuple[int, int], prefix: int = 0) -> Grid:
        """Return the grid of an image of (height, width) pixels, multiples of the patch."""
        return patch_grid(image, self.reduction, prefix)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Set another image or patch size for the position information."""
        image = to_2tuple(self.img_size if img_size is None else img_size)
        patch_grid(image, to_2tuple(self.patch_size if patch_size is None else patch_size))
        super().set_input_size(img_size=image, patch_size=None if patch_size is None else to_2tuple(patch_size))


class Tokenizer(nn.Module, ABC):
    """Maps images (B, C, height, width) to tokens (B, N, D), row by row.

    Args:
        img_size: (height, width) in pixels, the size of the position information.
        patch_size: (height, width) of a patch, as the tokenizer defines it.
    """

    def __init__(self, img_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        super().__init__()
        self.img_size = img_size
        self.patch_size = patch_size

    @property
    @abstractmethod
    def reduction(self) -> tuple[int, int]:
        """(height, width) of the patch of a token, in pixels."""

    def grid(self, image: tuple[int, int], prefix: int = 0) -> Grid:
        """Return the grid of an image of (height, width) pixels.

        Raises:
            ValueError: if they are not multiples of the patch of a token.
        """
        return patch_grid(image, self.reduction, prefix)

    def set_input_size(self, img_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        """Set another image size for the position information."""
        if patch_size != self.patch_size:
            raise ValueError(
                f"`patch_size` must stay {self.patch_size[0]} x {self.patch_size[1]} in {type(self).__name__}, "
                f"got {patch_size[0]} x {patch_size[1]}."
            )
        self.grid(img_size)
        self.img_size = img_size


def patch_grid(image: tuple[int, int], patch: tuple[int, int], prefix: int = 0, step: int = 1) -> Grid:
    """Return the grid of an image of (height, width) pixels with `step` tokens per side of a `patch`.

    Raises:
        ValueError: if a side of the image is not a multiple of the patch's.
    """
    coarse = Grid.of_image(image, patch)
    return Grid(coarse.height * step, coarse.width * step, prefix=prefix)


torch.fx.wrap("patch_grid")  # it compares sizes, so torch.fx records the call as one node
