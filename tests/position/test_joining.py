"""The position of each layer for each joining: LaPE's norms and their replacements, DETR's and TUPE's."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from timm.models._manipulate import group_with_matcher

import graticule
from graticule import Grid, LayerPosition, build_position
from graticule.position.bias import Bias
from graticule.position.joining import (
    DECOMPOSITIONS,
    JOININGS,
    Concatenation,
    Default,
    Lape,
    LapeSharing,
    QueriesKeys,
    Shared,
    TableScale,
    Tupe,
    Unshared,
    build_joining,
)
from graticule.position.position import ENCODINGS
from graticule.position.rotation import PairRotation
from graticule.registry.specs import Spec
from in_turn import in_turn, refusals
from tiny import PAIRS, assert_same, draw, draw_double, spec, tiny

DEPTH, HEADS, TOKENS, DIM = 4, 3, 7, 12


@pytest.fixture
def table():
    return torch.randn(TOKENS, DIM, dtype=torch.float64)


def norm(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()


def test_concatenation_adds_the_projected_table_once(table):
    """A token with w appended, [p, w], and a projection (V_1, V_2) is V_1 p + V_2 w (Turner, 2024, footnote 16)."""
    joining = draw_double(Concatenation(DIM, DEPTH))
    first, *others = joining(table)
    projected = torch.einsum("nd,ed->ne", table, joining.projection)
    assert_same(first.added_to_stream, projected, 1e-12)
    assert others == [LayerPosition()] * 3


def test_the_stream_gets_one_table_once_or_in_every_layer_or_that_of_the_layer(table):
    added = LayerPosition(added_to_stream=table)
    assert Default(DEPTH)(table) == [added, *[LayerPosition()] * 3] and Shared(DEPTH)(table) == [added] * 4
    tables = [table + layer for layer in range(DEPTH)]
    assert Unshared(DEPTH).tables == DEPTH
    assert Unshared(DEPTH)(*tables) == [LayerPosition(added_to_stream=single) for single in tables]


@in_turn("name", JOININGS)
def test_layers_that_are_not_there_or_named_twice_are_refused(name):
    for layers in ([], [-1], [0, DEPTH], [2, 1, 2]):
        message = rf"`layers` must be .* different layers from 0 to 3, at least one, got {re.escape(str(layers))}"
        with pytest.raises(ValueError, match=message):
            build_joining(Spec(name, {"layers": layers}), DIM, DEPTH)
    for eta in (0, -1, DEPTH + 1):
        with pytest.raises(ValueError, match=rf"`layers` must be from 1 to the depth of the model, 4, got {eta}"):
            build_joining(Spec(name, {"layers": eta}), DIM, DEPTH)
    with pytest.raises(ValueError, match="`depth` must be at least 1, got 0"):
        build_joining(Spec(name), DIM, 0)


@in_turn("layers", [(1,), (0, 2), (3, 1, 2), *range(1, DEPTH + 1)])
@in_turn("name", JOININGS)
def test_some_layers_receive_the_same_as_all_layers_of_a_model_of_that_depth(name, layers, table):
    some = draw_double(build_joining(Spec(name, {"layers": layers}), DIM, DEPTH))
    layers = range(layers) if isinstance(layers, int) else layers  # the first ones
    alone = build_joining(Spec(name), DIM, len(layers)).double()
    alone.load_state_dict(dict(zip(alone.state_dict(), some.state_dict().values(), strict=True)))
    tables = [table + wanted for wanted in range(some.tables)]
    actual, expected = some(*tables), alone(*tables)
    for layer, wanted in zip(sorted(layers), expected, strict=True):
        assert_same(actual[layer], wanted, 0)
    assert all(actual[layer] == LayerPosition() for layer in range(DEPTH) if layer not in layers)
    assert some.layers == len(layers)


GRID, SOME = Grid(2, 3), [0, 2]
#: Encodings and joinings of only some layers; in LaPE's chain a layer gets w after the norms of earlier joined layers.
PARTS = [
    (encoding, joining)
    for encoding, joining in PAIRS
    if ENCODINGS[encoding].layered
    and (joining, ENCODINGS[encoding].joinable_as)
    not in (("lape", "table"), ("default", "table"), ("concatenation", "table"))
]


@in_turn(("encoding", "joining"), PARTS)
def test_joining_some_layers_is_joining_all_with_nothing_for_the_others(encoding, joining):
    full, part = (
        build_position(GRID, dim=24, depth=3, num_heads=3, encoding=encoding, joining=spec(joining, **options))
        for options in ({}, {"layers": SOME})
    )
    draw_double(full), part.double().eval()
    values = full.state_dict()
    for name, value in part.state_dict().items():  # the part of every parameter for the joined layers
        (axis,) = [axis for axis, side in enumerate(value.shape) if side != values[name].shape[axis]] or [None]
        chosen = values[name] if axis is None else values[name].index_select(axis, torch.tensor(SOME))
        value.copy_(chosen)
    queries = torch.randn(2, 3, GRID.tokens, 8, dtype=torch.float64)
    for layer, (a, b) in enumerate(zip(part(GRID), full(GRID), strict=True)):
        if layer not in SOME:
            assert a == LayerPosition()
            continue
        value, other = ((*x._replace(bias=None if x.bias is None else Bias.of(x.bias).table(queries)),) for x in (a, b))
        assert_same(value, other, 1e-12)


@pytest.mark.parametrize(
    ("encoding", "joining", "names"),
    [
        ("learnable", "lape", ["position.joining.norms.{}.weight", "blocks.{}.pe_norm.weight"]),
        ("learnable", "unshared", ["position.encodings.{}.pos_embed", "pos_embed{}"]),
        ("relative_bias", "default", ["position.encodings.{}.relative_position_bias_table"]),
    ],
)
def test_the_parameters_of_a_joined_layer_have_its_index_and_its_learning_rate(encoding, joining, names):
    model = tiny(encoding, spec(joining, layers=SOME))
    parameters = dict(model.named_parameters())
    published = {f"position.{mine}": name for name, mine in model.position.published_names().items()}
    groups = group_with_matcher(model.named_parameters(), model.group_matcher(), reverse=True)
    for layer in range(3):
        mine = names[0].format(layer)
        assert (mine in parameters) == (layer in SOME)
        if mine in parameters:
            assert groups[mine] == groups[f"blocks.{layer}.norm1.weight"]
            assert len(names) < 2 or published[mine] == names[1].format(layer)


FORMULAS = {
    "w": lambda w, gamma, beta: w,
    "scalar_w": lambda w, gamma, beta: gamma * w,
    "channel_w": lambda w, gamma, beta: gamma * w,
    "affine_w": lambda w, gamma, beta: gamma * w + beta,
    "norm": lambda w, gamma, beta: norm(w),
    "scalar_norm": lambda w, gamma, beta: gamma * norm(w),
    "channel_norm": lambda w, gamma, beta: gamma * norm(w),
    "layer_norm": lambda w, gamma, beta: gamma * norm(w) + beta,
}


@in_turn("kind", [Lape, LapeSharing])
@in_turn("name", [None, *DECOMPOSITIONS])
def test_layer_l_of_lape_gets_all_norms_up_to_its_own_and_of_its_first_version_its_own_alone(kind, name, table):
    options = {} if name is None else {"decomposition": name}
    joining, w = draw_double(kind(DIM, DEPTH, **options)), table
    positions = joining(table)
    for position, module in zip(positions, joining.norms, strict=True):
        parameters = [*module.parameters(), None, None][:2]
        w = FORMULAS[name or "layer_norm"](w if kind is Lape else table, *parameters)
        assert_same(position.after_norm, w)
        assert position == LayerPosition(after_norm=position.after_norm)
    assert len(positions) == DEPTH


@in_turn("name", DECOMPOSITIONS)
def test_a_decomposition_starts_as_its_norm_or_as_nothing(name, table):
    start = DECOMPOSITIONS[name](DIM).double()(table)
    expected = F.layer_norm(table, (DIM,), eps=1e-6) if "norm" in name else table
    assert_same(start, expected, 1e-12)


def test_scale_keeps_the_dtype(table):
    for dtype in (torch.bfloat16, torch.float32):
        for module in (TableScale(1), TableScale(DIM), TableScale(DIM, shift=True)):
            assert module.to(dtype)(table.to(dtype)).dtype == dtype


def test_merging_adds_what_both_say_and_keeps_what_one_says(table):
    bias, rotary = torch.randn(3, TOKENS, TOKENS), PairRotation(torch.randn(TOKENS, 4))
    first = LayerPosition(added_to_stream=table, after_norm=table, rotary=rotary)
    other = LayerPosition(after_norm=2 * table, bias=bias)
    for merged in (first.merge(other), other.merge(first)):
        assert torch.equal(merged.added_to_stream, table)
        torch.testing.assert_close(merged.after_norm, 3 * table)
        assert torch.equal(merged.bias, bias) and merged.rotary is rotary
    assert LayerPosition().merge(LayerPosition()) == LayerPosition()


def bias_from(queries, start=0, stop=None):
    """Return a bias that depends on the queries and their positions: key j of query i has q_0 + 100 i + j."""
    i = torch.arange(start, start + queries.shape[-2], dtype=queries.dtype)[:, None]
    return (queries[..., :1] + 100 * i + torch.arange(TOKENS, dtype=queries.dtype))[..., :stop]


@pytest.mark.parametrize(("start", "stop"), [(0, TOKENS), (0, 3), (2, 5), (4, 5)])
def test_a_part_has_the_rows_of_its_tokens_and_the_columns_of_those_so_far(start, stop, table):
    constant = torch.randn(2, TOKENS, TOKENS, dtype=torch.float64)
    queries = torch.randn(3, 2, TOKENS, 4, dtype=torch.float64)
    part_queries = queries[:, :, start:stop]
    turned = PairRotation(torch.randn(2, TOKENS, 8, dtype=torch.float64))
    full = LayerPosition(added_to_stream=table, after_norm=table + 1, bias=constant, rotary=turned)
    part = full.part(start, stop)
    assert torch.equal(part.added_to_stream, table[start:stop]) and torch.equal(part.after_norm, table[start:stop] + 1)
    assert torch.equal(part.bias, constant[:, start:stop, :stop])
    assert torch.equal(part.rotary.table, turned.table[:, start:stop])
    assert torch.equal(
        full._replace(rotary=PairRotation(turned.table[0])).part(start, stop).rotary.table, turned.table[0, start:stop]
    )
    made = LayerPosition(bias=bias_from)
    both = made.merge(full)
    twice = made.merge(made)
    for position in (made, both, twice):
        expected = Bias.of(position.bias).table(queries)[..., start:stop, :stop]
        assert torch.equal(Bias.of(position.part(start, stop).bias).table(part_queries), expected)
        again = position.part(0, stop).part(start, stop)  # a part of a part
        assert torch.equal(Bias.of(again.bias).table(part_queries), expected)
    assert LayerPosition().part(start, stop) == LayerPosition()


@in_turn("field", ["map_before", "inputs", "map_after", "mixing", "spatial_bias"])
def test_what_acts_on_all_tokens_has_no_part(field):
    with pytest.raises(ValueError, match=f"`{field}` must be None for a part of the tokens"):
        LayerPosition(**{field: torch.zeros(1)}).part(0, 1)


def tupe(**options):
    return draw(Tupe(DIM, DEPTH, HEADS, **options)).double()


def test_queries_keys_gives_every_layer_the_same_table():
    table = torch.randn(7, DIM)
    assert QueriesKeys(DEPTH)(table) == [LayerPosition(queries_keys=table)] * DEPTH
    some = QueriesKeys(DEPTH, (1, 3))(table)
    assert [position.queries_keys is table for position in some] == [False, True, False, True]


def test_the_table_reaches_queries_and_keys_and_not_values():
    attention = graticule.layers.Attention(DIM, HEADS).double()
    x, table = torch.randn(2, 7, DIM, dtype=torch.float64), torch.randn(7, DIM, dtype=torch.float64)
    q, k, v, _ = attention._project(x, LayerPosition(queries_keys=table))
    (whole_q, whole_k, _, _), (_, _, plain_v, _) = (attention._project(y, LayerPosition()) for y in (x + table, x))
    for actual, expected in ((q, whole_q), (k, whole_k), (v, plain_v)):
        assert_same(actual, expected, 1e-12)


def test_beside_inputs_of_their_own_the_table_is_added_to_those_of_queries_and_keys():
    attention = graticule.layers.Attention(DIM, HEADS).double()
    x, table, a, b, c = (torch.randn(7, DIM, dtype=torch.float64) for _ in range(5))
    both = LayerPosition(queries_keys=table, inputs=lambda x: (x + a, x + b, x + c))
    position = LayerPosition(inputs=lambda x: (x + a + table, x + b + table, x + c))
    for actual, expected in zip(attention._project(x[None], both), attention._project(x[None], position), strict=True):
        assert_same(actual, expected, 1e-12)


def tupe_by_hand(joining, table, query, prefix):
    """Return TUPE's logits of a query with every key, without the content, one number at a time."""
    d, bias = DIM // HEADS, torch.zeros(HEADS, len(table), dtype=torch.float64)
    for head in range(HEADS):
        rows = slice(head * d, (head + 1) * d)
        for key in range(len(table)):
            if query < prefix:
                bias[head, key] = joining.theta[head, 0]
            elif key < prefix:
                bias[head, key] = joining.theta[head, 1]
            else:
                left, right = joining.queries.weight[rows] @ table[query], joining.keys.weight[rows] @ table[key]
                bias[head, key] = (left * right).sum() / math.sqrt(2 * d)
    return bias


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_the_bias_is_tupes_formula_with_the_class_token_untied(prefix):
    joining, table = tupe(prefix=prefix), torch.randn(prefix + 6, DIM, dtype=torch.float64)
    positions = joining(table)
    assert len(positions) == DEPTH and all(position is positions[0] for position in positions)  # shared by the layers
    for query in range(len(table)):
        expected = tupe_by_hand(joining, table, query, prefix)
        assert_same(positions[0].bias[:, query], expected, 1e-12)
    assert_same(positions[0].query_scale, torch.full((len(table),), math.sqrt(0.5)).double(), 1e-7)


SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
SAM = {"img_size": 64, "embed_dim": 16, "depth": 3, "num_heads": 2, "window_size": 2, "global_layers": (1,)}
test_tupe_without_a_table_and_in_windows_is_refused = refusals(
    ({"name": "vit_nano_patch4_28", "encoding": "rope"}, "`joining` must be 'default'"),
    (
        {"name": "swin_tiny_patch4_window7_224", **SWIN},
        "`joining` must not be 'tupe' where tokens attend within windows",
    ),
    ({"name": "samvit_base_patch16_224", **SAM}, "`joining` must not be 'tupe' where tokens attend within windows"),
    call=lambda kwargs: graticule.create_model(**{"encoding": "learnable", "joining": "tupe", **kwargs}),
)
