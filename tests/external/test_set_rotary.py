"""Rotations of models of diffusers and transformers: found by class, replaced exactly, restored."""

import copy
import importlib
import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import graticule
from graticule.encodings.build import build_position
from graticule.external.rotary import _arguments, rotation_of
from graticule.position.grid import Grid
from rotary_models import DIFFUSERS, GRIDS, QWEN2, TRANSFORMERS, build, dialect, rotation, run

MODELS = [*TRANSFORMERS, *(pytest.param(name, marks=pytest.mark.slow) for name in DIFFUSERS)]


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


@pytest.mark.parametrize("name", MODELS)
def test_arguments_have_the_names_of_the_model(name):
    own, new = rotation(build(name)), rotation(graticule.set_rotary(build(name), dialect(name)))
    names = [*inspect.signature(own.forward).parameters]
    values = dict(zip(names, _arguments(own, (3, 4), torch.float32), strict=True))
    assert all(map(torch.equal, new(**dict(reversed(values.items()))), own(**values)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'idx'"):
        new(**values, idx=None)


def test_every_rotation_of_a_model_is_replaced_and_restored():
    model = nn.ModuleList([build(QWEN2), build("PixtralVisionModel")])
    graticule.set_rotary(model[0], "rope_mixed")
    for encoding, kinds in (
        ("rope(preset='pixtral')", {"ReplacedRotation"}),
        (None, {type(rotation(m)).__name__ for m in map(build, (QWEN2, "PixtralVisionModel"))}),
    ):
        graticule.set_rotary(model, encoding)
        assert {type(rotation(part)).__name__ for part in model} == kinds


def test_a_rotation_with_another_forward_is_refused():
    model = build("PixtralVisionModel")
    rotation(model).forward = rotation(model).forward  # as hooks of accelerate and diffusers do
    with pytest.raises(ValueError, match="`model` must not have another forward in PixtralVisionRotaryEmbedding"):
        graticule.set_rotary(model, "rope(preset='pixtral')")


def test_rotations_of_grids_follow_casts_progress_and_inference_mode():
    model = graticule.set_rotary(build("DINOv3ViTModel"), "rope(preset='dinov3')")
    with torch.inference_mode():
        first = rotation(model)(torch.zeros(1, 3, 24, 32))
    again, pixels = rotation(model)(torch.zeros(1, 3, 24, 32)), torch.zeros(1, 3, 24, 32, dtype=torch.bfloat16)
    assert torch.equal(first[0], again[0]) and not again[0].is_inference()
    assert rotation(model)(torch.zeros(1, 3, 24, 32))[0] is again[0]
    assert rotation(model)(pixels)[0].dtype == torch.bfloat16 and rotation(model)(pixels.mT)[0].shape == again[0].shape
    scaled = "rope(layout='half', scaling='dy_ntk', reference=(2, 2))"
    graticule.set_rotary(model, scaled)
    noise = rotation(model)(pixels)[0]
    graticule.set_progress(model, 0.7)
    assert not torch.equal(rotation(model)(pixels)[0], noise)


def test_scaled_rotation_and_its_temperature_are_those_of_the_encoding():
    encoding, grid = "rope(base=50, layout='half', scaling='yarn', reference=(4, 4))", Grid(6, 9)
    cosines, sines = rotation(graticule.set_rotary(build(QWEN2), encoding))(torch.zeros(1), grid.coordinates())
    expected = build_position(Grid(2, 2), dim=16, depth=1, num_heads=1, encoding=encoding)(grid)[0]
    table = torch.cat([sines, cosines], -1) / expected.query_scale[:, None].sqrt()
    torch.testing.assert_close(table, expected.rotary.table, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("DINOv3ViTModel", marks=pytest.mark.long),
        *(pytest.param(f"{name}Transformer2DModel", marks=pytest.mark.slow) for name in ("Flux", "QwenImage")),
    ],
)
def test_a_model_compiles_as_one_graph(name):
    model = graticule.set_rotary(build(name), dialect(name))
    expected, counter = [run(model, grid) for grid in GRIDS], CompileCounter()
    model.compile(fullgraph=True, backend="eager")
    assert all(map(torch.equal, (run(model, grid) for grid in GRIDS), expected))
    call = torch.compile(rotation(model), backend=counter, fullgraph=True)
    for grid in [(3, 4), (6, 5), (7, 9), (11, 8), (8, 20)]:
        call(*_arguments(rotation(build(name)), grid, torch.float32))
    assert counter.frame_count == 2  # the second is for any grid


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
    rotate, _ = rotation_of(graticule.set_rotary(model, f"rope(preset={preset!r})"))
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
