"""Laws of Shaw's relative encoding in two dimensions: the bias of an offset depends on the query's content."""

import copy

import pytest
import torch

from graticule import Grid
from graticule.encodings.shaw import ShawBias
from in_turn import in_turn
from tiny import DEPTH, draw, images, spec, tiny

GRID, OTHER = Grid(3, 5, prefix=1), Grid(6, 4, prefix=1)
HEADS, DIM, BATCH = 2, 4, 2


def drawn(grid=GRID, clip=2, heads=HEADS, dim=DIM):
    encoding = ShawBias(grid, heads, dim, clip).double()
    for table in encoding.parameters():
        torch.nn.init.normal_(table)
    return encoding


def queries(grid=GRID, heads=HEADS, dim=DIM):
    return torch.randn(BATCH, heads, grid.tokens, dim, dtype=torch.float64)


def naive(encoding, q, grid):
    """Compute q_i . (u[clip(dy)] + v[clip(dx)]) in loops over batch, head, query and key."""
    k = encoding.clip
    bias = q.new_zeros(len(q), q.shape[1], grid.tokens, grid.tokens)
    places = list(enumerate(grid.coordinates().tolist(), start=grid.prefix))
    for sample in range(len(q)):
        for head in range(q.shape[1]):
            for i, (yi, xi) in places:
                for j, (yj, xj) in places:
                    u = encoding.relative_position_y[max(-k, min(k, yj - yi)) + k]
                    v = encoding.relative_position_x[max(-k, min(k, xj - xi)) + k]
                    bias[sample, head, i, j] = q[sample, head, i] @ (u + v)
    return bias


def assert_near(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@in_turn("clip", [1, 2, 3, 8])  # smaller than either side, between them, larger
@in_turn("grid", [GRID, Grid(4, 2), Grid(2, 4, prefix=2), Grid(1, 3)])
def test_the_bias_is_that_of_the_formula_pair_by_pair(grid, clip):
    encoding, q = drawn(grid, clip), queries(grid)
    bias = encoding(grid)(q)
    assert bias.shape == (BATCH, HEADS, grid.tokens, grid.tokens)
    assert_near(bias, naive(encoding, q, grid))


def test_a_row_of_three_by_hand():
    grid = Grid(1, 3, prefix=1)
    encoding = ShawBias(grid, 1, 1, clip=1).double()
    with torch.no_grad():
        encoding.relative_position_y.copy_(torch.tensor([[-100.0], [5.0], [100.0]]))  # no key is in another row
        encoding.relative_position_x.copy_(torch.tensor([[1.0], [2.0], [3.0]]))  # left, here, right
    q = torch.tensor([9.0, 1, 10, 100], dtype=torch.float64).view(1, 1, 4, 1)
    by_hand = [[0, 0, 0, 0], [0, 7, 8, 8], [0, 60, 70, 80], [0, 600, 600, 700]]
    assert encoding(grid)(q)[0, 0].tolist() == by_hand


@in_turn("prefix", [0, 1, 2])
@in_turn("shape", [(3, 5), (6, 4)])
def test_prefix_tokens_get_no_bias_as_queries_or_as_keys(shape, prefix):
    grid = Grid(*shape, prefix=prefix)
    bias = drawn()(grid)(queries(grid))
    assert not bias[:, :, :prefix].any()
    assert not bias[..., :prefix].any()
    assert bias[:, :, prefix:, prefix:].all()


@pytest.mark.parametrize("prefix", [1, 2])
def test_the_bias_of_patches_does_not_see_prefix_tokens(prefix):
    encoding, without = drawn(), queries(Grid(3, 5))
    behind = torch.cat([torch.full((BATCH, HEADS, prefix, DIM), 1e6, dtype=torch.float64), without], 2)
    assert_near(encoding(Grid(3, 5, prefix=prefix))(behind)[..., prefix:, prefix:], encoding(Grid(3, 5))(without))


def test_offsets_beyond_the_clip_count_as_the_clip():
    grid, clip = Grid(1, 9), 3
    bias = drawn(grid, clip)(grid)(queries(grid))[0, 0]
    for query in range(9):
        farther = bias[query, query + clip :]
        nearer = bias[query, : max(query - clip, 0) + 1]
        for side in (farther, nearer):
            assert_near(side, side[:1].expand_as(side))
    assert (bias[0, 2] - bias[0, 3]).abs() > 1e-3  # offsets within the clip differ
    assert (bias[8, 0] - bias[0, 8]).abs() > 1e-3  # and so do the clipped ends


def test_a_clip_beyond_the_grid_reads_the_middle_of_the_tables():
    wide, narrow = drawn(clip=8), drawn(clip=4)
    with torch.no_grad():
        for mine, theirs in zip(narrow.parameters(), wide.parameters(), strict=True):
            mine.copy_(theirs[4:-4])
    q = queries()
    assert_near(narrow(GRID)(q), wide(GRID)(q))


@pytest.mark.parametrize("grid", [GRID, OTHER], ids=str)
def test_for_constant_queries_the_bias_depends_only_on_the_offset_and_on_nothing_less(grid):
    clip = 8
    q = queries(grid)[:, :, :1].expand(-1, -1, grid.tokens, -1)
    bias = drawn(clip=clip)(grid)(q)[0, 0, 1:, 1:].detach()
    found = {}
    for offset, value in zip(grid.offsets().flatten(0, 1).tolist(), bias.flatten(), strict=True):
        assert_near(found.setdefault(tuple(offset), value), value)
    assert len(found) == (2 * grid.height - 1) * (2 * grid.width - 1)
    values = torch.stack(list(found.values())).sort().values
    assert values.diff().min() > 1e-9


def test_for_constant_queries_a_shift_of_both_patches_changes_nothing():
    grid = Grid(4, 5)
    q = queries(grid)[:, :, :1].expand(-1, -1, 20, -1)
    bias = drawn()(grid)(q).unflatten(-1, (4, 5)).unflatten(2, (4, 5))
    assert_near(bias[:, :, 1:, 2:, 1:, 2:], bias[:, :, :-1, :-2, :-1, :-2])


def test_a_query_is_seen_by_its_own_row_alone():
    bias, q = drawn()(GRID), queries()
    other = q.clone()
    other[:, :, 4] += 1
    changed = (bias(other) - bias(q)).abs().amax((0, 1, 3)) > 1e-9
    assert changed.nonzero().flatten().tolist() == [4]


def test_all_heads_share_the_tables():
    encoding, q = drawn(heads=3), queries(heads=3)
    assert sum(p.numel() for p in encoding.parameters()) == 2 * (2 * 2 + 1) * DIM
    bias = encoding(GRID)(q)
    assert_near(encoding(GRID)(q.flip(1)), bias.flip(1))
    same = encoding(GRID)(q[:, :1].expand(-1, 3, -1, -1))
    assert_near(same, same[:, :1].expand_as(same))


def test_the_tables_start_as_a_normal_of_std_a_fiftieth():
    tables = torch.cat(list(ShawBias(GRID, 1, 256, clip=32).parameters()))
    assert abs(tables.std().item() / 0.02 - 1) < 0.05
    assert abs(tables.mean().item()) < 1e-3


@pytest.mark.parametrize("clip", [1, 2, 4])
def test_a_gradient_reaches_every_offset_of_both_tables_and_the_queries(clip):
    grid = Grid(5, 6, prefix=1)
    encoding, q = drawn(grid, clip), queries(grid).requires_grad_()
    weight = torch.randn(BATCH, HEADS, grid.tokens, grid.tokens, dtype=torch.float64)
    inputs = [q, *encoding.parameters()]
    found = torch.autograd.grad((encoding(grid)(q) * weight).sum(), inputs)
    expected = torch.autograd.grad((naive(encoding, q, grid) * weight).sum(), inputs)
    for actual, by_hand in zip(found, expected, strict=True):
        assert_near(actual, by_hand, atol=1e-10)
    assert not found[0][:, :, 0].any()  # prefix queries are not used
    assert all(gradient.all() for gradient in (found[0][:, :, 1:], *found[1:]))


def test_offsets_that_a_grid_does_not_have_are_not_trained_on_it():
    encoding, q = drawn(clip=4), queries()
    encoding(GRID)(q).square().sum().backward()
    rows = encoding.relative_position_y.grad.abs().sum(1) > 0
    columns = encoding.relative_position_x.grad.abs().sum(1) > 0
    assert rows.tolist() == [False] * 2 + [True] * 5 + [False] * 2  # -2 ... 2 of three rows
    assert columns.all()


@pytest.mark.parametrize("grid", [OTHER, Grid(1, 1, prefix=1), Grid(2, 7)], ids=str)
def test_another_grid_than_the_one_it_was_built_for_needs_no_resampling(grid):
    encoding, q = drawn(), queries(grid)
    asked = encoding(grid)(q).detach()
    assert_near(asked, naive(encoding, q, grid))
    before = copy.deepcopy(encoding.state_dict())
    encoding.set_grid(grid)
    assert encoding.grid == grid
    assert torch.equal(encoding(grid)(q), asked)
    assert all(torch.equal(value, before[name]) for name, value in encoding.state_dict().items())


def test_a_larger_grid_holds_the_smaller_one_in_its_corner():
    encoding, small, large = drawn(), Grid(3, 4), Grid(5, 6)
    q = queries(large).unflatten(2, (5, 6))
    corner = encoding(small)(q[:, :, :3, :4].flatten(2, 3))
    within = encoding(large)(q.flatten(2, 3)).unflatten(-1, (5, 6)).unflatten(2, (5, 6))[:, :, :3, :4, :3, :4]
    assert_near(within.flatten(-2).flatten(2, 3), corner)


def explicit(attention, encoding, x, grid):
    """Compute softmax(q (k + a)^T / sqrt(d)) v, with a separate vector for every pair of tokens."""
    heads, d = attention.num_heads, attention.head_dim
    q, k, v = (part.unflatten(-1, (heads, d)) for part in attention.qkv(x).chunk(3, -1))  # (B, N, h, d)
    a = torch.zeros(grid.tokens, grid.tokens, d, dtype=x.dtype)
    clip = encoding.clip
    for i, (yi, xi) in enumerate(grid.coordinates().tolist(), start=grid.prefix):
        for j, (yj, xj) in enumerate(grid.coordinates().tolist(), start=grid.prefix):
            a[i, j] = encoding.relative_position_y[min(max(yj - yi, -clip), clip) + clip]
            a[i, j] += encoding.relative_position_x[min(max(xj - xi, -clip), clip) + clip]
    mixed = torch.zeros_like(q)
    for head in range(heads):
        keys = k[:, None, :, head] + a  # (B, N, N, d)
        weights = ((q[:, :, None, head] * keys).sum(-1) / d**0.5).softmax(-1)
        mixed[:, :, head] = weights @ v[:, :, head]
    return attention.proj(mixed.flatten(2))


@in_turn("clip", [1, 2, 8])
@in_turn("size", [(32, 32), (24, 40)])
def test_a_model_with_shaw_is_one_with_explicit_shaw_attention(size, clip):
    model = draw(tiny(spec("shaw", clip=clip))).double().eval()
    for table in model.position.parameters():
        torch.nn.init.normal_(table)
    x = images(*size, dtype=torch.float64)
    grid = model.grid_of(x)
    tokens = model.embed(x)
    for block, encoding in zip(model.blocks, model.position.encodings, strict=True):
        tokens = tokens + explicit(block.attn, encoding, block.norm1(tokens), grid)
        tokens = tokens + block.mlp(block.norm2(tokens))
    assert_near(model(x), model.forward_head(model.norm(tokens)), atol=1e-10)
    plain = tiny("none").double().eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "position" not in name})
    assert (model(x) - plain(x)).abs().max() > 1e-3


def test_attention_weights_are_those_of_the_explicit_form():
    model = draw(tiny("shaw")).double().eval()
    x = images(24, 40, dtype=torch.float64)
    attention, position, grid = model.blocks[0].attn, model.position(model.grid_of(x))[0], model.grid_of(x)
    tokens = model.blocks[0].norm1(model.embed(x))
    weights = attention.weights(tokens, position)
    v = attention.qkv(tokens).chunk(3, -1)[2].unflatten(-1, (3, 8)).transpose(1, 2)
    expected = explicit(attention, model.position.encodings[0], tokens, grid)
    assert_near(attention.proj((weights @ v).transpose(1, 2).flatten(2)), expected)


@pytest.mark.parametrize("layer", range(DEPTH))
def test_every_layer_has_tables_of_its_own(layer):
    model = draw(tiny("shaw")).double().eval()
    x = images(dtype=torch.float64)
    before = [tokens for tokens, _ in model.each_layer(x)]
    assert len({id(p) for p in model.position.parameters()}) == 2 * DEPTH
    with torch.no_grad():
        model.position.encodings[layer].relative_position_x.normal_()
    after = [tokens for tokens, _ in model.each_layer(x)]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [at < layer for at in range(DEPTH)]


def test_clip_is_eight_unless_said():
    assert [encoding.clip for encoding in tiny("shaw").position.encodings] == [8] * DEPTH
    assert [encoding.clip for encoding in tiny("shaw(clip=3)").position.encodings] == [3] * DEPTH
    assert tiny("shaw").position.encodings[0].relative_position_y.shape == (17, 8)


def test_the_description_names_heads_channels_and_clip():
    assert "num_heads=2, head_dim=4, clip=2" in repr(drawn())
