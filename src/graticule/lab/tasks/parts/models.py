"""The models of recipes: their arguments, and the backbones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from graticule.backbones.base import Backbone
from graticule.backbones.registry import create_model, list_arguments, list_models
from graticule.hub.config import PREFIX, Architecture, architecture_of
from graticule.hub.config import build_backbone as build_described
from graticule.lab.training.opening import open_backbone
from graticule.lab.training.recipe import USUAL_JOINING, TrainingRecipe
from graticule.lab.training.task import SourceModel
from graticule.registry.checks import known_name

M = TypeVar("M")


def describe_source(recipe: TrainingRecipe) -> dict[str, SourceModel]:
    """Return the architecture of a recipe's model as the entry `backbone` of recipe.json; nothing for a name."""
    if not recipe.of_source:
        return {}
    return {"backbone": describe_backbone(open_backbone(recipe.model, weights=recipe.start_from is None))}


def describe_backbone(backbone: Backbone) -> SourceModel:
    """Return the architecture of a backbone, with its own position."""
    found = architecture_of(backbone)
    return {"architecture": found.architecture, "model_args": json.loads(json.dumps(found.model_args))}


def build_backbone(
    recipe: TrainingRecipe,
    num_classes: int,
    channels: int,
    img_size: tuple[int, ...],
    patch_size: int | None = None,
    global_pool: str | None = None,
    source: SourceModel | None = None,
) -> Backbone:
    """Build the backbone of a recipe; values that the recipe leaves open are the defaults of the backbone.

    Args:
        recipe: model, position and drop path.
        num_classes: outputs of the head.
        channels: channels of the images.
        img_size: (height, width) in pixels, or (depth, height, width).
        patch_size: side of a patch in pixels.
        global_pool: token or avg.
        source: the description of a model that exists; its arguments are the defaults.

    Raises:
        ValueError: for an argument that the backbone does not have, or a combination that it refuses.
    """
    if recipe.of_source:
        given = {"num_classes": num_classes, "in_chans": channels, "img_size": img_size, "patch_size": patch_size}
        given |= {"global_pool": global_pool, "drop_path_rate": recipe.drop_path_rate}
        return _build_source(recipe, source or describe_source(recipe)["backbone"], given)
    known_name("model", recipe.model.removeprefix(PREFIX), list_models())
    given = {"global_pool": global_pool, "num_classes": num_classes}
    if global_pool is not None and "class_token" in list_arguments(recipe.model):
        given["class_token"] = global_pool == "token"
    arguments = backbone_arguments(recipe, channels, img_size, patch_size, **given)
    model: Backbone = built(partial(create_model, recipe.model, **arguments), recipe)
    return model


def _build_source(recipe: TrainingRecipe, source: SourceModel, given: Mapping[str, Any]) -> Backbone:
    """Build a described backbone with the arguments that are given; its position unless the recipe has another."""
    further, known = recipe.backbone_arguments(), source["model_args"]
    given = {name: value for name, value in given.items() if value is not None}
    for name in further:
        known_name("model_kwargs", name, [argument for argument in known if argument not in given])
    chosen = {} if recipe.encoding is None else {"encoding": recipe.encoding, "joining": recipe.joining}
    if recipe.joining != USUAL_JOINING:
        chosen["joining"] = recipe.joining
    arguments = {name: value for name, value in (known | further | given | chosen).items() if name in known}
    described = Architecture(source["architecture"], json.loads(json.dumps(arguments)))
    model: Backbone = built(partial(build_described, Path(recipe.model), described), recipe)
    return model


def backbone_arguments(
    recipe: TrainingRecipe, channels: int, img_size: tuple[int, ...], patch_size: int | None, **given: Any
) -> dict[str, Any]:
    """Return the arguments of a backbone that a recipe gives, checked.

    Args:
        recipe: model, position and drop path.
        channels: of the images.
        img_size: (height, width) in pixels, or (depth, height, width).
        patch_size: side of a patch in pixels; None for the backbone's default.
        given: further arguments, None for the backbone's defaults; `model_kwargs` must not have them.
    """
    known_name("model", recipe.model.removeprefix(PREFIX), list_models())
    known = list_arguments(recipe.model)
    given = {
        "img_size": img_size,
        **({} if patch_size is None else {"patch_size": patch_size}),  # else `model_kwargs` can have it
        # a backbone without stochastic depth needs no argument for none
        "drop_path_rate": recipe.drop_path_rate if recipe.drop_path_rate or "drop_path_rate" in known else None,
        "in_chans": channels,
        **given,
    }
    for name, value in given.items():
        if value is not None and name not in known:
            raise ValueError(f"`{name}` must be left out: {recipe.model} has no such argument, got {value!r}.")
    return model_arguments(recipe, known, given)


def model_arguments(recipe: TrainingRecipe, known: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model: the position of a recipe, `given`, and `model_kwargs`, which must be others.

    Args:
        recipe: position and `model_kwargs`; what it leaves open is the model's default.
        known: the arguments that the model has.
        given: the arguments that follow from other values of the recipe.
    """
    further = recipe.backbone_arguments()
    for name in further:
        known_name("model_kwargs", name, [argument for argument in known if argument not in given])
    encoding = {} if recipe.encoding is None else {"encoding": recipe.encoding}
    return {"joining": recipe.joining, **encoding, **given, **further}


def built(build: Callable[[], M], recipe: TrainingRecipe) -> M:
    """Return the result of `build`; a value in `model_kwargs` of a wrong type is a ValueError."""
    further = recipe.backbone_arguments()
    if not further:
        return build()
    try:
        return build()
    except TypeError as error:  # from a value of a wrong type
        raise ValueError(f"`model_kwargs` must be valid for {recipe.model}, got {further}: {error}.") from None
