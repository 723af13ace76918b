"""Encodings of texts, films and volumes: laws that connect grids of different numbers of axes."""

import copy
import itertools

import pytest
import torch

from graticule import Grid, LayerPosition, Points, build_position
from graticule.encodings import ENCODINGS
from graticule.encodings.forms.mixing import TokenMixing
from graticule.layers.attention import Attention
from graticule.position.bias import Bias
from graticule.position.displacement import Displacements
from in_turn import in_turn

DIM, DEPTH, HEADS = 48, 2, 4

#: Encodings that depend on coordinates through formulas or small networks, and take points.
COMPUTED = [
    "sinusoidal_2d",
    "fourier",
    "fourier(coordinates='patches')",
    "coordinates",
    "rope",
    "rope(coordinates='separate', split=(2, 3))",
    "rope_mixed",
    "rope_golden_gate(coordinates='patches')",
    "liere",
    "mrope",
    "pope",
    "alibi",
    "alibi(distance='manhattan')",
    "alibi(distance='squared')",
    "alibi(distance='axes')",
    "fire",
    "fire(form='axes')",
    "kerple",
    "kerple(kernel='power')",
    "sandwich",
    "continuous_bias",
    "mlp_bias",
    "gqpe_bias",
    "irpe(method='euclidean', on='qkv')",
    "irpe(method='cross', on='k')",
    "pape",
    "pape(rotation_invariant=True)",
    "gpsa",
    "log_n",
]
#: Encodings with parts for each axis, so that the parts of a film are others.
_PER_AXIS = ("alibi(distance='axes')", "irpe(method='cross'")
#: Encodings whose film of one frame, and whose one row, equals the image, or text, with the same parameters.
SAME = [
    *(name for name in COMPUTED if not name.startswith(("sinusoidal", "rope", "pope", *_PER_AXIS))),
    "rope_1d",
    "rope_mixed",
    "sinusoidal_1d",
    "learnable",
    "factorized",
    "relative_bias",
    "relative_bias(prefix_rows=True)",
    "decomposed",
    "shaw",
    "bucketed_bias",
    "lrpe",
    "sgu",
    "global_filter",
    "ggqpe",
    "ggqpe(form='gamma_released')",
    "ggqpe(form='alpha')",
    "token_mlp",
]
#: Distances alone, so that the order of the axes does not matter.
ISOTROPIC = [
    "alibi",
    "alibi(distance='manhattan')",
    "alibi(distance='squared')",
    "fire",
    "kerple",
    "sandwich",
    "irpe(method='euclidean', on='qkv')",
    "irpe(method='quant')",
    "pape(rotation_invariant=True)",
    "log_n",
]


def mixes(encoding):
    return any(issubclass(ENCODINGS[spec.name], TokenMixing) for spec in ENCODINGS.specs(encoding))


def built(grid, encoding):
    """Build a position in float64 with random parameters, drawn by their names."""
    torch.set_default_dtype(torch.float64)
    try:
        position = build_position(grid, dim=DIM, depth=DEPTH, num_heads=HEADS, encoding=encoding).double().eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in position.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    return position


def values(position: LayerPosition, tokens):
    """Return all that a layer gets, its functions evaluated at fixed tokens, as tensors."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, q, w = draw(2, tokens, DIM), draw(2, HEADS, tokens, DIM // HEADS), draw(2, HEADS, tokens, tokens).softmax(-1)
    found = {name: getattr(position, name) for name in ("pre", "inner", "query_scale", "spatial_bias")}
    if position.bias is not None:
        found["bias"] = Bias.of(position.bias).table(q)
    if position.token_bias is not None:
        found["bias"] = Bias.of(position.token_bias(x)).table(q)
    for name, at in (("key_bias", q), ("value_bias", w), ("before", x), ("after", x), ("inputs", x)):
        if getattr(position, name) is not None:
            found[name] = getattr(position, name)(at)
    if position.rotary is not None:
        q, k = position.rotary(q, q.flip(0))
        found["rotary"] = q @ k.mT
    if position.positional is not None:
        found |= position.positional._asdict()
    if position.mixing is not None:
        mixing = position.mixing
        found["mixing"] = mixing.matrix() if isinstance(mixing, Displacements) else mixing
        if not isinstance(found["mixing"], torch.Tensor):
            found["mixing"] = mixing.mix(x)
    return {name: value for name, value in found.items() if value is not None}


def assert_same(one, two, tokens):
    assert len(one) == len(two) == DEPTH and any(values(each, tokens) for each in one)
    for first, second in zip(one, two, strict=True):
        first, second = values(first, tokens), values(second, tokens)
        assert first.keys() == second.keys()
        for name, value in first.items():
            torch.testing.assert_close(value, second[name], rtol=0, atol=1e-12)


def shared_parameters(source, target):
    """Copy parameters to an encoding of one more axis: what it has of that axis keeps its random values.

    Along an axis of a parameter that is longer by one, the values of the new axis are the first, or the last where the
    axes are counted from the last.
    """
    given, random = dict(source.named_parameters()), dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if "scales" in name:
            buffer.copy_(random[name])
    for name, parameter in target.named_parameters():
        if name not in given:
            continue
        value = given[name].data
        if value.numel() == parameter.numel():
            value = value.view(parameter.shape)  # a filter of one frame has one more axis
        elif value.shape != parameter.shape:
            last_first = "freqs" in name or "center" in name or "matrix" in name
            at = 2 if name.endswith("pos_proj.weight") else None  # (x, y, squared distance)
            for axis, (old, new) in enumerate(zip(value.shape, parameter.shape, strict=True)):
                if old != new:
                    assert new == old + 1, name
                    place = (value.shape[axis] - 1 if at else old) if last_first or at else 0
                    fresh = parameter.data.narrow(axis, place, 1)
                    for other in range(value.ndim):
                        fresh = fresh if other == axis else fresh.narrow(other, 0, value.shape[other])
                    fresh = 0 * fresh if "matrix" in name else fresh  # a Gaussian whose axes are independent
                    parts = value.split([place, old - place], axis)
                    value = torch.cat([parts[0], fresh, parts[1]], axis)
        parameter.data = value.clone()


@in_turn("encoding", SAME)
@in_turn("shape", [(5,), (3, 4)])
@torch.no_grad()
def test_a_film_of_one_frame_is_the_image_and_one_row_is_the_text(encoding, shape):
    prefix = 0 if mixes(encoding) else 1
    lower, higher = Grid(*shape, prefix=prefix), Grid(1, *shape, prefix=prefix)
    if encoding == "mrope" and len(shape) == 1:
        return  # in a text all frequencies are of the index, as in its models
    one, two = built(lower, encoding), built(higher, encoding)
    shared_parameters(one, two)
    if encoding == "factorized":  # the row of the one frame is added to all
        two.encodings[0].get_parameter(two.encodings[0].names[0]).zero_()
    if encoding == "shaw" or encoding == "decomposed":  # the vector of no displacement is added to all
        for each in two.encodings:
            getattr(each, each.names[0]).zero_()
    assert_same(one(lower), two(higher), lower.tokens)


@in_turn("encoding", ["rope(split=(0, 3, 3))", "rope(split=(0, 2, 4), order='xy', layout='half')", "mrope"])
@torch.no_grad()
def test_a_film_of_one_frame_is_the_image_where_time_has_no_channels_of_an_axis(encoding):
    lower, higher = Grid(3, 4, prefix=1), Grid(1, 3, 4, prefix=1)
    image = encoding.replace("(0, ", "(")
    assert_same(built(lower, image)(lower), built(higher, encoding)(higher), lower.tokens)


@in_turn("encoding", ISOTROPIC)
@in_turn("order", [(1, 0, 2), (2, 0, 1)])
@torch.no_grad()
def test_permuting_the_axes_of_the_grid_permutes_the_result(encoding, order):
    shape = (2, 3, 4)
    grid, other = Grid(*shape, prefix=1), Grid(*(shape[axis] for axis in order), prefix=1)
    index = torch.arange(24).view(shape).permute(order).flatten()
    index = torch.cat([torch.zeros(1, dtype=torch.int64), index + 1])
    first, second = built(grid, encoding), built(other, encoding)
    second.load_state_dict({**first.state_dict(), **{n: b for n, b in second.named_buffers() if "reference" in n}})
    for one, two in zip(first(grid), second(other), strict=True):
        for name in ("bias", "query_scale"):
            a, b = getattr(one, name), getattr(two, name)
            if isinstance(a, torch.Tensor):
                a = a[..., index] if name == "query_scale" else a[..., index, :][..., index]
                torch.testing.assert_close(b, a, rtol=0, atol=1e-12)
            elif a is not None:
                q = torch.randn(1, HEADS, 25, DIM // HEADS, dtype=torch.float64)
                a, b = Bias.of(a).table(q), Bias.of(b).table(q[:, :, index])
                torch.testing.assert_close(b, a[..., index, :][..., index], rtol=0, atol=1e-12)
        if one.token_bias is not None:
            x = torch.randn(1, 25, DIM, dtype=torch.float64)
            a, b = one.token_bias(x).table(), two.token_bias(x[:, index]).table()
            torch.testing.assert_close(b, a[..., index, :][..., index], rtol=0, atol=1e-12)


@in_turn("name", ["factorized", "shaw", "decomposed", "learnable", "relative_bias", "rope_mixed", "liere", "mlp_bias"])
@torch.no_grad()
def test_permuting_the_axes_of_the_parameters_and_of_the_grid_permutes_the_result(name):
    shape, order = (2, 3, 4), (2, 0, 1)
    grid, other = Grid(*shape), Grid(*(shape[axis] for axis in order))
    index = torch.arange(24).view(shape).permute(order).flatten()
    first, second = built(grid, name), built(other, name)
    theirs = dict(second.named_parameters())
    own = dict(first.named_parameters())
    for key, parameter in theirs.items():
        letters = "thw" if "rel_pos" in key else "tyx"
        if key[-2] == "_" and key[-1] in letters:
            parameter.copy_(own[key[:-1] + letters[order[letters.index(key[-1])]]])
        elif key.endswith("pos_embed"):
            parameter.copy_(own[key].unflatten(1, shape).permute(0, *(axis + 1 for axis in order), 4).flatten(1, 3))
        elif key.endswith("bias_table"):
            table = own[key].unflatten(0, grid.table).permute(*order, 3)
            parameter.copy_(table.flatten(0, 2))
        elif key.endswith("generators"):
            parameter.copy_(own[key][list(order)])
        elif key.endswith("freqs"):  # the last axis first
            parameter.copy_(own[key].flip(0)[list(order)].flip(0))
        elif key.endswith("fc1.weight"):
            parameter.copy_(own[key][:, list(order)])
        else:
            parameter.copy_(own[key])
    q = torch.randn(1, HEADS, 24, DIM // HEADS, dtype=torch.float64)
    for one, two in zip(first(grid), second(other), strict=True):
        if one.pre is not None:
            torch.testing.assert_close(two.pre, one.pre[index], rtol=0, atol=1e-12)
        if one.bias is not None:
            a, b = Bias.of(one.bias).table(q), Bias.of(two.bias).table(q[:, :, index])
            torch.testing.assert_close(b, a[..., index, :][..., index], rtol=0, atol=1e-12)
        if one.rotary is not None:
            (a, k), (b, j) = one.rotary(q, q), two.rotary(q[:, :, index], q[:, :, index])
            torch.testing.assert_close(b @ j.mT, (a @ k.mT)[..., index, :][..., index], rtol=0, atol=1e-12)


@in_turn("encoding", [one for one in (*ENCODINGS, *COMPUTED, *SAME) if one not in ("none", "log_n")])
@torch.no_grad()
def test_a_position_that_was_moved_to_a_grid_is_one_that_is_built_for_it_with_its_parameters(encoding):
    first, other = (Grid(*shape, prefix=0 if mixes(encoding) else 1) for shape in ((3, 4), (5, 2)))
    moved = built(first, encoding)
    passing = moved(other)
    moved.set_grid(other)
    assert_same(moved(other), passing, other.tokens)
    again = built(other, encoding)
    again.load_state_dict(moved.state_dict())
    assert_same(again(other), moved(other), other.tokens)


@in_turn("encoding", ENCODINGS)
@torch.no_grad()
def test_in_bfloat16_a_position_is_the_exact_one_up_to_its_digits(encoding):
    grid = Grid(3, 4, prefix=0 if mixes(encoding) else 1)
    exact = built(grid, encoding).float()
    rounded = copy.deepcopy(exact).bfloat16()
    for one, two in zip(exact(grid), rounded(grid), strict=True):
        for name in ("pre", "inner", "bias", "mixing", "spatial_bias"):
            value, other = getattr(one, name), getattr(two, name)
            if isinstance(value, torch.Tensor):
                assert value.dtype == torch.float32 and other.dtype == torch.bfloat16, name
                torch.testing.assert_close(other.float(), value, rtol=2**-6, atol=2**-4)


@in_turn("encoding", COMPUTED)
@torch.no_grad()
def test_points_on_a_grid_are_the_grid(encoding):
    grid = Grid(3, 4, prefix=1)
    position = built(grid, encoding)
    assert_same(position(grid), position(Points(grid.coordinates().double(), prefix=1)), grid.tokens)


@in_turn("encoding", [name for name in COMPUTED if name != "log_n"])
@torch.no_grad()
def test_points_follow_their_coordinates_and_not_their_order(encoding):
    places = torch.tensor([[0.5, 2.25], [1.75, 0.0], [2.0, 3.0], [0.25, 1.5]], dtype=torch.float64)
    position, index = built(Grid(3, 4), encoding), torch.tensor([2, 0, 3, 1])
    first, second = position(Points(places)), position(Points(places[index]))
    q, x = torch.randn(1, HEADS, 4, DIM // HEADS, dtype=torch.float64), torch.randn(1, 4, DIM, dtype=torch.float64)
    for one, two in zip(first, second, strict=True):
        if one.pre is not None:
            torch.testing.assert_close(two.pre, one.pre[index], rtol=0, atol=1e-12)
            assert not torch.allclose(two.pre, one.pre)
        pairs = []
        if one.bias is not None:
            pairs = [Bias.of(one.bias).table(q), Bias.of(two.bias).table(q[:, :, index])]
        if one.token_bias is not None:
            pairs = [one.token_bias(x).table(), two.token_bias(x[:, index]).table()]
        if one.positional is not None:
            pairs = [one.positional.weights, two.positional.weights]
        if one.rotary is not None:
            (a, k), (b, j) = one.rotary(q, q), two.rotary(q[:, :, index], q[:, :, index])
            pairs = [a @ k.mT, b @ j.mT]
        if pairs:
            torch.testing.assert_close(pairs[1], pairs[0][..., index, :][..., index], rtol=0, atol=1e-12)


@in_turn("encoding", COMPUTED)
@torch.no_grad()
def test_points_of_each_sample_are_computed_as_those_of_one(encoding):
    places = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64).abs()
    position = built(Grid(3, 4, prefix=1), encoding)
    together = position(Points(places, prefix=1))
    assert values(together[0], 6)
    for sample in range(2):
        for one, two in zip(together, position(Points(places[sample], prefix=1)), strict=True):
            found, alone = values(one, 6), values(two, 6)
            assert found.keys() == alone.keys()
            for name, value in alone.items():
                own = found[name][sample]
                expected = value[sample] if value.ndim == found[name].ndim else value.reshape(own.shape)
                torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_attention_takes_points_of_each_sample():
    attention = Attention(DIM, HEADS).double().eval()
    position = built(Grid(3, 4), "fourier + rope_mixed + alibi")
    places, x = torch.rand(2, 5, 2, dtype=torch.float64), torch.randn(2, 5, DIM, dtype=torch.float64)
    (together, _), each = position(Points(places)), [position(Points(one))[0] for one in places]
    found = attention(together.enter(x), together)
    for sample, one in enumerate(each):
        alone = attention(one.enter(x[sample : sample + 1]), one)
        torch.testing.assert_close(found[sample : sample + 1], alone, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"`places` must be \(N, axes\), one row per token, or \(B, N, axes\)"):
        Points(torch.rand(2, 3, 5, 2))
    with pytest.raises(ValueError, match="`places` must be finite numbers"):
        Points(torch.tensor([[0.0, torch.nan]]))


@in_turn(
    "encoding",
    ["learnable", "factorized", "relative_bias", "decomposed", "shaw", "bucketed_bias", "rope_1d", "sinusoidal_1d"],
)
def test_points_are_refused_with_the_choice_where_there_is_a_table_or_an_order(encoding):
    points = Points(torch.rand(5, 2))
    with pytest.raises(ValueError, match=r"`grid` must be a Grid, got Points: .*fourier, .*alibi"):
        values(built(Grid(3, 4), encoding)(points)[0], points.tokens)


@in_turn("encoding", ["sinusoidal_2d", "alibi", "fire", "kerple", "pape", "rope_mixed", "fourier(coordinates='max')"])
@torch.no_grad()
def test_coordinates_are_in_the_unit_of_the_spacing(encoding):
    """Twice the spacing on an axis is every second patch of a grid that is twice as long there."""
    fine, coarse = Grid(2, 6, 4), Grid(2, 3, 4, spacing=(1, 2, 1))
    position = built(Grid(4, 6, 4), encoding)
    index = torch.arange(48).view(2, 6, 4)[:, ::2].flatten()
    if encoding.startswith("fourier"):  # centers of larger patches: the offset of half a patch is twice as far
        places = build_position(coarse, dim=DIM, depth=1, num_heads=HEADS, encoding=encoding).encodings[0].coordinates
        pairs = places(fine).view(2, 3, 2, 4, 3).mean(2).flatten(0, 2)
        torch.testing.assert_close(places(coarse)[:, 1], pairs[:, 1], rtol=0, atol=1e-15)
        return
    for one, two in zip(position(fine), position(coarse), strict=True):
        for name, value in values(two, coarse.tokens).items():
            if name == "pre":
                torch.testing.assert_close(value, one.pre[index], rtol=0, atol=1e-12)
            if isinstance(one.bias, torch.Tensor) and encoding != "fire":  # relative to the largest distance
                torch.testing.assert_close(value, one.bias[:, index][..., index], rtol=0, atol=1e-12)


def test_each_encoding_is_built_for_texts_and_films_or_says_why_not():
    refused = set()
    for name, shape in itertools.product(ENCODINGS, [(6,), (2, 3, 4)]):
        grid = Grid(*shape)
        try:
            given = build_position(grid, dim=DIM, depth=DEPTH, num_heads=HEADS, encoding=name)(grid)
            assert len(given) == DEPTH
        except ValueError as error:
            refused.add((name, len(shape)))
            assert "axes" in str(error), name
    assert refused == {("per_frame", 1)}  # a film of points without an axis


@in_turn("encoding", ["learnable", "rope", "mlp_bias", "lrpe", "shaw", "coordinates", "log_n"])
def test_a_grid_of_another_number_of_axes_is_refused(encoding):
    position = build_position(Grid(3, 4), dim=DIM, depth=1, num_heads=HEADS, encoding=encoding)
    for grid, count in ((Grid(12), 1), (Grid(2, 3, 4), 3)):
        with pytest.raises(ValueError, match=rf"`grid` must have 2 axes \(images\), .* got {count}"):
            position(grid)


@in_turn(
    ("encoding", "shape", "message"),
    [
        ("rope(split=(2, 4))", (2, 3, 4), "`split` must be 3 numbers of pairs, of 6 at most"),
        ("rope(split=(3, 4))", (3, 4), "`split` must be 2 numbers of pairs, of 6 at most"),
        ("rope(scaling='yarn', reference=(16, 16))", (2, 3, 4), "`reference` must have 3 sides"),
        ("mrope", (2, 2, 2, 2), "`grid` must have time, rows and columns at most with mrope, got 4 axes"),
        ("alibi(distance='axes')", (1, 2, 2, 2, 2), "`num_heads` must be at least 5"),
    ],
)
def test_options_that_do_not_fit_the_axes_are_refused(encoding, shape, message):
    with pytest.raises(ValueError, match=message):
        build_position(Grid(*shape), dim=DIM, depth=1, num_heads=HEADS, encoding=encoding)(Grid(*shape))
