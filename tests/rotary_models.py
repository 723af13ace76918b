"""Small models of diffusers and transformers with a rotation, the dialect of each, and its output for a grid."""

import copy
import functools
import importlib

import torch

from evidence.models_page import SMALL
from graticule.external.rotary import FORMATS

GRIDS = [(3, 4), (6, 2), (5, 9)]
_DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "in_channels": 4}
_FLUX = {**_DIT, "num_single_layers": 1, "patch_size": 1, "joint_attention_dim": 32}
_WAN = {**_DIT, "out_channels": 4, "text_dim": 32, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32}
_HUNYUAN = {**_DIT, "out_channels": 4, "num_single_layers": 1, "num_refiner_layers": 1, "rope_axes_dim": (4, 4, 8)}
_TEXT = {"text_embed_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": False}
_QWEN = {**_DIT, "out_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
_VL = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 16, "patch_size": 4}
_CENTERED = "rope(base=10000, split=(2, 2, 4), coordinates=('patches', 'centered', 'centered'))"
_FLUX1 = {**_FLUX, "axes_dims_rope": [4, 4, 8], "pooled_projection_dim": 32}
_FLUX2 = {**_FLUX, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32}
QWEN2 = "Qwen2VisionTransformerPretrainedModel"
#: Class -> arguments of it or of its configuration, and the encoding that it has on (time, row, column).
DIFFUSERS = {
    "FluxTransformer2DModel": (_FLUX1, "rope(base=10000, split=(2, 2, 4))"),
    "Flux2Transformer2DModel": (_FLUX2, "rope(base=2000)"),
    "WanTransformer3DModel": (_WAN, "rope(base=10000, split=(4, 2, 2))"),
    "HunyuanVideoTransformer3DModel": ({**_HUNYUAN, **_TEXT}, "rope(base=256, split=(2, 2, 4))"),
    "QwenImageTransformer2DModel": (_QWEN, _CENTERED),
}
TRANSFORMERS = {
    "DINOv3ViTModel": ({**SMALL, "num_register_tokens": 2}, "rope(preset='dinov3')"),
    "PixtralVisionModel": ({**SMALL, "hidden_act": "silu"}, "rope(preset='pixtral')"),
    QWEN2: ({**_VL, "embed_dim": 32, "hidden_size": 16}, "rope(preset='qwen2_vl')"),
    "Qwen2_5_VisionTransformerPretrainedModel": ({**_VL, "window_size": 16}, "rope(preset='qwen2_vl')"),
    "Qwen3VLVisionModel": ({**_VL, "deepstack_visual_indexes": []}, "rope(preset='qwen2_vl')"),
}


@functools.cache
def _built(name):
    torch.manual_seed(0)
    version = {QWEN2: "2", "Qwen2_5_VisionTransformerPretrainedModel": "2_5"}.get(name)
    room = f"transformers.models.qwen{version}_vl.modeling_qwen{version}_vl" if version else "transformers"
    kind = getattr(importlib.import_module("diffusers" if name in DIFFUSERS else room), name)
    options = {**DIFFUSERS, **TRANSFORMERS}[name][0]
    return (kind(**options) if name in DIFFUSERS else kind(kind.config_class(**options))).eval()


def build(name):
    """Return a small model with random weights."""
    return copy.deepcopy(_built(name))


def dialect(name):
    """Return the encoding that a model has."""
    return {**DIFFUSERS, **TRANSFORMERS}[name][1]


def rotation(model):
    """Return the module that computes the rotation of a model."""
    return next(part for part in model.modules() if type(part).__name__ in (*FORMATS, "ReplacedRotation"))


@torch.no_grad()
def run(model, grid):
    """Return the output of a model for a grid of patches, with texts where it takes them, and a second image."""
    torch.manual_seed(1)
    name, (height, width) = type(model).__name__, grid
    draw = functools.partial(torch.randn, dtype=next(model.parameters()).dtype)
    texts = {"encoder_hidden_states": draw(1, 5, 32), "timestep": draw(1)}
    if name.startswith("Flux"):
        axes = len(model.config.axes_dims_rope)
        ids = torch.cartesian_prod(*(torch.arange(side) for side in (1, height, width, 1)[:axes]))
        text = torch.cartesian_prod(*(torch.arange(side) for side in (1, 1, 1, 5)))[:, 4 - axes :] * (axes == 4)
        more = {"pooled_projections": draw(1, 32)} if axes == 3 else {"guidance": draw(1)}
        return model(draw(1, height * width, 4), **texts, **more, img_ids=ids, txt_ids=text).sample
    if name.startswith(("Wan", "Hunyuan")):
        more = {"encoder_attention_mask": torch.ones(1, 5), "pooled_projections": draw(1, 32)}
        return model(draw(1, 4, 2, 2 * height, 2 * width), **texts, **(more if name[0] == "H" else {})).sample
    if name in DIFFUSERS:
        return model(draw(1, height * width + 6, 4), **texts, img_shapes=[[(1, *grid), (1, 2, 3)]]).sample
    if "Qwen" not in name:
        return model(draw(1, 3, 8 * height, 8 * width)).last_hidden_state
    patches = draw(8 * height * width, 3 * 2 * 16)  # two images of merged blocks of 2 x 2
    return model(patches, grid_thw=torch.tensor([[1, 2 * height, 2 * width]] * 2)).last_hidden_state
