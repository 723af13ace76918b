"""Models of transformers with an attached position, in folders: the model's own files, and the position beside them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graticule.checkpoints.load import load_own
from graticule.checkpoints.read import save_weights
from graticule.external.attach import NAME, attach, detach
from graticule.external.images import image_channels
from graticule.external.transformers_folder import import_transformers, with_weights
from graticule.hub.config import used_by
from graticule.hub.files import POSITION
from graticule.hub.kinds import register_kind
from graticule.registry.checks import printable
from graticule.registry.fields import Count, read_typed
from graticule.surgery.attach_hooks import AttachedPosition


@dataclass(frozen=True)
class Words:
    """Names of the module and of its position."""

    model: str
    encoding: str
    joining: str


@dataclass(frozen=True)
class AttachArguments:
    """The arguments of `attach`, and (height, width) in pixels of the images."""

    blocks: str
    norm: str
    patch_grid: tuple[Count, Count] | None
    remove: tuple[str, ...]
    image: tuple[Count, Count]


@dataclass(frozen=True)
class _Config:
    """Entries that are read from the config.json of a model of transformers with an attached position."""

    graticule: Words
    attached: AttachArguments


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers itself, not of a subclass elsewhere."""
    return type(module).__module__.startswith("transformers.models.") and hasattr(module, "save_pretrained")


def described_attachment(module: nn.Module) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the names of the attached position, and the arguments of `attach` with the present size of the images.

    Raises:
        ValueError: if it was attached with other inputs than images.
    """
    attached = module.get_submodule(NAME)
    assert isinstance(attached, AttachedPosition)
    made = dict(attached.created)
    words = {name: made.pop(name) for name in ("encoding", "joining")}
    if attached.patch_size is not None:  # the size may have been changed by `resize`
        made["image"] = [side * n for side, n in zip(attached.patch_size, attached.grid.shape, strict=True)]
    if made["image"] is None:
        raise ValueError("`model` must have been attached to with images as `example`, got one of other inputs.")
    return words, made


def save_with_host(module: Any, folder: Path) -> Path:
    """Write a model of transformers by its own `save_pretrained`, with its attached position beside it, to `folder`.

    The model is written as it was before `attach`, so transformers opens it without the position. `graticule` and
    `attached` in its config.json describe the position, whose weights are in graticule.safetensors.
    """
    words, made = described_attachment(module)
    host = detach(copy.deepcopy(module))
    used = used_by(module.get_submodule(NAME).modules())
    host.config.graticule = {"kind": "attached_transformers", "model": type(module).__name__, **words, **used}
    host.config.attached = made
    host.save_pretrained(folder)
    save_weights(module.get_submodule(NAME).state_dict(), folder / POSITION)
    return folder


@register_kind("attached_transformers")
def open_attached_host(config: Path, weights: Path) -> nn.Module:
    """Open a model of transformers and attach its position; the class is one of transformers itself."""
    transformers = import_transformers(config)
    described = read_typed(config, _Config)
    words, made = described.graticule, described.attached
    kind = getattr(transformers, words.model, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(
            f"{config} must be of a model of transformers, got {printable(words.model)}; code of a repository is never "
            "run."
        )
    module = with_weights(transformers, kind, weights)
    try:
        attach(
            module,
            words.encoding,
            words.joining,
            blocks=made.blocks,
            norm=made.norm,
            patch_grid=made.patch_grid,
            remove=made.remove,
            example=torch.zeros(2, image_channels(module), *made.image),
            start="new",
        )
    except ValueError as error:
        raise ValueError(f"{config} describes no model that can be built: {error}") from error
    load_own(module.get_submodule(NAME), config.parent / POSITION)
    return module
