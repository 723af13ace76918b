"""Models of timm are converted to ours and back, with equal outputs and equal bits."""

import copy
from contextlib import contextmanager
from functools import cache, partial
from unittest.mock import patch

import pytest
import timm
import torch
import torchvision
import transformers
from timm.models.vision_transformer import Block, LayerScale, VisionTransformer
from timm_models import attribute, changed, within
from timm_models import build as small

import graticule
from in_turn import in_turn
from tiny import SIZE, draw, holds, images, without_memory


@pytest.fixture(scope="module")
def vit():
    return draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": (24, 40)})).double().eval()


def test_another_joining_keeps_the_table_and_all_other_weights(vit):
    plain, joined = graticule.convert(vit), graticule.convert(vit, joining="lape")
    new = joined.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(new[name], value), name
    assert {name for name in new if name not in plain.state_dict()} == {
        f"position.joining.norms.{layer}.{leaf}" for layer in range(3) for leaf in ("weight", "bias")
    }


def test_a_saved_model_is_converted_back_with_a_model_of_timm_of_the_same_arguments(vit, tmp_path):
    original, x = copy.deepcopy(vit).float(), images(24, 40)
    opened = graticule.from_pretrained(graticule.convert(original).save_pretrained(tmp_path))
    like = timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": (32, 32), "num_classes": 3})
    back = graticule.to_timm(opened, like=like)
    assert holds(back, original.state_dict()) and torch.equal(back(x), original(x))
    with pytest.raises(
        ValueError, match=r"`model` must come from `convert` .* and opened, `like` gives the model of timm"
    ):
        graticule.to_timm(opened)
    with pytest.raises(
        ValueError, match=r"must be a backbone that `convert` made, got Debiased; .*, model.backbone is one"
    ):
        graticule.to_timm(graticule.debias(opened, images(24, 40, batch=9)))
    deeper = timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": (24, 40), "depth": 2})
    with pytest.raises(ValueError, match=r"`like` must be built as .* another depth"):
        graticule.to_timm(opened, like=deeper)


def tie(model):
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight


class Labeled(torch.Tensor):
    pass


class Longer(VisionTransformer):
    pass


@contextmanager
def global_hook():
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


class Tripled(torch.nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


VIT = partial(small, "vit_tiny_patch16_224")
of = partial(partial, small)
naflex = partial(of, "naflexvit_base_patch16_gap", img_size=None, pos_embed_grid_size=(4, 6))
SWIN = partial(timm.create_model, "swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2, 2))
DINOV3 = partial(small, "vit_small_patch16_dinov3")
MIXER = partial(timm.create_model, "mixer_s32_224", img_size=(64, 96))
#: Models that are refused, and the error, which names the part and its value.
REFUSED = [
    # changes that the names of modules and tensors do not show
    (
        changed(VIT, lambda m: m.blocks[1].register_forward_hook(lambda *_: None)),
        "but blocks.1._forward_hooks is the function",
    ),
    (changed(VIT, lambda m: m.register_forward_pre_hook(lambda *_: None)), "but _forward_pre_hooks is the function"),
    (
        changed(VIT, lambda m: m.norm.register_full_backward_hook(lambda *_: None)),
        "but norm._backward_hooks is the function",
    ),
    (changed(VIT, attribute("forward", lambda x: x)), "of test_convert, not its class's own; convert"),
    (changed(VIT, attribute("_pos_embed", lambda x: x)), "but _pos_embed is the function"),
    (changed(VIT, attribute("blocks.1.forward", lambda x: x)), "but blocks.1.forward is the function"),
    (changed(VIT, lambda m: m.register_state_dict_post_hook(lambda *_: None)), "but _state_dict_hooks is the function"),
    (within(global_hook(), VIT), "but torch.nn.modules.module._global_backward_hooks is the function"),
    (changed(VIT, lambda m: vars(m.blocks[1]).update(mlp=torch.relu)), "but blocks.1.mlp is hidden by an attribute of"),
    (within(patch.object(Block, "mlp", torch.relu, create=True), VIT), "but blocks.0.mlp is hidden by an attribute of"),
    (within(patch.object(Block, "forward", LayerScale.forward), VIT), "is the function LayerScale.forward of"),
    (within(patch.object(Block, "forward", cache(tie)), VIT), "but timm.models.vision_transformer.Block.forward is"),
    (
        within(patch.object(torch.nn.functional, "scaled_dot_product_attention", tie), VIT),
        "torch.nn.functional.scaled_dot_product_attention is the function tie of test_convert, not its library's own",
    ),
    (
        changed(VIT, lambda m: m.blocks.__setitem__(1, torch.compile(m.blocks[1]))),
        "must not be compiled, got blocks.1, which is; compile it after",
    ),
    (changed(VIT, attribute("head.weight.lr_scale", 0.1)), "but head.weight.lr_scale is 0.1, not its class's own"),
    (
        changed(
            VIT, lambda m: setattr(m.blocks[1].mlp.fc1, "weight", torch.nn.Parameter(m.blocks[0].mlp.fc1.weight.data))
        ),
        "but blocks.1.mlp.fc1.weight is the parameter blocks.0.mlp.fc1.weight, not a p",
    ),
    (changed(VIT, lambda m: m.blocks[1].compile()), "must not be compiled, got blocks.1"),
    (
        changed(VIT, lambda m: setattr(m.norm, "weight", torch.nn.Parameter(m.norm.weight.data.as_subclass(Labeled)))),
        "must have weights of PyTorch's own class, got norm.weight, Labeled of torch.float32; replace it by",
    ),
    (
        changed(VIT, attribute("__class__", Longer)),
        "must be a VisionTransformer itself, got Longer of test_convert, a sub",
    ),
    (changed(VIT, attribute("blocks.1.mlp.fc1.__class__", Tripled)), "but blocks.1.mlp.fc1 is Tripled, not Linear"),
    (changed(VIT, attribute("blocks.1.drop_path2", timm.layers.DropPath(0.3))), "drop_path2 is DropPath, not Identity"),
    # changed parts
    (
        changed(VIT, attribute("blocks.0.mlp.act", torch.nn.SiLU())),
        "blocks.0.mlp.act is SiLU, not GELU as in the others;",
    ),
    (changed(VIT, attribute("blocks.0.norm1.eps", 1e-3)), "blocks.0.norm1.eps is 0.001, not 1e-06 as in the others;"),
    (
        changed(VIT, attribute("blocks.0.ls1", timm.layers.LayerScale(32))),
        "blocks.0.ls1 is LayerScale, not Identity as in the others;",
    ),
    (changed(VIT, attribute("norm_pre", torch.nn.LayerNorm(48))), "`norm_pre` of VisionTransformer must be Identity"),
    (
        changed(partial(VIT, reg_tokens=2), attribute("reg_token", None)),
        "`reg_token` of VisionTransformer must be as `num_reg_tokens` = 2 says to be converted, got None.",
    ),
    (
        changed(VIT, attribute("blocks.1.ls1", torch.nn.ReLU())),
        "`model` must be a VisionTransformer as timm builds it from settings that have a counterpart here, but "
        "blocks.1.ls1 is ReLU, not Identity; convert the model before such a change.",
    ),
    (changed(VIT, attribute("blocks.1.norm2.eps", 1e-3)), "but blocks.1.norm2.eps is 0.001, not 1e-06"),
    (changed(VIT, attribute("blocks.1.mlp.act", torch.nn.SiLU())), "but blocks.1.mlp.act is SiLU, not GELU"),
    (changed(VIT, attribute("blocks.1.attn.scale", 7.0)), "but blocks.1.attn.scale is 7.0, not 0.25"),
    (changed(VIT, attribute("extra", torch.nn.Linear(2, 2))), "but extra is Linear, not absent"),
    (changed(VIT, attribute("patch_embed.proj.padding", (1, 0))), "but patch_embed.proj.padding is (1, 0), not (0, 0)"),
    (
        changed(VIT, lambda m: m.blocks[1].train()),
        "but blocks.1 is in training mode and the VisionTransformer in evaluation mode",
    ),
    (
        changed(VIT, lambda m: m.blocks[1].double()),
        "on one device, got VisionTransformer with blocks.1.norm1.weight in",
    ),
    (changed(VIT, tie), "but blocks.1.mlp.fc1.weight is the parameter blocks.0.mlp.fc1.weight, not a parameter of its"),
    (
        changed(VIT, lambda m: setattr(m.blocks[1], "attn", m.blocks[0].attn)),
        "is the parameter blocks.0.attn.qkv.weight",
    ),
    (changed(DINOV3, lambda m: m.rope.periods.mul_(1.5)), "but rope.periods is a tensor of other values, not what its"),
    (
        changed(DINOV3, attribute("rope.temperature", 7.0)),
        "its class computes, which follows from rope.temperature = 7.0;",
    ),
    (
        changed(DINOV3, attribute("rope.shift_coords", 0.5)),
        "rope.aug_active is False, not True, which follows from rope.shift_coords = 0.5;",
    ),
    (changed(SWIN, attribute("layers.0.blocks.1.shift_size", (0, 0))), "blocks.1.shift_size is (0, 0), not (2, 2)"),
    (
        changed(SWIN, attribute("layers.0.blocks.1.attn.scale", 0.9)),
        "but layers.0.blocks.1.attn.scale is 0.9, not 0.17",
    ),
    (changed(SWIN, attribute("norm.eps", 0.1)), "eps is 1e-05, not 0.1"),
    (changed(MIXER, attribute("blocks.1.mlp_channels.act", torch.nn.ReLU())), "mlp_channels.act is ReLU, not GELU"),
    (
        changed(VIT, attribute("blocks.0.attn", torch.nn.ReLU())),
        "part of another kind: `blocks.0.attn`, ReLU, which has no `",
    ),
    # parts without a counterpart
    (of("vit_dwee_patch16_reg1_gap_256"), "but blocks.0.attn is DiffAttention, not Attention"),
    (partial(MIXER, proj_drop_rate=0.1), "but blocks.0.mlp_tokens.drop1.p is 0.1, not 0.0"),
    (
        of("vit_small_patch16_rope_mixed_224", rope_grid_indexing="ij"),
        "`grid_indexing` of RotaryEmbeddingMixed must be 'xy'",
    ),
    (
        of("vit_srelpos_small_patch16_224", rel_pos_type="mlp-swin", shared_rel_pos=True),
        "`mode` of RelPosMlp must be 'cr' if shared",
    ),
    (naflex(pos_embed_ar_preserving=True), "`pos_embed_ar_preserving` of NaFlexEmbeds must be False with a table"),
    (naflex(pos_embed="factorized"), "`pos_embed_type` of NaFlexEmbeds must be 'learned' or 'none'"),
    (naflex(rope_type="mixed"), "`grid_indexing` of RotaryEmbeddingMixed must be 'xy'"),
    (partial(timm.create_model, "gmixer_12_224", img_size=32), "but blocks.0.mlp_tokens is GluMlp, not Mlp"),
    # other classes
    (
        partial(timm.create_model, "pvt_v2_b0"),
        "that is read, got PyramidVisionTransformerV2 of timm.models.pvt_v2. Read are timm's ",
    ),
    (partial(timm.create_model, "test_resnet"), "got ResNet of timm.models.resnet"),
    (partial(torchvision.models.VisionTransformer, 32, 8, 1, 3, 24, 48), "; graticule.attach"),
    (lambda: graticule.convert(VIT()), "which is one of ours already"),
]


@in_turn(("build", "message"), REFUSED)
def test_what_would_be_lost_is_refused_in_one_sentence(build, message):
    with pytest.raises(ValueError) as refusal:
        graticule.convert(build())
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_model_goes_back_after_another_was_compiled():
    compiled = torch.compile(graticule.convert(VIT()), backend="eager")
    compiled(images(*compiled.img_size))  # which puts functions into the modules of the library
    assert isinstance(graticule.to_timm(graticule.convert(VIT())), VisionTransformer)


def test_a_frozen_table_stays_frozen_with_another_joining():
    model = VIT()
    model.pos_embed.requires_grad_(False)
    parameters = dict(graticule.convert(model, joining="lape").named_parameters())
    assert [name for name, value in parameters.items() if not value.requires_grad] == ["position.encodings.0.pos_embed"]


def test_a_model_that_was_not_converted_does_not_go_back():
    with pytest.raises(ValueError, match="`model` must come from `convert`"):
        graticule.to_timm(graticule.create_model("vit_nano_patch4_28"))


def test_a_hook_of_transformers_is_no_obstacle_and_another_one_is():
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32)
    model = transformers.ViTModel(config).eval()
    model(images(), output_hidden_states=True)  # which registers hooks
    graticule.convert(model)
    model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"but layers.0._forward_hooks is the function"):
        graticule.convert(model)


def test_hooks_on_parameters_and_a_tensor_that_is_trained_in_part_are_refused():
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32)
    for change, message in (
        (
            lambda weights: weights[1].register_hook(torch.zeros_like),
            "weight._backward_hooks is <built-in method zeros_like",
        ),
        (lambda weights: weights[1].requires_grad_(False), "must train all parts of blocks.0.attn.qkv.weight or none"),
    ):
        model = transformers.ViTModel(config).eval()
        weights = [value for name, value in model.named_parameters() if "layers.0." in name and value.shape == (32, 32)]
        change(weights)
        with pytest.raises(ValueError, match=message):
            graticule.convert(model)
    model = transformers.ViTModel(config).requires_grad_(False).eval()
    assert not any(value.requires_grad for value in graticule.convert(model).parameters())


FAMILIES = (
    *("vit_*_rope*", "eva02_*", "*_dinov3*", "vit_relpos_*", "vit_srelpos_*", "beit*", "samvit*"),
    *("convit*", "mixer_*", "resmlp_*", "swinv2_*"),
)
#: Models without a counterpart: names -> text of the error.
WITHOUT = {"swinv2_cr_*": "`model` must be of a class that is read, got"}


def matching(*patterns):
    return {name for pattern in patterns for name in timm.list_models(pattern)}


def on_meta(name):
    """Build a model without weights, with one layer where timm supports it."""
    chosen = {"depths": (1, 1, 1, 1)} if name.startswith("swinv2") else {"depth": 1}
    chosen = {} if name.startswith(("mixer", "resmlp", "convit")) else chosen
    with without_memory():
        model = timm.create_model(name, **chosen)
    for module in model.modules():  # a bias that must be zero for the conversion
        if getattr(module, "k_bias", None) is not None:
            module.k_bias = torch.zeros(module.k_bias.shape, device="cpu")
    return model


@pytest.mark.slow
def test_every_model_of_these_families_is_converted_or_refused_with_a_reason():
    wrong, names = {}, matching(*FAMILIES)
    refused = {name: why for pattern, why in WITHOUT.items() for name in matching(pattern)}
    larger = matching("*large*", "*huge*", "*giant*", "*enormous*", "*_7b_*", "swinv2_cr_[bst]*")
    assert len(names - larger - refused.keys()) > 60
    for name in sorted(names - larger):  # the large ones differ only in size
        try:
            with without_memory():
                graticule.convert(on_meta(name))
            refusal = ""
        except ValueError as error:
            refusal = str(error)
        if not (refused[name] in refusal if name in refused else not refusal):
            wrong[name] = refusal
    assert not wrong
