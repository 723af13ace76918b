"""Published modules with an attached position: their config.json, and how to open them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from graticule.checkpoints.load import load_own, misfits
from graticule.external.attach import NAME, attach
from graticule.external.transformers_attached import (
    AttachArguments,
    Words,
    described_attachment,
    is_of_transformers,
    save_with_host,
)
from graticule.external.view import evaluating
from graticule.hub.card import Card
from graticule.hub.config import OF_TIMM, Preparation, prepare, used_by
from graticule.hub.files import check_folder, write_model
from graticule.hub.kinds import HubModel, register_kind
from graticule.registry.checks import check_numbers, checked, known_name
from graticule.registry.fields import read_typed
from graticule.registry.specs import Spec
from graticule.surgery.attach_hooks import AttachedPosition
from graticule.system.memory import build_within_memory

#: Options of torchvision's models that name weights.
_OF_TORCHVISION = ("weights", "weights_backbone", "progress")


def build_host(text: str) -> Any:
    """Build a module of timm or torchvision, with the weights of its initialization.

    Args:
        text: the library and the name, with options, such as 'timm:vit_tiny_patch16_224(img_size=64)' or
            'torchvision:vit_b_16(num_classes=10)'.

    Raises:
        ValueError: if there is no such model, or an option is unknown or out of its range.
    """
    library, _, rest = text.partition(":")
    known_name("host", library, _LIBRARIES)
    names, refused, create = _LIBRARIES[library]
    spec = Spec.parse(rest, "host")
    known_name("host", spec.name, names())
    for option, value in spec.options.items():
        if option in refused or option.endswith("_layer") or not _is_plain(value):
            raise ValueError(f"`host` must have options that name no files or classes, got {option}={value!r}.")
        check_numbers(option, value)  # before building layers, which can take minutes
    try:
        return build_within_memory(partial(create, spec.name, **spec.options))
    except (TypeError, RuntimeError, AssertionError) as error:  # raised by the library for unknown options
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"`host` must be a model that can be built, got {text!r}: {said}") from error


def host_of(module: nn.Module) -> str:
    """Return the name and the options of a module of timm, which records its name.

    Raises:
        ValueError: if it does not record it.
    """
    configuration = getattr(module, "pretrained_cfg", None) or {}
    name = str(configuration.get("architecture", "")).partition(".")[0]
    if not timm.is_model(name):
        raise ValueError(
            f"`host` must be given for {type(module).__name__}: the name that it was built from, as "
            "'torchvision:vit_b_16(num_classes=10)' or 'timm:vit_tiny_patch16_224'. A module of your own cannot be "
            "built again from a file, which holds no code: save its state dict, and attach again before loading it."
        )
    given: dict[str, Any] = {}
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    channels, *sides = configuration.get("input_size", (3, 224, 224))
    if size is not None and list(size) != sides:
        given["img_size"] = tuple(size)
    for option, value, known in (
        ("in_chans", getattr(module, "in_chans", channels), channels),
        ("num_classes", getattr(module, "num_classes", None), configuration.get("num_classes")),
    ):
        if value is not None and value != known:
            given[option] = value
    return f"timm:{Spec(name, given)}"


def _torchvision_names() -> list[str]:
    from torchvision import models

    return list(models.list_models())


def _create_torchvision(name: str, **options: Any) -> nn.Module:
    from torchvision import models

    model: nn.Module = models.get_model(name, weights=None, **options)
    return model


def _create_timm(name: str, **options: Any) -> nn.Module:
    model: nn.Module = timm.create_model(name, **options)
    return model


#: The names, the refused options and the function of each library.
_LIBRARIES = {
    "timm": (timm.list_models, OF_TIMM, _create_timm),
    "torchvision": (_torchvision_names, _OF_TORCHVISION, _create_torchvision),
}


def _is_plain(value: object) -> bool:
    items = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(one, str | int | float | None) for one in items)


#: Largest difference between the outputs of a module and of the rebuilt one, relative to the largest output.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class _Config:
    """Entries that are read from the config.json of a module with an attached position."""

    graticule: Words
    attached: AttachArguments
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
    words, made = described_attachment(module)
    host = host_of(module) if host is None else host
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
    with evaluating(module), evaluating(again):
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
        "graticule": {"kind": "attached", "model": host, **words, **used_by(module.get_submodule(NAME).modules())},
    }


#: Entries of timm's configuration that are kept.
_KEPT = tuple(Preparation.__annotations__)


@register_kind("attached")
def open_attached(config: Path, weights: Path) -> nn.Module:
    """Open a module with an attached position."""
    described = read_typed(config, _Config)
    try:
        module = _build(vars(described.graticule), vars(described.attached))
    except ValueError as error:
        raise ValueError(f"{config} describes no model that can be built: {error}") from error
    if hasattr(module, "pretrained_cfg"):
        prepare(module, described.pretrained_cfg)
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


@checked
def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    host: str | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    card: Card | None = None,
) -> Path:
    """Write config.json, model.safetensors and README.md to `folder`, as `model.save_pretrained` does; returns it.

    It also works for a module of timm or torchvision with an attached position, which lacks that method. A model of
    transformers with one is written by its own `save_pretrained`, as it was before `attach`, with the position beside
    it in graticule.safetensors.

    Args:
        model: a backbone, also a converted one; a detector or a segmentation model; or a module with an attached
            position, of transformers or one that timm or torchvision builds by name.
        folder: created if it does not exist.
        host: the name that a module with an attached position was built from, with its options, as
            'torchvision:vit_b_16(num_classes=10)'. Not needed for a module of timm, unless it was built with other
            options than `img_size`, `in_chans` and `num_classes`.
        preprocessing: entries of timm's configuration, such as `mean`, `std` and `label_names`.
        card: text of the model card, in addition to the names of the model.

    Raises:
        ValueError: if the model cannot be built again from names, such as a module of your own.
    """
    if isinstance(model, HubModel):
        if host is not None:
            raise ValueError(f"`host` must be left out with a model of this library, got {host!r}.")
        return model.save_pretrained(folder, preprocessing=preprocessing, card=card)
    if not isinstance(getattr(model, NAME, None), AttachedPosition):
        raise ValueError(
            f"`model` must be a backbone or a dense model of this library, or have an attached position, got "
            f"{type(model).__name__}; graticule.convert makes a backbone of a model of timm."
        )
    folder = Path(folder)
    check_folder(folder)
    if is_of_transformers(model):
        for name, value in (("host", host), ("preprocessing", preprocessing), ("card", card)):
            if value is not None:
                raise ValueError(f"`{name}` must be left out with a model of transformers, got {value!r}.")
        return save_with_host(model, folder)
    return write_model(model, folder, attached_config(model, host, preprocessing or {}), card or Card())
