"""Our names in timm's registry, where every model is `graticule_` and its own name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import timm
from timm.models import register_model
from torch import nn

from graticule.checkpoints import load_checkpoint
from graticule.checks import checked
from graticule.encodings import ENCODINGS, PositionBuilder, TokenMixing
from graticule.factory import build_position
from graticule.memory import build_within_memory
from graticule.names import known_name
from graticule.plugins import register_once
from graticule.specs import Spec

PREFIX = "graticule_"
_backbones: dict[str, type[nn.Module]] = {}


def registry_name(name: str) -> str:
    """Return the name under which timm knows our model `name`."""
    return PREFIX + name


def register(module: str, name: str, build: Callable[..., nn.Module], backbone: type[nn.Module]) -> None:
    """Enter `build(pretrained, **kwargs)` in timm's registry; `module` is the `__name__` that holds `default_cfgs`.

    `backbone` is the class that it builds, whose arguments `kwargs` may name.
    """

    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        check_arguments(kwargs, [*_arguments(backbone), *CHOICES, *_OF_TIMM], name)
        # published weights are of sizes that are known, and would be fetched twice
        return build(True, **kwargs) if pretrained else build_within_memory(partial(build, False, **kwargs))

    entry.__name__ = entry.__qualname__ = registry_name(name)
    entry.__module__ = module
    entry.__doc__ = f"Build {name}; the keyword arguments are those of its backbone, and encoding and joining."
    register_model(entry)
    _backbones[name] = backbone


def register_backbone(
    name: str, *, encoding: str = "learnable", **sizes: Any
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Return a decorator that registers a backbone of yours as `name`, for `create_model`, timm and the command line.

    The class takes `position`, a `PositionBuilder`, as its first argument; all others can be given by name.

    Args:
        name: of the model.
        encoding: that of the model if none is given.
        sizes: arguments of the class that make up this model; the decorator can be applied several times.

    Raises:
        ValueError: if `name` is no identifier, or another class has it.
    """

    def add(cls: type[nn.Module]) -> type[nn.Module]:
        register_once("backbone", name, cls, _backbones.get(name))

        def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
            if pretrained:
                raise ValueError(f"`pretrained` must be False: {name} has no published weights.")
            for given_by_timm in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
                kwargs.pop(given_by_timm, None)
            make: Any = cls
            model = make(take_position(kwargs, encoding), **{**sizes, **kwargs})
            if not hasattr(model, "pretrained_cfg"):
                size = (getattr(model, "in_chans", 3), *getattr(model, "img_size", (224, 224)))
                model.pretrained_cfg = imagenet_cfg(input_size=size, num_classes=getattr(model, "num_classes", 1000))
            return model

        register(cls.__module__, name, build, cls)
        return cls

    return add


def imagenet_cfg(**kwargs: Any) -> dict[str, Any]:
    """Make a timm configuration of a model for ImageNet at 224 pixels; `kwargs` override or add."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **kwargs,
    }


def gray_cfg(size: int, **kwargs: Any) -> dict[str, Any]:
    """Make a timm configuration of a model for gray images of `size` pixels; `kwargs` override or add."""
    given = {"input_size": (1, size, size), "num_classes": 10, "mean": (0.5,), "std": (0.5,), "crop_pct": 1.0}
    return imagenet_cfg(**{**given, **kwargs})


#: The arguments of every model that say what its position is.
CHOICES = ("encoding", "joining")


#: What timm's `create_model` and builder take themselves, beside the arguments of a backbone.
_OF_TIMM = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path", "cache_dir"),
    *("features_only", "feature_cls", "out_indices"),
)


def check_arguments(given: Iterable[str], known: Collection[str], name: str) -> None:
    """Check that model `name` has every argument that is given.

    Raises:
        ValueError: for the first that it has not, with the nearest ones.
    """
    for argument in given:
        if argument not in known:
            near = difflib.get_close_matches(argument, known, n=2)
            hint = f"; did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else "."
            raise ValueError(
                f"`{argument}` is no argument of {name}{hint} The arguments are {', '.join(sorted(known))}."
            )


def take_position(
    kwargs: dict[str, Any], encoding: str = "learnable", defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> PositionBuilder:
    """Take `encoding` and `joining`, or `position` itself, out of the arguments of a model, and return the builder.

    Args:
        kwargs: the arguments.
        encoding: that of the model if none is given.
        defaults: options that the model's family has of its own, by the name of the encoding.
    """
    given = {name: kwargs.pop(name) for name in CHOICES if name in kwargs}
    if "position" in kwargs:
        if given:
            raise ValueError(f"`position` must be given alone, without {', '.join(given)}.")
        return kwargs.pop("position")
    specs = ENCODINGS.specs(given.pop("encoding", encoding))
    specs = tuple(Spec(spec.name, {**(defaults or {}).get(spec.name, {}), **spec.options}) for spec in specs)
    return partial(build_position, encoding=specs, **given)


def has_softmax(encoding: Any) -> bool:
    """Whether an encoding mixes tokens by a softmax; a gating unit is better without its norm then (PosMLP, 5.3)."""
    kinds = [ENCODINGS[spec.name] for spec in ENCODINGS.specs(encoding)]
    return any(issubclass(kind, TokenMixing) and kind.softmax for kind in kinds)


@checked
def list_models(pattern: str = "*") -> list[str]:
    """List the names of our models that match a shell-like `pattern`."""
    return [name for name in _backbones if fnmatch(name, pattern)]


@checked
def backbone_of(name: str) -> type[nn.Module] | None:
    """Return the class of model `name`; None if it is no backbone of images."""
    return _backbones.get(name.removeprefix(PREFIX))


def list_arguments(name: str) -> list[str]:
    """List the arguments of the backbone of model `name` that are numbers, words or truth values.

    Those of position are left out.
    """
    hidden = ("position", "embed_layer", "block_layer", "norm_layer", "act_layer")
    backbone = _backbones[known_name("name", name.removeprefix(PREFIX), _backbones)]
    return [argument for argument in _arguments(backbone) if argument not in hidden]


def _arguments(backbone: type[nn.Module]) -> list[str]:
    """List the arguments of a class, with those that it passes on to the class that it extends."""
    found: dict[str, None] = {}
    for kind in backbone.__mro__:
        parameters = list(inspect.signature(kind).parameters.values()) if "__init__" in vars(kind) else []
        found |= {parameter.name: None for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        if parameters and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(found)


@checked
def create_model(name: str, pretrained: bool = False, checkpoint_path: str | Path | None = None, **kwargs: Any) -> Any:
    """Create one of `list_models()`.

    The same is `timm.create_model("graticule_" + name, ...)`, and all that timm takes goes through
    (`num_classes`, `img_size`, `features_only`, ...).

    Args:
        name: with or without the `graticule_` of timm's registry.
        pretrained: load the published weights, where timm has them on its hub.
        checkpoint_path: load the weights of this file, as `load_checkpoint` does.
        **kwargs: `encoding` and `joining`, names with options as 'shaw(clip=4)' (see `build_position`), and the
            arguments of the backbone.

    Raises:
        ValueError: for an unknown name or argument, with the nearest ones; for a checkpoint that cannot be read or
            does not fit.
        FileNotFoundError: if there is no such checkpoint.

    Example:
        >>> model = create_model("deit_tiny_patch16_224", encoding="sinusoidal_2d", joining="lape(layers=6)")
        >>> len(model.position.joining.norms)
        6
    """
    name = known_name("name", name.removeprefix(PREFIX), _backbones)
    if checkpoint_path is not None and (pretrained or kwargs.get("features_only")):
        raise ValueError("`checkpoint_path` must be given without `pretrained` and `features_only`, got both.")
    model = timm.create_model(registry_name(name), pretrained=pretrained, **kwargs)
    return model if checkpoint_path is None else load_checkpoint(model, checkpoint_path)
