"""Recorded outputs of LaPE's code and timm compared with ours, and the program that checks them."""

import json
import shutil
from pathlib import Path

import check
import pytest
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
CASES = [path.stem for path in check.RECORDED]


def test_all_recorded_cases_are_there():
    assert len(CASES) > 70


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


def test_the_program_fails_a_case_that_is_off_by_1e_8(tmp_path, capsys):
    case = "lape_learnable_lape"
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    tensors["output"][0, 0] += 1e-8
    save_file(tensors, tmp_path / f"{case}.safetensors")
    shutil.copy(GOLDEN / f"{case}.json", tmp_path)
    assert check.main([str(tmp_path / f"{case}.safetensors")]) == 1
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")] == ["output"]
