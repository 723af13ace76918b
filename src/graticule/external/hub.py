"""Modules of other libraries with an attached position in folders: how they are saved, described and opened."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torchvision import models

from graticule.checkpoints.load import load_own, misfits
from graticule.checkpoints.read import save_weights
from graticule.external.attach import NAME, Module, attach, detach
from graticule.external.images import evaluating, image_channels
from graticule.external.tracer import nested_tensors
from graticule.external.transformers_folder import LAYERS, converted_or_itself, import_transformers, with_weights
from graticule.hub.config import CHOICES, OF_TIMM, Preparation, built_from, prepare, record_input, used_by
from graticule.hub.files import POSITION, Card, check_folder, quick_hub, write_model
from graticule.hub.kinds import SOURCES, HubModel, ModelWords, register_kind
from graticule.registry.checks import check_numbers, checked, known_name, printable
from graticule.registry.fields import Bounded, Count, Depth, check_value, read_typed
from graticule.registry.specs import Spec
from graticule.surgery.attached import AttachedPosition
from graticule.surgery.export import difference
from graticule.system.memory import build_within_memory


@dataclass(frozen=True)
class AttachArguments:
    """The arguments of `attach`, and (height, width) in pixels of the images."""

    blocks: str
    norm: str
    patch_grid: tuple[Count, Count] | None
    remove: tuple[str, ...]
    image: tuple[Count, Count]


@dataclass(frozen=True)
class _Attached:
    """Entries that are read from the config.json of a module with an attached position."""

    graticule: ModelWords
    attached: AttachArguments

    def attach_to(self, module: Module) -> Module:
        """Attach the position to the module again, as initialized, and return the module."""
        words, arguments = self.graticule, dict(vars(self.attached))
        example = torch.zeros(2, image_channels(module), *arguments.pop("image"))
        arguments["remove"] = tuple(arguments["remove"])  # a list, before it is written
        return attach(module, words.encoding, words.joining, **arguments, example=example, start="new")


@dataclass(frozen=True)
class _HubConfig(_Attached):
    """Entries of a module that timm or torchvision builds."""

    pretrained_cfg: Preparation


@SOURCES.register("timm")
def open_timm(name: str) -> nn.Module:
    """Open a model of timm with its published weights, converted if its class is."""
    if ":" not in name:
        known_name("source", f"timm:{name.partition('.')[0]}", [f"timm:{model}" for model in timm.list_models()])
    try:
        with quick_hub():
            model = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:  # also errors of the client of the hub
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(
            f"`source` must be a model of timm with published weights, got {f'timm:{name}'!r}: {reason}"
        ) from error
    return converted_or_itself(model, f"timm:{name}")


def described_attachment(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the names of the attached position, and the arguments of `attach` with the present size of the images."""
    attached = module.get_submodule(NAME)
    assert isinstance(attached, AttachedPosition)
    made = dict(attached.created)
    words = {name: made.pop(name) for name in CHOICES}
    if attached.patch_size is not None:  # the size may have been changed by `resize`
        made["image"] = [side * n for side, n in zip(attached.patch_size, attached.grid.shape, strict=True)]
    if made["image"] is None:
        raise ValueError("`model` must have been attached to with images as `example`, got one of other inputs.")
    return words, made


@register_kind("attached_transformers")
def open_attached_host(config: Path, weights: Path) -> nn.Module:
    """Open a model of transformers and attach its position; the class is one of transformers itself."""
    transformers = import_transformers(config)
    described = read_typed(config, _Attached)
    name = described.graticule.model
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(
            f"{config} must be of a model of transformers, got {printable(name)}; code of a repository is never run."
        )
    module = with_weights(transformers, kind, weights)
    with built_from(config):
        described.attach_to(module)
    load_own(module.get_submodule(NAME), config.parent / POSITION)
    return module


#: The names, the function, and the options that are refused of each library.
_LIBRARIES: dict[str, tuple[Any, Any, Sequence[str]]] = {
    "timm": (timm.list_models, timm.create_model, OF_TIMM),
    "torchvision": (
        models.list_models,
        lambda name, **options: models.get_model(name, weights=None, **options),
        ("weights", "weights_backbone", "progress"),
    ),
}


def build_host(text: str) -> Any:
    """Build a module of timm or torchvision, such as 'torchvision:vit_b_16(num_classes=10)', with initial weights."""
    library, _, rest = text.partition(":")
    known_name("host", library, _LIBRARIES)
    names, create, refused = _LIBRARIES[library]
    spec = Spec.parse(rest, "host")
    known_name("host", spec.name, names())
    for option, value in spec.options.items():
        parts = value if isinstance(value, list | tuple) else (value,)
        plain = all(isinstance(part, str | int | float | None) for part in parts)
        if option in refused or option.endswith("_layer") or not plain:
            raise ValueError(f"`host` must have options that name no files or classes, got {option}={value!r}.")
        limits = Depth if re.search(LAYERS, option) else Bounded  # building layers can take minutes
        check_numbers(option, value, limits)
    try:
        return build_within_memory(partial(create, spec.name, **spec.options))
    except (TypeError, RuntimeError, AssertionError) as error:  # raised by the library for unknown options
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"`host` must be a model that can be built, got {text!r}: {reason}") from error


def host_of(module: nn.Module) -> str:
    """Return the name and the options of a module of timm, which records its name."""
    configuration = getattr(module, "pretrained_cfg", None) or {}
    name = str(configuration.get("architecture", "")).partition(".")[0]
    if not timm.is_model(name):
        raise ValueError(
            f"`host` must be given for {type(module).__name__}: the name that it was built from, as "
            "'torchvision:vit_b_16(num_classes=10)' or 'timm:vit_tiny_patch16_224'. A module of your own cannot be "
            "built again from a file, which holds no code: save its state dict, and attach again before loading it."
        )
    options: dict[str, Any] = {}
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    default: Any = timm.get_pretrained_cfg(name)
    channels, *sides = default.input_size  # by default; the module's size follows its images
    if size is not None and list(size) != sides:
        options["img_size"] = tuple(size)
    for option, value, known in (
        ("in_chans", getattr(module, "in_chans", channels), channels),
        ("num_classes", getattr(module, "num_classes", None), configuration.get("num_classes")),
    ):
        if value is not None and value != known:
            options[option] = value
    return f"timm:{Spec(name, options)}"


#: Largest difference between the outputs of a module and of the rebuilt one, relative to the largest output.
_TOLERANCE = 1e-3


def attached_config(module: nn.Module, host: str | None, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json for a module with an attached position.

    The module is rebuilt from `host`, a name such as 'torchvision:vit_b_16' that modules of timm record, with its
    weights, and must compute the same outputs. It is not changed.
    """
    words, created = described_attachment(module)
    host = host_of(module) if host is None else host
    weight = next(module.parameters())
    images = torch.randn(
        2, image_channels(module), *created["image"], generator=torch.Generator().manual_seed(0), dtype=torch.float32
    ).to(weight)
    described = _Attached(ModelWords(model=host, **words), AttachArguments(**created))
    again = described.attach_to(build_host(host)).to(weight.device, weight.dtype)
    problem = ""
    if complaints := misfits(again, module.state_dict()):
        problem = f"with which {'; '.join(complaints)}"
    else:
        again.load_state_dict(module.state_dict())
        with evaluating(module), evaluating(again):
            outputs, expected = ([*nested_tensors(part(images))] for part in (again, module))
            if difference(outputs, expected) > _TOLERANCE:
                problem = "which computes something else with the same weights"
    if problem:
        raise ValueError(
            f"`host` must be the name and the options that the module was built with, got {host!r}, {problem}."
        )
    check_value(Preparation, dict(preprocessing), "`preprocessing`")
    configuration = getattr(module, "pretrained_cfg", None) or {}
    known = {key: value for key, value in configuration.items() if key in Preparation.__annotations__}
    return {
        "num_classes": int(getattr(module, "num_classes", 0)),
        "pretrained_cfg": {**known, "input_size": [image_channels(module), *created["image"]], **preprocessing},
        "attached": created,
        "graticule": {"kind": "attached", "model": host, **words, **used_by(module.get_submodule(NAME).modules())},
    }


@register_kind("attached")
def open_attached(config: Path, weights: Path) -> nn.Module:
    """Open a module with an attached position."""
    described = read_typed(config, _HubConfig)
    with built_from(config):
        module = described.attach_to(build_host(described.graticule.model))
    if hasattr(module, "pretrained_cfg"):
        prepare(module, described.pretrained_cfg)
        record_input(module, image_channels(module), described.attached.image)
    return load_own(module, weights)


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
    if type(model).__module__.startswith("transformers.models.") and hasattr(model, "save_pretrained"):
        for name, value in (("host", host), ("preprocessing", preprocessing), ("card", card)):
            if value is not None:
                raise ValueError(f"`{name}` must be left out with a model of transformers, got {value!r}.")
        words, created = described_attachment(model)
        original: Any = detach(copy.deepcopy(model))
        used = used_by(model.get_submodule(NAME).modules())
        original.config.graticule = {"kind": "attached_transformers", "model": type(model).__name__, **words, **used}
        original.config.attached = created
        original.save_pretrained(folder)
        save_weights(model.get_submodule(NAME).state_dict(), folder / POSITION)
        return folder
    return write_model(model, folder, attached_config(model, host, preprocessing or {}), card or Card())
