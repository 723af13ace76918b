"""Names are built into modules: valid pairs, numbers of parameters, and refusals."""

import sys
from pathlib import Path

import pytest
import torch

import graticule
from graticule import Grid, build_position, encodings
from graticule.encodings.conditional import ConvolutionalProjection, Peg, QueryKeyPeg
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.forms.bias import BiasPosition, NormalizedBias
from graticule.encodings.forms.mixing import TokenMixing
from graticule.encodings.learnable import Learnable
from graticule.encodings.relative_bias import RelativeBias
from graticule.encodings.shaw import ShawBias
from graticule.encodings.sinusoidal import Sinusoidal2d
from graticule.position.displacement import TokenMlp
from graticule.position.joining import JOININGS, Lape, Unshared
from graticule.position.position import ENCODINGS, NoPosition
from in_turn import in_turn, refusals
from tiny import DEPTH, DIM, count, spec, takes, tiny

GRID = Grid(4, 4, prefix=1)


def build(encoding="learnable", joining="default", **kwargs):
    return build_position(GRID, dim=24, depth=3, num_heads=3, encoding=encoding, joining=joining, **kwargs)


@in_turn("encoding", ENCODINGS)
def test_a_pair_is_built_or_refused_with_a_reason(encoding):
    flat = Grid(4, 4)
    mixes = issubclass(ENCODINGS[encoding], TokenMixing)
    for joining in JOININGS:
        if mixes and joining == "default":
            positions = build_position(flat, dim=24, depth=3, num_heads=3, encoding=encoding)(flat)
            for layer in positions:
                if isinstance(layer.mixing, TokenMlp):
                    assert layer.mixing.first.shape[1] == layer.mixing.second.shape[0] == 16
                else:  # the periodic weights of a global filter are not computed
                    weights = layer.mixing if isinstance(layer.mixing, torch.Tensor) else layer.mixing.matrix()
                    assert weights.shape[1:] == (16, 16)
            assert len(positions) == DEPTH
            with pytest.raises(ValueError, match="`grid` must have no prefix tokens"):  # they have no position
                build(encoding)
        elif takes(joining, encoding):
            assert len(build(encoding, joining)(GRID)) == DEPTH, joining
        else:
            with pytest.raises(ValueError, match=rf"`joining` must (be .*|not be )'.*{joining}"):
                build(encoding, joining)


@in_turn("encoding", ENCODINGS)
def test_parameters_that_start_at_random_are_drawn_again_each_time(encoding):
    grid = Grid(4, 4) if issubclass(ENCODINGS[encoding], TokenMixing) else GRID
    one, other = (build_position(grid, dim=24, depth=3, num_heads=3, encoding=encoding) for _ in range(2))
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    at_random = {name for (name, value), again in pairs if not torch.equal(value, again)}
    makers = {name: part for name, part in one.named_modules() if hasattr(part, "reset_parameters")}
    redrawn = {name for at, part in makers.items() for name, _ in part.named_parameters(prefix=at)}
    for _ in range(2):
        before = {name: value.detach().clone() for name, value in one.named_parameters()}
        for part in makers.values():
            part.reset_parameters()
        assert at_random & redrawn <= {
            name for name, value in one.named_parameters() if not torch.equal(value, before[name])
        }


def test_every_file_of_the_folder_is_imported_and_its_classes_are_public():
    files = {path.stem for path in Path(encodings.__file__).parent.glob("[!_]*.py")}
    imported = {name.removeprefix("graticule.encodings.") for name in sys.modules if name.startswith("graticule.enc")}
    assert files <= imported
    ours = [kind for kind in ENCODINGS.values() if kind.__module__.startswith("graticule.")]
    assert ours and all(getattr(encodings, kind.__name__) is kind for kind in ours)
    assert {kind.__name__ for kind in ours} <= set(encodings.__all__)
    assert graticule.list_encodings() == list(ENCODINGS) and graticule.list_joinings() == list(JOININGS)
    assert [graticule.list_decompositions()[at] for at in (0, -1)] == ["w", "layer_norm"]


def test_names_become_the_classes_of_their_names():
    position = build("sinusoidal_2d", "lape")
    assert isinstance(position.encodings[0], Sinusoidal2d) and type(position.joining) is Lape
    assert isinstance(build("none"), NoPosition)
    assert [type(bias) for bias in build("relative_bias").encodings] == [RelativeBias] * DEPTH
    assert [type(bias) for bias in build("relative_bias", "lape").encodings] == [NormalizedBias] * DEPTH
    beside = build("learnable+relative_bias", "lape")
    assert [type(bias) for bias in beside.parts[1].encodings] == [RelativeBias] * DEPTH
    assert [type(bias) for bias in build("shaw").encodings] == [ShawBias] * DEPTH
    assert [type(peg) for peg in build("peg").pegs.values()] == [Peg]
    assert [type(peg) for peg in build("peg(acts_on='queries_keys')").inputs.values()] == [QueryKeyPeg]
    assert build(Peg.options(kernel=7)).pegs["0"].proj[0].kernel_size == (7, 7)  # in Python as in the text
    assert [type(p) for p in build("convolutional_projection").inputs.values()] == [ConvolutionalProjection]


@pytest.mark.parametrize("joining", ["lape", "lape_sharing"])
def test_the_decompositions_add_0_1_d_2d_0_1_d_2d_a_layer(joining):
    default = count(tiny("learnable", "default"))
    counts = [
        count(tiny("learnable", spec(joining, decomposition=name))) - default
        for name in graticule.list_decompositions()
    ]
    assert counts == [DEPTH * of_layer for of_layer in (0, 1, DIM, 2 * DIM, 0, 1, DIM, 2 * DIM)]


test_invalid_arguments_are_refused_by_name = refusals(
    ({"encoding": "learnabel"}, r"`encoding` must be one of .*got 'learnabel'; did you mean 'learnable'"),
    ({"encoding": "sinusoidal"}, r"got 'sinusoidal'; did you mean 'sinusoidal_\dd' or 'sinusoidal_\dd'"),
    ({"encoding": "learnable+relatve_bias"}, r"got 'relatve_bias'; did you mean 'relative_bias'"),
    ({"encoding": ""}, r"`encoding` must be a name, .*got ''"),
    ({"joining": "lap"}, r"`joining` must be one of .*got 'lap'; did you mean 'lape'"),
    ({"joining": "LaPE!?"}, r"`joining` must be a name, .*got 'LaPE!\?'"),
    ({"joining": "lape+default"}, r"`joining` must be one joining, got lape\+default"),
    (
        {"joining": "lape(decomposition='layernorm')"},
        r"`decomposition` of joining lape must be .*'layer_norm'.*got 'layernorm'",
    ),
    ({"joining": "default(decomposition='norm')"}, r"`joining` default must not have the option 'decomposition'"),
    ({"joining": "shared(decomposition='norm')"}, r"the options are layers"),
    (
        {"encoding": "relative_bias", "joining": "lape(decomposition='norm')"},
        r"`decomposition` must go with an absolute encoding",
    ),
    ({"joining": "lape(over='heads')"}, r"`over` must be left out unless a relative bias is joined"),
    ({"joining": "default(layers=2)"}, r"`layers` must be left out with joining 'default'"),
    ({"joining": "lape(layers=0)"}, r"`layers` must be from 1 to .*3, got 0"),
    ({"joining": "lape(layers=4)"}, r"`layers` must be from 1 to .*3, got 4"),
    ({"encoding": "relative_bias", "joining": "default(layers=4)"}, r"`layers` must be from 1 to .*3, got 4"),
    ({"encoding": "none", "joining": "lape"}, r"`joining` must be 'default' with encoding 'none'.*got 'lape'"),
    ({"encoding": "none+learnable"}, r"`encoding` must name each encoding once per layer, and 'none' alone"),
    ({"encoding": "learnable+learnable"}, r"`encoding` must name each encoding once"),
    ({"encoding": "learnable+sinusoidal_1d"}, r"one absolute encoding at most, got learnable and sinusoidal_1d"),
    ({"encoding": "sinusoidal_1d", "joining": "unshared"}, r"`joining` must not be 'unshared' .*'sinusoidal_1d'"),
    ({"encoding": "relative_bias", "joining": "shared"}, r"`joining` must be 'default' or 'lape'.*got 'shared'"),
    ({"encoding": "peg", "joining": "lape"}, r"'default' with encoding 'peg': there is nothing to join, got 'lape'"),
    (
        {"encoding": "peg+convolutional_projection", "joining": "lape"},
        r"`joining` must be 'default' with encoding 'peg \+ convolutional_projection'.*got 'lape'",
    ),
    ({"encoding": "peg+relative_bias", "joining": "shared"}, r"`joining` must be 'default' or 'lape'.*'shared'"),
    ({"encoding": "shaw", "joining": "lape"}, r"'default' with encoding 'shaw': .* to join, got 'lape'"),
    ({"encoding": "none", "joining": "default(layers=2)"}, r"`layers` of the joining must be left out .*'none'"),
    ({"encoding": "peg", "joining": "default(layers=1)"}, r"`layers` of the joining must be left out .*'peg'"),
    ({"encoding": "peg+learnable", "joining": "default(layers=2)"}, r"`layers` must be left out with joining 'defa"),
    ({"encoding": "learnable(kernel=5)"}, r"`encoding` learnable must not have the option 'kernel': .* are std,"),
    ({"encoding": "none(places=[1])"}, r"`encoding` none must not have the option 'places': it has no options"),
    ({"encoding": "shaw(clip=0)"}, r"`clip` of encoding shaw must be at least 1, got 0"),
    ({"encoding": "learnable+relative_bias(clip=4)"}, r"`encoding` relative_bias must not have the option 'clip'"),
    ({"encoding": "shaw(clip=1.5)"}, r"`clip` of encoding shaw .*got 1.5"),
    ({"encoding": "sinusoidal_2d(std=1.0)"}, r"must not have the option 'std': the options are temperature"),
    ({"encoding": "learnable(std=-0.1)"}, r"`std` of encoding learnable must be at least 0, got -0.1"),
    ({"encoding": "learnable(std=1e999)"}, r"`std` of encoding learnable must be a finite number, got inf"),
    ({"encoding": "learnable(std='1')"}, r"`std` of encoding learnable .*got '1'"),
    call=lambda kwargs: build(**kwargs),
)


test_other_numbers_of_encodings_than_the_joining_takes_are_refused = refusals(
    (lambda: JoinedPosition([Learnable(GRID, 24)], Unshared(3)), "`encodings` must be as many as Unshared .* 3, got 1"),
    (lambda: BiasPosition([RelativeBias(GRID, 3)] * 4, 3), "`biases` must be from 1 to 3, one per layer, got 4"),
)


_DIFFERENT = r"`places` must be different layers, at least one, such as \[0, 1, 2\], got"
_KNOWN = "convolutional_projection must not have the option .*he options are kernel, padding, bias, places, frozen"


test_invalid_options_of_conditional_encodings_are_refused = refusals(
    (("peg", {"place": 1}), r"`encoding` peg must not have the option 'place'; did you mean 'places'\?"),
    (("peg", {"kernel_size": 3}), r"option 'kernel_size'; did you mean 'kernel'\?"),
    (("peg", {"kernel": 3, "xyzzy": 3}), r"option 'xyzzy': the options are kernel, convolution, .*frozen\.$"),
    (("peg", {"acts_on": "values"}), r"`acts_on` of encoding peg .*'tokens' or 'queries_keys'.*got 'values'"),
    (("peg", {"kernel": 4}), r"`kernel` must be odd, so that it has a center, got 4"),
    (("peg", {"convolution": "sparse"}), r"`convolution` of encoding peg .*'separable' or 'dense'.*got 'sparse'"),
    (("peg", {"padding": "same"}), r"`padding` of encoding peg .*got 'same'"),
    (("peg", {"layers": 0}), r"`layers` must be at least 1, got 0"),
    *((("peg", {"places": same}), _DIFFERENT) for same in ((), [], (0, 0), (1, -1, 1))),
    *(
        (("peg", {"places": places}), "`places` of encoding peg must be")
        for places in (("0",), "12", (0.5,), None, True)
    ),
    (("peg", {"places": (0, 3)}), r"`places` must be from -1, before the first of the 3 layers, to 2, got 3"),
    (("peg", {"places": -2}), r"`places` must be from -1, .* to 2, got -2"),
    (("peg", {"places": 2, "acts_on": "queries_keys"}), r"`places` must be from -1, .* to 1, got 2"),
    *(
        (("convolutional_projection", {"places": place}), rf"`places` must be from -1, .* to 1, got {place}")
        for place in (2, -2)
    ),
    (
        ("convolutional_projection", {"padding": "none"}),
        r"`padding` must keep the grid's size to convolve queries, got 'none'",
    ),
    (("convolutional_projection", {"convolution": "dense"}), _KNOWN),
    (("convolutional_projection", {"layers": 2}), _KNOWN),
    (("convolutional_projection", {"acts_on": "queries_keys"}), _KNOWN),
    (("convolutional_projection", {"kernel": 5, "layers": 3}), _KNOWN),
    call=lambda case: build(spec(case[0], **case[1])),
)


@in_turn("joining", graticule.list_joinings())
@in_turn("conditional", ["peg", "convolutional_projection", "shaw"])
def test_beside_an_absolute_encoding_what_is_made_from_tokens_stays_as_it_is(conditional, joining):
    alone, table = build(conditional)(GRID), build("learnable", joining)(GRID)
    both = build(f"{conditional}+learnable", joining)(GRID)
    for layer, (mine, single, joined) in enumerate(zip(both, alone, table, strict=True)):
        for field, value in zip(mine._fields, mine, strict=True):
            told = getattr(single, field) is not None or getattr(joined, field) is not None
            assert (value is not None) == told, (layer, field)
