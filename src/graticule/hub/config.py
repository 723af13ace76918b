"""The config.json of a backbone: its name in timm's registry, its arguments, and the words of our grammar."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import timm
from pydantic import Field
from torch import nn

from graticule.encodings.build import build_position
from graticule.position.position import ENCODINGS, PositionBuilder
from graticule.position.resampling import Resampler
from graticule.registry.checks import known_name
from graticule.registry.fields import Finite, Positive, check_value
from graticule.registry.plugins import plugins_of
from graticule.registry.registry import parameters_of
from graticule.registry.specs import Spec

#: The arguments of every model that choose its position.
CHOICES = ("encoding", "joining")
#: Arguments of timm's `create_model` and of its builder, in addition to a backbone's.
OF_TIMM = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "pretrained_model_args"),
    *("checkpoint_path", "cache_dir", "features_only", "feature_cls", "out_indices"),
)


def check_arguments(arguments: Iterable[str], known: Collection[str], name: str) -> None:
    """Check that model `name` has every argument that is given."""
    for argument in arguments:
        if argument not in known:
            near = difflib.get_close_matches(argument, known, n=2)
            hint = f"; did you mean {' or '.join(f'`{close}`' for close in near)}?" if near else "."
            raise ValueError(
                f"`{argument}` is not an argument of {name}{hint} The arguments are {', '.join(sorted(known))}."
            )


#: The types of the arguments of `CHOICES` (see `build_position`).
EncodingChoice = str | Spec | tuple[Spec, ...] | None
JoiningChoice = str | Spec | None


def given_choices(encoding: EncodingChoice, joining: JoiningChoice) -> dict[str, Any]:
    """Return those arguments of `CHOICES` that are given."""
    return {name: value for name, value in zip(CHOICES, (encoding, joining), strict=True) if value is not None}


def take_position(
    kwargs: dict[str, Any], encoding: str = "learnable", defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> PositionBuilder:
    """Remove `encoding` and `joining`, or `position` itself, from the arguments of a model, and return the builder.

    `defaults` has default options of the model's family, by the name of the encoding.
    """
    choices = {name: kwargs.pop(name) for name in CHOICES if name in kwargs}
    if "position" in kwargs:
        if choices:
            raise ValueError(f"`position` must be given alone, without {', '.join(choices)}.")
        return kwargs.pop("position")
    specs = ENCODINGS.specs(choices.pop("encoding", encoding))
    specs = tuple(Spec(spec.name, {**(defaults or {}).get(spec.name, {}), **spec.options}) for spec in specs)
    return partial(build_position, encoding=specs, **choices)


def written_words(builder: Callable[..., Any]) -> dict[str, str] | None:
    """Return the encoding and joining of a builder made by `take_position`, as text; None for any other builder."""
    if not isinstance(builder, partial):
        return None
    keywords = builder.keywords
    encoding, joining = keywords.get("encoding", "learnable"), keywords.get("joining", "default")
    specs = encoding if isinstance(encoding, tuple) else (encoding,)
    return {"encoding": " + ".join(map(str, specs)), "joining": str(joining) if isinstance(joining, Spec) else joining}


@cache
def argument_defaults(backbone: type) -> Mapping[str, Any]:
    """Return the arguments of a class and their defaults, including those that it passes to its base class."""
    parameters = parameters_of(backbone)
    first = next(iter(parameters.values()))[0]
    defaults = {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, (function, parameter) in parameters.items()
        # the class itself gives its base class what that requires
        if function is first or parameter.default is not parameter.empty
    }
    return MappingProxyType(defaults)


PREFIX = "graticule_"
#: Arguments that a config.json must not set, in addition to timm's: their values are functions and classes.
_FUNCTIONS = ("position", "embed_layer", "merging_layer", "attn_layer")


@dataclass(frozen=True)
class Preparation:
    """Preprocessing of images and names of the classes, as in timm's configuration; None if they are not known."""

    mean: list[Finite] | None = None
    std: list[Positive] | None = None
    interpolation: str | None = None
    crop_pct: Annotated[float, Field(ge=0.1, le=2)] | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    label_names: list[str] | None = None


@dataclass(frozen=True)
class Architecture:
    """A backbone by its name in timm's registry, and its arguments."""

    architecture: str
    model_args: dict[str, Any]


@contextmanager
def built_from(path: Path) -> Iterator[None]:
    """Raise an error of building a model as one of the config.json at `path`, which describes it."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} describes no model that can be built: {error}") from error


def build_backbone(path: Path, described: Architecture) -> Any:
    """Build the backbone that the config.json at `path` describes."""
    with built_from(path):
        known_name("architecture", described.architecture, timm.list_models(f"{PREFIX}*"))
        for name, value in described.model_args.items():
            if name in (*OF_TIMM, *_FUNCTIONS):
                raise ValueError(f"`model_args` must not set `{name}`, which names files or classes.")
            if not _plain(value):
                raise ValueError(f"`model_args` must hold plain values, got {name} = {value!r}.")
        arguments = {name: tuples(value) for name, value in described.model_args.items()}
        return timm.create_model(described.architecture, **arguments)


def prepare(model: Any, preparation: Preparation) -> None:
    """Set the entries of a backbone's timm configuration that describe the preprocessing of its images."""
    values = {key: value for key, value in vars(preparation).items() if value is not None}
    tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **values, **tuples}


def record_input(model: Any, channels: int, size: Sequence[int]) -> None:
    """Keep timm's configuration of a model in step with its images: timm resolves the transforms from it.

    For other channels, means and standard deviations are repeated, or averaged to one.
    """
    if not (known := getattr(model, "pretrained_cfg", None)):
        return
    values: dict[str, Any] = {"input_size": (channels, *size)}
    for name in ("mean", "std"):
        if numbers := known.get(name):
            values[name] = for_channels(numbers, channels)
    if known.get("test_input_size") and tuple(known.get("input_size") or ()) != values["input_size"]:
        values["test_input_size"] = None
    model.pretrained_cfg = model.default_cfg = {**known, **values}


def for_channels(numbers: Sequence[float], channels: int) -> Any:
    """Return means or standard deviations for other channels: repeated, or averaged to one; of the same, unchanged."""
    if len(numbers) == channels:
        return numbers
    return (sum(numbers) / len(numbers),) if channels == 1 else tuple(islice(cycle(numbers), channels))


def _plain(value: object) -> bool:
    return all(map(_plain, value)) if isinstance(value, list) else isinstance(value, str | int | float | None)


def tuples(value: object) -> Any:
    """Return a value with tuples instead of lists, at any depth."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def backbone_config(model: Any, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a backbone's config.json."""
    described = architecture_of(model, "pruned")
    described.model_args.update({"num_classes": model.num_classes, "global_pool": model.global_pool})
    return {
        **vars(described),
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": model.global_pool,
        "pretrained_cfg": configuration_of(model, model.num_classes, preprocessing),
        "graticule": words_of(model, model),
    }


def architecture_of(model: Any, refused: str = "shorter") -> Architecture:
    """Return the name of a backbone in timm's registry, and its arguments with its present sizes."""
    if model.created is None or model.created.get(refused):
        raise ValueError(
            "`model` must be built by create_model or convert, with all of its blocks, got a "
            f"{type(model).__name__} that {'lacks some' if model.created else 'was built in another way'}."
        )
    arguments = {**model.created["arguments"], "img_size": list(model.img_size), "in_chans": model.in_chans}
    sizes = inspect.signature(model.set_input_size).parameters  # the size of windows may have been changed with it
    arguments |= {argument: getattr(model, argument) for argument in sizes if argument != "img_size"}
    for argument, value in arguments.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(
                f"`model` must be built from plain values, got `{argument}` of type {type(value).__name__}."
            ) from None
    return Architecture(PREFIX + model.created["name"], arguments)


def configuration_of(backbone: Any, num_classes: int, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Return timm's configuration of a model, without the locations of pretrained weights."""
    known = dict(getattr(backbone, "pretrained_cfg", None) or {})
    checked_values = check_value(Preparation, dict(preprocessing), "`preprocessing`")
    for name, count in (("mean", backbone.in_chans), ("std", backbone.in_chans), ("label_names", num_classes)):
        values = getattr(checked_values, name)
        if values is not None and len(values) != count:
            raise ValueError(f"`preprocessing` must have {count} values of `{name}`, as the model, got {len(values)}.")
        if len(known.get(name) or ()) != count:  # of a stem or a classifier that was replaced
            known.pop(name, None)
    return {
        **{key: value for key, value in known.items() if key not in ("hf_hub_id", "url", "file", "source")},
        "input_size": [backbone.in_chans, *backbone.img_size],
        "num_classes": num_classes,
        **preprocessing,
    }


def words_of(model: nn.Module, backbone: Any) -> dict[str, Any]:
    """Return the entry `graticule` of config.json, for a model whose backbone was built from names."""
    arguments = backbone.created["arguments"]
    return {
        "model": backbone.created["name"],
        "encoding": arguments["encoding"],
        "joining": arguments["joining"],
        **used_by(model.modules()),
    }


def used_by(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the resamplers of modules, and the plugins that define modules or resamplers."""
    modules = list(modules)
    return {
        "resamplers": sorted({str(resampler) for resampler in _resamplers(modules)}),
        "plugins": plugins_of(classes_within(modules)),
    }


def classes_within(modules: Iterable[nn.Module]) -> set[type]:
    """Return the classes of modules and of their resamplers."""
    modules = list(modules)
    return {type(part) for part in (*modules, *_resamplers(modules))}


def _resamplers(modules: Iterable[nn.Module]) -> list[Resampler]:
    resamplers = (getattr(module, "resampler", None) for module in modules)
    return [resampler for resampler in resamplers if isinstance(resampler, Resampler)]
