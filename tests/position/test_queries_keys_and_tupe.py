"""The joinings within attention: DETR's, added to queries and keys; TUPE's, a bias of untied projections."""

import math

import pytest
import torch

import graticule
from graticule import LayerPosition
from graticule.position.joining import QueriesKeys, Tupe
from in_turn import in_turn
from tiny import assert_same, draw, tiny

DIM, HEADS, DEPTH = 12, 3, 4


def drawn(**options):
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
    joining, table = drawn(prefix=prefix), torch.randn(prefix + 6, DIM, dtype=torch.float64)
    positions = joining(table)
    assert len(positions) == DEPTH and all(position is positions[0] for position in positions)  # shared by the layers
    for query in range(len(table)):
        expected = tupe_by_hand(joining, table, query, prefix)
        assert_same(positions[0].bias[:, query], expected, 1e-12)
    assert_same(positions[0].query_scale, torch.full((len(table),), math.sqrt(0.5)).double(), 1e-7)


def test_a_bias_is_added_to_tupes():
    model = draw(tiny("learnable + bucketed_bias", "tupe")).double().eval()
    tupe, bucketed = (part(model.grid) for part in model.position.parts)
    for combined, a, b in zip(model.position(model.grid), tupe, bucketed, strict=True):
        assert_same(combined.bias, a.bias + b.bias, 1e-12)


@in_turn(
    ("kwargs", "message"),
    [
        ({"joining": "tupe", "encoding": "rope"}, "`joining` must be 'default'"),
        (
            {"joining": "tupe", "encoding": "learnable", "name": "swin_tiny_patch4_window7_224"},
            "`joining` must not be 'tupe' where tokens attend within windows",
        ),
    ],
)
def test_invalid_arguments_are_refused(kwargs, message):
    name = kwargs.pop("name", "vit_tiny_patch16_224")
    sizes = {"embed_dim": 24, "depth": 3, "num_heads": 3, "img_size": 32} if name.startswith("vit") else {}
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        graticule.create_model(name, **kwargs, **sizes)
