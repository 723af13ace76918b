"""Rotations of models of diffusers and transformers: found by class, replaced exactly, restored."""

import functools
import importlib

import pytest
import torch
from torch import nn
from transformers_models import SMALL

from graticule.encodings.build import build_position
from graticule.external.rotary import rotation_of
from graticule.position.grid import Grid

GRIDS = [(3, 4), (6, 2), (5, 9)]
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_DIT = {**_HEADS, "num_layers": 1, "in_channels": 4}
_FLUX = {**_DIT, "num_single_layers": 1, "patch_size": 1, "joint_attention_dim": 32}
_VL = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 16, "patch_size": 4}
_QWEN = "rope(preset='qwen2_vl')"
#: Name of a model -> class, arguments of the class or of its configuration, own dialect on (time, row, column).
DIFFUSERS = {
    "flux": (
        "FluxTransformer2DModel",
        {**_FLUX, "axes_dims_rope": [4, 4, 8], "pooled_projection_dim": 32},
        "rope(base=10000, split=(2, 2, 4))",
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {**_FLUX, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32},
        "rope(base=2000)",
    ),
    "wan": (
        "WanTransformer3DModel",
        {**_DIT, "out_channels": 4, "text_dim": 32, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32},
        "rope(base=10000, split=(4, 2, 2))",
    ),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel",
        {
            **{**_DIT, "out_channels": 4, "num_single_layers": 1, "num_refiner_layers": 1, "rope_axes_dim": (4, 4, 8)},
            **{"text_embed_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": False},
        },
        "rope(base=256, split=(2, 2, 4))",
    ),
    "qwen_image": (
        "QwenImageTransformer2DModel",
        {**_DIT, "out_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
        None,
    ),
}
TRANSFORMERS = {
    "dinov3": ("DINOv3ViTModel", {**SMALL, "num_register_tokens": 2}, "rope(preset='dinov3')"),
    "pixtral": ("PixtralVisionModel", {**SMALL, "hidden_act": "silu"}, "rope(preset='pixtral')"),
    "qwen2_vl": ("Qwen2VisionTransformerPretrainedModel", {**_VL, "embed_dim": 32, "hidden_size": 16}, _QWEN),
    "qwen2_5_vl": ("Qwen2_5_VisionTransformerPretrainedModel", {**_VL, "window_size": 16}, _QWEN),
    "qwen3_vl": ("Qwen3VLVisionModel", {**_VL, "deepstack_visual_indexes": []}, _QWEN),
}


@functools.cache
def build(name):
    """Return a small model with random weights."""
    torch.manual_seed(0)
    if name in DIFFUSERS:
        kind, options, _ = DIFFUSERS[name]
        return getattr(importlib.import_module("diffusers"), kind)(**options).eval()
    kind, options, _ = TRANSFORMERS[name]
    at = "transformers.models.qwen2_vl.modeling_qwen2_vl" if name == "qwen2_vl" else "transformers"
    model = getattr(importlib.import_module(at), kind)
    return model(model.config_class(**options)).eval()


def run(name, model, grid, dtype=torch.float32):
    """Return the output of a model for a grid of patches, with texts where it takes them."""
    torch.manual_seed(1)
    height, width = grid
    draw = functools.partial(torch.randn, dtype=dtype)
    texts = {"encoder_hidden_states": draw(1, 5, 32), "timestep": torch.tensor([0.5], dtype=dtype)}
    with torch.no_grad():
        if name in ("flux", "flux2"):
            axes = len(model.config.axes_dims_rope)
            ids = torch.zeros(height, width, axes)
            ids[..., 1], ids[..., 2] = torch.arange(height)[:, None], torch.arange(width)
            text = torch.zeros(5, axes)
            text[:, 3:] = torch.arange(5.0)[:, None]
            more = {"pooled_projections": draw(1, 32)} if name == "flux" else {"guidance": torch.ones(1, dtype=dtype)}
            tokens = draw(1, height * width, 4)
            return model(tokens, **texts, **more, img_ids=ids.flatten(0, 1), txt_ids=text).sample
        if name == "wan":
            return model(draw(1, 4, 2, 2 * height, 2 * width), **texts).sample
        if name == "hunyuan_video":
            more = {"encoder_attention_mask": torch.ones(1, 5), "pooled_projections": draw(1, 32)}
            return model(draw(1, 4, 2, 2 * height, 2 * width), **texts, **more).sample
        if name == "qwen_image":
            shapes = [[(1, height, width), (1, 2, 3)]]
            return model(draw(1, height * width + 6, 4), **texts, img_shapes=shapes).sample
        if name in ("dinov3", "pixtral"):
            size = model.config.patch_size
            return model(draw(1, 3, size * height, size * width)).last_hidden_state
        patches = draw(8 * height * width, 3 * 2 * 16)  # two images of merged blocks of 2 x 2
        return model(patches, grid_thw=torch.tensor([[1, 2 * height, 2 * width]] * 2)).last_hidden_state


MODELS = [*TRANSFORMERS, *(pytest.param(name, marks=pytest.mark.slow) for name in DIFFUSERS)]


@pytest.mark.parametrize("name", MODELS)
def test_rotation_of_a_model_is_its_dialect(name):
    rotate, channels = rotation_of(build(name))
    queries = torch.randn(2, 1, 45, channels, dtype=torch.float64)
    rotated = rotate(queries, (5, 9))
    torch.testing.assert_close(rotated.norm(dim=-1), queries.norm(dim=-1), rtol=1e-6, atol=0)
    *_, dialect = {**DIFFUSERS, **TRANSFORMERS}[name]
    if dialect is not None:
        grid = Grid(5, 9) if name in TRANSFORMERS else Grid(1, 5, 9, *(1,) * (name == "flux2"))
        position = build_position(grid, dim=channels, depth=1, num_heads=1, encoding=dialect).double().eval()
        expected, _ = position(grid)[0].rotary(queries, queries)
        torch.testing.assert_close(rotated, expected, rtol=0, atol=5e-6)


def test_rotation_of_another_model_is_refused():
    with pytest.raises(
        ValueError, match=r"`model` must have a rotation of FluxPosEmbed, .*, got Linear, which has none"
    ):
        rotation_of(nn.Linear(2, 2))
