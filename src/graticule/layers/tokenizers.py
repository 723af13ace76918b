"""Tokenizers of images: patches, and the interface of other tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from graticule.position.grid import Grid
from graticule.position.places import Shape, by
from graticule.registry.checks import Checked
from graticule.registry.fields import Side
from graticule.system.symbolic import ceiling

#: What becomes of sides that are no multiples of the patch: they are refused, cut, or padded.
Fit = Literal["exact", "floor", "pad"]


class Patches(PatchEmbed):
    """Non-overlapping patches, each mapped by a linear layer: timm's `PatchEmbed`, with the grid of an image.

    A video or a volume (B, C, depth, height, width) has patches of three sides.

    Args:
        img_size: (height, width) in pixels, or (depth, height, width).
        patch_size: (height, width) in pixels, or (depth, height, width).
        in_chans: channels of the image.
        embed_dim: D.
        bias: whether the linear layer has a bias.
        norm_layer: builds a norm of the patches from D; None for no norm.
        frames: number of frames of a patch of a model of videos, for which an image is repeated so often.
        fit: which sizes it accepts, as in `fit_images`; the images of `forward` have been fitted.
    """

    def __init__(
        self,
        img_size: Shape,
        patch_size: Shape,
        in_chans: int,
        embed_dim: int,
        bias: bool = True,
        norm_layer: Callable[[int], nn.Module] | None = None,
        frames: int = 1,
        fit: Fit = "exact",
    ) -> None:
        grid = patch_grid(img_size, patch_size, fit=fit)  # raises for sizes that do not fit
        image: Any = img_size[-2:]
        square: Any = patch_size[-2:]  # timm annotates an int and accepts both sides
        super().__init__(image, square, in_chans, embed_dim, norm_layer, bias=bias, strict_img_size=False)
        self.frames, self.fit = frames, fit
        if grid.ndim == 3 or frames > 1:
            sides: Any = (frames, *patch_size) if grid.ndim == 2 else patch_size
            self.proj: Any = nn.Conv3d(in_chans, embed_dim, sides, sides, bias=bias)
        self.set_sizes(img_size, patch_size)

    def set_sizes(self, image: Shape, patch: Shape) -> None:
        """Set timm's attributes for the sizes of a video or volume, which timm does not know."""
        if len(image) > 2:
            grid = patch_grid(image, patch, fit=self.fit)
            self.img_size, self.patch_size = image, patch
            self.grid_size, self.num_patches = grid.shape, grid.patches

    def forward(self, x: Tensor) -> Tensor:
        """Turn images (B, C, height, width), videos or volumes into tokens (B, N, D)."""
        tokens: Tensor
        if self.frames > 1:
            x = x[:, :, None].expand(-1, -1, self.frames, -1, -1)
        elif len(self.reduction) == 2:
            tokens = PatchEmbed.forward(self, x)
            return tokens
        tokens = self.norm(self.proj(x).flatten(2).transpose(1, 2))
        return tokens

    @property
    def reduction(self) -> Shape:
        """(height, width) of the patch of a token, in pixels, or (depth, height, width)."""
        return tuple(self.patch_size)

    def grid(self, image: Shape, prefix: int = 0) -> Grid:
        """Return the grid of an image of (height, width) pixels."""
        return patch_grid(image, self.reduction, prefix, fit=self.fit)

    def set_input_size(self, img_size: int | Shape | None = None, patch_size: int | Shape | None = None) -> None:
        """Set another image or patch size for the position information."""
        if (axes := len(self.reduction)) > 2:
            video = on_axes(self.img_size if img_size is None else img_size, axes)
            if patch_size is not None and on_axes(patch_size, axes) != self.reduction:
                raise ValueError(f"`patch_size` must stay {by(self.reduction)} with {axes} axes, got {patch_size}.")
            return self.set_sizes(video, self.reduction)
        if self.frames > 1 and patch_size is not None and to_2tuple(patch_size) != self.reduction:
            raise ValueError(f"`patch_size` must stay {by(self.reduction)} with patches of videos, got {patch_size}.")
        image = to_2tuple(self.img_size if img_size is None else img_size)
        patch_grid(image, to_2tuple(self.patch_size if patch_size is None else patch_size), fit=self.fit)
        super().set_input_size(img_size=image, patch_size=None if patch_size is None else to_2tuple(patch_size))


class Tokenizer(Checked, nn.Module, ABC):
    """Maps images (B, C, height, width) to tokens (B, N, D), row by row.

    Args:
        img_size: (height, width) in pixels, the size of the position information.
        patch_size: (height, width) of a patch, as the tokenizer defines it.

    A subclass also takes `in_chans`, the channels of the image, and `embed_dim`, D.
    """

    def __init__(self, img_size: tuple[Side, Side], patch_size: tuple[Side, Side]) -> None:
        super().__init__()
        self.img_size = img_size
        self.patch_size = patch_size

    @property
    @abstractmethod
    def reduction(self) -> tuple[int, int]:
        """(height, width) of the patch of a token, in pixels."""

    def grid(self, image: Shape, prefix: int = 0) -> Grid:
        """Return the grid of an image of (height, width) pixels."""
        return patch_grid(image, self.reduction, prefix)

    def set_input_size(self, img_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        if patch_size != self.patch_size:
            raise ValueError(
                f"`patch_size` must stay {self.patch_size[0]} x {self.patch_size[1]} in {type(self).__name__}, "
                f"got {patch_size[0]} x {patch_size[1]}."
            )
        self.grid(img_size)
        self.img_size = img_size


def on_axes(size: int | Sequence[int], axes: int) -> Shape:
    """Return a size as one side per axis; a number is the side of all."""
    return (size,) * axes if isinstance(size, int) else tuple(size)


def patch_grid(image: Shape, patch: Shape, prefix: int = 0, step: int = 1, fit: Fit = "exact") -> Grid:
    """Return the grid of an image of (height, width) pixels, or of more axes, with `step` tokens per side of a `patch`.

    Raises:
        ValueError: if a side of the image is not a multiple of the patch's, and `fit` is 'exact'.
    """
    if fit == "pad":
        image = tuple(ceiling(side, length) * length for side, length in zip(image, patch, strict=True))
    elif fit == "floor" and all(side >= length for side, length in zip(image, patch, strict=True)):
        image = tuple(side // length * length for side, length in zip(image, patch, strict=True))
    grid = Grid.of_image(image, patch, prefix)
    return grid if step == 1 else Grid(*(side * step for side in grid.shape), prefix=prefix)


def fit_for(image: Shape, patch: Shape) -> Fit:
    """Return the `fit` of a model of another library that is built for a size: what is over is left out there."""
    return "floor" if any(side % length for side, length in zip(image, patch, strict=True)) else "exact"


def fit_images(images: Tensor, patch: Shape, fit: Fit) -> Tensor:
    """Let the sides of images (B, C, height, width) be multiples of the patch: cut, or padded with zeros.

    This is at the bottom and on the right; `fit` 'exact' leaves them as they are.
    """
    sides = images.shape[2:]
    if fit == "floor":
        for axis, (side, length) in enumerate(zip(sides, patch, strict=True), start=2):
            images = images.narrow(axis, 0, side // length * length)
    elif fit == "pad":
        ends = [amount for side, length in zip(sides, patch, strict=True) for amount in (-side % length, 0)]
        images = F.pad(images, ends[::-1]) if any(ends) else images
    return images


torch.fx.wrap("patch_grid")  # they compare sizes, so torch.fx records each call as one node
torch.fx.wrap("fit_images")
