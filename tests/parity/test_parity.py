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


def test_all_recorded_cases_are_there():
    assert {
        "lape_distilled_basic",
        "lape_learnable_basic",
        "lape_learnable_lape",
        "lape_learnable_share",
        "lape_learnable_unshare",
        "lape_rpe2d_basic",
        "lape_sin1d_basic",
        "lape_sin1d_lape",
        "lape_sin2d_lape",
        "lape_sin2d_share",
        "deit",
        "gmlp",
        "peg",
        "pvt",
        "pvt_peg_gap",
        "swin",
        "vit_lite_learnable",
        "cct_learnable",
        "cvt_sine",
        "t2t_performer",
        "ceit",
        *[f"posmlp_block_{gate}" for gate in ("ggqpe", "lrpe_m", "nonsplit", "sgu")],
        *[f"posmlp_gate_{gate}" for gate in ("ggqpe", "nonsplit", "norm", "sgu", "sgu_chain")],
        "posmlp_gmlp_ggqpe",
        *[f"posmlp_pyramid{kind}" for kind in ("", "_glrpe", "_linear", "_nonsplit", "_norms", "_sgu", "_shifted")],
        *[f"posmlp_unit_{form}" for form in ("ggqpe", "ggqpe_alpha", "ggqpe_gamma", "glrpe")],
        *[f"posmlp_unit_{form}" for form in ("gqpe", "gqpe_1d", "lrpe", "lrpe_m")],
        *["eva02_rope", "rope_swin_mixed", "rope_vit_axial", "rope_vit_mixed"],
        *[f"vit_rope_{kind}_timm" for kind in ("axial", "dinov3", "mixed")],
        *["irpe_alone_euclidean_3x13", "irpe_alone_product_2x17"],
        *[f"irpe_{method}_k" for method in ("cross", "euclidean", "product", "quant")],
        *["vit_relpos_bias_cls", "vit_relpos_mlp", "swin_ape", "swin_v2"],
        *["ms_deform_attn", "vit_adapter_segmentation", "segmenter_linear", "segmenter_mask_decoder"],
        *["uperhead", "fpnhead", "fpn_semantic", "fpn_retinanet", "retina_head", "pvt_retinanet", "cpvt_retinanet"],
        *[f"film_{name}" for name in ("axial_language", "axial_pixels", "monai_sincos", "monai_vit", "mrope_timm")],
        *[f"film_{name}" for name in ("vit_nd", "vit_nd_rotary", "vit_nd_rotary_causal")],
        *[f"packed_naflex_{kind}" for kind in ("axial", "factorized", "learned", "mixed", "mrope")],
        "packed_siglip2",
    } == set(CASES)


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
