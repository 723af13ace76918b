"""Recorded outputs of LaPE's code and timm compared with ours, and the program that checks them."""

import json
import runpy
import shutil
from pathlib import Path

import check
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from tiny import draw

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
CASES = [path.stem for path in check.RECORDED]


def test_every_recorded_case_is_checked():
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


def test_the_program_without_arguments_checks_every_recorded_case(monkeypatch, capsys):
    monkeypatch.setattr(check, "differences", lambda path: {"output": 0.0})
    assert check.main([]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == CASES


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


@pytest.fixture
def copy(tmp_path):
    """Copy a case and change its tensors or its description."""

    def change(case, tensors=None, **description):
        path = tmp_path / f"{case}.safetensors"
        shutil.copy(GOLDEN / path.name, path)
        if tensors:
            save_file({**load_file(path), **tensors}, path)
        facts = json.loads((GOLDEN / f"{case}.json").read_text())
        path.with_suffix(".json").write_text(json.dumps({**facts, **description}))
        return path

    return change


#: Cases of timm that are not recorded: class and arguments.
FURTHER = [
    ("VisionTransformer", {"qk_norm": True, "init_values": 0.1, "class_token": False, "global_pool": "avg"}),
    ("VisionTransformer", {"reg_tokens": 2, "no_embed_class": True, "qkv_bias": False, "pre_norm": True}),
    ("VisionTransformerDistilled", {}),
    ("MlpMixer", {"num_blocks": 2, "mlp_ratio": 4, "block_layer": "ResBlock", "norm_layer": "Affine"}),
    ("SwinTransformer", {"img_size": (32, 64), "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}),
    ("VisionTransformerRelPos", {"rel_pos_type": "bias", "class_token": True, "init_values": 0.1}),
    ("Beit", {"use_rel_pos_bias": True, "use_abs_pos_emb": False, "init_values": 0.1}),
]


@pytest.mark.parametrize(("kind", "kwargs"), FURTHER)
@torch.no_grad()
def test_a_case_of_timm_that_is_not_recorded_is_checked_by_convert(kind, kwargs, tmp_path):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_classes": 5}
    if "depths" not in kwargs and "num_blocks" not in kwargs:
        sizes |= {"depth": 2, "num_heads": 3}
    case = {"reference": f"timm {timm.__version__}", "class": f"timm.models.{kind}", "kwargs": {**sizes, **kwargs}}
    torch.set_default_dtype(torch.float64)
    try:
        model = draw(check.build_timm(kind, dict(case["kwargs"]), None))
        side = case["kwargs"]["img_size"]
        images = torch.randn(2, 3, *((side, side) if isinstance(side, int) else side))
        output = model(images)
    finally:
        torch.set_default_dtype(torch.float32)
    weights = {f"weight.{name}": value.clone() for name, value in model.state_dict().items()}
    save_file({"input": images, "output": output, **weights}, tmp_path / "case.safetensors")
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert check.differences(tmp_path / "case.safetensors")["output"] < 1e-12


def test_an_argument_that_ours_does_not_have_is_named(copy, capsys):
    kwargs = json.loads((GOLDEN / "ceit.json").read_text())["kwargs"]
    for more, message in (({"hybrid_backbone": "ResNet()"}, "`hybrid_backbone` can only be"), ({"w": 1}, "'w'")):
        assert check.main([str(copy("ceit", kwargs={**kwargs, **more}))]) == 1
        assert message in capsys.readouterr().out
    kwargs = json.loads((GOLDEN / "posmlp_block_sgu.json").read_text())["kwargs"]
    assert check.main([str(copy("posmlp_block_sgu", kwargs={**kwargs, "chunks": 3}))]) == 1
    assert "a chain of gates is not supported" in capsys.readouterr().out


def test_the_program_passes_a_good_case_and_prints_its_differences(capsys, monkeypatch):
    cases = [GOLDEN / "lape_learnable_lape.safetensors", GOLDEN / "deit.safetensors"]
    monkeypatch.setattr("sys.argv", ["check.py", *map(str, cases)])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(HERE / "check.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert (done.value.code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("ok ") for line in lines)


def test_the_program_fails_a_case_that_is_off_by_1e_8(copy, capsys):
    case = "lape_learnable_lape"
    output = load_file(GOLDEN / f"{case}.safetensors")["output"].clone()
    output[0, 0] += 1e-8
    assert check.main([str(copy(case, {"output": output}))]) == 1
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")] == ["output"]


def test_the_program_fails_an_unknown_class_and_continues_with_the_next_case(copy, capsys):
    unknown = copy("deit", **{"class": "timm.models.Mystery"})
    assert check.main([str(unknown), str(GOLDEN / "lape_sin2d_lape.safetensors")]) == 1
    out = capsys.readouterr().out
    assert "has no Mystery" in out
    assert "ok   lape_sin2d_lape" in out


@pytest.mark.parametrize("change", ["nan", "shape", "missing weight", "unknown output", "no description", "truncated"])
def test_a_case_that_cannot_agree_fails_without_a_traceback(change, copy, capsys):
    path = copy("deit")
    tensors = load_file(path)
    if change == "nan":
        tensors["output"] = torch.full_like(tensors["output"], torch.nan)
    elif change == "shape":
        tensors["output"] = tensors["output"][:1]
    elif change == "missing weight":
        del tensors["weight.norm.bias"]
    elif change == "unknown output":
        tensors["attention_map"] = torch.zeros(2)
    save_file(tensors, path)
    if change == "no description":
        path.with_suffix(".json").unlink()
    elif change == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    assert check.main([str(path)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_program_says_how_it_is_used(capsys):
    assert check.main(["--help"]) == 0
    assert "CASE.safetensors" in capsys.readouterr().out
