"""The arguments of models by name: those of their classes, those that choose the position, and those of timm."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from graticule.encodings import ENCODINGS, PositionBuilder
from graticule.factory import build_position
from graticule.specs import Spec

#: The arguments of every model that choose its position.
CHOICES = ("encoding", "joining")
#: Arguments of timm's `create_model` and of its builder, in addition to those of a backbone.
OF_TIMM = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "pretrained_model_args"),
    *("checkpoint_path", "cache_dir", "features_only", "feature_cls", "out_indices"),
)


def check_arguments(given: Iterable[str], known: Collection[str], name: str) -> None:
    """Check that model `name` has every argument that is given.

    Raises:
        ValueError: for the first unknown argument, with the nearest names.
    """
    for argument in given:
        if argument not in known:
            near = difflib.get_close_matches(argument, known, n=2)
            hint = f"; did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else "."
            raise ValueError(
                f"`{argument}` is not an argument of {name}{hint} The arguments are {', '.join(sorted(known))}."
            )


def take_position(
    kwargs: dict[str, Any], encoding: str = "learnable", defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> PositionBuilder:
    """Remove `encoding` and `joining`, or `position` itself, from the arguments of a model, and return the builder.

    Args:
        kwargs: the arguments.
        encoding: the encoding if none is given.
        defaults: default options of the model's family, by the name of the encoding.
    """
    given = {name: kwargs.pop(name) for name in CHOICES if name in kwargs}
    if "position" in kwargs:
        if given:
            raise ValueError(f"`position` must be given alone, without {', '.join(given)}.")
        builder: PositionBuilder = kwargs.pop("position")
        return builder
    specs = ENCODINGS.specs(given.pop("encoding", encoding))
    specs = tuple(Spec(spec.name, {**(defaults or {}).get(spec.name, {}), **spec.options}) for spec in specs)
    return partial(build_position, encoding=specs, **given)


def written_words(builder: Callable[..., Any]) -> dict[str, str] | None:
    """Return the encoding and joining of a builder made by `take_position`, as text; None for any other builder."""
    if not isinstance(builder, partial):
        return None
    given = builder.keywords
    encoding, joining = given.get("encoding", "learnable"), given.get("joining", "default")
    specs = encoding if isinstance(encoding, tuple) else (encoding,)
    return {"encoding": " + ".join(map(str, specs)), "joining": str(joining) if isinstance(joining, Spec) else joining}


@cache
def argument_defaults(backbone: type) -> Mapping[str, Any]:
    """Return the arguments of a class and their defaults, including those that it passes to its base class."""
    found: dict[str, Any] = {}
    for kind in backbone.__mro__:
        parameters = list(inspect.signature(kind).parameters.values()) if "__init__" in vars(kind) else []
        for parameter in parameters:
            if parameter.kind is not parameter.VAR_KEYWORD:
                found.setdefault(parameter.name, None if parameter.default is parameter.empty else parameter.default)
        if parameters and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return MappingProxyType(found)
