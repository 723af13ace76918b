"""Open published detectors and segmentation models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, with_config
from torch import nn
from typing_extensions import TypedDict

from graticule.backbones import register_kind
from graticule.backbones.hub_config import Architecture, Preparation, build_backbone, prepare
from graticule.checkpoints import load_own
from graticule.dense.factory import create_detector, create_segmenter
from graticule.memory import build_within_memory
from graticule.typed import Count, read_typed

Made = TypeVar("Made", bound=nn.Module)


@with_config(ConfigDict(extra="allow"))
class _Config(TypedDict):
    """The entries of the config.json of a dense model that are read."""

    num_classes: Count
    backbone: Architecture
    parts: dict[str, str | None]
    pretrained_cfg: Preparation


@register_kind("segmenter")
def open_segmenter(config: Path, weights: Path) -> nn.Module:
    """Open a segmentation model."""
    return _open(config, weights, create_segmenter)


@register_kind("detector")
def open_detector(config: Path, weights: Path) -> nn.Module:
    """Open a detector."""
    return _open(config, weights, create_detector)


def _open(config: Path, weights: Path, create: Callable[..., Made]) -> nn.Module:
    described = read_typed(config, _Config)

    def build() -> Made:
        backbone = build_backbone(config, described["backbone"])
        prepare(backbone, described["pretrained_cfg"])  # a detector normalizes by this
        return create(backbone, described["num_classes"], **described["parts"])

    try:
        model = build_within_memory(build)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{config} describes no model that can be built: {error}") from error
    return load_own(model, weights)
