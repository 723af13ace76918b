"""Names become modules: which pairs there are, how many parameters they have, what is refused and how."""

import itertools

import pytest
import torch

import graticule
from graticule import Grid, LayerPosition, build_position
from graticule.encodings import Learnable, NormalizedBias, RelativeBias, Sinusoidal2d
from graticule.joining import Lape, Unshared
from graticule.position import BiasPosition, JoinedPosition, NoPosition
from tiny import DEPTH, DIM, PAIRS, TOKENS, count, images, tiny

GRID = Grid(4, 4, prefix=1)
TABLE = TOKENS * DIM


def build(encoding="learnable", joining="default", **kwargs):
    return build_position(GRID, dim=24, depth=3, num_heads=3, encoding=encoding, joining=joining, **kwargs)


@pytest.mark.parametrize(
    ("encoding", "joining"), list(itertools.product(graticule.list_encodings(), graticule.list_joinings()))
)
def test_a_pair_is_built_or_refused_with_a_reason(encoding, joining):
    if (encoding, joining) in PAIRS:
        assert len(build(encoding, joining)(GRID)) == DEPTH
    else:
        with pytest.raises(ValueError, match=r"`joining` must (be|not be) .*'"):
            build(encoding, joining)


def test_the_names_are_listed_in_the_order_of_the_papers():
    assert graticule.list_encodings() == ["none", "learnable", "sinusoidal_1d", "sinusoidal_2d", "relative_bias"]
    assert graticule.list_joinings() == ["default", "shared", "unshared", "lape_sharing", "lape"]
    assert graticule.list_decompositions()[0] == "w"
    assert graticule.list_decompositions()[-1] == "layer_norm"


def test_names_become_the_classes_of_their_names():
    position = build("sinusoidal_2d", "lape")
    assert isinstance(position.encodings[0], Sinusoidal2d)
    assert type(position.joining) is Lape
    assert isinstance(build("none"), NoPosition)
    assert [type(bias) for bias in build("relative_bias").encodings] == [RelativeBias] * DEPTH
    assert [type(bias) for bias in build("relative_bias", "lape").encodings] == [NormalizedBias] * DEPTH


@pytest.mark.parametrize(
    ("encoding", "joining", "extra"),
    [
        ("none", "default", -TABLE),
        ("learnable", "shared", 0),
        ("learnable", "unshared", (DEPTH - 1) * TABLE),
        ("learnable", "lape_sharing", 2 * DIM * DEPTH),
        ("learnable", "lape", 2 * DIM * DEPTH),
        ("sinusoidal_1d", "default", 0),
        ("sinusoidal_2d", "lape", 2 * DIM * DEPTH),
        ("relative_bias", "default", -TABLE + DEPTH * 7 * 7 * 3),
        ("relative_bias", "lape", -TABLE + DEPTH * (7 * 7 * 3 + 2 * 16)),
        ("learnable+relative_bias", "lape", 2 * DIM * DEPTH + DEPTH * 7 * 7 * 3),
    ],
)
def test_parameters_beyond_those_of_learnable_default(encoding, joining, extra):
    assert count(tiny(encoding, joining)) - count(tiny("learnable", "default")) == extra


@pytest.mark.parametrize("eta", range(1, DEPTH + 1))
@pytest.mark.parametrize(
    ("encoding", "joining", "each", "less"),
    [
        ("learnable", "shared", 0, 0),
        ("learnable", "unshared", TABLE, TABLE),
        ("learnable", "lape", 2 * DIM, 0),
        ("learnable", "lape_sharing", 2 * DIM, 0),
        ("relative_bias", "default", 147, TABLE),
    ],
)
def test_eta_joined_layers_have_eta_times_the_parameters_of_one(encoding, joining, each, less, eta):
    default = count(tiny("learnable", "default"))
    assert count(tiny(encoding, joining, joined_layers=eta)) - default == each * eta - less


@pytest.mark.parametrize("joining", ["lape", "lape_sharing"])
def test_the_decompositions_add_0_1_d_2d_0_1_d_2d_a_layer(joining):
    default = count(tiny("learnable", "default"))
    counts = [
        count(tiny("learnable", joining, decomposition=name)) - default for name in graticule.list_decompositions()
    ]
    assert counts == [DEPTH * own for own in (0, 1, DIM, 2 * DIM, 0, 1, DIM, 2 * DIM)]


@pytest.mark.parametrize("joining", ["lape", "lape_sharing"])
def test_the_decomposition_layer_norm_is_lape(joining):
    named, default = tiny("learnable", joining, decomposition="layer_norm").eval(), tiny("learnable", joining).eval()
    default.load_state_dict(named.state_dict(), strict=True)
    x = images()
    assert torch.equal(named(x), default(x))


def test_beside_an_absolute_encoding_a_relative_one_keeps_its_bias_as_it_is():
    positions = build("learnable+relative_bias", "lape")(GRID)
    for position in positions:
        assert position.pre is None
        assert position.inner.shape == (TOKENS, DIM)
        assert position.bias.shape == (3, TOKENS, TOKENS)
        assert position.bias.abs().max() < 0.2  # as it was drawn: not normalised


def test_the_order_of_the_names_does_not_matter():
    a, b = build("learnable+relative_bias", "lape"), build("relative_bias+learnable", "lape")
    assert count(a) == count(b)
    assert [[field is None for field in layer] for layer in a(GRID)] == [
        [field is None for field in layer] for layer in b(GRID)
    ]


def test_eta_leaves_the_later_layers_of_a_relative_bias_empty():
    positions = build("relative_bias", joined_layers=1)(GRID)
    assert positions[0].bias is not None
    assert positions[1:] == [LayerPosition()] * 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"encoding": "learnabel"}, r"`encoding` must be one of .*got 'learnabel'; did you mean 'learnable'\?"),
        ({"encoding": "sinusoidal"}, r"got 'sinusoidal'; did you mean 'sinusoidal_\dd' or 'sinusoidal_\dd'"),
        ({"encoding": "learnable+relatve_bias"}, r"got 'relatve_bias'; did you mean 'relative_bias'\?"),
        ({"encoding": ""}, r"`encoding` must be one of none, learnable, .*got ''"),
        ({"joining": "lap"}, r"`joining` must be one of .*got 'lap'; did you mean 'lape'"),
        ({"joining": "LaPE!?"}, r"`joining` must be one of default, shared, unshared, lape_sharing, lape; got"),
        (
            {"joining": "lape", "decomposition": "layernorm"},
            r"`decomposition` must be one of .*did you mean 'layer_norm'",
        ),
        ({"decomposition": "norm"}, r"`decomposition` must go with .*joining 'lape' or 'lape_sharing'.*'default'"),
        ({"joining": "shared", "decomposition": "norm"}, r"`decomposition` must go with .*'shared'"),
        (
            {"encoding": "relative_bias", "joining": "lape", "decomposition": "norm"},
            r"`decomposition` must go with an absolute encoding .*'relative_bias'",
        ),
        ({"joined_layers": 2}, r"`joined_layers` must be left out with joining 'default'.*got 2"),
        ({"joining": "lape", "joined_layers": 0}, r"`joined_layers` must be from 1 to .*3, got 0"),
        ({"joining": "lape", "joined_layers": 4}, r"`joined_layers` must be from 1 to .*3, got 4"),
        ({"encoding": "relative_bias", "joined_layers": 4}, r"`joined_layers` must be from 1 to .*3, got 4"),
        ({"encoding": "none", "joining": "lape"}, r"`joining` must be 'default' with encoding 'none'.*got 'lape'"),
        ({"encoding": "none+learnable"}, r"`encoding` must name each encoding once, and 'none' alone"),
        ({"encoding": "learnable+learnable"}, r"`encoding` must name each encoding once"),
        ({"encoding": "learnable+sinusoidal_1d"}, r"one absolute encoding at most, got learnable and sinusoidal_1d"),
        ({"encoding": "sinusoidal_1d", "joining": "unshared"}, r"`joining` must not be 'unshared' .*'sinusoidal_1d'"),
        ({"encoding": "sinusoidal_2d", "joining": "unshared"}, r"`joining` must not be 'unshared' .*'sinusoidal_2d'"),
        ({"encoding": "relative_bias", "joining": "shared"}, r"`joining` must be 'default' or 'lape'.*got 'shared'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**kwargs)


def test_joined_layers_without_an_encoding_are_refused_by_their_own_name():
    with pytest.raises(ValueError, match="`joined_layers`"):
        build("none", joined_layers=2)


@pytest.mark.parametrize(("encoding", "dim"), [("sinusoidal_1d", 25), ("sinusoidal_2d", 26)])
def test_a_dim_that_the_formula_cannot_fill_is_refused(encoding, dim):
    with pytest.raises(ValueError, match=f"`dim` must be a multiple of .*got {dim}"):
        build_position(GRID, dim=dim, depth=3, num_heads=3, encoding=encoding)


def test_as_many_encodings_as_the_joining_takes():
    with pytest.raises(ValueError, match="`encodings` must be as many as Unshared takes, 3, got 1"):
        JoinedPosition([Learnable(GRID, 24)], Unshared(3))
    with pytest.raises(ValueError, match="`encoding` must be learnable where each layer has a table of its own"):
        JoinedPosition([Sinusoidal2d(GRID, 24) for _ in range(3)], Unshared(3))
    with pytest.raises(ValueError, match="`encodings` must be from 1 to 3, one a layer, got 4"):
        BiasPosition([RelativeBias(GRID, 3) for _ in range(4)], 3)
