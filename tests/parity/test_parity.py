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
    assert len(CASES) == 88


@pytest.mark.parametrize("case", CASES)
def test_every_recorded_output_agrees_to_1e_9(case):
    differences = check.differences(GOLDEN / f"{case}.safetensors")
    recorded = json.loads((GOLDEN / f"{case}.json").read_text())
    assert differences.keys() == {name for name in recorded["tensors"] if not name.startswith("input")} != set()
    assert all(difference <= 1e-9 for difference in differences.values()), differences
    if case.endswith("_lape"):  # also what every layer adds
        assert {f"pe_layer_{layer}" for layer in range(recorded["kwargs"]["depth"])} < differences.keys()


@pytest.mark.parametrize("off", [1e-8, math.nan])
def test_the_program_fails_a_case_that_is_off(tmp_path, capsys, off):
    case = "lape_learnable_lape"
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    tensors["output"][0, 0] += off
    save_file(tensors, tmp_path / f"{case}.safetensors")
    shutil.copy(GOLDEN / f"{case}.json", tmp_path)
    assert check.main([str(tmp_path / f"{case}.safetensors")]) == 1
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")] == ["output"]
