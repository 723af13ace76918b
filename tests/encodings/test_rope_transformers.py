"""The presets of rotary encodings rotate as transformers' own code of the image encoders, in float64."""

import importlib

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")  # earlier ones have other classes for the same tables
from test_rope_dialects import InFloat64, build

from graticule import Grid

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
#: Model, class of its rotary encoding, configuration, and our preset; heads have 16 channels.
AXIAL = [
    ("dinov3_vit", "DINOv3ViTRopePositionEmbedding", {"hidden_size": 32, "num_attention_heads": 2}, "dinov3"),
    ("pixtral", "PixtralVisionRotaryEmbedding", SMALL, "pixtral"),
    ("qwen2_vl", "Qwen2VLVisionRotaryEmbedding", {"embed_dim": 32, "num_heads": 2}, "qwen2_vl"),
    ("qwen2_5_vl", "Qwen2_5_VLVisionRotaryEmbedding", {"hidden_size": 32, "num_heads": 2}, "qwen2_vl"),
    ("qwen3_vl", "Qwen3VLVisionRotaryEmbedding", {"hidden_size": 32, "num_heads": 2}, "qwen2_vl"),
]


def rotated(preset, grid, q):
    """Return queries (B, h, N, d) that are rotated by a preset."""
    return build(f"rope(preset='{preset}')", grid)(grid)[0].rotary(q, q)[0]


def config_of(module, name, arguments):
    """Return the configuration that a class of a module of transformers is built from."""
    annotation = getattr(module, name).__init__.__annotations__["config"]
    kind = annotation if isinstance(annotation, type) else getattr(module, annotation)
    return kind(**arguments)


@pytest.mark.parametrize(("model", "name", "arguments", "preset"), AXIAL, ids=[row[0] for row in AXIAL])
def test_a_preset_rotates_as_the_encoder(model, name, arguments, preset, monkeypatch):
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            grid = Grid(3, 5)
            q = torch.randn(1, 2, grid.tokens, 16)
            rope = getattr(module, name)(config_of(module, name, arguments)).eval()
            if model == "dinov3_vit":
                uncached = module.get_patches_center_coordinates.__wrapped__  # other tests fill its cache in float32
                monkeypatch.setattr(module, "get_patches_center_coordinates", uncached)
                cos, sin = rope(torch.zeros(1, 3, 3 * 16, 5 * 16))
            else:
                y, x = torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij")
                cos, sin = rope(q, torch.stack([y, x], -1).flatten(0, 1))
            expected = q * cos + module.rotate_half(q) * sin
            torch.testing.assert_close(rotated(preset, grid, q), expected, rtol=0, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_preset_of_llama_4_rotates_as_its_encoder():
    module = importlib.import_module("transformers.models.llama4.modeling_llama4")
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            rope = module.Llama4VisionRotaryEmbedding(module.Llama4VisionConfig(**SMALL))
            grid = Grid(4, 4)  # its tables are square; the class token is last there
            q = torch.randn(1, grid.tokens + 1, 2, 16)
            expected, _ = module.vision_apply_rotary_emb(q, q, rope(q))
            actual = rotated("llama4", grid, q[:, :-1].transpose(1, 2)).transpose(1, 2)
            torch.testing.assert_close(actual, expected[:, :-1], rtol=0, atol=1e-10)
            assert torch.equal(expected[:, -1], q[:, -1])
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_axes_take_turns_in_one_series():
    table = build("rope(base=10000, alternate=True)", Grid(2, 2))(Grid(2, 2))[0].rotary
    plain = build("rope(base=10000)", Grid(2, 2))(Grid(2, 2))[0].rotary
    assert not torch.allclose(table.table, plain.table)
    (vectors,) = [
        m.vectors() for m in build("rope(base=10000, alternate=True)", Grid(2, 2)).modules() if hasattr(m, "vectors")
    ]
    series = 10_000.0 ** (-torch.arange(8).double() / 8)
    torch.testing.assert_close(vectors.sum(1), torch.cat([series[0::2], series[1::2]]), rtol=1e-12, atol=0)
