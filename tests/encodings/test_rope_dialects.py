"""The dialects of rotary encodings against timm's and transformers', in float64; presets; noise in training."""

import copy
import importlib
import math
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3

import graticule
from evidence.vector_rotations import in_float64 as computed_in_float64
from graticule import Grid, get_rope_index
from graticule.encodings.build import build_position
from graticule.encodings.forms.coordinates import Coordinates, Noise
from graticule.encodings.rope import Frequencies, Rope
from graticule.layers.attention import Attention
from in_turn import in_turn, refusals
from tiny import assert_same, tiny

GRIDS = [(4, 4), (3, 5), (7, 2)]
HEAD_DIM = 16


@pytest.fixture
def in_float64():
    """Compute timm's float32 tables in float64."""
    with computed_in_float64():
        yield


def build(text, grid, depth=2):
    return build_position(grid, dim=2 * HEAD_DIM, depth=depth, num_heads=2, encoding=text).double().eval()


def patches(layer, grid):
    return layer.rotary.table[..., grid.prefix :, :]


#: timm's class, its arguments, and our encoding.
DIALECTS = [
    (RotaryEmbeddingCat, {"temperature": 100.0}, "rope"),
    (RotaryEmbeddingCat, {"temperature": 100.0, "grid_indexing": "xy"}, "rope(preset='rope_vit')"),
    (RotaryEmbeddingCat, {"ref_feat_shape": [16, 16]}, "rope(preset='eva02')"),
    (
        RotaryEmbeddingCat,
        {"ref_feat_shape": [24, 24], "grid_indexing": "xy", "grid_offset": 1.0},
        "rope(preset='pe', reference=(24, 24))",
    ),
    (RotaryEmbeddingCat, {"ref_feat_shape": [5, 3]}, "rope(base=10000, scaling='interpolation', reference=(5, 3))"),
    (RotaryEmbeddingCat, {"in_pixels": True, "max_res": 224}, "rope(pixels=224, coordinates='corners')"),
    (
        RotaryEmbeddingCat,
        {"in_pixels": True, "max_res": 64, "linear_bands": True},
        "rope(pixels=64, linear=True, coordinates='corners')",
    ),
    (RotaryEmbeddingDinoV3, {}, "rope(preset='dinov3')"),
    (RotaryEmbeddingDinoV3, {"rotate_half": False}, "rope(preset='dinov3', layout='interleaved')"),
    (RotaryEmbeddingDinoV3, {"normalize_coords": "min"}, "rope(preset='dinov3', coordinates='min')"),
    (RotaryEmbeddingDinoV3, {"normalize_coords": "max"}, "rope(preset='dinov3', coordinates='max')"),
    (RotaryEmbeddingDinoV3, {"grid_offset": 0.3}, "rope(preset='dinov3', offset=0.3)"),
    (
        RotaryEmbeddingDinoV3,
        {"min_period": 0.5, "max_period": 90.0},
        "rope(periods=(0.5, 90), coordinates='separate', layout='half')",
    ),
]


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_every_dialect_is_timms_table_in_float64(shape, in_float64):
    grid = Grid(*shape, prefix=2)
    for kind, arguments, text in DIALECTS:
        defaults = {"in_pixels": False} if kind is RotaryEmbeddingCat else {}
        table = kind(HEAD_DIM, **{**defaults, **arguments}).eval().get_embed(list(shape))
        assert table.dtype == torch.float64
        difference = (patches(build(text, grid)(grid)[0], grid) - table).abs().max().item()
        assert difference < 1e-10, (text, difference)


#: timm's models, and the encoding of their attention.
MODELS = {
    "vit_small_patch16_rope_224": "rope(preset='rope_vit')",
    "vit_base_patch16_rope_reg1_gap_256": "rope(preset='eva02')",
    "vit_small_patch16_rope_mixed_224": "rope_mixed(preset='rope_vit')",
    "eva02_tiny_patch14_224": "rope(preset='eva02')",
    "vit_pe_core_tiny_patch16_384": "rope(preset='pe', reference=(24, 24))",
    "vit_small_patch16_dinov3": "rope(preset='dinov3')",
}


@in_turn("shape", [(3, 5), (4, 4)])
@in_turn("name", MODELS)
def test_attention_of_timms_models_is_ours_with_the_preset(name, shape, in_float64):
    patch = 14 if "patch14" in name else 16
    reference = timm.create_model(name, img_size=tuple(patch * n for n in shape), embed_dim=32, depth=2, num_heads=2)
    reference.eval()
    grid = Grid(*shape, prefix=reference.num_prefix_tokens)
    position = build(MODELS[name], grid)
    rope = reference.rope
    tables = rope.get_embed(list(shape)) if getattr(rope, "feat_shape", None) is None else rope.get_embed()
    if "mixed" in name:
        position.load_state_dict({"encoding.freqs": rope.freqs.detach()})
    else:
        tables = [tables] * 2
    x = torch.randn(2, grid.tokens, 32)
    for block, layer, table in zip(reference.blocks, position(grid), tables, strict=True):
        assert_same(patches(layer, grid), table, 1e-10)
        attention = Attention(32, 2)
        torch.nn.init.normal_(block.attn.qkv.weight)
        state = {key: value for key, value in block.attn.state_dict().items() if not key.endswith("_bias")}
        if "qkv.bias" not in state:
            parts = [getattr(block.attn, f"{part}_bias", None) for part in "qkv"]
            state["qkv.bias"] = torch.cat([torch.zeros(32) if part is None else part.detach() for part in parts])
        attention.load_state_dict(state)
        assert_same(attention(x, layer), block.attn(x, rope=table), 1e-10)


def test_options_replace_those_of_a_preset_and_the_others_stay():
    grid = Grid(3, 5)
    encoding = build("rope(preset='dinov3', base=50, rescale=None)", grid).encoding
    assert encoding.frequencies == Frequencies(base=50.0, turns=True)
    assert encoding.noise == Noise() and encoding.coordinates == Coordinates("separate") and encoding.layout == "half"
    assert Rope(grid, 8).frequencies == Frequencies()


#: Our encoding -> the pairs of 16 channels that it rotates at (t, y, x), with their angles.
ANGLES = {
    "rope(base=(9, 16, 81), split=(1, 2, 2), coordinates=('patches', 'centered', 'centered'), layout='half_rotated')": (
        lambda t, y, x: ((0, 5, t), (1, 6, y - 2), (2, 7, (y - 2) / 4), (3, 8, x - 2), (4, 9, (x - 2) / 9))
    ),
    "rope(base=16, split=(2, 1, 2), layout='half_rotated', order='xy', unrotated='first')": (
        lambda t, y, x: ((6, 11, x), (7, 12, x / 4), (8, 13, y), (9, 14, t), (10, 15, t / 4))
    ),
    "rope(base=16, split=(2, 2, 2), arrangement='interleaved', unrotated='first')": (
        lambda t, y, x: ((4, 5, t), (6, 7, y), (8, 9, x), (10, 11, t / 4), (12, 13, y / 4), (14, 15, x / 4))
    ),
}


@in_turn("shape", [(2, 3, 4), (3, 4)])  # an image is the video of one frame, 0
@in_turn("encoding", ANGLES)
def test_pairs_and_angles_of_a_dialect_are_those_that_are_computed_by_hand(encoding, shape):
    grid = Grid(*shape, prefix=1)
    units = torch.eye(HEAD_DIM, dtype=torch.float64)[:, None, None].expand(-1, 1, grid.tokens, -1)
    actual = build(encoding, grid)(grid)[0].rotary(units, units)[0][:, 0].movedim(0, 2)  # (N, to, from)
    expected = torch.eye(HEAD_DIM, dtype=torch.float64).repeat(grid.tokens, 1, 1)
    for matrix, place in zip(expected[1:], grid.coordinates().tolist(), strict=True):
        for i, j, angle in ANGLES[encoding](*[0] * (3 - len(place)), *place):
            matrix[i, i] = matrix[j, j] = math.cos(angle)
            matrix[j, i], matrix[i, j] = math.sin(angle), -math.sin(angle)
    assert_same(actual, expected, 1e-12)


def test_noise_draws_what_timm_draws():
    noise = {"shift": 0.2, "jitter": 1.3, "rescale": 2.0}
    reference = RotaryEmbeddingDinoV3(HEAD_DIM, **{f"{name}_coords": value for name, value in noise.items()}).train()
    mine = Rope(Grid(3, 5), HEAD_DIM, Frequencies(turns=True), Coordinates("separate"), "half", noise=Noise(**noise))
    torch.manual_seed(7)
    expected = reference.get_embed([3, 5])
    torch.manual_seed(7)
    assert_same(mine.train()(Grid(3, 5)), expected, 1e-4)


@pytest.mark.parametrize("encoding", ["rope(preset='dinov3')", "rope_mixed(rescale=2.0)", "liere(rescale=2.0)"])
def test_noise_is_one_draw_per_forward_pass_in_training_alone(encoding):
    model = tiny(encoding)
    first, second = model.train().position(model.grid), model.position(model.grid)
    assert not torch.equal(first[0].rotary[0], second[0].rotary[0])
    if encoding.startswith("rope("):
        assert all(layer.rotary is first[0].rotary for layer in first)
    state = torch.get_rng_state()
    model.eval()
    assert torch.equal(model.position(model.grid)[0].rotary[0], model.position(model.grid)[0].rotary[0])
    folded = graticule.fold(copy.deepcopy(model).train())
    assert torch.equal(folded.position(model.grid)[0].rotary[0], model.position(model.grid)[0].rotary[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_stays_within_its_bounds():
    places = torch.tensor([[1.0, 2.0]], dtype=torch.float64).expand(4, 2)
    draws = torch.stack([Noise(shift=0.5)(places) - places for _ in range(200)])
    assert draws.abs().max() <= 0.5 and draws.min() < -0.4 and draws.max() > 0.4
    assert not torch.equal(draws[..., 0], draws[..., 1]) and torch.equal(draws[:, 0], draws[:, 3])
    for noise, shared in ((Noise(jitter=2.0), False), (Noise(rescale=2.0), True)):
        draws = torch.stack([noise(places) / places for _ in range(200)])
        assert draws.min() >= 0.5 and draws.max() <= 2 and draws.min() < 0.6 and draws.max() > 1.7
        assert torch.equal(draws[..., 0], draws[..., 1]) == shared and draws.log().mean().abs() < 0.2


EVERY = ["rope", "rope(preset='dinov3')", "rope_1d", "rope_mixed", "rope_golden_gate", "mrope", "liere", "pope"]


@in_turn("encoding", EVERY)
def test_autocast_and_low_precision_do_not_merge_positions(encoding):
    """200 patches in a row have 200 different rows, although bfloat16 would round 129 to 128."""
    grid = Grid(1, 200)
    position = build_position(grid, dim=32, depth=1, num_heads=2, encoding=encoding).eval()
    for built in (grid, Grid(1, 199)):  # the stored grid, and a computed one
        exact = [t.clone() for t in position(built)[0].rotary if isinstance(t, torch.Tensor)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = position(built)[0].rotary
        low = copy.deepcopy(position).bfloat16()(built)[0].rotary
        for table, under in zip(exact, cast, strict=False):
            assert torch.equal(table, under)
        for table in (t for t in low if isinstance(t, torch.Tensor)):
            assert table.dtype == torch.float32
            rows = table.movedim(-2 if encoding != "liere" else 1, 0).flatten(1)
            assert len(rows.unique(dim=0)) == built.patches, encoding


REFUSED = {
    "rope(preset='dinov4')": "`preset` .*'dinov4'.*'dinov3'",
    "rope(base=10, periods=(1, 2))": "`base` must be left out with `periods`",
    "rope(periods=(1, 2), pixels=224)": "`periods` must be left out with `pixels`",
    "rope(turns=True, periods=(1, 2))": "`turns` must be left out with `periods`",
    "rope(linear=True)": "`linear` must be left out without `pixels`",
    "rope(offset=1.0, coordinates='corners')": "`offset` must be 0 with coordinates 'corners', got 1.0",
    "rope(reference=(3, 3))": "`reference` must be left out without `scaling`",
    "rope(scaling='ntk', ramp=(1, 2))": "`ramp` must be left out with scaling 'ntk'",
    "rope(scaling='yarn', ramp=(2, 1))": "`ramp` must be two increasing numbers of turns",
    "rope(scaling='dy_yarn', reference=(4, 4, 4))": "`reference` must have 2 sides, as many as the grid has axes",
    "rope(resonance='turns')": "`resonance` must be 'wavelengths' without `scaling`",
    "rope(scaling='dy_yarn', ramp=(1, 2))": "`ramp` must be left out with scaling 'dy_yarn'",
    "rope(scaling='ntk', coordinates='separate')": "`scaling` must go with coordinates 'patches', .*'separate'",
    "rope(coordinates=('patches', 'centered', 'centered'))": "`coordinates` must be 2 names, one for each axis",
    "rope(coordinates=('patches', 'center'))": "`coordinates`.*'patches', 'centered', ",
    "rope(base=(100, 10, 1))": "`base` must be 2 numbers, one for each axis, got",
    "rope(base=(100, -1))": "`base`.*greater than 0, got",
    "rope(base=(100, 10), alternate=True)": "`base` must be one number with `alternate`",
    "rope(preset='flux')": "`preset` 'flux' must have heads of 128 channels, got 8; for others give `split`",
    "rope(preset='flux2', split=(1, 1, 1, 1))": r"`split` must be 2 .*four an image is Grid\(1, H, W, 1\)",
    "rope(arrangement='interleaved', split=(1, 2))": "`split` must have equal numbers with `arrangement`",
    "rope(unrotated='first')": r"`unrotated` must be left out with `split` \(2, 2\), which rotates all 4 pairs",
    "rope(jitter=0.5)": "`jitter`.*at least 1",
    "rope(shift=-1.0)": "`shift`.*at least 0",
    "rope(layout='pairs')": "`layout`.*'interleaved', 'half', 'half_per_axis', 'half_rotated' or 'tiled'",
    "rope(layout='tiled', alternate=True)": "`alternate` must be left out with layout 'tiled'",
    "rope(layout='half_per_axis', split=(1, 2))": "`split` must be equal parts of all pairs with layout",
    "rope_1d(layout='tiled')": "`layout`.*'interleaved' or 'half'",
    "rope(order='zx')": "`order`.*'yx' or 'xy'",
    "rope(sections=(1, 1, 2))": "must not have the option 'sections'",
    "rope_mixed(scaling='yarn')": "`scaling` must be 'interpolation' with learned frequencies",
    "rope_mixed(resonance='wavelengths')": "`resonance` must not be 'wavelengths' with frequencies of other directions",
    "rope_golden_gate(scaling='riflex', coordinates='patches')": "`scaling` must not be 'riflex' with frequencies",
    "rope_mixed(layout='half')": "must not have the option 'layout'",
    "rope_golden_gate(lowest=2.0, highest=1.0)": "`lowest` must be at most `highest`",
    "rope_golden_gate(zeros=1.0)": r"`zeros` of encoding rope_golden_gate must be less than 1, got 1.0",
    "mrope(arrangement='chunked')": "`sections` must be three numbers of sum head_dim / 2 = 4",
    "mrope(sections=(0, -1, 2))": "`sections` must not be negative",
    "mrope(sections=(3, 3))": "`sections` of encoding mrope must have more values, got",
    "liere(block=3)": "`block` must be at least 2 and divide head_dim = 8, got 3",
    "liere(scaling='yarn')": "must not have the option 'scaling'",
    "log_n(reference=1)": "`reference` must be at least 2",
    "rope + rope_mixed": "`rotary` must be given by one encoding at most",
    "pope + shaw": "`bias` must not be made from queries or keys whose channels `rotary` doubles",
}


test_what_has_no_effect_or_no_meaning_is_refused = refusals(*REFUSED.items(), call=tiny)


VIDEO = Grid(4, 1, 2, spacing=(1.5, 1, 1))  # 2 tokens per second, 0.75 seconds per frame
#: Model -> the class of its indices, and a sequence of texts, images and videos.
SEQUENCES = {
    "qwen2_vl": ("Qwen2VL", [Grid(3), Grid(2, 4), Grid(2), Grid(2, 3, 2), Grid(1)]),
    "qwen2_5_vl": ("Qwen2_5_VL", [Grid(2), VIDEO, Grid(2), Grid(3, 1), Grid(1)]),
    "qwen3_vl": ("Qwen3VL", [Grid(2), Grid(2, 3), Grid(1), Grid(1, 2), Grid(4)]),
}


@pytest.mark.parametrize("model", SEQUENCES)
def test_mrope_at_the_indices_of_texts_images_and_videos_rotates_as_the_model(model, in_float64):
    pytest.importorskip("transformers", minversion="5.20")  # earlier ones have other classes for the same tables
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
