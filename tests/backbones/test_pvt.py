"""Pyramids: sizes, stages, supported positions, and support of timm's tools and torch's compilers."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import nn
from torch.export import Dim, export

import graticule
from graticule import Grid
from graticule.backbones.pvt import PyramidVisionTransformer
from graticule.encodings.build import build_position
from in_turn import in_turn
from tiny import SMALL, assert_same, draw, gradients, images

SIZE = {
    "img_size": 64,
    "embed_dims": [8, 16, 24, 32],
    "num_heads": [1, 2, 3, 4],
    "depths": [1, 2, 1, 1],
    "mlp_ratios": [4, 4, 2, 2],
    "num_classes": 5,
}
DIMS = SIZE["embed_dims"]
NAMES = ["pvt_tiny", "pvt_tiny_peg", "pvt_tiny_gap", "pvt_tiny_peg_gap"]
JOININGS = ["default", "shared", "unshared", "lape_sharing", "lape"]
#: Name -> arguments.
FORMS = {
    **{name: {"name": name} for name in NAMES},
    **{f"pvt_tiny {joining}": {"name": "pvt_tiny", "joining": joining} for joining in JOININGS[1:]},
    "pvt_tiny peg+learnable": {"name": "pvt_tiny", "encoding": "peg+learnable"},
    "pvt_tiny_gap sinusoidal_2d lape": {"name": "pvt_tiny_gap", "encoding": "sinusoidal_2d", "joining": "lape"},
    "pvt_tiny none": {"name": "pvt_tiny", "encoding": "none"},
}
names = in_turn("name", NAMES)
forms = in_turn("form", FORMS)


def pvt(name="pvt_tiny", **kwargs):
    return graticule.create_model(name, **{**SIZE, **kwargs})


def exact(form, **kwargs):
    """Return a form with every weight drawn, in float64 and evaluation mode."""
    return draw(pvt(**FORMS[form], **kwargs)).double().eval()


def wide(*size, **kwargs):
    return images(*(size or (64, 64)), dtype=torch.float64, **kwargs)


# Sizes


@in_turn(
    ("size", "message"),
    [
        (72, "got height 72 with a patch of 32; the nearest sizes are 64 and 96"),
        ((64, 100), "got width 100 with a patch of 32; the nearest sizes are 96 and 128"),
        (16, "got height 16 with a patch of 32; the nearest size is 32"),
    ],
)
def test_sizes_that_32_does_not_divide_are_refused_with_the_nearest(size, message):
    with pytest.raises(ValueError, match=f"`img_size` must be a positive multiple .*{message}"):
        pvt(img_size=size)
    model = pvt()
    height, width = (size, size) if isinstance(size, int) else size
    with pytest.raises(ValueError, match=message):
        model(images(height, width))
    with pytest.raises(ValueError, match=message):
        model.set_input_size(size)
    assert (model.img_size, model.grid.shape) == ((64, 64), (16, 16))


def test_channels_of_the_image_and_the_patch_can_be_others():
    model = pvt(in_chans=1, patch_size=2, img_size=32).eval()
    assert model(torch.randn(2, 1, 16, 48)).shape == (2, 5)
    assert [info["reduction"] for info in model.feature_info] == [2, 4, 8, 16]


# Computation


@names
def test_the_forward_pass_is_the_stages_with_each_ones_position(name):
    """Computes the whole forward pass by hand, from the modules."""
    model = draw(pvt(name)).double().eval()
    pixels = x = wide(64, 64)
    for s in range(4):
        embed = model.patch_embeds[s]
        y = F.conv2d(x, embed.proj.weight, embed.proj.bias, stride=2 if s else 4)
        height, width = y.shape[-2:]
        stream = F.layer_norm(y.flatten(2).mT, (DIMS[s],), embed.norm.weight, embed.norm.bias, 1e-5)
        prefix = int(s == 3 and "gap" not in name)
        if prefix:
            stream = torch.cat([model.cls_token.expand(2, -1, -1), stream], 1)
        if "peg" not in name:
            stream = stream + model.position.stages[s].encodings[0].pos_embed
        for index, block in enumerate(model.blocks[s]):
            where = (graticule.LayerPosition(), Grid(height, width, prefix=prefix))
            stream = stream + block.attn(block.norm1(stream), *where)
            stream = stream + block.mlp(block.norm2(stream))
            if "peg" in name and index == 0:
                c = model.position.stages[s].pegs["0"].proj[0]
                image = stream[:, prefix:].mT.unflatten(-1, (height, width))
                added = F.conv2d(image, c.weight, c.bias, padding=1, groups=DIMS[s]).flatten(2).mT
                stream = torch.cat([stream[:, :prefix], stream[:, prefix:] + added], 1)
        x = stream[:, prefix:].mT.unflatten(-1, (height, width))
    end = model.norm(stream)
    assert_same(model(pixels), model.head(end.mean(1) if "gap" in name else end[:, 0]))


# Combinations


@in_turn("class_token", [True, False])
@in_turn("global_pool", ["token", "avg", ""])
def test_a_class_token_is_there_where_it_is_read_and_nowhere_else(class_token, global_pool):
    for given in (class_token, None):
        if given is not None and given != (global_pool == "token"):
            with pytest.raises(ValueError, match=f"`class_token` must be {not given} where .* got {given}"):
                pvt(global_pool=global_pool, class_token=given)
        else:
            model = pvt(global_pool=global_pool, class_token=given)
            assert (model.cls_token is not None) == (global_pool == "token") == (model.num_prefix_tokens == 1)


def test_an_unknown_pool_is_refused():
    with pytest.raises(ValueError, match="`global_pool` must be one of '', 'token', 'avg', got 'max'"):
        pvt(global_pool="max")


@in_turn(
    ("kwargs", "said"),
    [
        ({"encoding": "relative_bias"}, "layer 0 `bias`"),
        ({"encoding": "learnable+relative_bias"}, "layer 0 `bias`"),
        ({"encoding": "shaw"}, "layer 0 `bias`"),
        ({"encoding": "convolutional_projection"}, "layer 1 `inputs`"),
        ({"encoding": "convolutional_projection(places=-1)"}, "layer 0 `inputs`"),
        ({"encoding": "peg(acts_on='queries_keys')"}, "layer 1 `inputs`"),
    ],
)
def test_an_encoding_that_acts_inside_attention_is_refused_by_name(kwargs, said):
    message = f"`encoding` must be one that PyramidVisionTransformer can use, .*; got one that gives {said}"
    with pytest.raises(ValueError, match=message):
        pvt(depths=[2, 2, 2, 2], **kwargs)


@in_turn(
    ("kwargs", "message"),
    [
        ({"embed_dims": [8, 16, 24]}, "`embed_dims` and `depths` must have .* every stage, got 3 and 4"),
        ({"num_heads": [1, 2, 3]}, "`num_heads` must have a value for each of the 4 stages, got 3"),
        ({"depths": [1, 1, 1]}, "for each of the 3 stages, got 4 and 4"),
        ({"mlp_ratios": [4, 4, 4]}, "`mlp_ratios` and `sr_ratios` must .* 4 stages, got 3 and 4"),
        ({"sr_ratios": [8, 4, 2, 1, 1]}, "`mlp_ratios` and `sr_ratios` must .* 4 stages, got 4 and 5"),
        ({"depths": [1, 0, 1, 1]}, "`depths` must be at least 1, got 0"),
        ({"depths": [], "embed_dims": [], "num_heads": [], "mlp_ratios": [], "sr_ratios": []}, "`depths` must"),
        ({"num_classes": -1}, "`num_classes` must be at least 0, got -1"),
        ({"in_chans": 0}, "`in_chans` must be at least 1, got 0"),
        ({"drop_path_rate": 1.0}, r"`drop_path_rate` must be in \[0, 1\), got 1.0"),
        ({"num_heads": [1, 2, 5, 4]}, "`embed_dim` must be a multiple of `num_heads`, got 24 with 5 heads"),
        ({"sr_ratios": [8, 4, 0, 1]}, "`sr_ratios` must be at least 1 .* got 0 for 4 x 4 patches"),
        ({"sr_ratios": [8, 4, 8, 1]}, "`sr_ratios` must be .* no more than the sides .* got 8 for 4 x 4 patches"),
        ({"img_size": (64, 32), "sr_ratios": [8, 4, 4, 1]}, "`sr_ratios` must .* got 4 for 4 x 2 patches"),
        ({"encoding": "peg(places=1)"}, "`places` must be from -1, .* 1 layers, to 0, got 1"),
        ({"pretrained": True}, "`pretrained` must be False: timm's hub has no weights of pvt_tiny;"),
    ],
)
def test_invalid_arguments_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        pvt(**kwargs)


def test_a_reduction_larger_than_the_grid_of_its_stage_is_refused_with_the_grid():
    model = pvt(sr_ratios=[8, 4, 4, 1]).eval()
    assert model(images(64, 64)).shape == (2, 5)
    with pytest.raises(ValueError, match=r"at least 4 patches per side, .* got 2 x 4"):
        model(images(32, 64))


def test_a_model_of_other_than_four_stages_can_be_built():
    model = PyramidVisionTransformer(
        partial(build_position, encoding="peg"),
        img_size=32,
        embed_dims=(8, 16),
        depths=(1, 2),
        num_heads=(1, 2),
        mlp_ratios=(2, 2),
        sr_ratios=(2, 1),
        num_classes=5,
        global_pool="avg",
    ).eval()
    assert model.forward_features(images(16, 24)).shape == (2, 6, 16)


# Training


def test_tokens_are_dropped_where_they_enter_a_stage_alone():
    model = pvt(depths=[2, 2, 2, 2], pos_drop_rate=0.5)
    seen = []
    model.pos_drop.register_forward_hook(lambda _, args, y: seen.append(tuple(y.shape)))
    model(images(64, 96))
    assert seen == [(2, 384, 8), (2, 96, 16), (2, 24, 24), (2, 7, 32)]


def test_weights_are_drawn_as_pvts_code_draws_them():
    model = pvt(embed_dims=[32, 64, 96, 128])
    for key, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert not module.bias.any(), key
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.15), key
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.4)
    for stage in model.position.stages:
        assert stage.encodings[0].pos_embed.std().item() == pytest.approx(0.02, rel=0.2)


@forms
def test_layer_decay_puts_every_parameter_in_one_group_and_position_with_its_stage(form):
    model = pvt(**FORMS[form])
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    key = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [key[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    scale = {key[id(p)]: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    decay = {key[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    rate = [scale[f"blocks.{stage}.0.mlp.fc1.weight"] for stage in range(4)]
    assert scale["patch_embeds.0.proj.weight"] == scale["patch_embeds.0.norm.weight"] < rate[0]
    for stage in range(4):
        own = {s for name, s in scale.items() if name.startswith((f"blocks.{stage}.", f"position.stages.{stage}."))}
        assert own == {rate[stage]}
        assert stage == 0 or scale[f"patch_embeds.{stage}.proj.weight"] == rate[stage]
        assert stage == 0 or rate[stage - 1] == pytest.approx(0.7 * rate[stage])
    assert rate[3] <= scale["norm.weight"] <= scale["head.weight"] == 1
    assert {decay[name] for name in decay if name.startswith("position.") or name == "cls_token"} <= {0}
    assert decay["blocks.2.0.attn.sr.weight"] == 0.05


# timm's interface


def test_an_invalid_pooling_leaves_the_classifier_unchanged():
    model = pvt("pvt_tiny_gap")
    head = model.head
    with pytest.raises(ValueError, match="`global_pool` must be 'avg' or '' where there is no class token"):
        model.reset_classifier(7, "token")
    with pytest.raises(ValueError, match="`global_pool` must be one of"):
        model.reset_classifier(7, "max")
    assert (model.global_pool, model.num_classes, model.head) == ("avg", 5, head)


def test_without_a_peg_what_leaves_a_stage_is_what_its_last_block_returns():
    model = draw(pvt()).double().eval()
    returned = []
    for stage in model.blocks:
        stage[-1].register_forward_hook(lambda _, args, y: returned.append(y))
    maps = model.forward_intermediates(wide(64, 96), intermediates_only=True)
    for stage, (y, at) in enumerate(zip(maps, returned, strict=True)):
        assert_same(y.flatten(2).mT, at[:, stage == 3 :])


@names
def test_the_final_norm_is_for_the_last_stage_alone(name):
    model = draw(pvt(name)).double().eval()
    x = wide()
    plain = model.forward_intermediates(x, intermediates_only=True)
    normed = model.forward_intermediates(x, intermediates_only=True, norm=True)
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], normed[:3], strict=True))
    assert_same(normed[3].flatten(2).mT, model.norm(plain[3].flatten(2).mT))
    assert_same(normed[3].flatten(2).mT, model.forward_features(x)[:, model.num_prefix_tokens :])


@pytest.mark.parametrize(("indices", "ran"), [([0], [0]), ([0, 1], [0, 1, 1]), ([3], [0, 1, 1, 2, 3])])
def test_stopping_early_runs_no_stage_after_the_last_one_wanted(indices, ran):
    model = draw(pvt("pvt_tiny_peg")).double().eval()
    x = wide()
    everything = model.forward_intermediates(x, intermediates_only=True)
    runs = []
    for stage, blocks in enumerate(model.blocks):
        for block in blocks:
            block.register_forward_hook(lambda *_, stage=stage: runs.append(stage))
    maps = model.forward_intermediates(x, indices=indices, stop_early=True, intermediates_only=True)
    assert runs == ran
    assert all(torch.equal(y, everything[stage]) for y, stage in zip(maps, indices, strict=True))


def test_the_module_of_a_stage_that_timm_knows_is_its_last_block():
    model = pvt()
    assert [info["module"] for info in model.feature_info] == ["blocks.0.0", "blocks.1.1", "blocks.2.0", "blocks.3.0"]
    assert all(model.get_submodule(info["module"]) for info in model.feature_info)
    assert model.get_submodule(model.default_cfg["first_conv"]) is model.patch_embeds[0].proj
    assert model.get_submodule(model.default_cfg["classifier"]) is model.head


# Folding, compiling, exporting, other memory


def two_stages(name, **kwargs):
    """Return a pyramid of two stages of one block, with every weight drawn, in float64."""
    return draw(graticule.create_model(name, **{**SMALL["PVT"][1], "depths": (1, 1), **kwargs})).double().eval()


def test_forward_and_backward_are_one_graph_with_the_same_gradients():
    model = two_stages("pvt_tiny_peg_gap").train()
    x = wide(16, 24)
    model(x).square().sum().backward()
    eager = copy.deepcopy(gradients(model))
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[key], rtol=1e-10, atol=1e-10, msg=key)


def exported(model, step):
    """Export a model for any height and width that are multiples of `step`."""
    height, width = (step * Dim(side, min=2, max=16) for side in ("h", "w"))
    return export(model, (wide(2 * step, 3 * step),), dynamic_shapes=({2: height, 3: width},)).module()


def test_a_pyramid_with_pegs_is_exported_for_any_height_and_width():
    model = two_stages("pvt_tiny_peg")
    program = exported(model, 8)
    for size in ((16, 24), (32, 16), (24, 40)):
        x = wide(*size)
        assert_same(program(x), model(x))


def test_a_cpvt_is_exported_for_any_height_and_width():
    size = {"img_size": 64, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 5}
    model = draw(graticule.create_model("cpvt_tiny_patch16_224", **size)).double().eval()
    program = exported(model, 16)
    for size in ((32, 48), (64, 64), (80, 32)):
        x = wide(*size)
        assert_same(program(x), model(x))


@names
def test_a_pyramid_inside_another_module_takes_published_names_too(name):
    first, holder = draw(pvt(name)).eval(), nn.ModuleDict({"backbone": pvt(name)}).eval()
    published = graticule.published_state_dict(first)
    holder.load_state_dict({f"backbone.{key}": value for key, value in published.items()}, strict=True)
    x = images(64, 96)
    assert torch.equal(holder["backbone"](x), first(x))
