"""A model whose features have position removed: the removals, the model around another one, and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.token_model import check_image
from graticule.checkpoints.load import load_own
from graticule.external.images import Size, fit_of
from graticule.external.view import split_features, unpooled
from graticule.hub.config import (
    Architecture,
    Preparation,
    architecture_of,
    build_backbone,
    configuration_of,
    prepare,
    words_of,
)
from graticule.hub.kinds import HubModel, register_kind
from graticule.layers.tokenizers import patch_grid
from graticule.position.grid import Grid
from graticule.position.resampling import BICUBIC
from graticule.registry.fields import Count, Whole, read_typed
from graticule.system.memory import build_within_memory

#: The name of the removal from the model's features; those from the tokens of a layer have the index of the layer.
FEATURES = "features"


class Eraser(nn.Module):
    r"""Removes directions from features, with the smallest change of the features for given directions.

    .. math:: x' = x - A (\beta^T A)^{-1} \beta^T (x - \mu)

    with :math:`\beta` the read directions, (D, k), and A the written ones. If A is the covariance of the features with
    some labels, no feature is correlated with a label afterwards, so no linear probe does better than a constant. If
    both are the same orthonormal vectors, it is a projection.

    Reference: LEACE (Belrose et al., 2023), Theorem 4.3.

    Args:
        mean: the mean of the features, (D,).
        read: :math:`\beta`, (D, k).
        write: :math:`A (\beta^T A)^{-1}`, (D, k).
    """

    mean: Tensor
    read: Tensor
    write: Tensor

    def __init__(self, mean: Tensor, read: Tensor, write: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("read", read)
        self.register_buffer("write", write)

    def forward(self, features: Tensor, grid: Grid | None = None) -> Tensor:
        """Return features (..., D) without the directions, in their own dtype; every position is treated alike."""
        x = features.to(self.mean.dtype)
        mean, read, write = (part.to(x.device) for part in (self.mean, self.read, self.write))
        return (x - (x - mean) @ read @ write.T).to(features.dtype)


class Subtraction(nn.Module):
    """Subtracts the effect of each position, a table (H, W, D), which is resampled for another grid (bicubic)."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, features: Tensor, grid: Grid) -> Tensor:
        """Return features (..., H * W, D) without the effect of their positions, in their own dtype."""
        table = BICUBIC(self.table.movedim(-1, 0), grid.shape).flatten(1).T
        return (features.to(table.dtype) - table.to(features.device)).to(features.dtype)


class Debiased(HubModel):
    """A model whose features have position removed; `graticule.debias` makes it.

    The model itself is unchanged; only what it returns is. `forward_features` returns its features with position
    removed from the patches, and `forward` its output from these: `forward_head` of the features if the model has it,
    as models of timm and of this library have, and otherwise the features. Prefix tokens are kept.

    It folds, compiles and is exported like the model. If the model is a backbone of this library, it can be saved.

    Args:
        backbone: the model.
        patch: (height, width) in pixels of a patch of its features.
        removals: 'features', or the index of a layer -> an `Eraser` or a `Subtraction`; none for nothing to remove.
        method: the method that they were fitted by.
    """

    #: Report of remaining position and lost content (`graticule.analysis.certificate.DebiasCertificate`).
    certificate: Any = None

    def __init__(self, backbone: nn.Module, patch: Size, removals: Mapping[str, nn.Module], method: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.patch = patch
        self.method = method
        self.removals = nn.ModuleDict(removals)
        self.num_classes = int(getattr(backbone, "num_classes", 0))

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        return getattr(self.backbone, "pretrained_cfg", None) or {}

    def grid_of(self, images: Tensor) -> Grid:
        """Return the grid of the features of images (B, C, height, width)."""
        check_image(images)
        if isinstance(self.backbone, Backbone):
            return Grid(*self.backbone.position_grids(self.backbone.grid_of(images))[-1].shape)
        return patch_grid((images.shape[-2], images.shape[-1]), self.patch, fit=fit_of(self.backbone))

    def remove(self, name: str, patches: Tensor, grid: Grid) -> Tensor:
        """Return the patches (B, H * W, D) of the features or of a layer without position."""
        return self.removals[name](patches, grid) if name in self.removals else patches

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the model's features of images (B, C, height, width) with position removed from the patches."""
        grid = self.grid_of(x)  # checks x
        return self.clean(unpooled(self.backbone, x), grid)

    def clean(self, features: Tensor, grid: Grid) -> Tensor:
        """Return features, as tokens or a map as the model returns them, with position removed from the patches."""
        ahead, patches = split_features(features, grid)
        cleaned = self.remove(FEATURES, patches, grid)
        if features.ndim == 3:
            return torch.cat([ahead, cleaned], 1)
        last = tuple(features.shape[1:3]) == grid.shape
        return cleaned.unflatten(1, grid.shape) if last else cleaned.mT.unflatten(-1, grid.shape)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the output of the model for its features, or the pooled features with `pre_logits`."""
        host: Any = self.backbone
        return host.forward_head(features, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the model for images (B, C, height, width), from features without position."""
        features = self.forward_features(x)
        return self.forward_head(features) if hasattr(self.backbone, "forward_head") else features

    def layer_tokens(self, x: Tensor) -> list[Tensor]:
        """Return the patches (B, H * W, D) after the layers of `debias(layers=...)`, with position removed."""
        grid = self.grid_of(x)
        names = [name for name in self.removals if name != FEATURES]
        return [
            self.remove(name, patches, grid)
            for name, patches in zip(names, layer_patches(self.backbone, x, [int(name) for name in names]), strict=True)
        ]

    def hub_config(self, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of the model's config.json (see `HubModel`)."""
        backbone = self.backbone
        if not isinstance(backbone, Backbone):
            raise ValueError(
                f"`model` must be of a backbone of this library to be saved, got one of {type(backbone).__name__}; "
                "debias graticule.convert(model) instead."
            )
        removals = list(self.removals.items())
        return {
            "num_classes": self.num_classes,
            "pretrained_cfg": configuration_of(backbone, self.num_classes, preprocessing),
            "backbone": vars(architecture_of(backbone)),
            "removal": {
                "method": self.method,
                "patch": list(self.patch),
                "shapes": {name: list(next(iter(removal.buffers())).shape) for name, removal in removals},
                "components": {
                    name: removal.read.shape[1] for name, removal in removals if isinstance(removal, Eraser)
                },
            },
            "graticule": {"kind": "debiased", **words_of(self, backbone)},
        }


def layer_patches(model: nn.Module, images: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """Return the patches (B, H * W, D) after some layers, by `forward_intermediates`."""
    if not layers:
        return []
    if not hasattr(model, "forward_intermediates"):
        raise ValueError(
            f"`layers` must be left out with {type(model).__name__}, which has no `forward_intermediates`, got "
            f"{list(layers)}."
        )
    host: Any = model
    return host.forward_intermediates(images, indices=list(layers), output_fmt="NLC", intermediates_only=True)


@dataclass(frozen=True)
class _Removal:
    """The method, the patch and the shapes of the removals: a table (H, W, D), or (D,) with components."""

    method: str
    patch: tuple[Count, Count]
    shapes: dict[str, tuple[Count, ...]]
    components: dict[str, Whole]


@dataclass(frozen=True)
class _DebiasedConfig:
    """Entries that are read from the config.json of a debiased model."""

    backbone: Architecture
    removal: _Removal
    pretrained_cfg: Preparation


@register_kind("debiased")
def open_debiased(config: Path, weights: Path | None) -> nn.Module:
    """Open a debiased model."""
    described = read_typed(config, _DebiasedConfig)
    model = build_within_memory(partial(_build, config, described))
    return model if weights is None else load_own(model, weights)


def _build(config: Path, described: _DebiasedConfig) -> Debiased:
    backbone, removal = build_backbone(config, described.backbone), described.removal
    prepare(backbone, described.pretrained_cfg)
    removals: dict[str, nn.Module] = {}
    for name, shape in removal.shapes.items():
        if len(shape) == 3 and name not in removal.components:
            removals[name] = Subtraction(torch.zeros(shape))
        elif len(shape) == 1 and name in removal.components:
            parts = (torch.zeros(*shape, removal.components[name]) for _ in range(2))
            removals[name] = Eraser(torch.zeros(shape), *parts)
        else:
            raise ValueError(f"{config} describes no model that can be built: `removal` has the shape {shape}.")
    return Debiased(backbone, removal.patch, removals, removal.method)
