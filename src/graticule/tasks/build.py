"""From a recipe to its data and its untrained model."""

from __future__ import annotations

from functools import partial
from typing import Any

from graticule.backbones import create_model, list_arguments
from graticule.data import DataModule
from graticule.factory import MixingOptions, PegOptions, known_name
from graticule.tasks.recipe import Recipe


def build_data(recipe: Recipe) -> DataModule:
    """Build and check the data of a recipe."""
    data = DataModule(
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
    data.setup("fit")
    return data


def build_model(recipe: Recipe, num_classes: int, channels: int) -> Any:
    """Build the untrained model of a recipe; what the recipe leaves open is the backbone's own.

    Raises:
        ValueError: for an argument that the backbone does not have, or a combination that it refuses.
    """
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
        encoding=recipe.encoding,
        joining=recipe.joining,
        joined_layers=recipe.joined_layers,
        decomposition=recipe.decomposition,
        peg=None if recipe.peg == PegOptions() else recipe.peg,
        shaw_clip=recipe.shaw_clip,
        bias_norm=recipe.bias_norm,
        token_mixing=None if recipe.token_mixing == MixingOptions() else recipe.token_mixing,
        **given,
        **further,
    )
    if not further:
        return build()
    try:
        return build()
    except TypeError as error:  # of a value that is of another kind than the backbone asks for
        raise ValueError(f"`model_kwargs` must be what {recipe.model} takes, got {further}: {error}.") from None
