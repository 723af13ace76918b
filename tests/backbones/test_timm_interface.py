"""timm's interface of models: registry, configuration, parameter groups, checkpointing, sizes."""

import re
from pathlib import Path

import pytest
import timm
import torch
from timm.data import resolve_data_config, resolve_model_data_config
from timm.optim import param_groups_weight_decay

import graticule
from graticule.backbones import registry
from graticule.backbones.base import Backbone
from graticule.backbones.registry import MODELS, list_models, register_backbone
from in_turn import in_turn
from tiny import CLASSES, COVER, SIZE, SMALLEST, assert_same, draw, full_size, gradients, images, tiny

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
    assert first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def test_an_unknown_model_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"`name` must be .*got 'deit_tiny_patch16_244'; did you mean 'deit_tiny"):
        graticule.create_model("deit_tiny_patch16_244")


@pytest.mark.parametrize(
    "named", [SMALLEST, pytest.param(graticule.list_models(), marks=pytest.mark.slow)], ids=["smallest", "all"]
)
def test_the_data_configuration_is_that_of_timms_model_of_the_name(named):
    also_in_timm = [name for name in named if timm.is_model(name) and "pvt" not in name]
    assert also_in_timm
    for name in also_in_timm:
        ours = resolve_model_data_config(full_size(name))
        reference = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
        assert ours["input_size"] == (3, *MODELS[name].img_size), name
        assert ours == reference, name


def test_fresh_classifiers_of_a_distilled_model():
    model = tiny(name="deit_tiny_distilled_patch16_224")
    model.reset_classifier(7)
    assert [head.out_features for head in model.get_classifier()] == [7, 7] and model(images()).shape == (2, 7)
    with pytest.raises(ValueError, match="`global_pool` must be one of 'token', got 'avg'"):
        model.reset_classifier(7, "avg")
    model.reset_classifier(0)
    assert model(images()).shape == (2, 24)


def test_pruning_to_a_layer_that_there_is_not_leaves_the_model():
    model, x = tiny(global_pool="avg").eval(), images()
    expected = model(x)
    with pytest.raises(ValueError, match="`indices` must be a number from 1 to 3"):
        model.prune_intermediate_layers([7])
    assert torch.equal(model(x), expected)


def test_gradient_checkpointing_draws_the_same_dropout_again():
    model = draw(tiny("learnable", "lape", drop_path_rate=0.5, proj_drop_rate=0.3)).double()
    x = images(dtype=torch.float64, batch=4)
    masks = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(5)
        model(x).square().sum().backward()
        masks.append({name: gradient.clone() for name, gradient in gradients(model).items()})
    for name, gradient in masks[0].items():
        torch.testing.assert_close(masks[1][name], gradient, rtol=1e-12, atol=1e-12, msg=name)


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
    assert positional <= excluded and {"cls_token"} | ({"dist_token"} if "distilled" in name else set()) <= excluded
    matrices = {key for key, p in model.named_parameters() if p.ndim > 1}
    assert decaying(model) == matrices - excluded
    assert not any(key.startswith("position.") or "token" in key for key in decaying(model))
    assert {"patch_embed.proj.weight", "head.weight", "blocks.0.attn.qkv.weight"} <= decaying(model)


def test_setting_the_patch_size_resamples_kernel_and_table():
    model, reference = tiny().eval(), timm.create_model("deit_tiny_patch16_224", **SIZE).eval()
    reference.load_state_dict(graticule.published_state_dict(model))
    for module in (model, reference):
        module.set_input_size(img_size=48, patch_size=16)
    assert model.grid.shape == (3, 3)
    x = images(48, 48)
    assert_same(model(x), reference(x), 1e-5)


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
    namespace = {}
    exec(compile(code, "backbones.md", "exec"), namespace)
    model, images = namespace["model"], torch.randn(1, 1, 28, 36)
    assert namespace["outputs"]["middle"].shape == (2, 50, model.embed_dim)
    for x in (images, images[..., :28]):
        outputs = namespace["features"](x)
        tokens = [tokens for tokens, _ in model.each_layer(x)]
        assert_same([outputs["middle"], outputs["logits"]], [tokens[2], model(x)], 0)


names = pytest.mark.parametrize("named", [SMALLEST, pytest.param(list_models(), marks=pytest.mark.slow)])


@names
def test_the_tables_say_what_the_models_are(named):
    for name in named:
        model = full_size(name)
        size = MODELS[name]
        assert size.parameters == sum(p.numel() for p in model.parameters()), name
        assert (size.kind, size.dims, size.depths) == (type(model), model.embed_dims, model.depths), name
        assert size.img_size == model.img_size and size.configuration()["num_classes"] == model.num_classes, name


@names
def test_configurations_name_parameters_and_the_last_grid(named):
    for name in named:
        model = full_size(name)
        cfg, state = model.pretrained_cfg, model.state_dict()
        convolutions = cfg["first_conv"] if isinstance(cfg["first_conv"], tuple) else (cfg["first_conv"],)
        classifiers = cfg["classifier"] if isinstance(cfg["classifier"], tuple) else (cfg["classifier"],)
        for module in (*convolutions, *(classifiers if model.num_classes else ())):
            assert f"{module}.weight" in state, f"{name}: {module}"
        assert all(state[f"{module}.weight"].shape[1] == model.in_chans for module in convolutions), name
        assert cfg["input_size"] == (model.in_chans, *model.img_size), name
        if len(model.depths) > 1:
            assert cfg["pool_size"] == model.position_grids(model.grid)[-1].shape, name


def test_only_backbones_can_be_registered_as_backbones():
    with pytest.raises(TypeError, match="the backbone 'mine' must be a subclass of Backbone, got <class"):
        register_backbone("mine")(torch.nn.Linear)
    with pytest.raises(ValueError, match="`name` of a backbone must be an identifier"):
        register_backbone("not mine")(Backbone)
    assert "mine" not in list_models() and issubclass(MODELS["swin_tiny_patch4_window7_224"].kind, Backbone)
