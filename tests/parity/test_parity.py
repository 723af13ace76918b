"""Recorded outputs of LaPE's code and timm compared with ours, and the program that checks them."""

import json
from pathlib import Path

import check
import pytest

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
