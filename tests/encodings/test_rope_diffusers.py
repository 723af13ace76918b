"""Rotations of diffusion transformers equal diffusers' own code, in float64, on films that are not square."""

import importlib

import pytest
import torch
from test_rope_dialects import in_float64  # noqa: F401

from graticule import Grid, build_position

FLUX = (10_000, [16, 56, 56])
MINIMAX = "rope(base=10000, split=(16, 16, 16), layout='half_rotated')"
LTX = "rope(periods=(128, 0.0128), offset=-32, split=(21, 21, 21), arrangement='interleaved', unrotated='first')"
#: The class of diffusers, its arguments, its input, our encoding, and the axis that makes pairs.
CASES = [
    ("flux.FluxPosEmbed", FLUX, "ids", "rope(preset='flux')", -1),
    ("flux2.Flux2PosEmbed", (2_000, [32] * 4), "ids", "rope(preset='flux2')", -1),
    ("wan.WanRotaryPosEmbed", (128, (1, 2, 2), 64), "latents", "rope(preset='wan')", -1),
    ("hunyuan_video.HunyuanVideoRotaryPosEmbed", (2, 1, FLUX[1]), "latents", "rope(preset='hunyuan_video')", -1),
    ("z_image.RopeEmbedder", (256.0, [32, 48, 48], [64] * 3), "ids", "rope(preset='z_image')", -1),
    ("qwenimage.QwenEmbedRope", (*FLUX, True), "shape", "rope(preset='qwen_image')", -1),
    ("cosmos.CosmosRotaryPosEmbed", (128,), "latents", "rope(preset='cosmos')", -2),
    ("glm_image.GlmImageRotaryPosEmbed", (128, 2), "latents", "rope(preset='glm_image')", -2),
    ("minimax_h3.MiniMaxH3RotaryPosEmbed", (16,), "ids", MINIMAX, -2),
    ("ltx.LTXVideoRotaryPosEmbed", (128, 64, 64, 64), "sides", LTX, -1),
]


@pytest.mark.slow  # diffusers is imported in seconds
@pytest.mark.parametrize(("name", "arguments", "form", "encoding", "dim"), CASES, ids=[case[0] for case in CASES])
def test_a_rotation_is_that_of_diffusers(name, arguments, form, encoding, dim, in_float64):  # noqa: F811
    apply = importlib.import_module("diffusers.models.embeddings").apply_rotary_emb
    module, kind = name.split(".")
    rope = getattr(importlib.import_module(f"diffusers.models.transformers.transformer_{module}"), kind)(*arguments)
    for t, h, w in [(1, 3, 5), (2, 4, 3), (3, 2, 7)]:
        grid = Grid(*[t] * ("glm" not in name), h, w, *[1] * ("flux2" in name))
        x = torch.zeros(1, 16, *[t] * ("glm" not in name), 2 * h, 2 * w)
        forms = {"ids": [grid.coordinates()], "latents": [x], "shape": [(t, h, w), None, 1]}
        tables = rope(*forms.get(form, [x, t, h, w, (1, 1, 1)]))
        first = tables[0] if isinstance(tables, tuple) else tables
        if first.is_complex():
            tables = [part.repeat_interleave(2, -1) for part in (first.real, first.imag)]
        tables = [table.reshape(grid.tokens, -1) for table in tables]
        count = tables[0].shape[-1]
        units = torch.eye(128)[:, None, None].expand(-1, 1, grid.tokens, -1)
        expected = torch.cat([apply(units[..., :count], tables, use_real_unbind_dim=dim), units[..., count:]], -1)
        position = build_position(grid, dim=128, depth=1, num_heads=1, encoding=encoding).double().eval()
        worst = (position(grid)[0].rotary(units, units)[0] - expected).abs().max()
        assert worst < (2e-6 if "z_image" in name else 1e-9)  # its tables are complex64
