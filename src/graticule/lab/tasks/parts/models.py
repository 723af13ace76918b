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
    architecture = architecture_of(backbone)
    return {"architecture": architecture.architecture, "model_args": json.loads(json.dumps(architecture.model_args))}


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
        values = {"num_classes": num_classes, "in_chans": channels, "img_size": img_size, "patch_size": patch_size}
        values |= {"global_pool": global_pool, "drop_path_rate": recipe.drop_path_rate}
        return _build_source(recipe, source or describe_source(recipe)["backbone"], values)
    check_model_name(recipe.model)
    values = {"global_pool": global_pool, "num_classes": num_classes}
    if global_pool is not None and "class_token" in list_arguments(recipe.model):
        values["class_token"] = global_pool == "token"
    arguments = backbone_arguments(recipe, channels, img_size, patch_size, **values)
    return build_checked(partial(create_model, recipe.model, **arguments), recipe)


def _build_source(recipe: TrainingRecipe, source: SourceModel, values: Mapping[str, Any]) -> Backbone:
    """Build a described backbone with the values that are not None; its position unless the recipe has another."""
    further, known = recipe.backbone_arguments(), source["model_args"]
    values = {name: value for name, value in values.items() if value is not None}
    for name in further:
        known_name("model_kwargs", name, [argument for argument in known if argument not in values])
    chosen = {} if recipe.encoding is None else {"encoding": recipe.encoding, "joining": recipe.joining}
    if recipe.joining != USUAL_JOINING:
        chosen["joining"] = recipe.joining
    arguments = {name: value for name, value in (known | further | values | chosen).items() if name in known}
    described = Architecture(source["architecture"], json.loads(json.dumps(arguments)))
    return build_checked(
        partial(build_described, Path(f"{recipe.model}, with the values of the recipe,"), described), recipe
    )


def check_model_name(model: str) -> None:
    """Check that a model has this name; the error for the name of a folder suggests `./` before it."""
    folders = [f"./{model}"] if Path(model).is_dir() else []
    known_name("model", model.removeprefix(PREFIX), [*list_models(), *folders])


def backbone_arguments(
    recipe: TrainingRecipe, channels: int, img_size: tuple[int, ...], patch_size: int | None, **values: Any
) -> dict[str, Any]:
    """Return the checked arguments of a backbone; `values` are further ones, None for its defaults."""
    check_model_name(recipe.model)
    known = list_arguments(recipe.model)
    values = {
        "img_size": img_size,
        **({} if patch_size is None else {"patch_size": patch_size}),  # else `model_kwargs` can have it
        # a backbone without stochastic depth needs no argument for none
        "drop_path_rate": recipe.drop_path_rate if recipe.drop_path_rate or "drop_path_rate" in known else None,
        "in_chans": channels,
        **values,
    }
    for name, value in values.items():
        if value is not None and name not in known:
            raise ValueError(f"`{name}` must be left out: {recipe.model} has no such argument, got {value!r}.")
    return model_arguments(recipe, known, values)


def model_arguments(recipe: TrainingRecipe, known: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of a recipe, the arguments `values`, and its `model_kwargs`, which must be others of `known`.

    Values that the recipe leaves open are the model's defaults.
    """
    further = recipe.backbone_arguments()
    for name in further:
        known_name("model_kwargs", name, [argument for argument in known if argument not in values])
    encoding = {} if recipe.encoding is None else {"encoding": recipe.encoding}
    return {"joining": recipe.joining, **encoding, **values, **further}


def build_checked(build: Callable[[], M], recipe: TrainingRecipe) -> M:
    """Return the result of `build`; a value in `model_kwargs` of a wrong type is a ValueError."""
    further = recipe.backbone_arguments()
    try:
        return build()
    except TypeError as error:  # from a value of a wrong type
        if not further:
            raise
        raise ValueError(f"`model_kwargs` must be valid for {recipe.model}, got {further}: {error}.") from None
