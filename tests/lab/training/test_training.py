"""Training follows the recipe: schedule, optimizer, decay, averaging, precision; invalid values are refused."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from graticule.checkpoints.read import read_checkpoint
from graticule.lab.commands.compare import parse_choices
from graticule.lab.commands.options import overridden
from graticule.lab.data.augmentation import Augmentation, DenseAugmentation
from graticule.lab.recipes.load import load_recipe
from graticule.lab.tasks.options import Distillation, ImageMixing, Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.optimization import build_optimizer
from graticule.lab.training.task import build_data, build_model
from in_turn import in_turn, refusals
from short_runs import short


def test_position_and_vectors_do_not_decay_and_matrices_do():
    recipe = short(joining="lape", weight_decay=0.3)
    model = build_model(recipe, num_classes=10)
    optimizer = build_optimizer(recipe, model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        spared = name.startswith("position.") or name == "cls_token" or parameter.ndim < 2
        assert decay[id(parameter)] == (0.0 if spared else 0.3), name


@pytest.mark.parametrize("optimizer", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("adamw", "sgd")), "lamb"])
def test_every_optimizer_of_the_recipes_learns(tmp_path, optimizer):
    lr = 0.05 if optimizer == "sgd" else 3e-3
    run = train(short(optimizer=optimizer, lr=lr, epochs=6, warmup_epochs=1), tmp_path, progress=False)
    rows = read_checkpoint(run.last)["history"]["rows"]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_a_fixed_table_stays_as_it_is(tmp_path):
    run = train(short(encoding="sinusoidal_2d", joining="lape"), tmp_path, progress=False)
    torch.manual_seed(0)
    fresh = build_model(run.recipe(), num_classes=10, channels=1)
    name = "position.encodings.0.pos_embed"
    assert torch.equal(load_file(run.weights)[name], fresh.get_parameter(name))


def test_the_moving_average_is_kept_and_evaluated(tmp_path):
    run = train(short(ema_decay=0.9), tmp_path, progress=False)
    checkpoint = read_checkpoint(run.last)
    averaged, current = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert not torch.equal(averaged["model.head.weight"], current["model.head.weight"])
    assert torch.equal(run.model(checkpoint="last").head.weight, averaged["model.head.weight"])


#: Of recipes: a field, a value, and the end of the message, which begins with the field.
FIELDS = [
    *(("batch_size", 0, ""), ("epochs", 0, ""), ("lr", 0.0, ""), ("label_smoothing", 1.0, ""), ("ema_decay", 1.0, "")),
    *(("warmup_epochs", 2, ""), ("optimizer_eps", 0.0, "")),
    ("train_sizes", ("16", "16x16"), "must be different sizes"),
    *(("train_sizes", sizes, "must be sides in pixels") for sizes in (("0",), ("16x",))),
]
#: Of augmentations, by their kind: the values, of which the message names the first.
AUGMENTATIONS = [
    *(
        (Augmentation, values, "")
        for values in ({"hflip": 1.5}, {"erasing": -0.1}, {"crop_pct": 0.0}, {"ratio": (2, 1)})
    ),
    *((Augmentation, values, "") for values in ({"interpolation": "cubic"}, {"scale": (0.9, 0.1)}, {"ratio": (2, 1)})),
    (Augmentation, {"random_crop_padding": 4, "scale": (0.5, 1.0)}, ""),
    (Augmentation, {"random_crop_padding": 4, "ratio": (1.0, 1.0)}, ""),
    (Augmentation, {"random_crop_padding": 4, "random_interpolation": True}, ""),
    (DenseAugmentation, {"sizes": ("1333x800",)}, "must be SHORTERxLONGER"),
    (DenseAugmentation, {"sizes": ("x",)}, "must be sides"),
    (DenseAugmentation, {"scale": (2.0, 0.5)}, "must be a range"),
    (DenseAugmentation, {"hflip": 1.5}, ""),
    (DenseAugmentation, {"crop_majority": 0.5}, "must be left out without"),
]
#: Of distillation.
DISTILLATIONS = [
    ({"form": "warm"}, "must be 'hard' or 'soft', got 'warm'"),
    ({"alpha": -0.1}, "must be at least 0, got -0.1"),
    ({"alpha": 1.5}, "must be at most 1, got 1.5"),
    ({"alpha": math.nan}, "must be a finite number, got nan"),
    ({"temperature": 2.0}, "must be left out unless .* soft.* got 2.0"),
    ({"temperature": 0.0, "form": "soft"}, "must be greater than 0, got 0.0"),
    ({"temperature": math.inf, "form": "soft"}, "must be a finite number, got inf"),
    ({"teacher_checkpoint": "a.pth"}, "must be given with `distillation"),
]
SHARED = r"devices x nodes x accumulate, 2 x 1 x 3, got 20; the nearest is 18 or 24"
PRECISION = "`precision` must be 32-true, bf16-mixed or bf16-true with"

test_invalid_values_are_refused_by_name = refusals(
    *((partial(short, **{name: value}), f"`{name}` ?{rule}") for name, value, rule in FIELDS),
    *((partial(kind, **v), rf"`augmentation\.{next(iter(v))}` ?{rule}") for kind, v, rule in AUGMENTATIONS),
    *((partial(Distillation, **v), rf"`distillation\.{next(iter(v))}` {rule}") for v, rule in DISTILLATIONS),
    (partial(Recipe, batch_size=20, devices=2, accumulate=3), SHARED),
    (partial(Recipe, strategy="fsdp", devices=1), "`strategy` must be left out with one device"),
    (partial(Recipe, strategy="fsdp", devices=2, precision="64-true"), PRECISION),
)


@in_turn(
    ("choice", "needs"),
    [
        ("schedule=step,decay_epochs=5,min_lr=1e-4", "schedule=cosine or schedule=poly"),
        ("warmup_lr=1e-5,warmup_epochs=0", "warmup_epochs or warmup_steps"),
        ("mixing.prob=0.5", "mixing.mixup or mixing.cutmix"),
        ("mixing.off_epoch=2", "mixing.mixup or mixing.cutmix"),
        ("mixing.mixup=0.5,mixing.switch_prob=0.1", "mixing.mixup and mixing.cutmix"),
        ("distillation.alpha=0.2", "distillation.teacher"),
        ("augmentation.rand_augment=rand-m9,augmentation.color_jitter=0.1", "augmentation.rand_augment=None"),
        ("augmentation.crop_pct=0.5", "larger images than digits has"),
        ("augmentation.hflip=0.5,augmentation.ratio=0.2 5", "random crops by area"),
        ("augmentation.random_interpolation=true", "random crops by area"),
    ],
)
def test_a_given_value_without_effect_is_refused(choice, needs):
    with pytest.raises(ValueError, match=f"must be left out without {needs}.*since it has no effect, got "):
        build_data(parse_choices(load_recipe("digits_quick"), [choice], "train")[choice])


SCALED = Augmentation(scale=(0.5, 1.0), ratio=(0.9, 1.1))


@in_turn(
    ("choice", "values"),
    [
        ("schedule=step,decay_epochs=5", {"schedule": "step", "decay_epochs": (5,)}),
        ("mixing.mixup=0.5,mixing.prob=0.2", {"mixing": ImageMixing(mixup=0.5, prob=0.2)}),
        ("train_share=0.5", {"train_share": 0.5}),
        ("augmentation.scale=0.5 1,augmentation.ratio=0.9 1.1", {"augmentation": SCALED}),
        ("schedule=poly,min_lr=1e-4", {"schedule": "poly", "min_lr": 1e-4}),
    ],
)
def test_a_given_value_that_is_used_is_set_and_unused_ones_of_the_recipe_stay(choice, values):
    base = replace(load_recipe("digits_quick"), mixing=ImageMixing(prob=0.5), min_lr=1e-3, limit_train=50)
    recipe = parse_choices(base, [choice], "train")[choice]
    assert recipe == replace(base, **values)
    data = build_data(recipe)
    assert (data.train_share, data.limit_train) == (recipe.train_share, 50)


def test_a_given_warm_up_beyond_the_run_is_refused_and_that_of_the_recipe_is_shortened():
    choices = parse_choices(load_recipe("digits_quick"), ["warmup_epochs=0,warmup_steps=800"], "train")
    recipe = choices.popitem()[1]
    assert recipe.warmup(steps=81) == 800
    with pytest.raises(ValueError, match="`warmup_steps` must be fewer than the steps of the run, 800, got 800"):
        recipe.warmup(steps=80)
    assert replace(recipe).warmup(steps=80) == 80  # a tenth


def test_fewer_epochs_shorten_the_warm_up_of_the_recipe(capsys):
    recipe = overridden(replace(load_recipe("digits_quick"), warmup_epochs=4), ["--epochs", "3"], "train")
    assert (recipe.epochs, recipe.warmup_epochs) == (3, 1)
    assert "the warm-up of the recipe, 4 of 10 epochs, is shortened to 1 of 3" in capsys.readouterr().err
    recipe = overridden(load_recipe("digits_quick"), ["--epochs=1"], "train")
    assert (recipe.epochs, recipe.warmup_epochs) == (1, 0)
    with pytest.raises(ValueError, match="`warmup_epochs` must be fewer than `epochs`, 1, got 1"):
        overridden(load_recipe("digits_quick"), ["--epochs", "1", "--warmup-epochs", "1"], "train")


@pytest.mark.parametrize(("epochs", "decays"), [(6, (4, 5)), (2, (1,)), (1, ())])
def test_decays_of_the_recipe_move_with_the_number_of_epochs(epochs, decays, capsys):
    base = replace(load_recipe("digits_quick"), epochs=12, schedule="step", decay_epochs=(8, 11), warmup_epochs=0)
    recipe = overridden(base, ["--epochs", str(epochs)], "train")
    assert (recipe.epochs, recipe.decay_epochs) == (epochs, decays)
    moved = ", ".join(map(str, decays)) or "none"
    assert f"the decays of the recipe, at 8, 11 of 12 epochs, are moved to {moved} of" in capsys.readouterr().err
    with pytest.raises(ValueError, match="`decay_epochs` must increase and be below `epochs`"):
        overridden(base, ["--epochs", str(epochs), "--decay-epochs", "8", "11"], "train")


def test_an_optimizer_that_timm_does_not_have_is_refused():
    with pytest.raises(ValueError, match="`optimizer`") as refused:
        short(optimizer="adahessia")
    assert "adahessian" not in str(refused.value)  # it needs second derivatives
