"""Tests of slow commands and code of the site; `make docs` runs them."""

import re
import shlex
from pathlib import Path

import onnxruntime
import torch

import graticule
from graticule.lab.cli import main

DOCS = Path(__file__).parents[1]


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def block(name, word):
    """Return the Python block of a page that starts with "```python WORD"."""
    (code,) = re.findall(rf"^```python {word}\n(.*?)^```", page(name), flags=re.DOTALL | re.MULTILINE)
    return compile(code, f"{name}.md", "exec")


def test_the_example_of_an_audit_runs_from_the_images_to_the_findings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(block("audit", "audit"), {})
    section = page("audit").partition("## An example from start to end")[2].partition("\n## ")[0]
    train, audit, *_ = re.findall(r"^    (graticule .*)$", section, flags=re.MULTILINE)
    assert main(shlex.split(train.replace("--epochs 3", "--quick"))[1:]) == 0, capsys.readouterr().err
    assert main(shlex.split(audit.replace("--count 200", "--count 20"))[1:]) == 0, capsys.readouterr().err
    printed = " ".join(capsys.readouterr().out.split())
    for row in ("share of position in the features", "linear probe of row and column", "time of position"):
        assert row in printed and row in section


def test_an_exported_file_is_served_without_graticule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"graticule": graticule}
    exec(block("deploy", "serve"), names)
    assert names["logits"].shape == (4, 10)


def test_models_are_exported_and_published_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    code = re.findall(
        r"^```python\n(.*?)^```",
        page("deploy"),  # deploy.md
        flags=re.DOTALL | re.MULTILINE,
    )
    assert code
    for block in code:
        exec(compile(block, "guide", "exec"), names)
    files = {path.name for path in (tmp_path / "published").iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors"}


def test_a_segmenter_is_a_program_of_onnx_for_any_height_and_width(tmp_path):
    model = graticule.create_segmenter(
        "deit_tiny_patch16_224", 3, "segmenter_mask(depth=1)", img_size=64, embed_dim=16, depth=1, num_heads=2
    ).eval()
    graticule.export(model, tmp_path / "segmenter.onnx", dynamic=["sides"])
    session = onnxruntime.InferenceSession(tmp_path / "segmenter.onnx", providers=["CPUExecutionProvider"])
    for height, width in ((96, 64), (64, 64), (32, 160)):
        image = torch.randn(1, 3, height, width)
        (logits,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(image), rtol=1e-4, atol=1e-5)
