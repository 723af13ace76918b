"""Frequencies and the temperature of attention on grids larger than in training: NTK, YaRN, released methods, log-N."""

import math

import pytest
import torch

import graticule
from graticule import Grid, Points, build_position
from graticule.encodings.forms.rotary import axial, geometric
from graticule.encodings.forms.scaling import METHODS, Scaling
from graticule.encodings.log_n import LogN
from graticule.encodings.mrope import Mrope
from graticule.encodings.pope import Pope
from graticule.encodings.rope import Frequencies, Rope, Rope1d
from graticule.encodings.rope_directions import GoldenGateRope, MixedRope
from in_turn import in_turn
from tiny import assert_same, draw, images, tiny

BUILT, LARGE = Grid(4, 6, prefix=1), Grid(8, 18, prefix=1)
HEAD_DIM, BASE = 16, 100.0
KINDS = ("interpolation", "ntk", "yarn")
EVERY = tuple(METHODS)

BUILD = {
    "rope": lambda scaling, grid=BUILT: Rope(grid, HEAD_DIM, Frequencies(BASE), scaling=scaling),
    "rope_1d": lambda scaling, grid=BUILT: Rope1d(grid, HEAD_DIM, scaling=scaling),
    "mrope": lambda scaling, grid=BUILT: Mrope(grid, HEAD_DIM, scaling=scaling),
    "pope": lambda scaling, grid=BUILT: Pope(grid, 2, 2, HEAD_DIM, scaling=scaling),
}


def bands(encoding, grid):
    """Return the frequencies of (rows, columns) at a grid, in radians per patch, read from the angles."""
    angles = encoding.angles(grid).unflatten(0, grid.shape)
    return angles[1, 0, : HEAD_DIM // 4].tolist(), angles[0, 1, HEAD_DIM // 4 :].tolist()


def formula(kind, s, length, k, n=HEAD_DIM // 4):
    """Compute the scaled frequency by the formulas of the papers, for one axis."""
    omega = BASE ** (-k / n)
    if kind == "interpolation":
        return omega / s
    if kind == "ntk":
        return (BASE * s ** (n / (n - 1))) ** (-k / n)
    turns = length * omega / (2 * math.pi)
    share = min(max((turns - 0.25) / (1 - 0.25), 0), 1)
    return (1 - share) * omega / s + share * omega


@pytest.mark.parametrize("kind", KINDS)
def test_every_axis_is_scaled_by_its_own_ratio_and_the_formula(kind):
    encoding = BUILD["rope"](Scaling(kind, ramp=(0.25, 1.0) if kind == "yarn" else None))
    for grid in (LARGE, Grid(4, 18, prefix=1), Grid(12, 6, prefix=1)):
        for actual, axis in zip(bands(encoding, grid), (0, 1), strict=True):
            s = grid.shape[axis] / BUILT.shape[axis]
            expected = [formula(kind, s, BUILT.shape[axis], k) for k in range(HEAD_DIM // 4)]
            assert actual == pytest.approx(expected, rel=1e-12)


def test_ntk_keeps_the_highest_frequency_and_interpolates_the_lowest():
    for name, build in BUILD.items():
        plain, scaled = build(Scaling()), build(Scaling("ntk"))
        grid = Grid(8, 12, prefix=1)  # twice as long on both axes
        s = 4 if name == "rope_1d" else 2
        first, second = (encoding.scaled(grid) for encoding in (plain, scaled))
        lengths, after = first.norm(dim=-1), second.norm(dim=-1)
        moving = lengths > 0
        ratio = after[moving] / lengths[moving]
        assert ratio[lengths[moving].argmax()].item() == pytest.approx(1, rel=1e-12), name
        assert ratio[lengths[moving].argmin()].item() == pytest.approx(1 / s, rel=1e-12), name


@in_turn("kind", EVERY)
@in_turn("name", BUILD)
def test_at_the_reference_grid_nothing_changes(name, kind):
    plain = BUILD[name](Scaling()).double()
    for scaled, grid in ((BUILD[name](Scaling(kind)), BUILT), (BUILD[name](Scaling(kind, reference=(8, 18))), LARGE)):
        assert torch.equal(scaled.double()(grid), plain(grid)) and scaled.query_scale(grid) is None


@pytest.mark.parametrize("kind", EVERY[1:])
def test_a_smaller_grid_is_not_scaled(kind):
    plain, scaled = (BUILD["rope"](scaling).double() for scaling in (Scaling(), Scaling(kind)))
    small = Grid(2, 5, prefix=1)
    assert torch.equal(scaled(small), plain(small)) and scaled.query_scale(small) is None
    interpolated = BUILD["rope"](Scaling("interpolation"))
    assert bands(interpolated, small)[0] == pytest.approx([2 * f for f in bands(plain, small)[0]])


@pytest.mark.parametrize("kind", EVERY)
def test_the_reference_stays_that_of_training_however_often_a_grid_is_set(kind):
    encoding, other = BUILD["rope"](Scaling(kind)).double(), BUILD["rope"](Scaling(kind)).double()
    encoding.set_grid(Grid(9, 9, prefix=1))
    encoding.set_grid(LARGE)
    assert torch.equal(encoding(LARGE), other(LARGE)) and torch.equal(encoding(BUILT), other(BUILT))


def test_the_temperature_of_yarn_is_that_of_the_paper_for_the_ratio_of_tokens():
    for build, ratio in ((BUILD["rope"], 6), (BUILD["rope_1d"], 6)):
        scale = build(Scaling("yarn")).double().query_scale(LARGE)
        assert scale.shape == (LARGE.tokens,) and scale.dtype == torch.float64
        torch.testing.assert_close(scale, torch.full_like(scale, (0.1 * math.log(ratio) + 1) ** 2))
    for kind in set(EVERY) - {"yarn"}:
        assert BUILD["rope"](Scaling(kind)).query_scale(LARGE) is None


def test_learned_directions_are_interpolated():
    plain, scaled = MixedRope(BUILT, 2, 2, HEAD_DIM), MixedRope(BUILT, 2, 2, HEAD_DIM, scaling=Scaling("interpolation"))
    scaled.load_state_dict({**scaled.state_dict(), **plain.state_dict()})
    large = Grid(8, 12, prefix=1)
    every_other = scaled(large)[:, :, 1:].unflatten(2, (8, 12))[:, :, ::2, ::2].flatten(2, 3)
    assert_same(every_other, plain(BUILT)[:, :, 1:], 1e-5)


def test_golden_gate_directions_are_scaled_in_patches():
    encoding = GoldenGateRope(BUILT, 2, 8, coordinates=Rope(BUILT, 8).coordinates, scaling=Scaling("ntk"))
    lengths = encoding.scaled(Grid(8, 12)).norm(dim=-1)
    torch.testing.assert_close(lengths[:, [0, -1]], torch.tensor([[0.1, 20.0]] * 2, dtype=torch.float64))


def test_one_frequency_has_no_order_for_ntk():
    with pytest.raises(ValueError, match="`scaling` must not be 'ntk' with one frequency"):
        Rope(BUILT, 4, scaling=Scaling("ntk"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_scales_at_another_size_folded_or_set(kind):
    model = draw(tiny(f"rope(scaling='{kind}')")).double().eval()
    plain = tiny("rope").double().eval()
    plain.load_state_dict(dict(model.named_parameters()))
    same, large = images(dtype=torch.float64), images(64, 72, dtype=torch.float64)
    assert torch.equal(model(same), plain(same))
    before = model(large)
    assert (before - plain(large)).abs().max() > 1e-3
    assert_same(graticule.fold(model, (64, 72))(large), before, 1e-12)
    graticule.unfold(model).set_input_size((64, 72))
    assert_same(model(large), before, 1e-12)


LONG = Grid(7, 12, prefix=1)


def share_of_band(k, turns, reference, base, n):
    first, last = (n * math.log(reference / (2 * math.pi * r)) / math.log(base) for r in turns)
    first, last = max(math.floor(first), 0), min(math.ceil(last), n)
    return 1 - min(max((k - first) / (last - first), 0), 1)


def expected(scaling, length, reference, base, n, t):
    s, frequencies = max(length / reference, 1), []
    for k in range(n):
        exponent, turns = k / n, reference * base ** -(k / n) / (2 * math.pi)
        if scaling.resonance == "turns" and s > 1 and turns >= 1:
            exponent = -math.log(2 * math.pi * round(turns) / reference) / math.log(base)
        omega = base**-exponent
        if scaling.scaling == "dy_ntk":
            omega = (base * s ** (n / (n - 1) * 2 * t**2)) ** -exponent
        elif scaling.scaling == "dy_yarn" and s > 1:
            mixed = share_of_band(k, (1.25 * t**2, 0.75 * t**2), reference, base, n)
            mixed = mixed * (base * s ** (n / (n - 1))) ** -exponent + (1 - mixed) * omega / s
            omega = mixed + share_of_band(k, (16 * t**2, 2 * t**2), reference, base, n) * (omega - mixed)
        elif scaling.scaling == "riflex":
            periods = [round(2 * math.pi * base ** (j / n)) for j in range(n)]
            if k == min(range(n), key=lambda j: abs(periods[j] - reference)) and length > max(periods[k], reference):
                omega = 0.9 * 2 * math.pi / length
        frequencies.append(omega)
    return frequencies


FLUX, HUNYUAN_VIDEO = ((10_000.0,) * 3, (8, 28, 28)), ((256.0,) * 3, (8, 28, 28))
DY_YARN, DY_VIDEO = Scaling("dy_yarn", (1, 64, 64)), Scaling("dy_yarn", (16, 64, 64))
RIFLEX = Scaling("riflex", (48, 45, 80))
#: Where a user met it -> scaling, bases and numbers of frequencies of the axes, their lengths, times.
THREADS = {
    "huggingface/diffusers#14520, unchanged at 1024 pixels": (DY_YARN, *FLUX, (1, 64, 48), (1, 0.5)),
    "invoke-ai/InvokeAI#8847, bands of 64 patches, not 256": (DY_YARN, *FLUX, (1, 256, 144), (1, 0.6, 0.2)),
    "guyyariv/DyPE": (Scaling("dy_ntk", (1, 64, 64)), *FLUX, (1, 256, 144), (1, 0.5)),
    "wildminder/ComfyUI-DyPE#36, a base per axis": (DY_VIDEO, (256.0, 1e4, 1e3), (8, 28, 24), (32, 128, 256), (1, 0.7)),
    "Tencent-Hunyuan/HunyuanVideo#228, 261 frames": (RIFLEX, *HUNYUAN_VIDEO, (66, 45, 80), (1,)),
    "huggingface/diffusers#11009, unchanged at 129 frames": (RIFLEX, *HUNYUAN_VIDEO, (33, 45, 80), (1,)),
    "UltraFlux": (Scaling("dy_yarn", (1, 64, 64), resonance="turns"), *FLUX, (1, 128, 64), (1,)),
}


@in_turn("thread", THREADS)
def test_frequencies_are_those_of_released_code(thread):
    scaling, bases, counts, lengths, times = THREADS[thread]
    vectors = axial(*map(geometric, bases, counts))
    for t in times:
        actual = scaling.frequencies(vectors, lengths, "own", torch.tensor(t, dtype=torch.float64))
        axes = zip(lengths, scaling.reference, bases, counts, strict=True)
        frequencies = [frequency for axis in axes for frequency in expected(scaling, *axis, t)]
        torch.testing.assert_close(actual.sum(-1), torch.tensor(frequencies, dtype=torch.float64), rtol=1e-12, atol=0)
        assert torch.equal(actual == 0, vectors == 0) and torch.equal(actual, vectors) == ("unchanged" in thread)
    if "261" in thread:  # as the authors write it: the fourth frequency of time
        assert (actual != vectors).nonzero().tolist() == [[3, 0]] and actual[3, 0].item() == 0.9 * 2 * math.pi / 66


def test_whole_wavelengths_repeat_exactly_and_change_no_more():
    """Resonance RoPE is the identity where wavelengths are whole, also at the trained size."""
    resonance = Scaling(resonance="wavelengths")
    once = resonance.frequencies(geometric(100.0, 8)[:, None], (5,), "own", None)
    assert (2 * math.pi / once[:3, 0]).round().tolist() == [6, 11, 20]
    scaled = Scaling("ntk", (6,), resonance="wavelengths").frequencies(once, (12,), "own", None)
    for wavelengths in (2 * math.pi / once, 2 * math.pi / scaled):
        torch.testing.assert_close(wavelengths, wavelengths.round(), rtol=1e-15, atol=0)
    torch.testing.assert_close(resonance.frequencies(once, (9,), "own", None), once, rtol=1e-15, atol=0)


SCALED = [f"rope(base=1000, scaling='{method}', coordinates='centered')" for method in METHODS]


@in_turn("encoding", [*SCALED, "rope(preset='dinov3')"])
def test_points_with_an_extent_have_the_position_of_a_grid(encoding):
    position = build_position(BUILT, dim=32, depth=1, num_heads=2, encoding=encoding).double().eval()
    (layer,), places = position(LONG), LONG.coordinates()
    for extent in ((7, 12), torch.tensor([7, 12])):
        (points,), (both,) = (position(Points(at, 1, extent)) for at in (places, places.expand(2, -1, -1)))
        assert_same(points.rotary.table, layer.rotary.table, 1e-12)
        assert torch.equal(both.rotary.table[1, 0], points.rotary.table)
        assert (points.query_scale is None) == (layer.query_scale is None) == ("'yarn'" not in encoding)
    for extent in (None, (7,), (7, 0), (7, math.inf)) if "scaling" in encoding else ():
        with pytest.raises(ValueError, match=r"`extent` must be (given for Points|a positive length|finite)"):
            position(Points(places, 1, extent))


@in_turn("method", ["dy_ntk", "dy_yarn"])
def test_progress_changes_computed_stored_and_folded_tables(method):
    model, plain = (draw(tiny(text, embed_dim=48)).double().eval() for text in (f"rope(scaling='{method}')", "rope"))
    plain.load_state_dict(dict(model.named_parameters()))
    outputs, large = [], images(64, 72, dtype=torch.float64)
    for progress in (0.0, 0.75, 1.0):
        graticule.set_progress(graticule.unfold(model), progress)
        outputs.append(model(large))
        graticule.set_progress(graticule.fold(model, (64, 72)), 0.5)
        assert (model(large) - outputs[-1]).abs().max() > 1e-5
        graticule.set_progress(model, progress)
        assert_same(model(large), outputs[-1], 1e-12)
        assert method == "dy_yarn" or torch.equal(outputs[-1], plain(large)) == (progress == 1)
    assert graticule.unfold(model).bfloat16().position.encoding.time.dtype == torch.float32
    for refused, wrong in ((model, 1.5), (plain, 0.5)):
        with pytest.raises(ValueError, match=r"`progress` must be in \[0, 1\]|`model` must have a rotary encoding"):
            graticule.set_progress(refused, wrong)


def test_a_compiled_position_follows_progress_and_extent_without_another_compilation():
    position = build_position(BUILT, dim=32, depth=1, num_heads=2, encoding="rope(scaling='dy_yarn')")

    def tables(extent):
        points = Points(torch.arange(6.0).view(3, 2), extent=extent)
        return position(points)[0].rotary.table, position(BUILT)[0].rotary.table + 0

    compiled = torch.compile(tables, fullgraph=True, backend="eager")
    compiled(torch.tensor([8, 9]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for progress, extent in ((0.2, [8, 9]), (0.7, [16, 12]), (1.0, [4, 6])):
            graticule.set_progress(position, progress)
            torch.testing.assert_close(compiled(torch.tensor(extent)), tables(torch.tensor(extent)))


@in_turn("coordinates", ["patches", "centered", "separate", "max", "corners", "area", "unit"])
def test_points_in_the_unit_of_a_spacing_have_the_position_of_the_grid(coordinates):
    offset = 0.0 if coordinates in ("corners", "area", "unit") else 0.5
    encoding = f"rope(coordinates='{coordinates}', offset={offset})"
    position = build_position(Grid(4, 6, spacing=(2, 0.1)), dim=32, depth=1, num_heads=2, encoding=encoding).double()
    for grid in (Grid(7, 6, spacing=(2, 0.1)), Grid(4, 3, spacing=(2, 0.1))):
        points = Points(grid.coordinates(), extent=grid.extent)
        expected, actual = (position(tokens)[0].rotary.table for tokens in (grid, points))
        assert_same(actual, expected, 1e-12)


COMBINED = ["log_n", "rope + log_n", "learnable + log_n", "shaw + log_n", "relative_bias + log_n", "pope + log_n"]


def pair(encoding, **kwargs):
    model = draw(tiny(encoding, **kwargs)).double().eval()
    plain = tiny(encoding.removesuffix("log_n").removesuffix(" + ") or "none", **kwargs).double().eval()
    names = zip(plain.state_dict(), dict(model.named_parameters()), strict=True)
    plain.load_state_dict({plain_name: model.state_dict()[ours] for plain_name, ours in names})
    return model, plain


@in_turn("encoding", COMBINED)
def test_it_changes_nothing_at_the_size_of_training_and_something_at_another(encoding):
    model, plain = pair(encoding)
    x = images(dtype=torch.float64)
    assert torch.equal(model(x), plain(x))
    x = images(64, 40, dtype=torch.float64)
    assert (model(x) - plain(x)).abs().max() > 1e-4


def test_it_multiplies_the_logits_by_the_ratio_of_logarithms():
    model, plain = pair("rope + log_n")
    grid, x = Grid(6, 7, prefix=1), torch.randn(2, 43, 24, dtype=torch.float64)
    attention = model.blocks[0].attn
    with_it, without = (attention.weights(x, made.position(grid)[0]).log() for made in (model, plain))
    differences = [w - w[..., :1] for w in (with_it, without)]  # logits up to the normalizer of a row
    assert_same(differences[0], differences[1] * math.log(42) / math.log(16), 1e-10)


def test_the_reference_is_the_grid_of_building_or_given_and_stays():
    encoding = LogN(Grid(4, 4, prefix=1))
    assert torch.equal(encoding(Grid(4, 4, prefix=1)), torch.ones(17))
    assert torch.equal(encoding(Grid(2, 8, prefix=3)), torch.ones(19))
    torch.testing.assert_close(encoding(Grid(8, 8)), torch.full((64,), 1.5))
    assert torch.equal(LogN(Grid(4, 4), reference=196)(Grid(14, 14)), torch.ones(196))
    model = tiny("log_n")
    model.set_input_size(64)
    torch.testing.assert_close(model.position(model.grid)[0].query_scale, torch.full((65,), 1.5))
    assert LogN(Grid(1, 1))(Grid(1, 1)).item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_is_float32_at_least_and_queries_keep_their_dtype(dtype):
    model = tiny("log_n").to(dtype).eval()
    assert model.position(Grid(5, 5, prefix=1))[0].query_scale.dtype == torch.float32
    assert model(images(40, 40, dtype=dtype)).dtype == dtype


def test_a_token_of_a_text_has_the_factor_of_the_tokens_that_it_sees():
    encoding = LogN(Grid(8), causal=True)
    expected = [max(1.0, math.log(i + 1) / math.log(8)) for i in range(20)]
    torch.testing.assert_close(encoding(Grid(20)), torch.tensor(expected))
    assert torch.equal(encoding(Grid(8)), torch.ones(8))
