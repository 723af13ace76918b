"""Models of timm are converted to ours and back, with equal outputs and equal bits."""

import copy
from functools import partial

import pytest
import timm
import torch
import torchvision
import transformers
from timm_models import attribute, changed
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


class Tripled(torch.nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


VIT = partial(small, "vit_tiny_patch16_224")
of = partial(partial, small)
naflex = partial(of, "naflexvit_base_patch16_gap", img_size=None, pos_embed_grid_size=(4, 6))
SWIN = partial(timm.create_model, "swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2, 2))
MIXER = partial(timm.create_model, "mixer_s32_224", img_size=(64, 96))
#: Models that are refused, and the error, which names the part and its value.
REFUSED = [
    # changes that the names of modules and tensors do not show
    (changed(VIT, lambda m: m.blocks[1].register_forward_hook(lambda *_: None)), "`blocks.1._forward_hooks` of"),
    (changed(VIT, lambda m: m.register_forward_pre_hook(lambda *_: None)), "`_forward_pre_hooks` of Vis"),
    (changed(VIT, lambda m: m.norm.register_full_backward_hook(lambda *_: None)), "`norm._backward_hooks` of"),
    (changed(VIT, attribute("forward", lambda x: x)), "`forward` of VisionTransformer must be that of its"),
    (changed(VIT, attribute("_pos_embed", lambda x: x)), "`_pos_embed` of VisionTransformer must be that of"),
    (changed(VIT, attribute("blocks.1.forward", lambda x: x)), "`blocks.1.forward` of Vision"),
    (changed(VIT, attribute("blocks.1.mlp.fc1.__class__", Tripled)), "`blocks.1.mlp.fc1` of VisionTransf"),
    (changed(VIT, attribute("blocks.1.drop_path2", timm.layers.DropPath(0.3))), "`drop_path2` of Block must"),
    # changed parts
    (changed(VIT, attribute("blocks.1.norm2.eps", 1e-3)), "`norm2` of Block must be layernorm(eps=1e-06) as the other"),
    (
        changed(VIT, attribute("blocks.1.mlp.act", torch.nn.SiLU())),
        "`blocks.1` of VisionTransformer must have act_layer='gelu'",
    ),
    (
        changed(VIT, attribute("extra", torch.nn.Linear(2, 2))),
        "no tensor without a counterpart here, got VisionTransformer with extra.weight",
    ),
    (
        changed(SWIN, attribute("layers.0.blocks.1.shift_size", (0, 0))),
        "`layers.0.blocks.1.shift_size` of SwinTransformer must be (2, 2)",
    ),
    (changed(SWIN, attribute("norm.eps", 0.1)), "`norm.eps` of SwinTransformer must be"),
    (
        changed(MIXER, attribute("blocks.1.mlp_channels.act", torch.nn.ReLU())),
        "`blocks.1.mlp_channels.act` of MlpMixer must be the exact GELU",
    ),
    # parts without a counterpart
    (of("vit_dwee_patch16_reg1_gap_256"), "`attn` of Block must be Attention to be converted, got DiffAttention"),
    (partial(VIT, dynamic_img_pad=True), "`dynamic_img_pad` of PatchEmbed must be False"),
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
    (partial(timm.create_model, "gmixer_12_224", img_size=32), "`blocks.0.mlp_tokens.act` of MlpMixer must be the ex"),
    # other classes
    (partial(timm.create_model, "pvt_v2_b0"), "`model` must be of one of timm's classes Beit, ConVit, "),
    (partial(timm.create_model, "test_resnet"), "got ResNet of timm.models.resnet"),
    (partial(torchvision.models.VisionTransformer, 32, 8, 1, 3, 24, 48), "; graticule.attach"),
    (lambda: graticule.convert(VIT()), "which is one of ours already"),
]


@in_turn(("build", "message"), REFUSED)
def test_what_would_be_lost_is_refused_in_one_sentence(build, message):
    with pytest.raises(ValueError) as refusal:
        graticule.convert(build())
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_model_that_was_not_converted_does_not_go_back():
    with pytest.raises(ValueError, match="`model` must come from `convert`"):
        graticule.to_timm(graticule.create_model("vit_nano_patch4_28"))


def test_a_hook_of_transformers_is_no_obstacle_and_another_one_is():
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32)
    model = transformers.ViTModel(config).eval()
    model(images(), output_hidden_states=True)  # which registers hooks
    graticule.convert(model)
    model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"`layers.0._forward_hooks` of ViTModel must be removed to be converted"):
        graticule.convert(model)


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
WITHOUT = {"swinv2_cr_*": "`model` must be of one of timm's classes"}


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
