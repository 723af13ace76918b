"""The code of the guides to surgery works as described."""

import re
from pathlib import Path

import pytest
import torch

import graticule
from graticule.external.convert.parts import CONVERSIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join(
    (DOCS / name).read_text(encoding="utf-8") for name in ("convert.md", "converted.md", "sizes.md", "deploy.md")
)


def run(kind):
    """Run the code blocks of a section in order; returns their names."""
    names = {"torch": torch, "graticule": graticule}
    blocks = re.findall(rf"```python {kind}\n(.*?)```", PAGES, flags=re.DOTALL)
    for block in blocks:
        exec(compile(block, "docs", "exec"), names)
    return names, len(blocks)


def test_the_table_of_conversions_has_all_classes():
    for library, known in (
        ("timm", {kind.__name__ for kind in CONVERSIONS if isinstance(kind, type)}),
        ("transformers", {kind.rpartition(".")[2] for kind in CONVERSIONS if isinstance(kind, str)}),
    ):
        (table,) = re.findall(rf"\| class of {library} \|.*?\n\n", PAGES, flags=re.DOTALL)
        rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) ", table, flags=re.MULTILINE)
        assert {name for row in rows for name in re.findall(r"\w+", row)} == known


def test_models_of_transformers_are_converted_and_given_back():
    names, count = run("transformers")
    assert count == 1 and names["back"].config.image_size == 70


@pytest.fixture
def small_torchvision(monkeypatch):
    """Make torchvision's ViT-B small, for speed."""
    import torchvision

    def vit_b_16():
        return torchvision.models.VisionTransformer(32, 16, 2, 3, 24, 48)

    monkeypatch.setattr(torchvision.models, "vit_b_16", vit_b_16)


def test_positions_are_attached_to_models_of_transformers_and_torchvision(small_torchvision, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda model, fullgraph: model)  # test_attach.py compiles
    names, count = run("attach")
    assert count == 3 and names["logits"].shape == (2, 2)
    assert "grid=(4, 4), prefix=1, instead of vit.embeddings.position_embeddings" in capsys.readouterr().out
    model = names["model"]
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    assert list(dict(model.graticule.position.named_children())) == ["pegs"]
    assert model.encoder.pos_embedding.any()
    mine = names["mine"]
    assert not mine.pos_embed.any() and all(p.grad is not None for p in mine.graticule.position.parameters())


def test_models_are_resized_and_folded_for_every_size():
    names, count = run("resize")
    assert count == 4
    assert names["model"].grid.shape == (10, 16) and names["model"].training is False
    assert names["swin"].grid.windows == ((8, 8),) * 4 and names["swin"].in_chans == 1
    assert names["theirs"].pos_embed.shape[1] == 20 * 20 + 1 and names["logits"].shape == (1, 1000)


def test_a_run_is_opened_as_the_page_says():
    (block,) = re.findall(r"```python load\n(.*?)```", PAGES, flags=re.DOTALL)
    opened = []

    class Load:
        load = staticmethod(lambda source, **options: opened.append((source, options)))

    exec(compile(block.replace("import graticule\n", ""), "docs", "exec"), {"graticule": Load})
    assert opened == [
        ("runs/digits", {}),
        ("runs/digits", {"checkpoint": "last"}),
        ("runs/digits/weights.safetensors", {}),
        ("published/digits", {}),
    ]
