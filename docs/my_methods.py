"""Two encodings, a joining, a resampler, a backbone, a task and recipes; docs/extending.md describes this file.

graticule train digits_quick --plugin docs/my_methods.py --encoding "random_fourier(frequencies=16)" --joining decayed
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graticule
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.lab.data.module import DataModule
from graticule.lab.tasks.parts.models import build_backbone


@graticule.register_encoding("random_fourier")
class RandomFourier(graticule.ComputedEncoding):
    r"""Random Fourier features of the position, projected to the channels by a learned matrix.

    .. math:: w = W [\cos 2 \pi B p; \sin 2 \pi B p], \quad B \sim N(0, \sigma^2), \quad p \in [0, 1]^2

    Reference: Fourier Features Let Networks Learn High Frequency Functions (Tancik et al., 2020).
    """

    def __init__(self, grid: graticule.Grid, dim: int, frequencies: int = 32, sigma: float = 2.0) -> None:
        super().__init__(grid, dim)
        self.register_buffer("directions", torch.randn(len(grid.shape), frequencies) * sigma)
        self.project = nn.Linear(2 * frequencies, dim)

    def rows(self, grid: graticule.Grid) -> Tensor:
        """Return the rows of the patches of any `grid`, (H * W, D)."""
        place = grid.coordinates(self.directions.device).to(self.directions.dtype) + 0.5
        place = place / torch.tensor(grid.shape, device=place.device, dtype=place.dtype)
        angle = 2 * math.pi * place @ self.directions
        rows: Tensor = self.project(torch.cat([angle.cos(), angle.sin()], -1))
        return rows


@graticule.register_encoding("distance")
class Distance(graticule.PatchBias):
    """A relative bias: one learned slope per head on the logarithm of the distance of two patches."""

    def __init__(self, num_heads: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.slope = nn.Parameter(torch.zeros(num_heads))

    def patch_bias(self, grid: graticule.Grid) -> Tensor:
        """Return the bias between the patches of `grid`, (heads, H * W, H * W)."""
        distance = grid.distances(self.slope.device).to(self.slope.dtype)
        return -F.softplus(self.slope)[:, None, None] * self.scale * torch.log1p(distance)


@graticule.register_joining("decayed")
class Decayed(graticule.Joining):
    """Adds rate^l w to the residual stream before layer l."""

    def __init__(self, depth: int, layers: int | tuple[int, ...] | None = None, rate: float = 0.5) -> None:
        super().__init__(depth, layers)
        self.rate = rate

    def join(self, *tables: Tensor) -> tuple[list[graticule.LayerPosition], Tensor | None]:
        """Add w: (N, D), scaled down from layer to layer; a later stage of a pyramid gets w itself."""
        joined = [graticule.LayerPosition(added_to_stream=tables[0] * self.rate**layer) for layer in self.layer_indices]
        return joined, tables[0]


@graticule.register_resampler("nearest")
class Nearest(graticule.Resampler):
    """Takes the nearest entry of the old axis."""

    def weights(self, old: int, new: int, device: torch.device | None = None) -> Tensor:
        """Return the matrix from an axis of `old` entries to one of `new`, (new, old), float64."""
        index = (2 * torch.arange(new, device=device) + 1) * old // (2 * new)
        return torch.eye(old, device=device, dtype=torch.float64)[index]


@graticule.register_backbone("convolutional_vit", embed_dim=48, depth=3, num_heads=3, img_size=28, in_chans=1)
class ConvolutionalVit(VisionTransformer):
    """A small ViT with a 3 x 3 convolution on the image before it is cut into patches."""

    def __init__(self, position: graticule.PositionBuilder, patch_size: int = 4, **kwargs: Any) -> None:
        super().__init__(position, patch_size=patch_size, **kwargs)
        self.before = nn.Conv2d(self.in_chans, self.in_chans, 3, padding=1)

    def tokenize(self, x: Tensor, stage: int = 0) -> Tensor:
        """Turn images (B, C, height, width) into tokens (B, H * W, D)."""
        return super().tokenize(self.before(x), stage)


@graticule.register_recipe("fourier_digits", joining="decayed")
@graticule.register_recipe("fourier_digits_default", joining="default")
def fourier_digits(joining: str) -> graticule.Recipe:
    """A small ViT with Fourier features on the embedded digits."""
    return graticule.Recipe(
        model="vit_nano_patch4_28",
        encoding="random_fourier(frequencies=16)",
        joining=joining,
        dataset="digits",
        epochs=10,
        warmup_epochs=1,
        batch_size=50,
        lr=3e-3,
    )


@dataclass(frozen=True)
class SlantRecipe(graticule.TrainingRecipe):
    """Recipe of a run that learns the slant of a digit; it inherits the fields of every run."""

    task: ClassVar[str] = "slant"
    metric: ClassVar[graticule.Metric] = graticule.Metric("mae", "mean absolute error", "", highest=False, decimals=4)

    model: str = "vit_nano_patch4_28"
    """backbone, one of `graticule models`"""
    dataset: str = "digits"
    """data set of images"""
    img_size: tuple[int, int] = (28, 28)
    """height and width of the images in pixels"""


def slant(images: Tensor) -> Tensor:
    """Return the slant of digits (B, C, H, W): columns to the right per row downwards, from the moments of the ink."""
    ink = (images - images.amin((1, 2, 3), keepdim=True)).sum(1)  # (B, H, W)
    y, x = (torch.arange(n, device=ink.device, dtype=ink.dtype) for n in ink.shape[1:])
    ink = ink / ink.sum((1, 2), keepdim=True)
    y = y[None, :, None] - (ink * y[:, None]).sum((1, 2))[:, None, None]
    x = x[None, None, :] - (ink * x).sum((1, 2))[:, None, None]
    return (ink * y * x).sum((1, 2)) / (ink * y * y).sum((1, 2))


@graticule.register_task("slant")
class Slant(graticule.Task[SlantRecipe, DataModule]):
    """Regression of a digit's slant: a backbone with one output, trained by the squared error."""

    recipe_class = SlantRecipe

    def build_data(self, run: Any = None) -> DataModule:
        """Build the images; a resumed run uses the same ones."""
        recipe = self.recipe
        data = DataModule(**recipe.data_arguments(), size=recipe.img_size)
        return data

    def build_model(self, described: Mapping[str, Any]) -> Any:
        """Build the backbone with one output."""
        return build_backbone(self.recipe, num_classes=1, channels=1, img_size=self.recipe.img_size)

    def loss(self, model: nn.Module, batch: Any, epoch: int) -> Tensor:
        """Return the mean squared error."""
        images, _ = batch
        return F.mse_loss(model(images)[:, 0], slant(images))

    def validate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the squared and the absolute error of each image; `score` is the mean of the latter."""
        images, _ = batch
        error = model(images)[:, 0] - slant(images)
        return {"loss": error.square(), "mae": error.abs()}


@graticule.register_recipe("slant_digits")
def slant_digits() -> SlantRecipe:
    """A small ViT that learns the slant of the embedded digits."""
    return SlantRecipe(encoding="random_fourier(frequencies=16)", epochs=10, warmup_epochs=1, batch_size=50, lr=3e-3)
