"""Recipes say what their papers say."""

from pathlib import Path

import pytest
import torch
import yaml

from graticule.recipes import list_recipes, load_recipe
from graticule.tasks import Recipe, build_model, evaluate, train

FIGURES = yaml.safe_load((Path(__file__).parent / "parity" / "golden" / "figures.yaml").read_text())
TABLE = FIGURES["lape_first_version"]["settings_table7"]
ROWS = {
    "deit_tiny_imagenet": TABLE["deit"],
    "vit_lite_cifar10": TABLE["vit_lite_cvt_cct_cifar10"],
    "vit_lite_cifar100": TABLE["vit_lite_cvt_cct_cifar100"],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_has_the_values_of_the_papers_table(name):
    recipe, row = load_recipe(name), ROWS[name]
    # DeiT's learning rate is given before its scaling by batch / 512
    lr = float(row["lr"]) * (row["batch"] / 512 if name.startswith("deit") else 1)
    assert recipe.lr == pytest.approx(lr)
    assert recipe.min_lr == pytest.approx(float(row["min_lr"]))
    assert recipe.weight_decay == row["weight_decay"]
    assert recipe.batch_size == row["batch"]
    assert recipe.epochs == row["epochs"]
    assert recipe.warmup_epochs == row["warmup"]
    assert recipe.cooldown_epochs == row.get("cooldown", 0)
    assert recipe.optimizer == "adamw"


def test_the_deit_recipe_augments_as_cpvt_lists_it():
    recipe, row = load_recipe("deit_tiny_imagenet"), FIGURES["cpvt"]["hyperparameters_table10"]
    assert recipe.label_smoothing == row["label_smoothing"]
    assert recipe.drop_path_rate == row["stochastic_depth"]
    assert recipe.clip_grad is None and row["gradient_clip"] == "none"
    assert recipe.augmentation.rand_augment.startswith("rand-m9-mstd0.5") and row["rand_augment"] == "9/0.5"
    assert (recipe.mixing.mixup, recipe.mixing.cutmix) == (row["mixup"], row["cutmix"])
    assert recipe.augmentation.erasing == row["erasing"]


@pytest.mark.parametrize(
    "name", ["cpvt_tiny_imagenet", "cpvt_small_imagenet", "cpvt_base_imagenet", "pvt_tiny_imagenet"]
)
def test_the_recipes_of_cpvt_have_the_values_of_its_table(name):
    recipe, row = load_recipe(name), FIGURES["cpvt"]["hyperparameters_table10"]
    assert (recipe.epochs, recipe.batch_size, recipe.warmup_epochs) == (
        row["epochs"],
        row["batch"],
        row["warmup_epochs"],
    )
    assert row["lr_formula"] == "0.0005 * batch / 512" and recipe.lr == 0.0005 * recipe.batch_size / 512
    assert recipe.weight_decay == row["weight_decay"]
    # the table says LAMB for all, the text AdamW for all but base
    assert recipe.optimizer == (row["optimizer"] if "base" in name else "adamw")
    assert recipe.label_smoothing == row["label_smoothing"]
    assert recipe.drop_path_rate == row["stochastic_depth"]
    assert recipe.clip_grad is None and row["gradient_clip"] == "none"
    assert recipe.augmentation.rand_augment.startswith("rand-m9-mstd0.5") and row["rand_augment"] == "9/0.5"
    assert (recipe.mixing.mixup, recipe.mixing.cutmix) == (row["mixup"], row["cutmix"])
    assert recipe.augmentation.erasing == row["erasing"]
    assert recipe.model.startswith(name.removesuffix("_imagenet"))


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_says_what_it_reproduces_how_and_at_what_cost(name):
    module = __import__(f"graticule.recipes.{name}", fromlist=["recipe"])
    assert all(f"\n{word}:" in module.__doc__ or word == "Reproduces" for word in ("Command", "Cost", "Result"))
    assert "eproduces" in module.__doc__
    assert Recipe.from_dict(load_recipe(name).to_dict()) == load_recipe(name)


@pytest.mark.parametrize("name", [name for name in list_recipes() if not name.startswith("vit_lite")])
def test_the_model_of_every_recipe_can_be_built_for_its_size(name):
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = build_model(recipe, 10, 3)
    assert model.img_size == recipe.img_size and model.num_classes == 10


def test_the_recipe_of_a_small_cpvt_has_five_pegs_and_pools(tmp_path):
    recipe = load_recipe("digits_cpvt")
    run = train(recipe.quick(), tmp_path / "run", progress=False)
    model = run.model()
    assert list(model.position.pegs) == ["0", "1", "2", "3", "4"] and model.cls_token is None
    scores = evaluate(model, run.data(), [(28, 28), (20, 40)], progress=False)
    assert [score.images for score in scores] == [40, 40]


def test_a_recipe_with_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="epocs"):
        Recipe.from_dict({"epocs": 3})
