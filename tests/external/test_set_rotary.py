"""Rotations of models of diffusers and transformers: found by class, replaced exactly, restored."""

import copy
import functools
import importlib
from unittest import mock

import pytest
import torch
from torch import nn
from transformers_models import SMALL

import graticule
from graticule.encodings.build import build_position
from graticule.external.rotary import FORMATS, rotation_of
from graticule.position.grid import Grid

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
MODELS = [*TRANSFORMERS, *(pytest.param(name, marks=pytest.mark.slow) for name in DIFFUSERS)]


@functools.cache
def _built(name):
    torch.manual_seed(0)
    room = "transformers.models.qwen2_vl.modeling_qwen2_vl" if name == QWEN2 else "transformers"
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


@pytest.mark.parametrize("name", MODELS)
def test_rotation_of_a_model_is_its_dialect(name):
    rotate, channels = rotation_of(build(name))
    queries = torch.randn(2, 1, 45, channels, dtype=torch.float64)
    grid = Grid(5, 9) if name in TRANSFORMERS else Grid(1, 5, 9, *(1,) * (name[4] == "2"))
    position = build_position(grid, dim=channels, depth=1, num_heads=1, encoding=dialect(name)).double().eval()
    torch.testing.assert_close(
        rotate(queries, (5, 9)), position(grid)[0].rotary(queries, queries)[0], rtol=0, atol=5e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_own_dialect_gives_the_same_outputs_also_scaled_at_the_reference(name, dtype):
    model = build(name).to(dtype)
    if dtype == torch.bfloat16:  # the cast has rounded the frequencies, or cosines and sines, of the model
        vars(rotation(model)).update(vars(rotation(build(name))))
    expected = [run(model, grid) for grid in GRIDS]
    graticule.set_rotary(model, dialect(name))
    assert all(map(torch.equal, (run(model, grid) for grid in GRIDS), expected))
    reference = (2, 3, 4, 9)[: 3 + (name[4] == "2")] if name in DIFFUSERS else (6, 8) if "Qwen" in name else (3, 4)
    for scaling in ("yarn", "dy_ntk") if name != "DINOv3ViTModel" else ():
        graticule.set_rotary(model, f"{dialect(name)[:-1]}, scaling={scaling!r}, reference={reference})")
        assert torch.equal(run(model, GRIDS[0]), expected[0])
        assert not torch.equal(run(model, GRIDS[2]), expected[2])
    if name != "DINOv3ViTModel":
        graticule.set_progress(model, 1.0)
        assert torch.equal(run(model, GRIDS[2]), expected[2])
    graticule.set_rotary(model, dialect(name).replace("base=", "base=9").replace("preset", "base=9, preset"))
    assert not torch.equal(run(model, GRIDS[2]), expected[2])
    assert torch.equal(run(graticule.set_rotary(model, None), GRIDS[2]), expected[2])


def test_scaled_rotation_and_its_temperature_are_those_of_the_encoding():
    encoding, grid = "rope(base=50, layout='half', scaling='yarn', reference=(4, 4))", Grid(6, 9)
    cosines, sines = rotation(graticule.set_rotary(build(QWEN2), encoding))(torch.zeros(1), grid.coordinates())
    expected = build_position(Grid(2, 2), dim=16, depth=1, num_heads=1, encoding=encoding)(grid)[0]
    table = torch.cat([sines, cosines], -1) / expected.query_scale[:, None].sqrt()
    torch.testing.assert_close(table, expected.rotary.table, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DINOv3ViTModel", "FluxTransformer2DModel", "QwenImageTransformer2DModel"])
def test_a_model_compiles_as_one_graph(name):
    model = graticule.set_rotary(build(name), dialect(name))
    expected = [run(model, grid) for grid in GRIDS]
    model.compile(fullgraph=True, backend="eager")
    assert all(map(torch.equal, (run(model, grid) for grid in GRIDS), expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "kind", "arguments", "preset"),
    [
        ("krea2", "Krea2RotaryPosEmbed", (10_000, [16, 56, 56]), "flux"),
        ("motif_video", "MotifVideoRotaryPosEmbed", (2, 1, [16, 56, 56]), "hunyuan_video"),
        ("qwenimage", "QwenEmbedRope", (10_000, [16, 56, 56], True), "qwen_image"),
    ],
)
def test_presets_are_the_released_rotations_bit_by_bit(room, kind, arguments, preset):
    module = importlib.import_module(f"diffusers.models.transformers.transformer_{room}")
    model = nn.Sequential(getattr(module, kind)(*arguments))
    rotate, channels = rotation_of(model)
    queries = torch.randn(1, 1, 64 * 96, channels)
    expected = rotate(queries, (64, 96))
    new = rotation(graticule.set_rotary(model, f"rope(preset={preset!r})"))
    with mock.patch.object(new.replaced[0], "forward", new.forward):
        assert torch.equal(rotate(queries, (64, 96)), expected)


def test_noise_of_dinov3_in_training_is_that_of_the_model():
    model = build("DINOv3ViTModel").train()
    expected = run(model, (3, 4))
    assert not torch.equal(run(build("DINOv3ViTModel"), (3, 4)), expected)
    assert torch.equal(run(graticule.set_rotary(model, "rope(preset='dinov3')"), (3, 4)), expected)


def test_all_else_stays_the_same_object():
    model, outputs = build("PixtralVisionModel").train(), []
    own = rotation(model)
    handle = own.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    others = [part for part in model.modules() if part is not own]
    values, config = list(model.state_dict(keep_vars=True).items()), model.config.to_dict()
    assert graticule.set_rotary(nn.Sequential(model), "rope(preset='pixtral')")[0] is model
    graticule.set_rotary(model, "rope(preset='pixtral', offset=2)")
    assert [part for part in model.modules() if part not in rotation(model).modules()] == others
    assert all(part.training for part in model.modules()) and model.config.to_dict() == config
    now = model.state_dict(keep_vars=True)
    assert [*now] == [name for name, _ in values] and all(now[name] is value for name, value in values)
    run(copy.deepcopy(model), (3, 4))
    assert len(outputs) == 1
    handle.remove()
    assert rotation(graticule.set_rotary(model, None)) is own and not own._forward_hooks


def test_a_learned_encoding_has_parameters_and_keeps_its_precision():
    model = graticule.set_rotary(build(QWEN2), "rope_mixed")
    assert model.state_dict().keys() - build(QWEN2).state_dict().keys() == {"rotary_pos_emb.encoding.freqs"}
    with torch.autocast("cpu", torch.bfloat16):
        cosines, sines = rotation(model)(torch.zeros(1), torch.tensor([[3, 200], [1, 300]]))
    freqs = rotation(model).encoding.freqs
    torch.testing.assert_close(sines[0, :8], (3 * freqs[1, 0, 0] + 200 * freqs[0, 0, 0]).sin(), rtol=0, atol=2e-5)
    cosines.sum().backward()
    assert freqs.grad.any()


def test_casts_autocast_and_the_meta_device_change_no_angle():
    model = graticule.set_rotary(build(QWEN2), "rope(base=77, layout='half')")
    inputs = torch.zeros(1), torch.tensor([[3, 257], [1, 300]])
    expected = rotation(model)(*inputs)
    for change in (model.bfloat16, lambda: model.to("meta").to_empty(device="cpu")):
        change()
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, rotation(model)(*inputs), expected))


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("rope", "`layout` must be 'half', the pairs of channels of PixtralVisionRotaryEmbedding, got 'interleaved'"),
        *((name, f"`encoding` must rotate pairs .*, got {name}") for name in ("learnable", "pope", "liere", "rope_1d")),
        ("rope_mixed(layers=1)", "`layers` must be left out: Pixtral.* once for all layers"),
        ("rope(layout='half', split=(4, 4, 4, 4))", "`split` must be"),
        ("rope(layout='half', scaling='ntk')", "`reference` must be given with `scaling`"),
        ("rope(layout='half', coordinates='min')", "`coordinates` must be 'patches' with Pixtral"),
        (None, "`encoding` must be given: PixtralVisionModel has its own rotation"),
    ],
)
def test_other_encodings_are_refused(encoding, message):
    model = build("PixtralVisionModel")
    own = rotation(model)
    with pytest.raises(ValueError, match=message):
        graticule.set_rotary(model, encoding)
    assert rotation(model) is own


def test_models_without_a_known_rotation_are_refused():
    for function in (rotation_of, lambda model: graticule.set_rotary(model, "rope")):
        with pytest.raises(ValueError, match=r"`model` must have one of the rotations FluxPosEmbed, .*; got Linear"):
            function(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`model` must contain its rotation, got the rotation alone, PixtralVisionRot"):
        graticule.set_rotary(rotation(build("PixtralVisionModel")), "rope(preset='pixtral')")
