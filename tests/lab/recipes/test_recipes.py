"""Recipes have the values of their papers."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from timm.layers import DropPath
from torch import nn

import graticule
from commands import run_command
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.gqpe import Ggqpe, Gqpe
from graticule.encodings.lrpe import Glrpe, Lrpe, LrpeM
from graticule.encodings.sgu import Sgu
from graticule.lab.data.module import build_mixup
from graticule.lab.data.registry import DATASETS
from graticule.lab.data.sets.published import digits
from graticule.lab.recipes.load import RECIPES, list_recipes, load_recipe
from graticule.lab.tasks.classification import Classification
from graticule.lab.tasks.options import DenseRecipe, Distillation, ImageMixing, Recipe, TextRecipe
from graticule.lab.training.optimization import build_optimizer
from graticule.lab.training.task import build_model, read_recipe
from graticule.registry import plugins
from tiny import without_memory

GOLDEN = Path(__file__).parents[2] / "parity" / "golden"
FIGURES = yaml.safe_load((GOLDEN / "figures.yaml").read_text())
PUBLISHED = yaml.safe_load((GOLDEN / "published_recipes.yaml").read_text())
TABLE = FIGURES["lape_first_version"]["settings_table7"]
ROWS = {
    "deit_tiny_imagenet": TABLE["deit"],
    **{
        f"{family}_cifar{classes}": TABLE[f"vit_lite_cvt_cct_cifar{classes}"]
        for family in ("vit_lite", "cvt", "cct")
        for classes in (10, 100)
    },
    "t2t_vit_7_imagenet": TABLE["t2t_vit"],
    "swin_tiny_imagenet": TABLE["swin"],
    "ceit_tiny_imagenet": TABLE["ceit"],
}
POSMLP = FIGURES["posmlp"]
RELEASED = json.loads((GOLDEN / "posmlp_training.json").read_text())
GATED = {
    "posmlp_tiny_imagenet": "posmlp_tiny",
    "posmlp_small_imagenet": "posmlp_small",
    "posmlp_base_imagenet": "posmlp_base",
    "gmlp_small_imagenet": "gmlp_s16",
}
MIXING = {"sgu": Sgu, "lrpe": Lrpe, "lrpe_m": LrpeM, "glrpe": Glrpe, "gqpe": Gqpe, "ggqpe": Ggqpe}
#: The recipes of the package; a plugin may register others.
NAMES = [name for name in list_recipes() if RECIPES[name].function.__module__.startswith("graticule.lab.recipes.")]
#: The file of docs/extending.md.
PLUGIN = Path(__file__).parents[3] / "docs" / "my_methods.py"


@pytest.fixture(scope="module", autouse=True)
def _digits_are_unpacked_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "digits", functools.cache(digits))
        yield


@functools.cache
def model_of(recipe, classes=1000):
    """Build the model of a recipe without memory for its tensors."""
    with without_memory():
        if isinstance(recipe, DenseRecipe):
            return build_model(recipe, class_names=("a", "b", "c"), channels=3)
        return build_model(recipe, num_classes=classes, channels=3)


def stages(model):
    """Return the mixing encoding of each stage."""
    return [module for module in model.position.modules() if isinstance(module, MixingPosition)]


def values_of(recipe):
    """Return all values of a recipe, its augmentation and its mixing by their names, sequences as lists."""
    values = {**vars(recipe.mixing), **vars(recipe.augmentation), **vars(recipe)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def columns(recipe):
    """Return the values of a recipe, named as in the papers' tables."""
    values = values_of(recipe)
    magnitude, spread, _ = re.fullmatch(r"rand-m(.+)-mstd(.+)-inc(1)", recipe.augmentation.rand_augment).groups()
    same = ("epochs", "lr", "min_lr", "warmup_epochs", "label_smoothing", "mixup", "cutmix", "erasing", "optimizer")
    return {
        **{name: values[name] for name in (*same, "schedule", "weight_decay")},
        "dataset": {"image_folder": "imagenet"}.get(recipe.dataset, recipe.dataset),
        "batch": recipe.batch_size,
        "lr_formula": "0.0005 * batch / 512" if recipe.lr == 0.0005 * recipe.batch_size / 512 else None,
        "warmup": recipe.warmup_epochs,
        "cooldown": recipe.cooldown_epochs,
        "dropout": max((part.p for part in model_of(recipe).modules() if isinstance(part, nn.Dropout)), default=0),
        "stochastic_depth": recipe.drop_path_rate,
        "repeated_augmentation": recipe.aug_repeats == 3,
        "gradient_clip": "none" if recipe.clip_grad is None else recipe.clip_grad,
        "rand_augment": f"{magnitude}/{spread}",
    }


def scheduled(recipe, step, warm, last):
    """Return the rate that rises linearly until `warm` and falls as a cosine until `last`."""
    if step < warm:
        return recipe.warmup_lr + (recipe.lr - recipe.warmup_lr) * step / warm
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * min(step, last) / last)) / 2


def number(value):
    """Read the value of a table; YAML reads 5e-4 as text."""
    try:
        return float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else value
    except ValueError:
        return value


def cells(row):
    return {column: number(value) for column, value in row.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_has_the_values_of_the_papers_table(name):
    recipe = load_recipe(name)
    # DeiT's and CeiT's learning rates are given before its scaling by batch / 512
    before = recipe.batch_size / 512 if name.startswith(("deit", "ceit")) else 1
    values = columns(recipe) | {"lr": recipe.lr / before}
    row = {"cooldown": 0, "optimizer": "adamw", **ROWS[name]}
    assert cells({column: values[column] for column in row}) == pytest.approx(cells(row))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("cpvt_", "pvt_", "deit_tiny_im"))])
def test_the_recipes_of_cpvt_and_deit_have_the_values_of_its_table(name):
    recipe, row = load_recipe(name), FIGURES["cpvt"]["hyperparameters_table10"]
    assert row["optimizer"] == "lamb"
    # the table says LAMB for all CPVTs, the text AdamW for all but base; DeiT's column differs only in that
    row = {**row, "optimizer": "lamb" if "base" in name else "adamw"}
    values = columns(recipe)
    assert cells({column: values[column] for column in row}) == pytest.approx(cells(row))
    assert recipe.cooldown_epochs == 0
    assert recipe.model.startswith(name.removesuffix("_imagenet").removesuffix("_distilled"))


@pytest.mark.parametrize("family", ["deit_tiny", "cpvt_tiny"])
def test_a_distilled_recipe_is_the_plain_one_with_a_teacher(family):
    recipe, plain = load_recipe(f"{family}_distilled_imagenet"), load_recipe(f"{family}_imagenet")
    assert dataclasses.replace(recipe, model=plain.model, distillation=Distillation()) == plain
    distillation = recipe.distillation
    assert (distillation.teacher, distillation.form, distillation.share) == ("regnety_160", "hard", 0.5)
    assert str(FIGURES["cpvt"]["hard_distillation"][family]) in list_recipes()[f"{family}_distilled_imagenet"]
    tokens = [model_of(variant).num_prefix_tokens for variant in (recipe, plain)]
    assert tokens == ([2, 1] if family == "deit_tiny" else [1, 1])


#: The recipes with the values that PosMLP's section 5.2 prints -> the model of each.
PRINTED = {
    "gmlp_small_imagenet": "gmlp_s16_224",
    **{f"posmlp_{size}_printed_imagenet": f"posmlp_{size}_224" for size in ("tiny", "small", "base")},
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_has_the_values_that_posmlps_section_5_2_prints(name):
    recipe, row = load_recipe(name), POSMLP["recipe"]
    assert (recipe.epochs, recipe.optimizer) == (row["epochs"], row["optimizer"])
    assert (recipe.lr, recipe.min_lr) == (float(row["lr"]), float(row["min_lr"]))
    assert recipe.weight_decay == row["weight_decay"]
    assert recipe.batch_size in (4 * row["batch_per_gpu"], 8 * row["batch_per_gpu"])  # four or eight GPUs
    assert (recipe.ema_decay is not None) is row["ema"]
    assert recipe.cooldown_epochs == 0 and row["schedule"] == "cosine"
    assert recipe.img_size == (224, 224) and recipe.model == PRINTED[name]
    accuracy = POSMLP["models_table2"].get(name.removesuffix("_printed_imagenet"), {"acc": 72.14})["acc"]
    assert str(accuracy) in list_recipes()[name]
    deit, augmentation = load_recipe("deit_tiny_imagenet"), recipe.augmentation
    other = {name: getattr(augmentation, name) for name in ("crop_pct", "random_interpolation")}
    assert row["augmentation"] == "deit" and augmentation == dataclasses.replace(deit.augmentation, **other)
    assert (recipe.mixing, recipe.label_smoothing) == (deit.mixing, deit.label_smoothing)
    assert recipe.aug_repeats == deit.aug_repeats and recipe.drop_path_rate == (0.05 if "gmlp" in name else 0.1)


def test_values_that_section_5_2_leaves_out_are_those_of_deit_for_gmlp_and_of_the_released_files_for_posmlp():
    recipe, deit = load_recipe("gmlp_small_imagenet"), load_recipe("deit_tiny_imagenet")
    assert (recipe.warmup_epochs, recipe.warmup_lr) == (deit.warmup_epochs, deit.warmup_lr)
    for size in ("tiny", "small", "base"):
        recipe, released = (load_recipe(f"posmlp_{size}{printed}_imagenet") for printed in ("_printed", ""))
        stated = ("augmentation", "aug_repeats", "mixing", "batch_size", "lr", "min_lr", "cooldown_epochs")
        assert dataclasses.replace(recipe, **{name: getattr(released, name) for name in stated}) == released
        for name in ("crop_pct", "random_interpolation"):
            assert getattr(recipe.augmentation, name) == getattr(released.augmentation, name)


#: Columns of the released configuration whose value a recipe has under another name.
RENAMED = {
    **{"aa": "rand_augment", "reprob": "erasing", "smoothing": "label_smoothing", "opt": "optimizer"},
    **{"mixup_prob": "prob", "mixup_switch_prob": "switch_prob", "model_ema_decay": "ema_decay"},
    **{"opt_eps": "optimizer_eps", "sched": "schedule", "drop_path": "drop_path_rate"},
}


def released_settings(recipe, gpus=4):
    """Return the values of a recipe, named as in the released configuration."""
    model, values = model_of(recipe), values_of(recipe)
    block = model.block(3, 1)
    dropped = {block.mlp_channels.drop2.p, model.head_drop.p}
    assert (block.mlp_channels.drop1.p, model.pos_drop.p) == (0, 0) and len(dropped) == 1
    same = ("clip_grad", "color_jitter", "cooldown_epochs", "crop_pct", "cutmix", "epochs", "hflip", "min_lr", "mixup")
    return {
        **{
            name: values[name] for name in (*same, "lr", "ratio", "scale", "warmup_epochs", "warmup_lr", "weight_decay")
        },
        **{column: values[name] for column, name in RENAMED.items()},
        "amp": recipe.precision == "16-mixed",
        "batch_size": recipe.batch_size / gpus,
        "drop": dropped.pop(),
        "img_size": recipe.img_size[0],
        "model_ema": recipe.ema_decay is not None,
        "train_interpolation": "random" if recipe.augmentation.random_interpolation else values["interpolation"],
    }


@pytest.mark.parametrize(("name", "letter"), [("tiny", "T"), ("small", "S"), ("base", "S")])
def test_the_recipes_of_posmlp_have_the_settings_of_its_released_configurations(name, letter):
    recipe, row = load_recipe(f"posmlp_{name}_imagenet"), RELEASED["settings"][letter]
    settings = released_settings(recipe)
    assert settings == {column: row[column] for column in settings}
    assert row["model_hyper"]["shift"] is False
    assert (recipe.aug_repeats, recipe.augmentation.random_crop_padding) == (1, 0)
    # the others are seeds, reports, and disabled options: no other augmentation, no other decay
    off = {"vflip": 0.0, "drop_block": None, "drop_connect": None, "gp": None, "jsd": False, "aug_splits": 0}
    assert {column: row[column] for column in off} == off and not row["epoch_repeats"]
    for epoch, rate in RELEASED["learning_rate"]["values"][letter].items():
        assert scheduled(recipe, int(epoch), recipe.warmup_epochs, recipe.epochs) == pytest.approx(rate, rel=1e-9)


def test_tables_of_half_of_imagenet_are_trained_on_half_and_table_2_on_all():
    shares = {name: load_recipe(name).train_share for name in {**GATED, **PRINTED}}
    assert shares == {name: 0.5 if name.startswith("gmlp") else None for name in shares}


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_the_models_of_posmlps_recipes_have_the_sizes_of_its_table_11(size):
    table = POSMLP["architecture_table11"]
    model = model_of(load_recipe(f"posmlp_{size}_imagenet"))
    assert model.embed_dims == tuple(table["base_dim"][size] * factor for factor in table["dims"])
    assert list(model.depths) == table["depths"] and list(model.windows) == table["windows"]
    parts = stages(model)
    assert [part.grid.height for part in parts] == table["windows"]
    assert [{encoding.groups for encoding in part.encodings} for part in parts] == [{s} for s in table["groups"]]
    widths = [model.block(stage, 0).mlp_channels.fc1 for stage in range(4)]
    assert [layer.out_features / layer.in_features for layer in widths] == table["expansion"]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(
        POSMLP["models_table2"][f"posmlp_{size}"]["params"], abs=0.5
    )


def test_the_model_of_gmlps_recipe_is_that_of_table_3_with_and_without_ggqpe():
    recipe = load_recipe("gmlp_small_imagenet")
    for encoding, row in ((None, "gmlp"), ("ggqpe", "gmlp_ggqpe")):
        model = model_of(dataclasses.replace(recipe, encoding=encoding))
        count = sum(p.numel() for p in model.parameters()) / 1e6
        assert count == pytest.approx(POSMLP["components_table3"][row]["params"], abs=0.05)
        assert {type(mixing) for mixing in stages(model)[0].encodings} == {MIXING[encoding or "sgu"]}


def test_recipes_whose_results_are_means_of_lapes_seeds_have_the_first_and_others_0():
    # the paper names 121 to 125 for CIFAR and COCO, five runs for ADE20K, and nothing for ImageNet
    names = [name for name in NAMES if "cifar" in name or name.startswith(("vit_adapter_", "seg_"))]
    assert len(names) == 12 and {load_recipe(name).seed for name in names} == {121}
    assert {load_recipe(name).seed for name in NAMES if name not in names} == {0}


def test_every_recipe_can_be_written_and_read():
    for name in NAMES:
        recipe = load_recipe(name)
        assert read_recipe(json.loads(json.dumps(recipe.to_dict()))) == recipe, name


def test_the_model_of_every_recipe_can_be_built_for_its_size():
    for name in NAMES:
        recipe = load_recipe(name)
        if not recipe.model:  # an adaptation, whose model the user gives
            continue
        model = model_of(recipe)
        if isinstance(recipe, TextRecipe):
            assert (model.context, model.vocab_size) == (recipe.context, 1000), name
        elif isinstance(recipe, DenseRecipe):
            assert (model.backbone.img_size, model.num_classes) == (recipe.img_size, 3), name
        elif isinstance(recipe, Recipe):
            assert (model.img_size, model.num_classes) == (recipe.img_size, 1000), name


def test_the_recipe_of_a_small_cpvt_has_five_pegs_and_pools():
    model = model_of(load_recipe("digits_cpvt"))
    assert list(model.position.pegs) == ["0", "1", "2", "3", "4"] and model.cls_token is None
    assert isinstance(model.norm, nn.LayerNorm) and isinstance(model.fc_norm, nn.Identity)  # CPVT's form, not DeiT's


def test_swin_with_pegs_is_trained_as_swin_is_in_its_code_with_its_batch_and_rates():
    recipe, plain = load_recipe("swin_tiny_peg_imagenet"), load_recipe("swin_tiny_imagenet")
    assert (recipe.batch_size, recipe.lr, recipe.min_lr, recipe.warmup_lr) == (1024, 1e-3, 1e-5, 1e-6)
    changed = {name: getattr(plain, name) for name in ("model", "batch_size", "lr", "min_lr", "warmup_lr")}
    assert dataclasses.replace(recipe, **changed) == plain
    accuracy = FIGURES["cpvt"]["pyramid_table13"]["swin_tiny_peg_gap"]["cls"][1]
    assert str(accuracy) in list_recipes()["swin_tiny_peg_imagenet"]
    both, peg = (model_of(dataclasses.replace(recipe, encoding=encoding)) for encoding in (None, "peg"))
    names = {name for name, _ in both.named_parameters()} - {name for name, _ in peg.named_parameters()}
    assert sum("relative_position_bias_table" in name for name in names) == 12
    assert both.global_pool == peg.global_pool == "avg"


@pytest.mark.parametrize(("size", "depth"), [("tiny", 0.1), ("small", 0.2)])
@pytest.mark.parametrize(("task", "decayed"), [("mask_rcnn_coco", False), ("upernet_ade20k", True)])
def test_vit_adapters_have_the_scales_the_stochastic_depth_and_the_decay_of_its_configurations(
    size, depth, task, decayed
):
    recipe = load_recipe(f"vit_adapter_{size}_{task}")
    model = model_of(recipe)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales = [name for name in names.values() if re.search(r"blocks\.\d+\.ls[12]\.gamma$", name)]
    rates = {module.drop_prob for module in model.features.reader.modules() if isinstance(module, DropPath)}
    assert (len(scales), rates) == (24, {depth})
    groups = build_optimizer(recipe, model).param_groups
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    embeds = [name for name in decay if name.endswith(("reader.level_embed", ".pos_embed"))]
    assert {decay[name] for name in embeds} == {recipe.weight_decay * decayed} and len(embeds) == 2
    assert {decay[name] for name in scales} == {0} and max(decay.values()) == recipe.weight_decay


def test_segmenter_starts_from_a_table_that_is_resampled_bilinearly():
    small = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    kwargs = tuple(f"{name}={value}" for name, value in small.items())
    recipe = dataclasses.replace(load_recipe("seg_tiny_mask_ade20k"), model_kwargs=kwargs)
    model = build_model(recipe, class_names=("a", "b"), channels=3)
    source = graticule.create_model(recipe.model, **small).state_dict()
    graticule.transfer(model.backbone, source, classifier=False)
    old, new = (state["position.encodings.0.pos_embed"][0, 1:] for state in (source, model.backbone.state_dict()))
    expected = F.interpolate(old.T.unflatten(-1, (14, 14))[None], size=(32, 32), mode="bilinear")
    torch.testing.assert_close(new, expected.flatten(2)[0].T)


def test_windows_of_posmlps_detectors_are_shifted_as_in_section_5_5():
    for name in [name for name in NAMES if name.startswith("posmlp_") and name.endswith("_coco")]:
        backbone = model_of(load_recipe(name)).backbone
        grid = backbone.position_grids(backbone.grid_at((448, 448)))[2]  # of several windows
        shifted = [any(windows.shift) for (windows,) in backbone.block_arguments(2, grid)]
        assert backbone.shift == "swin" and shifted == [False, True] * (len(shifted) // 2), name


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"cifar", "imagenet"}))
def test_a_recipe_has_the_values_of_the_published_configuration(name):
    values = values_of(load_recipe(name))
    assert {column: values[column] for column in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in NAMES if "cifar" in name])
def test_a_compact_transformer_is_normalized_as_the_data_set_that_it_is_trained_on(name):
    recipe = load_recipe(name)
    classes = 100 if recipe.dataset == "cifar100" else 10
    cfg = model_of(recipe, classes).pretrained_cfg
    ten, hundred = (
        ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    )
    assert (cfg["mean"], cfg["std"]) == {10: ten, 100: hundred}[classes] and cfg["num_classes"] == classes


def test_nothing_is_mixed_from_the_epoch_on_that_a_recipe_names():
    recipe = Recipe(mixing=ImageMixing(mixup=0.8, off_epoch=2), label_smoothing=0.1)
    model, task = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), Classification(recipe)
    task.mixup = build_mixup(mixup=0.8, cutmix=0.0, prob=1.0, switch_prob=0.5, label_smoothing=0.1, num_classes=4)
    images, labels = torch.randn(6, 3, 2, 2), torch.arange(6) % 4
    plain = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    for epoch, mixed in ((0, True), (1, True), (2, False), (3, False), (309, False)):
        loss = task.loss(model, (images.clone(), labels), epoch)
        assert torch.allclose(loss, plain, rtol=0, atol=1e-6) is not mixed
    with pytest.raises(ValueError, match=r"`mixing.off_epoch` must be at least 0, got -1"):
        ImageMixing(off_epoch=-1)


@pytest.fixture
def registered():
    """Unregister the recipes that a test registers."""
    before = dict(RECIPES), dict(plugins._registered)
    yield RECIPES
    for table, entries in zip((RECIPES, plugins._registered), before, strict=True):
        table.clear()
        table.update(entries)


def test_a_registered_recipe_has_its_variants_and_its_line(registered):
    @graticule.register_recipe("mine_small", depth=2)
    @graticule.register_recipe("mine_large", "The large one.", depth=4)
    def mine(depth: int = 3) -> Recipe:
        """Train my model.

        More about it.
        """
        return Recipe(model_kwargs=(f"depth={depth}",))

    assert load_recipe("mine_small") == Recipe(model_kwargs=("depth=2",))
    assert load_recipe("mine_large") == Recipe(model_kwargs=("depth=4",))
    assert mine() == Recipe(model_kwargs=("depth=3",))
    assert list_recipes()["mine_small"] == "Train my model." and list_recipes()["mine_large"] == "The large one."
    assert plugins._registered[Path(__file__).resolve()] == plugins._hash(Path(__file__))
    with pytest.raises(ValueError, match=r"`recipe` must be one of .*; got 'mine_smal'; recipes with it: mine_small"):
        load_recipe("mine_smal")


def test_invalid_registrations_of_recipes_are_refused(registered):
    def mine(depth: int) -> Recipe:
        return Recipe(model_kwargs=(f"depth={depth}",))

    def of_nothing() -> None:
        """Return no recipe."""

    refused = [
        ("my recipe", mine, {"depth": 2}, ValueError, "`name` of a recipe must be an identifier, such as my_recipe, "),
        ("digits_quick", mine, {"depth": 2}, ValueError, "`name` must be new, got 'digits_quick', which is the recipe"),
        ("mine", mine, {}, ValueError, "the recipe 'mine' must have the arguments of mine: missing a required"),
        ("mine", mine, {"depht": 2}, ValueError, "the recipe 'mine' must have the arguments of mine: "),
        ("mine", Recipe, {}, TypeError, "the recipe 'mine' must be a function that returns a recipe"),
        ("mine", Recipe(), {}, TypeError, "the recipe 'mine' must be a function that returns a recipe"),
    ]
    for name, function, arguments, kind, message in refused:
        with pytest.raises(kind, match=message):
            graticule.register_recipe(name, **arguments)(function)
    assert not [name for name in registered if name.startswith(("mine", "my "))]
    graticule.register_recipe("nothing")(of_nothing)
    with pytest.raises(ValueError, match=r"nothing must .* that returns a recipe, such as graticule.Recipe"):
        load_recipe("nothing")


def test_a_recipe_of_a_plugin_is_trained_by_its_name_and_its_run_opened_as_documented(
    my_methods, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(PLUGIN.parent)
    code, out, _ = run_command(capsys, "train", "--help-all")
    assert code == 0 and re.search(r"fourier_digits +A small ViT with Fourier features", out)
    command = "train fourier_digits --plugin docs/my_methods.py --quick --output runs/fourier_digits"
    code, _, err = run_command(capsys, *command.split())
    assert code == 0, err
    (block,) = re.findall(r"```python\n(.*?)```", (PLUGIN.parent / "extending.md").read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(compile(block, "extending.md", "exec"), names)
    assert capsys.readouterr().out.startswith("random_fourier(frequencies=16) ")
    run = names["run"]
    assert run.recipe() == load_recipe("fourier_digits").quick() and run.recipe().joining == "decayed"
    assert run.plugins == {PLUGIN.name: plugins._hash(PLUGIN)}


@pytest.mark.parametrize("name", ["vit_adapter_tiny_mask_rcnn_coco", "vit_adapter_small_upernet_ade20k"])
def test_vit_adapters_resample_their_table_as_in_its_code(name):
    small = ("depth=4", "embed_dim=24", "num_heads=2", "init_values=1.0")
    backbone = model_of(dataclasses.replace(load_recipe(name), model_kwargs=small)).backbone
    encoding = backbone.position.encodings[0]
    table = encoding.pos_embed[0].T.reshape(1, -1, 14, 14)
    for grid in ((50, 83), (32, 32), (10, 12)):
        expected = F.interpolate(table, grid, mode="bicubic", align_corners=False).flatten(2)[0].T
        torch.testing.assert_close(encoding(graticule.Grid(*grid)), expected, rtol=0, atol=1e-5)
