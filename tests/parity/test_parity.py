"""Recorded outputs of LaPE's code and timm compared with ours, and the program that checks them."""

import json
import math
import shutil
from pathlib import Path

import check
import pytest
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
CASES = [path.stem for path in check.RECORDED]
RECORDED = """
cct_learnable ceit cpvt_retinanet cvt_sine deit eva02_rope film_axial_language film_axial_pixels film_monai_sincos
film_monai_vit film_mrope_timm film_vit_nd film_vit_nd_rotary film_vit_nd_rotary_causal fpn_retinanet fpn_semantic
fpnhead gmlp irpe_alone_euclidean_3x13 irpe_alone_product_2x17 irpe_cross_k irpe_euclidean_k irpe_product_k
irpe_quant_k lape_distilled_basic lape_learnable_basic lape_learnable_lape lape_learnable_share lape_learnable_unshare
lape_rpe2d_basic lape_sin1d_basic lape_sin1d_lape lape_sin2d_lape lape_sin2d_share ms_deform_attn packed_naflex_axial
packed_naflex_factorized packed_naflex_learned packed_naflex_mixed packed_naflex_mrope packed_siglip2 peg
posmlp_block_ggqpe posmlp_block_lrpe_m posmlp_block_nonsplit posmlp_block_sgu posmlp_gate_ggqpe posmlp_gate_nonsplit
posmlp_gate_norm posmlp_gate_sgu posmlp_gate_sgu_chain posmlp_gmlp_ggqpe posmlp_pyramid posmlp_pyramid_glrpe
posmlp_pyramid_linear posmlp_pyramid_nonsplit posmlp_pyramid_norms posmlp_pyramid_sgu posmlp_pyramid_shifted
posmlp_unit_ggqpe posmlp_unit_ggqpe_alpha posmlp_unit_ggqpe_gamma posmlp_unit_glrpe posmlp_unit_gqpe
posmlp_unit_gqpe_1d posmlp_unit_lrpe posmlp_unit_lrpe_m pvt pvt_peg_gap pvt_retinanet retina_head rope_swin_mixed
rope_vit_axial rope_vit_mixed segmenter_linear segmenter_mask_decoder swin swin_ape swin_v2 t2t_performer uperhead
vit_adapter_segmentation vit_lite_learnable vit_relpos_bias_cls vit_relpos_mlp vit_rope_axial_timm
vit_rope_dinov3_timm vit_rope_mixed_timm
"""


def test_all_recorded_cases_are_there():
    assert sorted(CASES) == RECORDED.split()


@pytest.mark.parametrize("case", CASES)
def test_every_recorded_output_agrees_to_1e_9(case):
    found = check.differences(GOLDEN / f"{case}.safetensors")
    recorded = json.loads((GOLDEN / f"{case}.json").read_text())["tensors"]
    assert found.keys() == {name for name in recorded if not name.startswith("input")} != set()
    assert all(difference <= 1e-9 for difference in found.values()), found


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("_lape")])
def test_what_every_layer_of_lape_adds_is_recorded_and_compared(case):
    found = check.differences(GOLDEN / f"{case}.safetensors")
    depth = json.loads((GOLDEN / f"{case}.json").read_text())["kwargs"]["depth"]
    assert found.keys() == {"output", *[f"pe_layer_{layer}" for layer in range(depth)]}


@pytest.mark.parametrize("off", [1e-8, math.nan])
def test_the_program_fails_a_case_that_is_off(tmp_path, capsys, off):
    case = "lape_learnable_lape"
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    tensors["output"][0, 0] += off
    save_file(tensors, tmp_path / f"{case}.safetensors")
    shutil.copy(GOLDEN / f"{case}.json", tmp_path)
    assert check.main([str(tmp_path / f"{case}.safetensors")]) == 1
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")] == ["output"]
