"""From a recipe to its data and its untrained model."""

from __future__ import annotations

from typing import Any

from graticule.backbones import create_model
from graticule.data import DataModule
from graticule.factory import MixingOptions, PegOptions
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
        limit_train=recipe.limit_train,
        limit_test=recipe.limit_test,
        drop_last=recipe.mixing.mixup > 0 or recipe.mixing.cutmix > 0,
    )
    data.setup("fit")
    return data


def build_model(recipe: Recipe, num_classes: int, channels: int) -> Any:
    """Build the untrained model of a recipe; what the recipe leaves open is the backbone's own."""
    pool = recipe.global_pool
    return create_model(
        recipe.model,
        encoding=recipe.encoding,
        joining=recipe.joining,
        joined_layers=recipe.joined_layers,
        decomposition=recipe.decomposition,
        peg=None if recipe.peg == PegOptions() else recipe.peg,
        shaw_clip=recipe.shaw_clip,
        token_mixing=None if recipe.token_mixing == MixingOptions() else recipe.token_mixing,
        img_size=recipe.img_size,
        patch_size=recipe.patch_size,
        global_pool=pool,
        class_token=None if pool is None else pool == "token",
        drop_path_rate=recipe.drop_path_rate,
        num_classes=num_classes,
        in_chans=channels,
    )
