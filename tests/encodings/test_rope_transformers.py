"""The presets of rotary encodings rotate as transformers' own code of the image encoders, in float64."""

import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")  # earlier ones have other classes for the same tables
from test_rope_dialects import InFloat64, build, in_float64  # noqa: F401

from graticule import Grid, get_rope_index

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
#: Model, class of its rotary encoding, configuration, and our preset; heads have 16 channels.
AXIAL = [
    ("dinov3_vit", "DINOv3ViTRopePositionEmbedding", {"hidden_size": 32, "num_attention_heads": 2}, "dinov3"),
    ("pixtral", "PixtralVisionRotaryEmbedding", SMALL, "pixtral"),
    ("qwen2_vl", "Qwen2VLVisionRotaryEmbedding", {"embed_dim": 32, "num_heads": 2}, "qwen2_vl"),
    ("qwen2_5_vl", "Qwen2_5_VLVisionRotaryEmbedding", {"hidden_size": 32, "num_heads": 2}, "qwen2_vl"),
    ("qwen3_vl", "Qwen3VLVisionRotaryEmbedding", {"hidden_size": 32, "num_heads": 2}, "qwen2_vl"),
    ("kimi_k25", "Kimi_K25VisionRotaryEmbedding", {"hidden_size": 32, "num_attention_heads": 2}, "kimi"),
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


FILM = Grid(4, 1, 2, spacing=(1.5, 1, 1))  # 2 tokens per second, 0.75 seconds per frame
#: Model -> the class of its indices, and a sequence of texts, images and films.
SEQUENCES = {
    "qwen2_vl": ("Qwen2VL", [Grid(3), Grid(2, 4), Grid(2), Grid(2, 3, 2), Grid(1)]),
    "qwen2_5_vl": ("Qwen2_5_VL", [Grid(2), FILM, Grid(2), Grid(3, 1), Grid(1)]),
    "qwen3_vl": ("Qwen3VL", [Grid(2), Grid(2, 3), Grid(1), Grid(1, 2), Grid(4)]),
}


@pytest.mark.parametrize("model", SEQUENCES)
def test_mrope_at_the_indices_of_texts_images_and_films_rotates_as_the_model(model, in_float64):  # noqa: F811
    name, parts = SEQUENCES[model]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    kind, axes = getattr(module, f"{name}Model"), torch.tensor([part.ndim for part in parts])
    types = (axes - 1).repeat_interleave(torch.tensor([part.patches for part in parts]))[None]
    images, films = (
        torch.tensor([[1, *part.shape][-3:] for part in parts if part.ndim == n] or [[1] * 3]) for n in (2, 3)
    )
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=1, tokens_per_second=2))
    owner = SimpleNamespace(config=config, get_vision_position_ids=partial(kind.get_vision_position_ids, None))
    ids, _ = kind.get_rope_index(owner, types, types, images, films, second_per_grid_ts=torch.tensor([0.75]))
    points = get_rope_index(parts, overlap=True)
    assert torch.equal(points.places, ids[:, 0].T)
    assert torch.equal(get_rope_index(parts).places, points.places) == (FILM not in parts)
    if FILM in parts:
        assert get_rope_index(parts).places[2:11:2].tolist() == [[2, 2, 2], [3, 2, 2], [5, 2, 2], [6, 2, 2], [7, 7, 7]]
    parameters = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10_000.0}
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "head_dim": 16, "rope_parameters": parameters}
    rotary = getattr(module, f"{name}{'Text' * ('3' in name)}RotaryEmbedding")
    q = torch.randn(1, 1, points.tokens, 16)
    cos, sin = rotary(getattr(module, f"{name}TextConfig")(**sizes))(q, ids)
    arrangement = "interleaved" if "3" in name else "chunked"
    ours = build(f"mrope(sections=(4, 2, 2), arrangement='{arrangement}')", Grid(1, 2, 3))(points)[0].rotary(q, q)[0]
    torch.testing.assert_close(ours, q * cos + module.rotate_half(q) * sin, rtol=0, atol=1e-10)
    for wrong in ([], [*parts, Grid(2, prefix=1)], [Grid(1, 1, 1, 1)], [3]):
        with pytest.raises(ValueError, match="`parts` must be grids of one to three axes, without prefix tokens"):
            get_rope_index(wrong)
