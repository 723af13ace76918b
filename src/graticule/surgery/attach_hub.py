"""Published modules with an attached position: their config.json, and how to open them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, with_config
from torch import Tensor, nn
from typing_extensions import TypedDict

from graticule.backbones import register_kind
from graticule.backbones.hub_config import Preparation, prepare, used_by
from graticule.checkpoints import load_own
from graticule.checkpoints.load import misfits
from graticule.surgery.attach import NAME, attach
from graticule.surgery.attach_hooks import AttachedPosition
from graticule.surgery.attach_host import build_host, host_of
from graticule.surgery.attach_survey import quiet
from graticule.typed import Count, read_typed

#: Largest difference between the outputs of a module and of the rebuilt one, relative to the largest output.
_TOLERANCE = 1e-3


class _Words(TypedDict):
    """Names of the module and of its position."""

    model: str
    encoding: str
    joining: str


class _Attached(TypedDict):
    """The arguments of `attach`, and (height, width) in pixels of the images."""

    blocks: str
    norm: str
    patch_grid: tuple[Count, Count] | None
    remove: tuple[str, ...]
    image: tuple[Count, Count]


@with_config(ConfigDict(extra="allow"))
class _Config(TypedDict):
    """Entries that are read from the config.json of a module with an attached position."""

    graticule: _Words
    attached: _Attached
    pretrained_cfg: Preparation


def attached_config(module: nn.Module, host: str | None, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json for a module with an attached position.

    The module is rebuilt from it, with its weights, and must compute the same outputs.

    Args:
        module: the module; it is not changed.
        host: the name that the module was built from, such as 'torchvision:vit_b_16'; modules of timm record it.
        preprocessing: entries of timm's configuration.

    Raises:
        ValueError: if it cannot be rebuilt from names.
    """
    attached = module.get_submodule(NAME)
    assert isinstance(attached, AttachedPosition)
    host = host_of(module) if host is None else host
    made = dict(attached.created)
    words = {name: made.pop(name) for name in ("encoding", "joining")}
    if attached.patch_size is not None:  # the size may have been changed by `resize`
        made["image"] = [side * n for side, n in zip(attached.patch_size, attached.grid.shape, strict=True)]
    if made["image"] is None:
        raise ValueError("`model` must have been attached to with images as `example`, got one of other inputs.")
    weight = next(module.parameters())
    images = torch.randn(
        2, _channels(module), *made["image"], generator=torch.Generator().manual_seed(0), dtype=torch.float32
    ).to(weight)
    again = _build({"model": host, **words}, made).to(weight.device, weight.dtype)
    if complaints := misfits(again, module.state_dict()):
        raise ValueError(
            f"`host` must be the name and the options that the module was built with, got {host!r}, with which "
            + "; ".join(complaints)
            + "."
        )
    again.load_state_dict(module.state_dict())
    with quiet(module), quiet(again):
        expected, found = module(images), again(images)
    if not _same(found, expected):
        raise ValueError(
            f"`host` must be the name and the options that the module was built with, got {host!r}, which computes "
            "something else with the same weights."
        )
    known = {key: value for key, value in (getattr(module, "pretrained_cfg", None) or {}).items() if key in _KEPT}
    return {
        "num_classes": int(getattr(module, "num_classes", 0)),
        "pretrained_cfg": {**known, "input_size": [_channels(module), *made["image"]], **preprocessing},
        "attached": made,
        "graticule": {"kind": "attached", "model": host, **words, **used_by(attached.modules())},
    }


#: Entries of timm's configuration that are kept.
_KEPT = tuple(Preparation.__annotations__)


@register_kind("attached")
def open_attached(config: Path, weights: Path) -> nn.Module:
    """Open a module with an attached position."""
    described = read_typed(config, _Config)
    try:
        module = _build(described["graticule"], described["attached"])
    except ValueError as error:
        raise ValueError(f"{config} describes no model that can be built: {error}") from error
    if hasattr(module, "pretrained_cfg"):
        prepare(module, described["pretrained_cfg"])
    return load_own(module, weights)


def _build(words: Mapping[str, Any], made: Mapping[str, Any]) -> nn.Module:
    """Build a module and attach a position to it."""
    module: nn.Module = build_host(words["model"])
    grid = made["patch_grid"]
    return attach(
        module,
        words["encoding"],
        words["joining"],
        blocks=made["blocks"],
        norm=made["norm"],
        patch_grid=None if grid is None else tuple(grid),
        remove=tuple(made["remove"]),
        example=torch.zeros(2, _channels(module), *made["image"]),
        start="new",
    )


def _channels(module: nn.Module) -> int:
    """Return the number of channels of the images of a module.

    Raises:
        ValueError: if the module has no convolution.
    """
    convolution = next((part for part in module.modules() if isinstance(part, nn.Conv2d)), None)
    if convolution is None:
        raise ValueError(f"`model` must cut images into patches by a convolution, got {type(module).__name__}.")
    return convolution.in_channels


def _same(found: object, expected: object) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or found.shape != expected.shape:
        return False
    worst = float((found.float() - expected.float()).abs().max())
    return worst <= _TOLERANCE * float(expected.float().abs().max().clamp(min=1e-12))
