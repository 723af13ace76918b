"""Rebuild the module that a position was attached to, from its name and options in timm or torchvision."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from torch import nn

from graticule.backbones.arguments import OF_TIMM
from graticule.checks import check_numbers
from graticule.memory import build_within_memory
from graticule.names import known_name
from graticule.specs import Spec

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
