"""MViTv2: queries and keys are pooled, so the bias of a layer is a part of that of the finer grid."""

import copy
import re

import pytest
import torch

import graticule
from graticule.encodings.forms.pyramid import Pooling
from graticule.position.bias import Bias, BiasSum, LowRank
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.rotation import PairRotation
from in_turn import in_turn
from tiny import draw

SIZE = {"img_size": (32, 48), "embed_dim": 8, "depths": (1, 2, 3), "num_heads": 1, "num_classes": 5}


def mvit(encoding="decomposed", joining="default", **kwargs):
    """Build a small model with every parameter random, in float64."""
    options = {**SIZE, "encoding": encoding, "joining": joining, **kwargs}
    return draw(graticule.create_model("mvitv2_tiny", **options)).double().eval()


@in_turn("pooling", [Pooling(1, 1), Pooling(1, 2), Pooling(2, 1), Pooling(1, 4), Pooling(4, 2)])
@in_turn("prefix", [0, 1])
def test_a_layer_gets_the_rows_and_columns_of_its_own_in_every_form_of_a_bias(pooling, prefix):
    grid = Grid(4, 6, prefix=prefix)
    rows, columns = (grid.every(step // pooling.finer) for step in pooling)
    table = torch.randn(2, grid.tokens, grid.tokens, dtype=torch.float64)
    expected = table[:, rows][:, :, columns]
    assert expected.shape[1] == grid.pooled(pooling.queries // pooling.finer).tokens
    queries = torch.randn(3, 2, len(rows), 8, dtype=torch.float64)
    factors = LowRank(table, torch.eye(grid.tokens, dtype=torch.float64)[None])

    def function(q):
        return q.sum(-1, keepdim=True) + table

    moved = queries.sum(-1, keepdim=True)
    made = {
        "table": (table, expected),
        "factors": (factors, expected),
        "function": (function, expected + moved),
        "sum": (BiasSum(table, function), 2 * expected + moved),
    }
    for form, (whole, wanted) in made.items():
        found = Bias.of(pooling.of(LayerPosition(bias=whole), grid).bias).table(queries)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=form)


def test_queries_and_keys_are_rotated_by_the_places_of_their_own():
    grid = Grid(2, 4)
    angle = torch.randn(grid.tokens, 4, dtype=torch.float64)
    rotation = PairRotation(torch.cat([angle.sin(), angle.cos()], -1))
    pooled = Pooling(1, 2).of(LayerPosition(rotary=rotation), grid).rotary
    q, k = torch.randn(2, 1, 1, grid.tokens, 4, dtype=torch.float64)
    expected_q, expected_k = rotation(q, k)
    found_q, found_k = pooled(q, k[:, :, [0, 2]])
    torch.testing.assert_close(found_q, expected_q)
    torch.testing.assert_close(found_k, expected_k[:, :, [0, 2]])


@pytest.mark.parametrize(("queries", "keys"), [(2, 1), (1, 2), (1, 4)])
def test_a_decomposed_bias_of_pooled_tokens_is_the_product_with_the_vector_of_their_displacement(queries, keys):
    grid, head_dim = Grid(4, 8, prefix=1), 3
    encoding = graticule.encodings.Decomposed(grid, 2, head_dim).double()
    q = torch.randn(1, 2, 1 + grid.pooled(queries).patches, head_dim, dtype=torch.float64)
    bias = encoding(grid).pooled(queries, keys)(q)
    places, others = (step * grid.pooled(step).coordinates() for step in (queries, keys))
    assert not bias[..., 0, :].any() and not bias[..., 0].any()
    for i, (y, x) in enumerate(places.tolist()):
        for j, (v, u) in enumerate(others.tolist()):
            vector = encoding.rel_pos_h[y - v + others[-1, 0]] + encoding.rel_pos_w[x - u + others[-1, 1]]
            expected = (q[0, :, i + 1] * head_dim**0.5) @ vector
            torch.testing.assert_close(bias[0, :, i + 1, j + 1], expected, rtol=0, atol=1e-12)


@in_turn("encoding", ["decomposed", "relative_bias", "rope", "sandwich", "shaw", "decomposed + log_n"])
@torch.no_grad()
def test_the_attention_that_is_looked_at_is_that_of_the_layer(encoding):
    model = mvit(encoding, class_token=True)
    model.norm, seen = torch.nn.Identity(), {}
    for stage, index, pairs in ((0, 0, (97, 7)), (1, 0, (25, 25)), (1, 1, (25, 7)), (2, 0, (7, 25)), (2, 1, (7, 7))):
        attention = model.block(stage, index).attn

        def keep(module, args, output, key=(stage, index), pairs=pairs):
            q, _, v, _ = module._pooled(*args)
            weights = module.weights(*args)
            assert weights.shape[-2:] == pairs
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
            seen[key] = module._output(weights @ v + q) - output

        attention.register_forward_hook(keep)
    model(torch.randn(1, 3, 32, 48, dtype=torch.float64))
    assert len(seen) == 5 and max(each.abs().max() for each in seen.values()) < 1e-10


@torch.no_grad()
def test_images_whose_sides_no_stride_divides_are_rounded_up():
    model = mvit()
    for size, last in (((33, 47), (3, 3)), ((20, 64), (2, 4)), ((1, 5), (1, 1))):
        (*_, (tokens, grid)) = model.each_layer(torch.randn(1, 3, *size, dtype=torch.float64))
        assert grid.shape == last and tokens.shape[1] == grid.tokens and tokens.isfinite().all()


@torch.no_grad()
def test_a_table_reaches_the_next_stage_along_the_residual_connection():
    model = mvit("sinusoidal_2d", "shared", class_token=True)
    given, block = model.position(model.grid), model.block(1, 0)
    table, grid = given[0].pre, model.grid
    assert torch.equal(given[1].pre, table) and given[1].pre.shape == (grid.tokens, 8)  # of the pooling block
    residual = block.shortcut_proj_attn(block.norm1(table))
    expected = block.shortcut_pool_attn(grid.to_map(residual[None])).flatten(2).transpose(1, 2)[0]
    torch.testing.assert_close(given[2].pre[1:], expected)
    torch.testing.assert_close(given[2].pre[0], residual[0])
    assert [one.pre.shape[1] for one in given] == [8, 8, 16, 16, 32, 32]


@torch.no_grad()
def test_a_pruned_model_keeps_its_class_token():
    model = mvit(class_token=True)
    x = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    before = model.forward_intermediates(x, intermediates_only=True)
    pruned = copy.deepcopy(model)
    pruned.prune_intermediate_layers([1])
    assert pruned.num_prefix_tokens == 1
    after = pruned.forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(after, before[:2], rtol=0, atol=0)


REFUSED = {
    "layers of one block": (
        {"depths": (2, 1)},
        "`depths` must be at least 2 in the last of several stages, got (2, 1)",
    ),
    "keys by three": ({"key_stride": 3}, "`key_stride` must be a power of 2, got 3"),
    "a bias from the keys": ({"encoding": "irpe(on='q')"}, "Queries and keys are pooled to different grids."),
    "a bias from a table": ({"encoding": "learnable", "joining": "tupe"}, "`joining` must be one that adds the table"),
    "a PEG where tokens are pooled": ({"encoding": "peg(places=1)"}, "must not act on the output of layer 1"),
    "a class token that does not exist": ({"global_pool": "token"}, "`global_pool` must be 'avg' or ''"),
}


def test_what_does_not_fit_is_refused_with_the_reason():
    for case, (kwargs, message) in REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            mvit(**kwargs)
            pytest.fail(case)
