"""The difference in accuracy at a larger size is the sum of its parts."""

import json
import math

import pytest

import graticule
from commands import run_command
from graticule.lab.data.module import DataModule
from graticule.lab.tasks.classification import Recipe
from graticule.lab.tasks.parts.image_scores import evaluate, size_causes
from graticule.lab.training.loop import train


@pytest.fixture(scope="module")
def data() -> DataModule:
    module = DataModule("digits", size=(28, 28), limit_train=20, limit_test=30, eval_batch_size=16)
    module.setup()
    return module


def model(encoding):
    return graticule.create_model("vit_nano_patch4_28", encoding=encoding, depth=1, embed_dim=8, num_heads=1)


def test_the_parts_add_up_to_the_difference_of_the_scores(data):
    for encoding in ("learnable", "rope"):
        one = model(encoding)
        found = size_causes(one, data, (36, 28), progress=False)
        small, large = evaluate(one, data, [(28, 28), (36, 28)], progress=False, measure_cost=False)
        assert found.top1 == pytest.approx((small.top1, large.top1))
        assert sum(part.top1 for part in found.parts.values()) == pytest.approx(large.top1 - small.top1)
        assert sum(part.loss for part in found.parts.values()) == pytest.approx(large.loss - small.loss, abs=1e-5)
        assert tuple(found.parts) == ("tokens", "content", "values")
        assert set(found.controls) == {"log_n", "canvas", "crop"} | ({"bilinear"} if encoding == "learnable" else set())
        assert all(math.isfinite(part.top1_error) for part in found.parts.values())


def test_evaluate_shows_the_causes(capsys, tmp_path):
    small = {"limit_train": 20, "limit_test": 10, "batch_size": 20, "epochs": 1, "accelerator": "cpu"}
    train(Recipe(model_kwargs=("depth=1", "embed_dim=8", "num_heads=1"), **small), tmp_path / "tiny", progress=False)
    command = ["evaluate", tmp_path / "tiny", "--output", tmp_path, "--device", "cpu"]
    code, out, err = run_command(capsys, *command, "--sizes", 28, 36, "--causes")
    assert code == 0, err
    (row,) = [line.split() for line in out.splitlines() if line.startswith("tiny")]
    assert row[1] == "36x36" and "difference = tokens + content + values" in out
    at_28, at_36 = json.loads((tmp_path / "evaluation.json").read_text())
    assert at_28["causes"] is None and set(at_36["causes"]["parts"]) == {"tokens", "content", "values"}
    for more, said in (
        (["--sizes", 20, "--mode", "canvas"], "`causes` must be left out"),
        (["--sizes", 20], "`sizes` must be no smaller"),
        (["--sizes", 28], "`sizes` must include one above that of the training, 28 x 28,"),
        ([], "`sizes` must include one above that of the training, 28 x 28,"),
    ):
        code, _, err = run_command(capsys, *command, "--causes", *more)
        assert code == 1 and said in err
