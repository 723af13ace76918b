"""Encodings of texts, videos and volumes: laws that connect grids of different numbers of axes."""

import copy
import itertools

import pytest
import torch

import graticule
from graticule import Grid, Points, build_position
from graticule.encodings import ENCODINGS
from graticule.layers.attention import Attention
from graticule.position.joining import JOININGS
from graticule.testing.places import DEPTH, DIM, HEADS, LAWS, build_random, check_layers, mixes, values
from in_turn import in_turn, refusals
from tiny import assert_same, draw, laws_of_places

#: Encodings that depend on coordinates through formulas or small networks, and take points.
COMPUTED = [
    *(
        "sinusoidal_2d",
        "fourier",
        "fourier(coordinates='patches')",
        "coordinates",
        "rope_mixed",
        "liere",
        "mrope",
        "pope",
    ),
    *("rope", "rope(coordinates='separate', split=(2, 3))", "rope(coordinates='middle')"),
    "rope(coordinates='centered', split=(2, 2), arrangement='interleaved', layout='half_rotated', unrotated='first')",
    "rope(coordinates=('centered', 'max'), base=(100, 9), offset=0.5)",
    *(
        "rope_golden_gate(coordinates='patches')",
        "gpsa",
        "log_n",
        "sandwich",
        "continuous_bias",
        "mlp_bias",
        "gqpe_bias",
    ),
    *("alibi", *(f"alibi(distance='{distance}')" for distance in ("manhattan", "squared"))),
    *("fire", "fire(form='axes')", "kerple", "kerple(kernel='power')"),
    *("gqpe_bias", "irpe(method='euclidean', on='qkv')", "irpe(method='cross', on='k')"),
]
#: More options.
OPTIONS = [
    *(*COMPUTED, "relative_bias(prefix_rows=True)", "ggqpe(form='gamma_released')", "ggqpe(form='alpha')"),
    *("irpe(method='quant')", "peg(convolution='dense', padding='circular')"),
]


@in_turn("encoding", [encoding for encoding in OPTIONS if encoding not in ENCODINGS])
def test_the_laws_of_places_hold_with_options(encoding):
    assert laws_of_places(encoding)


def test_each_law_applies_to_all_encodings_but_those_that_say_why_not():
    outcomes = {name: laws_of_places(name) for name in ENCODINGS}
    without = {law: {name for name in ENCODINGS if law not in outcomes[name]} for law in LAWS}
    divided = {"sinusoidal_2d", "rope", "rope_golden_gate", "pope", "mrope", "irpe"}
    convolved = {"peg", "convolutional_projection"}
    ordered = {"sinusoidal_1d", "rope_1d", "causal"}
    assert without["permutation"] == {*divided, *ordered, "global_filter"}
    maps = {"learnable", "factorized", "decomposed", "relative_bias", "shared_relative_bias", "mirrored_bias"}
    mixing = {"sgu", "gsgu", "lrpe", "glrpe", "lrpe_m", "gqpe", "ggqpe", "token_mlp", "global_filter"}
    assert set(ENCODINGS) - without["resampling"] == maps | mixing
    tables = {"learnable", "factorized", "relative_bias", "shared_relative_bias", "decomposed", "shaw", "bucketed_bias"}
    tables |= {"windowed", "cropped", "mirrored_bias"}
    assert {name for name in without["points"] if not mixes(name)} == {*tables, *convolved, *ordered} - {"causal"}
    assert {name for name in without["crop"] if not mixes(name)} == {*convolved, "log_n", "gpsa"}


@in_turn(
    ("encoding", "joining"),
    [
        *itertools.product(("sinusoidal_2d", "fourier", "relative_bias"), {*JOININGS} - {"default"}),
        *itertools.product(("learnable + rope_mixed + alibi", "sinusoidal_2d + relative_bias"), ("lape", "shared")),
    ],
)
def test_the_laws_of_places_hold_with_every_joining(encoding, joining):
    try:
        build_position(Grid(2, 3), dim=DIM, depth=DEPTH, num_heads=HEADS, encoding=encoding, joining=joining)
    except ValueError:
        return  # this joining does not take it
    assert laws_of_places(encoding, joining)


@in_turn("encoding", [*ENCODINGS, *OPTIONS])
@torch.no_grad()
def test_a_law_that_an_encoding_is_exempt_from_does_not_hold(encoding, monkeypatch):
    position = build_random(Grid(4, 5, prefix=int(not mixes(encoding))), encoding)
    reasons = [reason.partition(":")[0] for part in position.modules() for reason in getattr(part, "exempt", ())]
    exempt = {law for laws in reasons for law in laws.split(", ")}
    assert exempt <= LAWS.keys()
    for kind in {type(part) for part in position.modules()}:
        if exempt and hasattr(kind, "exempt"):
            monkeypatch.setattr(kind, "exempt", property(lambda self: (), lambda self, value: None))
    for law in exempt:
        with pytest.raises((AssertionError, RuntimeError)):
            LAWS[law](encoding, "default")


@in_turn("encoding", ["rope(split=(0, 3, 3))", "rope(split=(0, 2, 4), order='xy', layout='half')", "mrope"])
@torch.no_grad()
def test_a_video_of_one_frame_is_the_image_where_time_has_no_channels_of_an_axis(encoding):
    lower, higher = Grid(3, 4, prefix=1), Grid(1, 3, 4, prefix=1)
    image = encoding.replace("(0, ", "(")
    check_layers(build_random(higher, encoding)(higher), build_random(lower, image)(lower), lower.tokens, "one frame")


@in_turn("encoding", ENCODINGS)
@torch.no_grad()
def test_in_bfloat16_a_position_is_the_exact_one_up_to_its_digits(encoding):
    grid = Grid(3, 4, prefix=0 if mixes(encoding) else 1)
    exact = build_random(grid, encoding).float()
    rounded = copy.deepcopy(exact).bfloat16()
    for first, second in zip(exact(grid), rounded(grid), strict=True):
        for name in ("added_to_stream", "after_norm", "bias", "mixing", "spatial_bias"):
            value, other = getattr(first, name), getattr(second, name)
            if isinstance(value, torch.Tensor):
                assert value.dtype == torch.float32 and other.dtype == torch.bfloat16, name
                torch.testing.assert_close(other.float(), value, rtol=2**-6, atol=2**-4)


@in_turn("encoding", COMPUTED)
@torch.no_grad()
def test_points_of_each_sample_are_computed_as_those_of_one(encoding):
    places = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64).abs()
    position = build_random(Grid(3, 4, prefix=1), encoding)
    together = position(Points(places, prefix=1))
    assert values(together[0], 6)
    for sample in range(2):
        for first, second in zip(together, position(Points(places[sample], prefix=1)), strict=True):
            actual, alone = values(first, 6), values(second, 6)
            assert actual.keys() == alone.keys()
            for name, value in alone.items():
                of_sample = actual[name][sample]
                expected = value[sample] if value.ndim == actual[name].ndim else value.reshape(of_sample.shape)
                assert_same(of_sample, expected, 1e-12)


def test_the_coordinates_of_points_are_checked_once(monkeypatch):
    points = Points(torch.rand(2, 5, 2))
    monkeypatch.setattr(torch.Tensor, "isfinite", None)
    assert [sample.places.tolist() for sample in points.samples] == points.places.tolist()
    assert {sample.prefix for sample in points.samples} == {0}


@torch.no_grad()
def test_attention_takes_points_of_each_sample():
    attention = Attention(DIM, HEADS).double().eval()
    position = build_random(Grid(3, 4), "fourier + rope_mixed + alibi")
    places, x = torch.rand(2, 5, 2, dtype=torch.float64), torch.randn(2, 5, DIM, dtype=torch.float64)
    (together, _), separate = position(Points(places)), [position(Points(single))[0] for single in places]
    outputs = attention(together.enter_block(x), together)
    for sample, single in enumerate(separate):
        alone = attention(single.enter_block(x[sample : sample + 1]), single)
        assert_same(outputs[sample : sample + 1], alone, 1e-12)


test_points_of_other_shapes_and_values_are_refused = refusals(
    (torch.rand(2, 3, 5, 2), r"`places` must be \(N, axes\), one row per token, or \(B, N, axes\)"),
    (torch.tensor([[0.0, torch.nan]]), "`places` must be finite numbers"),
    call=Points,
)


@in_turn(
    "encoding",
    [
        *("learnable", "factorized", "windowed", "mirrored_bias", "relative_bias", "decomposed", "shaw"),
        *("bucketed_bias", "rope_1d", "sinusoidal_1d"),
    ],
)
def test_points_are_refused_with_the_choice_where_there_is_a_table_or_an_order(encoding):
    points = Points(torch.rand(5, 2))
    with pytest.raises(ValueError, match=r"`grid` must be a Grid, got Points: .*fourier, .*alibi"):
        values(build_random(Grid(3, 4), encoding)(points)[0], points.tokens)


@in_turn("encoding", ["sinusoidal_2d", "alibi", "fire", "kerple", "rope_mixed", "fourier(coordinates='max')"])
@torch.no_grad()
def test_coordinates_are_in_the_unit_of_the_spacing(encoding):
    """Twice the spacing on an axis is every second patch of a grid that is twice as long there."""
    fine, coarse = Grid(2, 6, 4), Grid(2, 3, 4, spacing=(1, 2, 1))
    position = build_random(Grid(4, 6, 4), encoding)
    index = torch.arange(48).view(2, 6, 4)[:, ::2].flatten()
    if encoding.startswith("fourier"):  # centers of larger patches: the offset of half a patch is twice as far
        places = build_position(coarse, dim=DIM, depth=1, num_heads=HEADS, encoding=encoding).encodings[0].coordinates
        pairs = places(fine).view(2, 3, 2, 4, 3).mean(2).flatten(0, 2)
        assert_same(places(coarse)[:, 1], pairs[:, 1], 1e-15)
        return
    for first, second in zip(position(fine), position(coarse), strict=True):
        for name, value in values(second, coarse.tokens).items():
            if name == "added_to_stream":
                assert_same(value, first.added_to_stream[index], 1e-12)
            if isinstance(first.bias, torch.Tensor) and encoding != "fire":  # relative to the largest distance
                assert_same(value, first.bias[:, index][..., index], 1e-12)


@in_turn("encoding", ["learnable", "rope", "mlp_bias", "lrpe", "shaw", "coordinates", "log_n"])
def test_a_grid_of_another_number_of_axes_is_refused(encoding):
    position = build_position(Grid(3, 4), dim=DIM, depth=1, num_heads=HEADS, encoding=encoding)
    for grid, count in ((Grid(12), 1), (Grid(2, 3, 4), 3)):
        with pytest.raises(ValueError, match=rf"`grid` must have 2 axes \(images\), .* got {count}"):
            position(grid)


test_options_that_do_not_fit_the_axes_are_refused = refusals(
    (("rope(split=(2, 4))", Grid(2, 3, 4)), "`split` must be 3 numbers of pairs, of 6 at most"),
    (("rope(split=(3, 4))", Grid(3, 4)), "`split` must be 2 numbers of pairs, of 6 at most"),
    (("rope(scaling='yarn', reference=(16, 16))", Grid(2, 3, 4)), "`reference` must have 3 sides"),
    (("mrope", Grid(2, 2, 2, 2)), "`grid` must have time, rows and columns at most with mrope, got 4 axes"),
    call=lambda case: build_position(case[1], dim=DIM, depth=1, num_heads=HEADS, encoding=case[0])(case[1]),
)


@in_turn("encoding", ["relative_bias + log_n", "continuous_bias", "irpe", "rope", "rope_mixed"])
def test_windows_have_the_position_of_a_window_whatever_the_image(encoding):
    sizes = {"img_size": 32, "embed_dim": DIM, "depths": (2, 1), "num_heads": (HEADS, HEADS), "window_size": 4}
    model = draw(graticule.create_model("swin_tiny_patch4_window7_224", encoding=encoding, **sizes)).double().eval()
    for size in ((64, 48), (48, 96)):
        for there, here in list(zip(model.position(model.grid_at(size)), model.position(model.grid), strict=True))[:2]:
            assert_same(values(there, 16), values(here, 16), atol=0)
