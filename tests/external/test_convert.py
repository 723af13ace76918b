"""Models of timm are converted to ours and back, with equal outputs and equal bits."""

import copy

import pytest
import timm
import torch
import transformers

import graticule
from tiny import SIZE, draw, holds, images, without_memory


@pytest.fixture(scope="module")
def vit():
    return draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": (24, 40)})).double().eval()


def test_the_way_back_is_equal_in_every_bit(vit):
    back = graticule.to_timm(graticule.convert(vit))
    assert type(back) is type(vit)
    assert back.state_dict().keys() == vit.state_dict().keys()
    assert holds(back, vit.state_dict())
    x = images(24, 40, dtype=torch.float64)
    assert torch.equal(back(x), vit(x))


def test_another_joining_keeps_the_table_and_all_other_weights(vit):
    plain, joined = graticule.convert(vit), graticule.convert(vit, joining="lape")
    new = joined.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(new[name], value), name
    assert {name for name in new if name not in plain.state_dict()} == {
        f"position.joining.norms.{layer}.{leaf}" for layer in range(3) for leaf in ("weight", "bias")
    }


def test_a_saved_model_is_converted_back_with_a_model_of_timm_of_the_same_arguments(vit, tmp_path):
    theirs, x = copy.deepcopy(vit).float(), images(24, 40)
    opened = graticule.from_pretrained(graticule.convert(theirs).save_pretrained(tmp_path))
    like = timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": (32, 32), "num_classes": 3})
    back = graticule.to_timm(opened, like=like)
    assert holds(back, theirs.state_dict()) and torch.equal(back(x), theirs(x))
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


class Tripled(torch.nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


#: Changes of a model that its modules' names and tensors do not show, and the error.
CHANGED = {
    "hook": (lambda m: m.blocks[1].register_forward_hook(lambda *_: None), "`blocks.1._forward_hooks` of"),
    "hook before": (lambda m: m.register_forward_pre_hook(lambda *_: None), "`_forward_pre_hooks` of Vis"),
    "hook of gradients": (lambda m: m.norm.register_full_backward_hook(lambda *_: None), "`norm._backward_hooks` of"),
    "forward": (lambda m: setattr(m, "forward", lambda x: x), "`forward` of VisionTransformer must be that of its"),
    "method": (lambda m: setattr(m, "_pos_embed", lambda x: x), "`_pos_embed` of VisionTransformer must be that of"),
    "forward of a block": (lambda m: setattr(m.blocks[1], "forward", lambda x: x), "`blocks.1.forward` of Vision"),
    "subclass": (lambda m: setattr(m.blocks[1].mlp.fc1, "__class__", Tripled), "`blocks.1.mlp.fc1` of VisionTransf"),
    "rates": (lambda m: setattr(m.blocks[1], "drop_path2", timm.layers.DropPath(0.3)), "`drop_path2` of Block must"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_would_be_lost_is_refused(vit, name):
    change, message = CHANGED[name]
    model = copy.deepcopy(vit)
    change(model)
    with pytest.raises(ValueError, match=message) as refusal:
        graticule.convert(model)
    assert "\n" not in str(refusal.value)


def test_a_hook_of_transformers_is_no_obstacle_and_another_one_is():
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32)
    model = transformers.ViTModel(config).eval()
    model(images(), output_hidden_states=True)  # which registers hooks
    graticule.convert(model)
    model.layers[0].register_forward_hook(lambda *_: None)
    for function in (graticule.convert, lambda one: graticule.resize(one, 64)):
        with pytest.raises(ValueError, match=r"`layers.0._forward_hooks` of ViTModel must be removed to be converted"):
            function(model)


def test_a_scale_that_the_fused_attention_of_timm_does_not_read_is_not_read(vit):
    model, x = copy.deepcopy(vit), images(24, 40, dtype=torch.float64)
    for block in model.blocks:
        assert block.attn.fused_attn
        block.attn.scale = 7.0
    torch.testing.assert_close(graticule.convert(model)(x), model(x), rtol=0, atol=1e-12)


FAMILIES = (
    *("vit_*_rope*", "eva02_*", "*_dinov3*", "vit_relpos_*", "vit_srelpos_*", "beit*", "samvit*"),
    *("convit*", "mixer_*", "resmlp_*", "swinv2_*"),
)
#: Models without a counterpart: names -> text of the error.
REFUSED = {
    "swinv2_cr_*": "`model` must be of one of timm's classes",
}


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
    refused = {name: why for pattern, why in REFUSED.items() for name in matching(pattern)}
    larger = matching("*large*", "*huge*", "*giant*", "*enormous*", "*_7b_*", "swinv2_cr_[bst]*")
    assert len(names - larger - refused.keys()) > 60
    for name in sorted(names - larger):  # the large ones differ only in size
        try:
            with without_memory():
                graticule.convert(on_meta(name))
            said = ""
        except ValueError as error:
            said = str(error)
        if not (refused[name] in said if name in refused else not said):
            wrong[name] = said
    assert not wrong
