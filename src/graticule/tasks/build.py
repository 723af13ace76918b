"""From a recipe to its data and its untrained model, for every task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from graticule.backbones import (
    create_language_model,
    create_model,
    list_arguments,
    list_language_arguments,
    list_language_models,
    list_models,
)
from graticule.backbones.registry import PREFIX, backbone_of
from graticule.data import DataModule, TextModule, Tokenizer
from graticule.encodings import ENCODINGS
from graticule.joining import JOININGS
from graticule.names import known_name
from graticule.plugins import plugins_of
from graticule.tasks.recipe import Recipe
from graticule.tasks.text_recipe import TextRecipe
from graticule.training.recipe import TrainingRecipe

_RECIPES: dict[str, type[TrainingRecipe]] = {kind.task: kind for kind in (Recipe, TextRecipe)}


def read_recipe(values: dict[str, Any]) -> TrainingRecipe:
    """Rebuild the recipe that its `to_dict` wrote, of whatever task.

    Raises:
        ValueError: for a task that is not known, or a key that no recipe of the task has.
    """
    task = known_name("task", str(values.get("task", Recipe.task)), _RECIPES)
    return _RECIPES[task].from_dict(values)


def build_data(recipe: TrainingRecipe, tokenizer: Tokenizer | None = None) -> Any:
    """Build and check the data of a recipe: a `DataModule` or a `TextModule`.

    Args:
        recipe: what is trained.
        tokenizer: for text, one that is there, in place of the recipe's.
    """
    data = _build_text(recipe, tokenizer) if isinstance(recipe, TextRecipe) else _build_images(_images(recipe))
    data.setup("fit")
    return data


def build_model(recipe: TrainingRecipe, num_classes: int, channels: int = 1) -> Any:
    """Build the untrained model of a recipe; what the recipe leaves open is the model's own.

    Args:
        recipe: what is trained.
        num_classes: classes of images, or tokens of a vocabulary.
        channels: of images.

    Raises:
        ValueError: for an argument that the model does not have, or a combination that it refuses.
    """
    if isinstance(recipe, TextRecipe):
        return _build_language_model(recipe, num_classes)
    return _build_backbone(_images(recipe), num_classes, channels)


def _images(recipe: TrainingRecipe) -> Recipe:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"`recipe` must be a Recipe or a TextRecipe, got {type(recipe).__name__}.")
    return recipe


def _build_images(recipe: Recipe) -> DataModule:
    return DataModule(
        dataset=recipe.dataset,
        root=recipe.data_root,
        size=recipe.img_size,
        batch_size=recipe.batch_size,
        eval_batch_size=recipe.eval_batch_size,
        workers=recipe.workers,
        seed=recipe.seed,
        augmentation=recipe.augmentation,
        train_share=recipe.train_share,
        share_seed=recipe.share_seed,
        limit_train=recipe.limit_train,
        limit_test=recipe.limit_test,
        drop_last=recipe.mixing.mixup > 0 or recipe.mixing.cutmix > 0,
        repeats=recipe.aug_repeats,
    )


def _build_text(recipe: TextRecipe, tokenizer: Tokenizer | None) -> TextModule:
    return TextModule(
        dataset=recipe.dataset,
        root=recipe.data_root,
        context=recipe.context,
        batch_size=recipe.batch_size,
        eval_batch_size=recipe.eval_batch_size,
        seed=recipe.seed,
        tokenizer=recipe.tokenizer if tokenizer is None else tokenizer,
        vocab_size=recipe.vocab_size if tokenizer is None else None,
        limit_train=recipe.limit_train,
        limit_test=recipe.limit_test,
    )


def _build_backbone(recipe: Recipe, num_classes: int, channels: int) -> Any:
    known_name("model", recipe.model.removeprefix(PREFIX), list_models())
    known = list_arguments(recipe.model)
    pool = recipe.global_pool
    given: dict[str, Any] = {
        "img_size": recipe.img_size,
        "patch_size": recipe.patch_size,
        "global_pool": pool,
        "drop_path_rate": recipe.drop_path_rate,
        "num_classes": num_classes,
        "in_chans": channels,
    }
    if pool is not None and "class_token" in known:
        given["class_token"] = pool == "token"
    for name, value in given.items():
        if value is not None and name not in known:
            raise ValueError(f"`{name}` must be left out: {recipe.model} has no such argument, got {value!r}.")
    further = recipe.backbone_arguments()
    for name in further:
        known_name("model_kwargs", name, [argument for argument in known if argument not in given])
    build = partial(
        create_model,
        recipe.model,
        **_position(recipe),
        **given,
        **further,
    )
    return _built(build, recipe, further)


def _build_language_model(recipe: TextRecipe, vocab_size: int) -> Any:
    given: dict[str, Any] = {
        "vocab_size": vocab_size,
        "context": recipe.context,
        "tied": recipe.tied,
        "pos_drop_rate": recipe.drop_rate,
        "proj_drop_rate": recipe.drop_rate,
        "drop_path_rate": recipe.drop_path_rate,
    }
    known_name("model", recipe.model, list_language_models())
    further = recipe.backbone_arguments()
    for name in further:
        known_name("model_kwargs", name, [known for known in list_language_arguments() if known not in given])
    build = partial(create_language_model, recipe.model, **_position(recipe), **given, **further)
    return _built(build, recipe, further)


def data_sizes(data: Any) -> tuple[int, int]:
    """Return what a model must know of its data: classes (or tokens), and channels (1 for text)."""
    return data.info.num_classes, getattr(data.info, "channels", 1)


def _position(recipe: TrainingRecipe) -> dict[str, Any]:
    """Return what every recipe says of position; what it leaves open is the model's own."""
    return {"joining": recipe.joining} | ({} if recipe.encoding is None else {"encoding": recipe.encoding})


def _built(build: Callable[[], Any], recipe: TrainingRecipe, further: dict[str, Any]) -> Any:
    if not further:
        return build()
    try:
        return build()
    except TypeError as error:  # of a value that is of another kind than the model asks for
        raise ValueError(f"`model_kwargs` must be what {recipe.model} takes, got {further}: {error}.") from None


def recipe_plugins(recipe: TrainingRecipe) -> dict[str, str]:
    """Return the files outside of the package that the classes of a recipe are from, with their SHA-256."""
    encodings = () if recipe.encoding is None else ENCODINGS.specs(recipe.encoding)
    classes: list[type] = [ENCODINGS[spec.name] for spec in encodings]
    classes += [JOININGS[spec.name] for spec in JOININGS.specs(recipe.joining)]
    backbone = backbone_of(recipe.model)
    return plugins_of(classes if backbone is None else [*classes, backbone])
