"""Plain transformers of timm are converted to ours and back, with equal outputs at any size and equal bits."""

import pytest
import timm
import torch
from timm_models import assert_same_bits, build, difference

import graticule
from evidence.vector_rotations import in_float64
from graticule.external.convert.parts import read
from graticule.position.position import ENCODINGS

#: Encoding -> models of timm, one for each part that no other one has: ViT, AugReg, DeiT; other blocks; CLIP, SigLIP,
#: AIMv2, BEiT-3; DINOv2 and v3; EVA, EVA-02, Perception Encoder, rope-vit; relative biases.
ENCODED = {
    "learnable": """
        vit_tiny_patch16_224 vit_base_patch16_gap_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224
        flexivit_small vit_medium_patch16_reg4_gap_256 vit_so150m_patch16_reg4_map_256
        vit_small_patch16_18x2_224 vit_base_patch16_xp_224 vit_base_patch16_rpn_224
        vit_base_patch32_clip_quickgelu_224 vit_base_patch16_siglip_224 vit_base_patch16_siglip_gap_224
        aimv2_large_patch14_224 beit3_base_patch16_224
        vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 vit_giant_patch14_dinov2
        eva_giant_patch14_224 eva02_enormous_patch14_clip_224
    """,
    "rope": """
        vit_small_patch16_dinov3 vit_7b_patch16_dinov3 vit_small_patch16_rope_224 vit_medium_patch16_rope_reg1_gap_256
    """,
    "learnable + rope": """
        eva02_tiny_patch14_224 eva02_base_patch14_224 eva02_base_patch16_clip_224
        vit_pe_core_tiny_patch16_384 vit_pe_spatial_base_patch16_512 vit_small_patch16_rope_ape_224
    """,
    "rope_mixed": "vit_small_patch16_rope_mixed_224",
    "learnable + rope_mixed": "vit_small_patch16_rope_mixed_ape_224",
    "relative_bias": "beit_base_patch16_224 beitv2_large_patch16_224",
    "mlp_bias": """
        vit_relpos_small_patch16_224 vit_relpos_base_patch16_clsgap_224 vit_relpos_base_patch16_rpn_224
    """,
    "shared_mlp_bias": "vit_srelpos_small_patch16_224",
}
MODELS = {name: encoding for encoding, names in ENCODED.items() for name in names.split()}
#: Segment Anything: arguments of timm, and the encoding.
SAM = [
    ({"window_size": 3, "global_attn_indexes": (1,)}, "learnable + decomposed"),
    ({"window_size": 3, "global_attn_indexes": (0, 2), "use_abs_pos": False, "neck_chans": None}, "decomposed"),
    ({"window_size": 2, "global_attn_indexes": (), "use_rel_pos": False, "num_classes": 0}, "learnable"),
]
#: Further arguments, for parts that no named model has: BEiT's shared table, tables in timm's `vit_relpos`.
VARIANTS = [
    *((name, {}) for name in MODELS),
    ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True}),
    ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "use_abs_pos_emb": True}),
    ("vit_relpos_small_patch16_224", {"rel_pos_type": "bias", "class_token": True}),
    ("vit_tiny_patch16_224", {"pos_embed": "none", "qk_norm": True, "init_values": 0.1, "final_norm": False}),
]
IDS = ["-".join([name, *options]) for name, options in VARIANTS]


# of timm's resampling of BEiT's tables
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_a_converted_model_computes_the_same_at_any_size_and_goes_back_bit_by_bit(name, options):
    with in_float64():
        original = build(name, **options)
        specs = ENCODINGS.specs(read(original).encoding)
        assert options or " + ".join(spec.name for spec in specs) == MODELS[name]
        ours = graticule.convert(original)
        assert difference(ours, original, 32, 48) < 1e-12
        back = graticule.to_timm(ours)
        assert_same_bits(back, original)
        assert difference(back, original, 32, 48) == 0
        original.set_input_size((56, 40))
        assert difference(ours, original, 56, 40) < 1e-12
        ours.set_input_size((56, 40))
        back = graticule.to_timm(ours)
        assert difference(back, original, 56, 40) < 1e-12


@pytest.mark.parametrize("kind", ["mlp", "mlp-swin"])
def test_dropout_in_the_network_of_a_bias_draws_as_in_timm(kind):
    with in_float64():
        original = build("vit_relpos_small_patch16_224", rel_pos_type=kind, rel_pos_dim=16)
        ours, x = graticule.convert(original).train(), torch.randn(2, 3, *original.patch_embed.img_size)
        outputs = []
        for model in (original.train(), ours):
            torch.manual_seed(0)
            outputs.append(model(x))
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
        assert not torch.allclose(outputs[0], original.eval()(x), rtol=0, atol=1e-9)


def test_a_bias_of_swin_v2_in_a_vit_stays_relative_to_the_size_that_it_was_built_for():
    with in_float64():
        original = build("vit_relpos_small_patch16_224", rel_pos_type="mlp-swin", rel_pos_dim=8)
        assert read(original).encoding == "continuous_bias(hidden=8, drop_rate=0.125)"
        ours = graticule.convert(original)
        assert difference(ours, original, 32, 48) < 1e-12
        assert_same_bits(graticule.to_timm(ours), original)
        if hasattr(original, "set_input_size"):  # timm has it since 1.0.31
            ours.set_input_size((56, 40))
            assert difference(ours, graticule.to_timm(ours), 56, 40) < 1e-12


@pytest.mark.parametrize(("options", "encoding"), SAM)
def test_the_encoder_of_segment_anything_computes_the_same_at_any_size(options, encoding):
    with in_float64():
        original = build("samvit_base_patch16", **options)
        assert read(original).encoding == encoding
        ours = graticule.convert(original)
        for size in ((32, 48), (56, 40), (16, 8)):
            x = torch.randn(2, 3, *size)
            features, maps = original.forward_intermediates(x, norm=True)
            own_features, own_maps = ours.forward_intermediates(x, norm=True)
            torch.testing.assert_close(ours(x), original(x), rtol=0, atol=1e-12)
            torch.testing.assert_close(own_features, features.flatten(2).mT, rtol=0, atol=1e-12)
            for ours_map, expected in zip(own_maps, maps, strict=True):
                torch.testing.assert_close(ours_map, expected, rtol=0, atol=1e-12)
        assert_same_bits(graticule.to_timm(ours), original)


def test_transforms_resolve_as_those_of_timm():
    original = build("vit_base_patch32_clip_quickgelu_224")
    ours = graticule.convert(original)
    expected = timm.data.resolve_model_data_config(original)
    assert timm.data.resolve_model_data_config(ours) == {**expected, "input_size": (3, 32, 48)}


def test_mode_and_trainable_parameters_are_kept():
    original = build("deit3_small_patch16_224").train()
    original.blocks[0].requires_grad_(False)
    ours = graticule.convert(original)
    back = graticule.to_timm(ours)
    assert ours.training
    assert back.training
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in ours.named_parameters() if name.startswith("blocks.0.")}
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in original.parameters()]


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "samvit_base_patch16"])
@pytest.mark.parametrize(("before", "after"), [(5, 3), (0, 3), (5, 0)])
def test_another_classifier_goes_back_to_timm(name, before, after):
    ours = graticule.convert(build(name, num_classes=before))
    ours.reset_classifier(after)
    back = graticule.to_timm(ours)
    x = torch.randn(1, 3, 32, 48)
    assert back.num_classes == after
    torch.testing.assert_close(back(x), ours(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("beit_base_patch16_224", {}), ("eva02_base_patch14_224", {}), ("samvit_base_patch16", SAM[0][0])],
)
def test_published_checkpoints_load_by_their_names(name, options):
    original, fresh = build(name, **options), graticule.convert(build(name, **options))
    fresh.load_state_dict(original.state_dict())
    x = torch.randn(1, 3, 32, 48)
    with torch.no_grad():
        assert torch.equal(fresh(x), graticule.convert(original)(x))
    assert {row.status for row in graticule.transfer(fresh, original.state_dict()).rows} == {"loaded"}


#: Models of NaFlexVit with a table, and its sides: prefix tokens and average pooling, pooling by attention, bilinear
#: resampling, and one that keeps the aspect ratio; rotations with and without a table, of all kinds.
NAFLEX = [
    ("gap", (4, 6), {}),
    ("map", (4, 6), {}),
    ("siglip", (4, 6), {}),
    ("par_gap", (5, 5), {}),
    (
        "gap",
        (4, 6),
        {"rope_type": "axial", "rope_ref_feat_shape": (3, 5), "rope_grid_offset": 0.5, "class_token": True},
    ),
    ("map", (4, 6), {"rope_type": "axial", "rope_rotate_half": True, "rope_grid_indexing": "xy", "qk_norm": True}),
    ("gap", (4, 6), {"rope_type": "mixed", "rope_grid_indexing": "xy", "pos_embed": "none"}),
    ("gap", (4, 6), {"rope_type": "dinov3", "rope_rotate_half": True, "pos_embed": "none", "reg_tokens": 2}),
    ("gap", (4, 6), {"rope_type": "dinov3", "attn_type": "eva"}),
]


@pytest.mark.parametrize(("name", "grid", "rotation"), NAFLEX)
def test_a_naflex_model_computes_the_same_for_images_of_any_size(name, grid, rotation):
    options = {"img_size": None, "pos_embed_grid_size": grid, **rotation}
    with in_float64():
        original = build(f"naflexvit_base_patch16_{name}", **options)
        ours = graticule.convert(original)
        for size in ((32, 48), (48, 32), (24, 24)):
            x = torch.randn(2, 3, *size)
            with torch.no_grad():
                torch.testing.assert_close(ours(x), original(x), rtol=1e-9, atol=1e-9)
        assert_same_bits(graticule.to_timm(ours), original)
