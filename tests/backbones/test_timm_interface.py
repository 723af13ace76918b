"""timm's interface of models: registry, configuration, parameter groups, checkpointing, sizes."""

import re
from pathlib import Path

import pytest
import timm
import torch
from timm.data import resolve_data_config, resolve_model_data_config
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

import graticule
from graticule import fold
from graticule.backbones import registry
from graticule.backbones.registry import MODELS
from in_turn import in_turn
from tiny import CLASSES, COVER, DEPTH, SIZE, SMALLEST, draw, full_size, gradients, images, spec, tiny

choices = in_turn(("encoding", "joining"), COVER)


def test_timm_knows_every_model_by_its_prefix():
    names = [*graticule.list_models(), *registry.CLASSES]
    assert set(timm.list_models("graticule_*")) == {f"graticule_{name}" for name in names}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_timm_creates_the_model_that_we_create(name):
    options = {**SIZE, "encoding": "learnable", "joining": "lape(layers=2)"}
    created = []
    for create, known in ((timm.create_model, "graticule_" + name), (graticule.create_model, name)):
        torch.manual_seed(3)
        created.append(create(known, **options))
    assert type(created[0]) is type(created[1])
    first, second = (model.state_dict() for model in created)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_a_name_goes_with_and_without_the_prefix():
    assert type(graticule.create_model("graticule_vit_tiny_patch16_224", **SIZE)) is type(tiny())


def test_an_unknown_model_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"`name` must be .*got 'deit_tiny_patch16_244'; did you mean 'deit_tiny"):
        graticule.create_model("deit_tiny_patch16_244")


def test_models_are_listed_by_pattern():
    assert set(graticule.list_models("*distilled*")) == {
        "deit_tiny_distilled_patch16_224",
        "deit_small_distilled_patch16_224",
        "deit_base_distilled_patch16_224",
        "deit_base_distilled_patch16_384",
    }
    assert graticule.list_models("nothing") == []


@pytest.mark.parametrize(
    "named", [SMALLEST, pytest.param(graticule.list_models(), marks=pytest.mark.slow)], ids=["smallest", "all"]
)
def test_the_data_configuration_is_that_of_timms_model_of_the_name(named):
    also_in_timm = [name for name in named if timm.is_model(name) and "pvt" not in name]
    assert also_in_timm
    for name in also_in_timm:
        ours = resolve_model_data_config(full_size(name))
        theirs = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
        assert ours["input_size"] == (3, *MODELS[name].img_size), name
        assert ours == theirs, name


@pytest.mark.parametrize("name", graticule.list_models("*_28"))
def test_the_models_for_small_images_take_gray_ones_of_28_pixels(name):
    model = graticule.create_model(name).eval()
    assert resolve_model_data_config(model)["input_size"] == (1, 28, 28)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_a_fresh_classifier_can_pool_otherwise():
    model = tiny().eval()
    x = images()
    features = model.forward_features(x)
    model.reset_classifier(7, "avg")
    torch.testing.assert_close(model.forward_head(features), model.head(features[:, 1:].mean(1)))
    with pytest.raises(ValueError, match="`global_pool` must be one of"):
        model.reset_classifier(7, "mean")
    assert (model.global_pool, model.num_classes) == ("avg", 7)


def test_a_model_without_a_class_token_cannot_be_pooled_by_it():
    model = tiny(global_pool="avg", class_token=False)
    with pytest.raises(ValueError, match="`class_token` must be True"):
        model.reset_classifier(7, "token")


def test_fresh_classifiers_of_a_distilled_model():
    model = tiny(name="deit_tiny_distilled_patch16_224")
    model.reset_classifier(7)
    assert [head.out_features for head in model.get_classifier()] == [7, 7]
    assert model(images()).shape == (2, 7)
    with pytest.raises(ValueError, match="`global_pool` must be one of 'token', got 'avg'"):
        model.reset_classifier(7, "avg")
    model.reset_classifier(0)
    assert model(images()).shape == (2, 24)


def test_gradient_checkpointing_draws_the_same_dropout_again():
    model = draw(tiny("learnable", "lape", drop_path_rate=0.5, proj_drop_rate=0.3)).double()
    x = images(dtype=torch.float64, batch=4)
    kept = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(5)
        model(x).square().sum().backward()
        kept.append({name: gradient.clone() for name, gradient in gradients(model).items()})
    for name, gradient in kept[0].items():
        torch.testing.assert_close(kept[1][name], gradient, rtol=1e-12, atol=1e-12, msg=name)


def decaying(model):
    """Return the names of the parameters with weight decay in timm's groups."""
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)] for group in groups for p in group["params"] if group["weight_decay"]}


@choices
@in_turn("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_nothing_that_says_where_tokens_are_decays(name, encoding, joining):
    model = tiny(encoding, joining, name)
    excluded = model.no_weight_decay()
    positional = {f"position.{key}" for key, _ in model.position.named_parameters()}
    assert positional <= excluded
    assert {"cls_token"} | ({"dist_token"} if "distilled" in name else set()) <= excluded
    matrices = {key for key, p in model.named_parameters() if p.ndim > 1}
    assert decaying(model) == matrices - excluded
    assert not any(key.startswith("position.") or "token" in key for key in decaying(model))
    assert {"patch_embed.proj.weight", "head.weight", "blocks.0.attn.qkv.weight"} <= decaying(model)


def test_the_names_that_do_not_decay_hold_fixed_tables_lapes_norms_and_published_names():
    excluded = tiny("sinusoidal_2d", "lape").no_weight_decay()
    assert {"position.encodings.0.pos_embed", "pos_embed", "cls_token"} <= excluded
    assert {"pos_block.0.proj.0.weight", "pos_block.1.proj.0.bias"} <= tiny("peg(places=(0, 2))").no_weight_decay()
    for layer in range(DEPTH):
        assert f"position.joining.norms.{layer}.weight" in excluded
        assert f"position.joining.norms.{layer}.bias" in excluded
        assert f"blocks.{layer}.pe_norm.weight" in excluded


def test_a_folded_model_excludes_the_same_parameters_from_decay():
    model = tiny("learnable", "lape")
    before = decaying(model)
    assert decaying(fold(model)) == before


@choices
def test_every_parameter_has_a_layer(encoding, joining):
    model = tiny(encoding, joining)
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert layers.keys() == dict(model.named_parameters()).keys()
    assert layers["patch_embed.proj.weight"] == 0
    assert [layers[f"blocks.{layer}.norm1.weight"] for layer in range(DEPTH)] == [1, 2, 3]
    assert layers["head.weight"] >= layers["norm.weight"] >= 3
    if "position.encodings.0.pos_embed" in layers and joining != "unshared":
        assert layers["position.encodings.0.pos_embed"] == 0


@pytest.mark.parametrize("joining", ["lape", "lape_sharing"])
@pytest.mark.parametrize("options", [{}, {"decomposition": "scalar_norm"}], ids=str)
def test_layer_decay_gives_the_norm_of_layer_l_the_rate_of_block_l(joining, options):
    model = tiny("learnable", spec(joining, **options))
    groups = param_groups_layer_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5, verbose=False
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scale = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    for layer in range(DEPTH):
        own = [key for key in scale if key.startswith(f"position.joining.norms.{layer}.")]
        assert own
        assert {scale[key] for key in own} == {scale[f"blocks.{layer}.mlp.fc1.weight"]}
        assert {decay[key] for key in own} == {0}
    assert scale["blocks.0.mlp.fc1.weight"] == scale["blocks.1.mlp.fc1.weight"] / 2
    assert scale["position.encodings.0.pos_embed"] == scale["patch_embed.proj.weight"]


@pytest.mark.parametrize(("encoding", "joining"), [("relative_bias", "default"), ("learnable", "unshared")])
def test_a_table_of_layer_l_has_the_rate_of_block_l(encoding, joining):
    model = tiny(encoding, joining)
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    for layer in range(DEPTH):
        own = {value for key, value in layers.items() if key.startswith(f"position.encodings.{layer}.")}
        assert own == {layers[f"blocks.{layer}.mlp.fc1.weight"]}


def test_setting_the_patch_size_resamples_kernel_and_table():
    model, theirs = tiny().eval(), timm.create_model("deit_tiny_patch16_224", **SIZE).eval()
    theirs.load_state_dict(graticule.published_state_dict(model))
    for one in (model, theirs):
        one.set_input_size(img_size=48, patch_size=16)
    assert model.grid.shape == (3, 3)
    x = images(48, 48)
    torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=1e-5)


def test_stopping_early_runs_no_block_after_the_last_one_wanted():
    model = tiny()
    runs = []
    for layer, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, layer=layer: runs.append(layer))
    model.forward_intermediates(images(), indices=[0, 1], stop_early=True)
    assert runs == [0, 1]


def test_one_initialisation_is_taken_by_timms_name():
    model = tiny()
    model.init_weights("")
    with pytest.raises(ValueError, match=r"`mode` must be ''.*got 'jax'"):
        model.init_weights("jax")


def test_pretrained_weights_of_another_task_can_be_loaded_by_timm(tmp_path):
    """timm's `checkpoint_path` uses the filter of published names."""
    path = tmp_path / "deit.pth"
    published = timm.create_model("deit_tiny_patch16_224", **SIZE).eval()
    torch.save({"model": published.state_dict()}, path)
    model = graticule.create_model("deit_tiny_patch16_224", **SIZE, checkpoint_path=str(path)).eval()
    x = images()
    torch.testing.assert_close(model(x), published(x))
    assert model(x).shape == (2, CLASSES)


def test_the_feature_extractor_of_the_docs_gives_tokens_and_logits():
    page = (Path(__file__).parents[2] / "docs" / "backbones.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python features\n(.*?)```", page, flags=re.DOTALL)
    shown = {}
    exec(compile(code, "backbones.md", "exec"), shown)
    model, images = shown["model"], torch.randn(1, 1, 28, 36)
    assert shown["found"]["middle"].shape == (2, 50, model.embed_dim)
    for x in (images, images[..., :28]):
        found = shown["features"](x)
        tokens = [tokens for tokens, _ in model.each_layer(x)]
        torch.testing.assert_close([found["middle"], found["logits"]], [tokens[2], model(x)], rtol=0, atol=0)
