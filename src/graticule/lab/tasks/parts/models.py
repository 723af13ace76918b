"""The models of image and text recipes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from graticule.backbones.base import Backbone
from graticule.backbones.language import (
    LanguageModel,
    create_language_model,
    list_language_arguments,
    list_language_models,
)
from graticule.backbones.registry import create_model, list_arguments, list_models
from graticule.hub.config import PREFIX
from graticule.lab.training.recipe import TrainingRecipe
from graticule.registry.checks import known_name

M = TypeVar("M")


def build_backbone(
    recipe: TrainingRecipe,
    num_classes: int,
    channels: int,
    img_size: tuple[int, int],
    patch_size: int | None = None,
    global_pool: str | None = None,
) -> Backbone:
    """Build the backbone of a recipe; values that the recipe leaves open are the defaults of the backbone.

    Args:
        recipe: model, position and drop path.
        num_classes: outputs of the head.
        channels: channels of the images.
        img_size: (height, width) in pixels.
        patch_size: side of a patch in pixels.
        global_pool: token or avg.

    Raises:
        ValueError: for an argument that the backbone does not have, or a combination that it refuses.
    """
    known_name("model", recipe.model.removeprefix(PREFIX), list_models())
    given = {"global_pool": global_pool, "num_classes": num_classes}
    if global_pool is not None and "class_token" in list_arguments(recipe.model):
        given["class_token"] = global_pool == "token"
    arguments = backbone_arguments(recipe, channels, img_size, patch_size, **given)
    model: Backbone = built(partial(create_model, recipe.model, **arguments), recipe)
    return model


def backbone_arguments(
    recipe: TrainingRecipe, channels: int, img_size: tuple[int, int], patch_size: int | None, **given: Any
) -> dict[str, Any]:
    """Return the arguments of a backbone that a recipe gives, checked.

    Args:
        recipe: model, position and drop path.
        channels: of the images.
        img_size: (height, width) in pixels.
        patch_size: side of a patch in pixels; None for the backbone's default.
        given: further arguments, None for the backbone's defaults; `model_kwargs` must not have them.

    Raises:
        ValueError: for an argument that the backbone does not have.
    """
    known_name("model", recipe.model.removeprefix(PREFIX), list_models())
    known = list_arguments(recipe.model)
    given = {
        "img_size": img_size,
        "patch_size": patch_size,
        # a backbone without stochastic depth needs no argument for none
        "drop_path_rate": recipe.drop_path_rate if recipe.drop_path_rate or "drop_path_rate" in known else None,
        "in_chans": channels,
        **given,
    }
    for name, value in given.items():
        if value is not None and name not in known:
            raise ValueError(f"`{name}` must be left out: {recipe.model} has no such argument, got {value!r}.")
    further = recipe.backbone_arguments()
    for name in further:
        known_name("model_kwargs", name, [argument for argument in known if argument not in given])
    return {**_position(recipe), **given, **further}


def build_language_model(
    recipe: TrainingRecipe, vocab_size: int, context: int, tied: bool = True, drop_rate: float = 0.0
) -> LanguageModel:
    """Build the language model of a recipe.

    Args:
        recipe: model, position and drop path.
        vocab_size: tokens of the vocabulary.
        context: tokens for which position information is built.
        tied: whether the head shares the weights of the token embedding.
        drop_rate: dropout of the tokens and of the outputs of attention and MLPs.

    Raises:
        ValueError: for an argument that the model does not have, or a combination that it refuses.
    """
    given: dict[str, Any] = {
        "vocab_size": vocab_size,
        "context": context,
        "tied": tied,
        "pos_drop_rate": drop_rate,
        "proj_drop_rate": drop_rate,
        "drop_path_rate": recipe.drop_path_rate,
    }
    known_name("model", recipe.model, list_language_models())
    further = recipe.backbone_arguments()
    for name in further:
        known_name("model_kwargs", name, [known for known in list_language_arguments() if known not in given])
    build = partial(create_language_model, recipe.model, **_position(recipe), **given, **further)
    return built(build, recipe)


def _position(recipe: TrainingRecipe) -> dict[str, Any]:
    """Return the position arguments that a recipe gives; the others are the model's defaults."""
    return {"joining": recipe.joining} | ({} if recipe.encoding is None else {"encoding": recipe.encoding})


def built(build: Callable[[], M], recipe: TrainingRecipe) -> M:
    """Return the result of `build`; a value in `model_kwargs` of a wrong type is a ValueError."""
    further = recipe.backbone_arguments()
    if not further:
        return build()
    try:
        return build()
    except TypeError as error:  # from a value of a wrong type
        raise ValueError(f"`model_kwargs` must be valid for {recipe.model}, got {further}: {error}.") from None
