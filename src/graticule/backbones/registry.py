"""Models by name: the backbone and the arguments of each model, as data, and its entry in timm's registry.

In timm every model is named `graticule_` and its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import timm
from timm.models import PretrainedCfg, build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from graticule.backbones.base import Backbone
from graticule.checkpoints.load import load_checkpoint, own_state
from graticule.checkpoints.read import read_state
from graticule.encodings.forms.mixing import TokenMixing
from graticule.hub.config import (
    CHOICES,
    OF_TIMM,
    PREFIX,
    Architecture,
    EncodingChoice,
    JoiningChoice,
    Preparation,
    argument_defaults,
    build_backbone,
    check_arguments,
    given_choices,
    prepare,
    record_input,
    take_position,
    tuples,
    written_words,
)
from graticule.hub.files import quick_hub
from graticule.hub.kinds import ModelWords, register_kind
from graticule.position.joining import JOININGS
from graticule.position.position import ENCODINGS
from graticule.position.resampling import RESAMPLERS
from graticule.registry.checks import check, checked, is_integer, is_path, known_name
from graticule.registry.fields import read_typed
from graticule.registry.plugins import Definition, check_class
from graticule.registry.registry import NameTable
from graticule.registry.specs import Spec
from graticule.system.memory import build_within_memory

Class = TypeVar("Class", bound=type[Backbone])


def registry_name(name: str) -> str:
    """Return the name under which timm knows our model `name`."""
    return PREFIX + name


@dataclass(frozen=True)
class Size:
    """A model by name, as data; it is read without building the model.

    parameters: number of parameters, with the encoding of the model; None if unknown.
    arguments: the backbone's arguments that differ from its defaults.
    encoding: the encoding if the caller gives none; None for the family's.
    hub: repository of the published weights on the Hugging Face hub, or only its tag, such as 'fb_in1k', where timm has
        the model under the same name; None if there are none.
    cfg: further entries of timm's configuration (`crop_pct`, `mean`, ...).
    cfg_of_classes: further entries by the number of classes, for models published for several data sets.
    backbone: the class, which registration sets.
    """

    parameters: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    encoding: str | None = None
    hub: str | None = None
    cfg: Mapping[str, Any] = field(default_factory=dict)
    cfg_of_classes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    backbone: type[Backbone] | None = None

    @property
    def kind(self) -> type[Backbone]:
        assert self.backbone is not None
        return self.backbone

    def argument(self, name: str, default: object = None) -> Any:
        """Return the value of a backbone argument: the model's, or else the default."""
        return self.arguments.get(name, argument_defaults(self.kind).get(name, default))

    @property
    def depths(self) -> tuple[int, ...]:
        """Return the number of blocks of each stage; empty if the arguments do not determine it."""
        several = self.argument("depths")
        depth = self.argument("depth", self.argument("num_blocks"))
        depths = several if isinstance(several, list | tuple) else (depth,)
        return tuple(depths) if all(map(is_integer, depths)) else ()  # the constructor refuses what is not a number

    @property
    def dims(self) -> tuple[int, ...]:
        """Return D of each stage; empty if the arguments do not determine it."""
        several, first = self.argument("embed_dims"), self.argument("embed_dim")
        if several is not None:
            return tuple(several)
        return () if first is None else tuple(first << stage for stage in range(len(self.depths)))

    @property
    def img_size(self) -> tuple[int, int]:
        """Return the image size, (height, width) in pixels."""
        size = self.argument("img_size", 224)
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    def configuration(self) -> dict[str, Any]:
        channels, classes = self.argument("in_chans", 3), self.argument("num_classes", 1000)
        color = channels == 3
        return {
            "num_classes": classes,
            "input_size": (channels, *self.img_size),
            "pool_size": None,
            "crop_pct": 0.9 if color else 1.0,
            "interpolation": "bicubic",
            "mean": (0.485, 0.456, 0.406) if color else (0.5,) * channels,
            "std": (0.229, 0.224, 0.225) if color else (0.5,) * channels,
            "first_conv": self.kind.first_conv,
            "classifier": self.kind.classifiers,
            **({} if self.hub is None else {"hf_hub_id": self.hub}),
            **self.cfg,
        }


#: The models by name, in the order of registration, as data; they are read without building a model.
MODELS: NameTable[str, Size] = NameTable("backbone", "graticule.backbones", definition=lambda size: size.kind)
#: The classes of the models by name. timm also builds them, as `graticule_` and the name of the class, from all their
#: arguments: published models that no name describes, such as converted ones, are opened in this way.
CLASSES: dict[str, type[Backbone]] = {}
#: Family -> one of its models, and arguments that make it as small as possible with all that is particular to it.
FAMILIES: NameTable[str, tuple[str, dict[str, Any]]] = NameTable("family", "graticule.backbones")
#: timm's configurations of the models, by their names there; timm reads them from this module.
default_cfgs: dict[str, Any] = {}


def register_sizes(backbone: type[Backbone], sizes: Mapping[str, Size], **cfg: Any) -> None:
    """Register the models of a family; `cfg` are further entries of timm's configuration of all of them."""
    for name, size in sizes.items():
        hub = size.hub if size.hub is None or "/" in size.hub else f"timm/{name}.{size.hub}"
        MODELS[name] = replace(size, hub=hub, cfg={**cfg, **size.cfg}, backbone=backbone)
        _enter_timm(name, MODELS[name])


def register_small(family: str, name: str, **arguments: Any) -> None:
    """Declare the small model of a family: a name, and arguments of its backbone."""
    FAMILIES[family] = name, arguments


def list_small_models() -> dict[str, tuple[str, dict[str, Any]]]:
    """List the small models of all families, and the first model of each class without a small one."""
    models = dict(sorted(FAMILIES.items(), key=lambda item: item[0].lower()))
    kinds = {MODELS[name].kind for name, _ in models.values()}
    for name, size in MODELS.items():
        if size.kind not in kinds:
            kinds.add(size.kind)
            models[name] = name, {}
    return models


def register_backbone(name: str, *, encoding: str | None = None, **sizes: Any) -> Callable[[Class], Class]:
    """Return a decorator that registers a subclass of `Backbone` as `name`, for `create_model`, timm and recipes.

    The class takes `position`, a `PositionBuilder`, as its first argument; all others can be given by name.

    Args:
        name: name of the model.
        encoding: the encoding if the caller gives none; `default_encoding` of the class by default.
        sizes: arguments of the class for this model; the decorator can be applied several times.

    Raises:
        ValueError: if `name` is not an identifier, or another class has it.
        TypeError: if the class is not a subclass of `Backbone`, or lacks abstract methods of it.
    """

    def describe(cls: Any) -> Size:
        check_class("backbone", name, cls, Backbone)
        return Size(arguments=sizes, encoding=encoding, backbone=cls)

    register = MODELS.register(name, describe)

    def add(cls: Class) -> Class:
        register(cls)
        _enter_timm(name, MODELS[name])
        return cls

    return add


def _enter_timm(name: str, size: Size) -> None:
    """Add a model of `MODELS` to timm's registry, and its class if it is a new one."""
    _enter(name, size, size.kind.encoding_options)
    if size.kind.__name__ not in CLASSES:
        CLASSES[size.kind.__name__] = size.kind
        _enter(size.kind.__name__, Size(backbone=size.kind), {})


def _enter(name: str, size: Size, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Add a model to timm's registry; `options` are the default options of its encodings."""

    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        check_arguments(kwargs, [*argument_defaults(size.kind), *CHOICES, *OF_TIMM], name)
        for argument in ("pretrained_cfg", "pretrained_cfg_overlay"):
            check(argument, kwargs.get(argument), Mapping[str, Any] | None)
            check_arguments(kwargs.get(argument) or {}, PretrainedCfg.__dataclass_fields__, f"`{argument}`")
        if pretrained and size.hub is None and not _has_weights(kwargs.get("pretrained_cfg")):
            raise ValueError(
                f"`pretrained` must be False: timm's hub has no weights of {name}; load a checkpoint file of its code "
                "with load_checkpoint."
            )
        # published weights have known sizes, and would be downloaded twice
        arguments = {argument: tuples(value) for argument, value in kwargs.items()}  # a config.json has lists
        build = partial(_build, name, size, options, pretrained, **arguments)
        return build() if pretrained else build_within_memory(build)

    entry.__name__ = entry.__qualname__ = registry_name(name)
    entry.__module__ = __name__
    entry.__doc__ = f"Build {name}; it takes the keyword arguments of its backbone, encoding and joining."
    default_cfgs.update(generate_default_cfgs({registry_name(name): size.configuration()}))
    register_model(entry)


def _build(
    name: str, size: Size, options: Mapping[str, Mapping[str, Any]], pretrained: bool, **kwargs: Any
) -> nn.Module:
    classes = kwargs.get("num_classes", 0)
    overlay = size.cfg_of_classes.get(classes) if is_integer(classes) else None  # the constructor refuses others
    if overlay:
        kwargs["pretrained_cfg_overlay"] = {**overlay, **(kwargs.get("pretrained_cfg_overlay") or {})}
    created = {argument: value for argument, value in kwargs.items() if argument not in (*CHOICES, *OF_TIMM)}
    position = take_position(kwargs, size.encoding or size.kind.default_encoding, options)
    words = written_words(position)
    check_mixing(size.kind, "none" if words is None else words["encoding"])
    described = replace(size, arguments={**size.arguments, **kwargs})
    depths = described.depths
    features = tuple(range(len(depths))) if len(depths) > 1 else min(3, *depths) if depths else 3
    kwargs = {**size.arguments, **kwargs}
    kind: Callable[..., nn.Module] = size.kind
    if isinstance(kwargs.get("img_size"), tuple) and len(kwargs["img_size"]) > 2:  # timm knows no videos and volumes
        kind = partial(kind, img_size=kwargs.pop("img_size"))
        kwargs["pretrained_cfg_overlay"] = {**(kwargs.get("pretrained_cfg_overlay") or {}), "fixed_input_size": False}
    model: nn.Module = build_model_with_cfg(
        kind,
        registry_name(name),
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", features), "feature_cls": "getter"},
        position=position,
        **kwargs,
    )
    if isinstance(model, Backbone) and words is not None:
        model.created = {"name": name, "arguments": {**created, **words}}
    if isinstance(model, Backbone):
        record_input(model, model.in_chans, model.img_size)
    return model


def check_mixing(kind: type[Backbone], encoding: str | Spec | tuple[Spec, ...]) -> None:
    """Refuse an encoding that mixes tokens in a family that mixes them by attention, naming the models that take it."""
    mixing = [spec.name for spec in ENCODINGS.specs(encoding) if issubclass(ENCODINGS[spec.name], TokenMixing)]
    if mixing and "mixing" not in kind.takes:
        families = {f"{name.partition('_')[0]}_*" for name, size in MODELS.items() if "mixing" in size.kind.takes}
        raise ValueError(
            f"`encoding` must be one for attention in {kind.__name__}, got {mixing[0]}, which mixes tokens and is only "
            f"for {', '.join(sorted(families))}."
        )


def _has_weights(pretrained_cfg: Any) -> bool:
    """Return True if timm read a configuration from a folder or a repository that has weights."""
    return isinstance(pretrained_cfg, dict) and pretrained_cfg.get("source") in ("hf-hub", "local-dir")


def checkpoint_filter_fn(checkpoint: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Turn a published checkpoint into a state dict of `model`; timm calls it with the weights of its hub."""
    return own_state(model, read_state(checkpoint))


@checked
def list_models(pattern: str = "*") -> list[str]:
    """List the names of our models that match a shell-like `pattern`."""
    return [name for name in MODELS if fnmatch(name, pattern)]


@checked
def backbone_of(name: str) -> type[Backbone] | None:
    """Return the class of model `name`; None if it is not an image backbone."""
    size = MODELS.get(name.removeprefix(PREFIX))
    return None if size is None else size.kind


def definitions_of(model: str, encoding: str | None, joining: str) -> list[Definition]:
    """Return the classes that the texts of a model name: encodings, resamplers, joining and backbone."""
    encodings = () if encoding is None else ENCODINGS.specs(encoding)
    resamplers = [resampler for spec in encodings if (resampler := spec.options.get("resampler")) is not None]
    backbone = backbone_of(model)
    return [
        *(ENCODINGS[spec.name] for spec in encodings),
        *(RESAMPLERS[spec.name] for resampler in resamplers for spec in RESAMPLERS.specs(resampler)),
        *(JOININGS[spec.name] for spec in JOININGS.specs(joining)),
        *([] if backbone is None else [backbone]),
    ]


def list_arguments(name: str) -> list[str]:
    """List the arguments of the backbone of model `name` that are numbers, strings or booleans.

    Position encodings are omitted.
    """
    kind = MODELS[known_name("name", name.removeprefix(PREFIX), MODELS)].kind
    return [argument for argument in argument_defaults(kind) if argument not in kind.hidden_arguments]


@overload
def create_model(
    name: str,
    pretrained: bool = ...,
    checkpoint_path: str | Path | None = ...,
    *,
    encoding: EncodingChoice = ...,
    joining: JoiningChoice = ...,
    features_only: Literal[False] = ...,
    **kwargs: Any,
) -> Backbone: ...
@overload
def create_model(
    name: str,
    pretrained: bool = ...,
    checkpoint_path: None = ...,
    *,
    encoding: EncodingChoice = ...,
    joining: JoiningChoice = ...,
    features_only: Literal[True],
    **kwargs: Any,
) -> nn.Module: ...
@checked
def create_model(
    name: str,
    pretrained: bool = False,
    checkpoint_path: str | Path | None = None,
    *,
    encoding: EncodingChoice = None,
    joining: JoiningChoice = None,
    **kwargs: Any,
) -> nn.Module:
    """Create one of `list_models()`.

    It equals `timm.create_model("graticule_" + name, ...)`, and accepts all arguments of timm
    (`num_classes`, `img_size`, `features_only`, ...).

    Args:
        name: with or without the `graticule_` of timm's registry.
        pretrained: load the published weights, if timm has them on its hub.
        checkpoint_path: load the weights of this file, as `load_checkpoint` does.
        encoding: names with options, such as 'shaw(clip=4)' (see `build_position`); by default the model's.
        joining: a name with options, such as 'lape(layers=6)'; 'default' by default.
        **kwargs: the arguments of the backbone.

    Returns:
        The backbone; with `features_only=True` timm's module of feature maps around it.

    Raises:
        ValueError: for an unknown name or argument, with the nearest ones; for a checkpoint that cannot be read or
            does not fit.
        FileNotFoundError: if there is no such checkpoint.
        ConnectionError: if published weights are not in the cache, and the hub cannot be reached.

    Example:
        >>> model = create_model("deit_tiny_patch16_224", encoding="sinusoidal_2d", joining="lape(layers=6)")
        >>> len(model.position.joining.norms)
        6
    """
    kwargs |= given_choices(encoding, joining)
    if is_path(name):
        is_local = name.startswith((".", "/")) or Path(name).exists()
        source = name if is_local else f"hf:{name.rpartition(':')[2]}"
        hint = f"graticule.load({source!r}) opens a trained model {'there' if is_local else 'of the hub'}"
    elif timm.is_model(of_timm := name.removeprefix("timm:")):
        built = f"graticule.convert(timm.create_model({of_timm!r}, pretrained=True))"
        hint = f"timm has it: {built} makes one of ours, if its class converts"
    else:
        hint = ""
    name = known_name("name", name.removeprefix(PREFIX), MODELS, hint)
    if checkpoint_path is not None and (pretrained or kwargs.get("features_only")):
        raise ValueError("`checkpoint_path` must be given without `pretrained` and `features_only`, got both.")
    with quick_hub() if pretrained else nullcontext():
        model: nn.Module = timm.create_model(registry_name(name), pretrained=pretrained, **kwargs)
    return model if checkpoint_path is None else load_checkpoint(model, checkpoint_path)


@dataclass(frozen=True)
class _BackboneConfig(Architecture):
    """Entries that are read from the config.json of a backbone; timm reads further ones."""

    pretrained_cfg: Preparation
    graticule: ModelWords | None = None
    num_classes: int | None = None
    global_pool: str | bool | None = None


@register_kind("backbone")
def open_backbone(config: Path, weights: Path | None) -> nn.Module:
    """Build the backbone of a config.json, and load its weights unless they are None."""
    described = read_typed(config, _BackboneConfig)
    model = build_backbone(config, described)
    for word in CHOICES:
        there, here = getattr(described.graticule, word, None), described.model_args.get(word)
        if there and here and there != here:
            raise ValueError(
                f"{config} must name one {word}, got {here!r} in `model_args` and {there!r} in `graticule`."
            )
    for word in ("num_classes", "global_pool"):
        there, here = getattr(described, word), getattr(model, word)
        if there not in (None, here):
            raise ValueError(f"{config} must have one `{word}`, got {here!r} of the model and {there!r}.")
    names = described.pretrained_cfg.label_names or ()
    if names and model.num_classes not in (0, len(names)):
        raise ValueError(f"{config} is damaged: it must name {model.num_classes} classes, got {len(names)} names.")
    prepare(model, described.pretrained_cfg)
    try:
        return model if weights is None else load_checkpoint(model, weights)
    except ValueError as error:
        settings = f"num_classes={model.num_classes} and global_pool={model.global_pool!r}"
        raise ValueError(f"{str(error).removesuffix('.')}; {config} says {settings}.") from error
