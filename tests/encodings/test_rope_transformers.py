"""M-RoPE of texts, images and videos equals transformers' own code, in float64."""

import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tiny import assert_same

pytest.importorskip("transformers", minversion="5.20")  # earlier ones have other classes for the same tables
from test_rope_dialects import build, in_float64  # noqa: F401

from graticule import Grid, get_rope_index

VIDEO = Grid(4, 1, 2, spacing=(1.5, 1, 1))  # 2 tokens per second, 0.75 seconds per frame
#: Model -> the class of its indices, and a sequence of texts, images and videos.
SEQUENCES = {
    "qwen2_vl": ("Qwen2VL", [Grid(3), Grid(2, 4), Grid(2), Grid(2, 3, 2), Grid(1)]),
    "qwen2_5_vl": ("Qwen2_5_VL", [Grid(2), VIDEO, Grid(2), Grid(3, 1), Grid(1)]),
    "qwen3_vl": ("Qwen3VL", [Grid(2), Grid(2, 3), Grid(1), Grid(1, 2), Grid(4)]),
}


@pytest.mark.parametrize("model", SEQUENCES)
def test_mrope_at_the_indices_of_texts_images_and_videos_rotates_as_the_model(model, in_float64):  # noqa: F811
    name, parts = SEQUENCES[model]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    kind, axes = getattr(module, f"{name}Model"), torch.tensor([part.ndim for part in parts])
    types = (axes - 1).repeat_interleave(torch.tensor([part.patches for part in parts]))[None]
    images, videos = (
        torch.tensor([[1, *part.shape][-3:] for part in parts if part.ndim == n] or [[1] * 3]) for n in (2, 3)
    )
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=1, tokens_per_second=2))
    owner = SimpleNamespace(config=config, get_vision_position_ids=partial(kind.get_vision_position_ids, None))
    ids, _ = kind.get_rope_index(owner, types, types, images, videos, second_per_grid_ts=torch.tensor([0.75]))
    points = get_rope_index(parts, overlap=True)
    assert torch.equal(points.places, ids[:, 0].T)
    assert torch.equal(get_rope_index(parts).places, points.places) == (VIDEO not in parts)
    if VIDEO in parts:
        assert get_rope_index(parts).places[2:11:2].tolist() == [[2, 2, 2], [3, 2, 2], [5, 2, 2], [6, 2, 2], [7, 7, 7]]
    parameters = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10_000.0}
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "head_dim": 16, "rope_parameters": parameters}
    rotary = getattr(module, f"{name}{'Text' * ('3' in name)}RotaryEmbedding")
    q = torch.randn(1, 1, points.tokens, 16)
    cos, sin = rotary(getattr(module, f"{name}TextConfig")(**sizes))(q, ids)
    arrangement = "interleaved" if "3" in name else "chunked"
    ours = build(f"mrope(sections=(4, 2, 2), arrangement='{arrangement}')", Grid(1, 2, 3))(points)[0].rotary(q, q)[0]
    assert_same(ours, q * cos + module.rotate_half(q) * sin, 1e-10)
    for wrong in ([], [*parts, Grid(2, prefix=1)], [Grid(1, 1, 1, 1)], [3], Grid(3)):
        with pytest.raises(ValueError, match="`parts` must be grids of one to three axes, without prefix tokens"):
            get_rope_index(wrong)
