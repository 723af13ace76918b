"""Our names in timm's registry, where every model is `graticule_` and its own name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import timm
from timm.models import register_model
from torch import nn

from graticule.backbones.load import load_checkpoint
from graticule.checks import checked
from graticule.factory import build_position
from graticule.memory import build_within_memory
from graticule.names import known_name
from graticule.position import PositionBuilder

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


#: What `build_position` can be told beside what a backbone says itself.
CHOICES = [
    name
    for name, parameter in inspect.signature(build_position).parameters.items()
    if parameter.default is not inspect.Parameter.empty
    and name not in ("window", "absolute", "merge", "merged", "causal")
]


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


def take_position(kwargs: dict[str, Any], **defaults: Any) -> PositionBuilder:
    """Take what is said of position out of the keyword arguments of a model, and make the builder of it.

    That is `position` itself, or the choices of `build_position`; `defaults` are those of the model.
    """
    given = {name: kwargs.pop(name) for name in CHOICES if name in kwargs}
    if "position" in kwargs:
        if given:
            raise ValueError(f"`position` must be given alone, without {', '.join(given)}.")
        return kwargs.pop("position")
    return partial(build_position, **{**defaults, **given})


def no_gate_norm(encoding: str) -> bool:
    """Whether a gating unit is better without its norm: where a softmax stands in the encoding (PosMLP, 5.3)."""
    return bool({"gqpe", "ggqpe"} & set(encoding.split("+")))


@checked
def list_models(pattern: str = "*") -> list[str]:
    """List the names of our models that match a shell-like `pattern`."""
    return [name for name in _backbones if fnmatch(name, pattern)]


@checked
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
        **kwargs: `encoding`, `joining`, `joined_layers`, `decomposition`, `table_std`, `peg`, `shaw_clip`,
            `token_mixing` (see `build_position`) and the arguments of the backbone.

    Raises:
        ValueError: for an unknown name or argument, with the nearest ones; for a checkpoint that cannot be read or
            does not fit.
        FileNotFoundError: if there is no such checkpoint.

    Example:
        >>> model = create_model("deit_tiny_patch16_224", encoding="sinusoidal_2d", joining="lape", joined_layers=6)
        >>> len(model.position.joining.norms)
        6
    """
    name = known_name("name", name.removeprefix(PREFIX), _backbones)
    if checkpoint_path is not None and (pretrained or kwargs.get("features_only")):
        raise ValueError("`checkpoint_path` must be given without `pretrained` and `features_only`, got both.")
    model = timm.create_model(registry_name(name), pretrained=pretrained, **kwargs)
    return model if checkpoint_path is None else load_checkpoint(model, checkpoint_path)
