"""Laws of the continuous bias, of iRPE with default options, and of norms of a bias over keys and over heads."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import WindowAttention as TimmWindowAttention

import graticule
from graticule import Grid
from graticule.encodings.decomposed import Decomposed
from graticule.encodings.forms.bias import HeadNormalizedBias, NormalizedBias
from graticule.encodings.irpe import Irpe
from graticule.encodings.mlp_bias import ContinuousBias
from graticule.encodings.relative_bias import RelativeBias
from graticule.encodings.shaw import ShawBias
from in_turn import in_turn
from tiny import DEPTH, draw, draw_double, images, spec, tiny

GRIDS = [Grid(4, 4), Grid(3, 5, prefix=1), Grid(1, 6), Grid(5, 2, prefix=2)]
BUILT, OTHER = Grid(3, 5, prefix=1), Grid(6, 4, prefix=1)
HEADS, HEAD_DIM = 3, 4

grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


def continuous(grid=BUILT, heads=HEADS):
    return draw_double(ContinuousBias(grid, heads, hidden=16))


def contextual(grid=BUILT, **kwargs):
    return draw_double(Irpe(grid, HEADS, HEAD_DIM, **kwargs))


def queries_on(grid, batch=2):
    return torch.randn(batch, HEADS, grid.tokens, HEAD_DIM, dtype=torch.float64)


def displacements(grid):
    """Return (i, j, dy, dx) of every pair of patches, by loops: position of the query minus that of the key."""
    places = [(y, x) for y in range(grid.height) for x in range(grid.width)]
    return [(i, j, a[0] - b[0], a[1] - b[1]) for i, a in enumerate(places) for j, b in enumerate(places)]


def by_displacement(bias, grid):
    """Return the values of every displacement, {(dy, dx): [(heads,), ...]}, of a bias of the patches."""
    found = {}
    for i, j, dy, dx in displacements(grid):
        found.setdefault((dy, dx), []).append(bias[:, i, j])
    return found


def assert_depends_on_the_displacement_alone(bias, grid):
    for values in by_displacement(bias, grid).values():
        torch.testing.assert_close(torch.stack(values), values[0].expand(len(values), -1), rtol=0, atol=1e-12)


def assert_no_bias_on_prefix_tokens(bias, grid):
    assert not bias[..., : grid.prefix, :].any()
    assert not bias[..., :, : grid.prefix].any()
    assert bias[..., grid.prefix :, grid.prefix :].any()


# The bias table


@grids
def test_the_relative_bias_is_a_look_up_by_displacement(grid):
    encoding = draw_double(RelativeBias(grid, HEADS))
    table = encoding.relative_position_bias_table.detach()
    by_hand = torch.zeros(HEADS, grid.tokens, grid.tokens, dtype=torch.float64)
    for i, j, dy, dx in displacements(grid):
        row = (dy + grid.height - 1) * (2 * grid.width - 1) + dx + grid.width - 1
        by_hand[:, grid.prefix + i, grid.prefix + j] = table[row]
    assert torch.equal(encoding(grid).detach(), by_hand)


@grids
def test_the_gradient_of_a_table_counts_the_pairs_of_every_displacement(grid):
    encoding = draw_double(RelativeBias(grid, HEADS))
    (encoding(grid) * torch.tensor([1.0, 2.0, -1.0])[:, None, None]).sum().backward()
    counts = torch.tensor(
        [
            (grid.height - abs(dy)) * (grid.width - abs(dx))
            for dy in range(1 - grid.height, grid.height)
            for dx in range(1 - grid.width, grid.width)
        ]
    ).double()
    by_hand = counts[:, None] * torch.tensor([1.0, 2.0, -1.0]).double()
    assert torch.equal(encoding.relative_position_bias_table.grad, by_hand)


@in_turn("dtype", [torch.float32, torch.bfloat16, torch.float64])
@in_turn("at", [BUILT, OTHER])
def test_the_relative_bias_has_the_dtype_of_its_table_and_none_on_prefix_tokens(dtype, at):
    bias = RelativeBias(BUILT, HEADS).to(dtype)(at)
    assert bias.dtype == dtype
    assert bias.shape == (HEADS, at.tokens, at.tokens)
    assert_no_bias_on_prefix_tokens(bias, at)


# The continuous bias


def naive_continuous(encoding, grid, reference):
    """Compute 16 sigmoid(W_2 relu(W_1 s + b)) pair by pair."""

    def scaled(t, side):
        return math.copysign(math.log(1 + 8 * abs(t) / max(side - 1, 1), 8), t) if t else 0.0

    first, last = encoding.cpb_mlp[0], encoding.cpb_mlp[2]
    bias = torch.zeros(encoding.num_heads, grid.tokens, grid.tokens, dtype=torch.float64)
    for i, j, dy, dx in displacements(grid):
        s = torch.tensor([scaled(dy, reference.height), scaled(dx, reference.width)], dtype=torch.float64)
        hidden = (first.weight @ s + first.bias).clamp(min=0)
        bias[:, grid.prefix + i, grid.prefix + j] = 16 / (1 + torch.exp(-(last.weight @ hidden)))
    return bias


@torch.no_grad()
@grids
def test_the_continuous_bias_is_the_formula_pair_by_pair(grid):
    encoding = continuous(grid)
    # the scaled displacements are rounded to float32, 2^-24 of at most 1.06, and the slope is below 100
    torch.testing.assert_close(encoding(grid), naive_continuous(encoding, grid, grid), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("at", [OTHER, Grid(2, 2, prefix=1), Grid(9, 11, prefix=1)], ids=str)
def test_another_grid_asks_the_same_function_on_the_scale_of_the_first(at):
    encoding = continuous()
    by_hand = naive_continuous(encoding, at, BUILT)
    torch.testing.assert_close(encoding(at), by_hand, rtol=0, atol=1e-5)
    encoding.set_grid(at)
    assert encoding.grid == at
    torch.testing.assert_close(encoding(at), by_hand, rtol=0, atol=1e-5)
    encoding.set_grid(BUILT)
    torch.testing.assert_close(encoding(BUILT), naive_continuous(encoding, BUILT, BUILT), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_displacement_has_one_continuous_bias_whatever_the_grid():
    encoding = continuous()
    small, large = (by_displacement(encoding.patch_bias(grid), grid) for grid in (BUILT, Grid(6, 7)))
    for displacement, values in small.items():
        torch.testing.assert_close(large[displacement][0], values[0], rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("window", [(4, 4), (7, 7), (3, 5)])
def test_the_continuous_bias_is_that_of_timms_swin_v2(window):
    theirs = TimmWindowAttention(dim=12, window_size=window, num_heads=HEADS)
    ours = ContinuousBias(Grid(*window), HEADS)
    ours.cpb_mlp.load_state_dict(theirs.cpb_mlp.state_dict())
    table = theirs.cpb_mlp(theirs.relative_coords_table).view(-1, HEADS)
    bias = 16 * table.sigmoid()[theirs.relative_position_index.flatten()]
    bias = bias.unflatten(0, (window[0] * window[1], -1)).permute(2, 0, 1)
    torch.testing.assert_close(ours(Grid(*window)), bias)
    # the order of the offsets matters: swapped or negated, it is another bias
    assert not torch.allclose(ours(Grid(*window)).transpose(1, 2), bias)
    places = Grid(*window).coordinates()
    for i, j in ((0, 1), (0, window[1]), (1, window[1])):
        index = theirs.relative_position_index[i, j]
        dy, dx = (places[i] - places[j]).tolist()
        coordinates = theirs.relative_coords_table.flatten(0, 2)[index]
        assert [math.copysign(1, t) if t else 0 for t in coordinates.tolist()] == [
            math.copysign(1, t) if t else 0 for t in (dy, dx)
        ]


@torch.no_grad()
def test_another_grid_is_a_pretrained_window_of_timms():
    theirs = TimmWindowAttention(dim=12, window_size=(6, 6), num_heads=HEADS, pretrained_window_size=(4, 4))
    ours = ContinuousBias(Grid(4, 4), HEADS)
    ours.cpb_mlp.load_state_dict(theirs.cpb_mlp.state_dict())
    table = theirs.cpb_mlp(theirs.relative_coords_table).view(-1, HEADS)
    bias = 16 * table.sigmoid()[theirs.relative_position_index.flatten()].unflatten(0, (36, 36)).permute(2, 0, 1)
    torch.testing.assert_close(ours(Grid(6, 6)), bias)


@torch.no_grad()
@grids
def test_the_continuous_bias_depends_on_the_displacement_alone_and_on_nothing_less(grid):
    bias = continuous(grid).patch_bias(grid)
    assert_depends_on_the_displacement_alone(bias, grid)
    values = {tuple(values[0].tolist()) for values in by_displacement(bias, grid).values()}
    assert len(values) == (2 * grid.height - 1) * (2 * grid.width - 1)
    assert bias.min() > 0 and bias.max() < 16


@pytest.mark.parametrize("at", [BUILT, OTHER, Grid(2, 2, prefix=3)], ids=str)
def test_prefix_tokens_get_no_continuous_bias(at):
    bias = continuous()(at)
    assert bias.shape == (HEADS, at.tokens, at.tokens)
    assert_no_bias_on_prefix_tokens(bias, at)


# The contextual product


def published_bucket(t, ratio):
    """Compute iRPE's published piecewise rule: rounded if near, else by the logarithm, truncated to integers."""
    alpha, beta, gamma = ratio, 2 * ratio, 8 * ratio
    if abs(t) <= alpha:
        return round(t)
    far = min(beta, round(alpha + math.log(abs(t) / alpha) / math.log(gamma / alpha) * (beta - alpha)))
    return int(far if t > 0 else -far)


def naive_buckets(grid, ratio=1.9):
    side = 2 * int(2 * ratio) + 1
    index = torch.full((grid.tokens, grid.tokens), side**2)
    for i, j, dy, dx in displacements(grid):
        row, column = (published_bucket(t, ratio) + side // 2 for t in (dy, dx))
        index[grid.prefix + i, grid.prefix + j] = row * side + column
    return index


@in_turn("ratio", [1.9, 1.0, 2.5, 0.5])
@in_turn("grid", [*GRIDS, Grid(14, 14, prefix=1), Grid(1, 40)])
def test_the_buckets_are_those_of_the_published_rule(grid, ratio):
    assert torch.equal(Irpe(grid, HEADS, HEAD_DIM, ratio=ratio).index[0], naive_buckets(grid, ratio))


def test_at_the_ratio_of_the_paper_there_are_forty_nine_buckets_and_one_for_prefix_tokens():
    assert Irpe(Grid(14, 14), 1, 2).rpe_k[0].shape[-1] == 49
    assert Irpe(Grid(14, 14, prefix=1), 1, 2).rpe_k[0].shape[-1] == 50
    assert Irpe(Grid(14, 14, prefix=1), 1, 2).index[0].unique().tolist() == list(range(50))
    row = Irpe(Grid(1, 14), 1, 2).index[0, 0] - 3 * 7 - 3  # the first patch sees displacements 0 to -13
    assert row.tolist() == [0, -1, -2, -2, -3, -3, -3, -3, -3, -3, -3, -3, -3, -3]


@pytest.mark.parametrize("ratio", [1.9, 1.0, 2.5])
def test_the_buckets_of_opposite_displacements_lie_opposite(ratio):
    encoding = Irpe(Grid(15, 16), 1, 2, ratio=ratio)  # far enough for the last bucket
    index = encoding.index[0]
    assert torch.equal(index.T, encoding.side**2 - 1 - index)
    assert index.min() == 0 and index.max() == encoding.side**2 - 1


@pytest.mark.parametrize("prefix", [1, 2])
def test_pairs_with_a_prefix_token_have_a_bucket_of_their_own(prefix):
    index = Irpe(Grid(3, 4, prefix=prefix), 1, 2).index[0]
    assert (index[:prefix] == 49).all() and (index[:, :prefix] == 49).all()
    assert (index[prefix:, prefix:] < 49).all()


@in_turn("shared", [True, False])
@in_turn("at", [BUILT, OTHER, Grid(7, 9, prefix=1)])
def test_the_contextual_bias_is_a_product_of_the_query_and_its_buckets_vector(at, shared):
    encoding = contextual(shared_heads=shared)
    weight = encoding.rpe_k[0].detach()
    assert weight.shape == (1 if shared else HEADS, HEAD_DIM, 50)
    queries, index = queries_on(at), naive_buckets(at)
    found = encoding(at).bias(queries)
    assert found.shape == (2, HEADS, at.tokens, at.tokens)
    for head in range(HEADS):
        vectors = weight[0 if shared else head]
        for i in range(at.tokens):
            by_hand = torch.stack([queries[:, head, i] @ vectors[:, index[i, j]] for j in range(at.tokens)], -1)
            torch.testing.assert_close(found[:, head, i], by_hand, rtol=0, atol=1e-12)


def test_heads_that_share_vectors_differ_by_their_queries_alone():
    queries = queries_on(BUILT)
    queries[:, 1] = queries[:, 0]
    shared, own = (contextual(shared_heads=shared)(BUILT).bias(queries) for shared in (True, False))
    assert torch.equal(shared[:, 0], shared[:, 1])
    assert not torch.equal(own[:, 0], own[:, 1])


@pytest.mark.parametrize("shared", [True, False])
def test_the_contextual_bias_is_zero_at_the_start(shared):
    encoding = Irpe(BUILT, HEADS, HEAD_DIM, shared_heads=shared).double()
    assert not encoding(BUILT).bias(queries_on(BUILT)).any()


@pytest.mark.parametrize("at", [BUILT, OTHER, Grid(8, 8, prefix=1)], ids=str)
def test_a_gradient_reaches_every_bucket_that_occurs_and_no_other(at):
    encoding = contextual()
    (encoding(at).bias(queries_on(at)) * torch.randn(at.tokens, at.tokens)).sum().backward()
    reached = (encoding.rpe_k[0].grad != 0).all(1)[0]
    assert reached.nonzero()[:, 0].tolist() == naive_buckets(at).unique().tolist()
    assert not encoding.rpe_k[0].grad[0, :, ~reached].any()


def test_a_ratio_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"`ratio` must be positive, got 0\.0"):
        Irpe(BUILT, HEADS, HEAD_DIM, ratio=0.0)


def test_a_model_gives_the_irpe_its_scaled_queries():
    """An equal vector in every bucket adds a constant to all logits of a query, which does not change the softmax."""
    model = draw(tiny("irpe")).double().eval()
    x = images(dtype=torch.float64)
    for encoding in model.position.encodings:
        torch.nn.init.zeros_(encoding.rpe_k[0])
    before = model(x)
    for encoding in model.position.encodings:
        encoding.rpe_k[0].data += torch.randn(1, 8, 1)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-10)
    for encoding in model.position.encodings:
        torch.nn.init.normal_(encoding.rpe_k[0])
    assert (model(x) - before).abs().max() > 1e-3


# Norms of a bias


@torch.no_grad()
@pytest.mark.parametrize("at", [BUILT, OTHER], ids=str)
def test_a_continuous_bias_is_normalised_over_the_keys_of_every_query(at):
    encoding = NormalizedBias(continuous()).double()
    plain = encoding.bias.patch_bias(at)
    mean, variance = plain.mean(-1, keepdim=True), plain.var(-1, correction=0, keepdim=True)
    found = encoding(at)
    torch.testing.assert_close(found[:, 1:, 1:], (plain - mean) / (variance + 1e-5).sqrt(), rtol=0, atol=1e-10)
    assert_no_bias_on_prefix_tokens(found, at)


@torch.no_grad()
def test_a_normalised_continuous_bias_goes_to_another_grid_with_its_scale_as_a_map():
    encoding = NormalizedBias(continuous()).double()
    torch.nn.init.constant_(encoding.norm.weight, 1.5)
    torch.nn.init.constant_(encoding.norm.bias, -0.25)
    asked = encoding(OTHER)
    plain = encoding.bias.patch_bias(OTHER)
    torch.testing.assert_close(asked[:, 1:, 1:], F.layer_norm(plain, (24,)) * 1.5 - 0.25, rtol=0, atol=1e-10)
    encoding.set_grid(OTHER)
    assert encoding.grid == OTHER and encoding.norm.weight.shape == (24,)
    torch.testing.assert_close(encoding(OTHER), asked, rtol=0, atol=1e-12)


BIASES = {"relative": lambda: draw_double(RelativeBias(BUILT, HEADS)), "continuous": continuous}
biases = pytest.mark.parametrize("kind", BIASES)


@torch.no_grad()
@biases
@pytest.mark.parametrize("at", [BUILT, OTHER], ids=str)
def test_over_the_heads_the_bias_of_every_pair_has_mean_zero_and_variance_one(kind, at):
    encoding = HeadNormalizedBias(BIASES[kind](), eps=1e-12).double()
    found = encoding(at)
    assert found.shape == (HEADS, at.tokens, at.tokens)
    assert_no_bias_on_prefix_tokens(found, at)
    pairs = found[:, 1:, 1:]
    torch.testing.assert_close(pairs.mean(0), torch.zeros_like(pairs[0]), rtol=0, atol=1e-9)
    torch.testing.assert_close(pairs.var(0, correction=0), torch.ones_like(pairs[0]), rtol=0, atol=1e-6)


@torch.no_grad()
@biases
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_the_norm_over_the_heads_by_hand(kind, eps):
    encoding = HeadNormalizedBias(BIASES[kind](), eps).double()
    weight, shift = torch.randn(2, HEADS, dtype=torch.float64)
    encoding.norm.weight.copy_(weight)
    encoding.norm.bias.copy_(shift)
    plain = encoding.bias.patch_bias(BUILT)
    mean, variance = plain.mean(0), plain.var(0, correction=0)
    for head in range(HEADS):
        by_hand = (plain[head] - mean) / (variance + eps).sqrt() * weight[head] + shift[head]
        torch.testing.assert_close(encoding(BUILT)[head, 1:, 1:], by_hand, rtol=0, atol=1e-10)


@torch.no_grad()
@biases
@pytest.mark.parametrize("at", [BUILT, OTHER], ids=str)
def test_normalised_over_the_heads_a_bias_stays_a_function_of_the_displacement(kind, at):
    encoding = HeadNormalizedBias(BIASES[kind]()).double()
    torch.nn.init.normal_(encoding.norm.weight)
    torch.nn.init.normal_(encoding.norm.bias)
    assert_depends_on_the_displacement_alone(encoding(at)[:, 1:, 1:], at)
    over_keys = by_displacement(NormalizedBias(BIASES[kind]()).double().forward(at)[:, 1:, 1:], at)
    spread = max((torch.stack(values) - values[0]).abs().max().item() for values in over_keys.values())
    assert spread > 1e-2  # which a norm over the keys would remove


@torch.no_grad()
def test_what_is_the_same_for_all_heads_is_lost_in_a_norm_over_them():
    encoding = HeadNormalizedBias(draw_double(RelativeBias(BUILT, HEADS))).double()
    before = encoding(BUILT)
    encoding.bias.relative_position_bias_table += torch.randn(45, 1)
    torch.testing.assert_close(encoding(BUILT), before, rtol=0, atol=1e-10)


@biases
def test_a_norm_over_one_head_is_refused(kind):
    one = RelativeBias(BUILT, 1) if kind == "relative" else ContinuousBias(BUILT, 1)
    with pytest.raises(ValueError, match="`over` must be 'keys' with one head"):
        HeadNormalizedBias(one)


@biases
def test_the_parameters_of_a_norm_over_the_heads_do_not_depend_on_the_grid(kind):
    encoding = HeadNormalizedBias(BIASES[kind]()).double()
    asked = encoding(OTHER).detach().clone()
    encoding.set_grid(OTHER)
    assert encoding.grid == OTHER and encoding.norm.weight.shape == (HEADS,)
    torch.testing.assert_close(encoding(OTHER), asked, rtol=0, atol=1e-12)


# By name


@in_turn("encoding", ["relative_bias", "continuous_bias"])
@in_turn(
    ("joining", "kind"),
    [("lape", NormalizedBias), ("lape(over='keys')", NormalizedBias), ("lape(over='heads')", HeadNormalizedBias)],
)
def test_the_norm_of_a_bias_is_over_the_keys_unless_it_is_said_to_be_over_the_heads(encoding, joining, kind):
    model = tiny(encoding, joining)
    assert [type(one) for one in model.position.encodings] == [kind] * DEPTH
    beside = tiny(f"{encoding}+peg", joining)
    assert [type(one) for one in beside.position.parts[0].encodings] == [kind] * DEPTH


@pytest.mark.parametrize("encoding", ["relative_bias", "continuous_bias"])
def test_a_model_normalises_its_bias_over_the_heads(encoding):
    model = draw(tiny(encoding, "lape(over='heads')")).double().eval()
    told = model.position(model.grid)
    assert len(told) == DEPTH
    for given, one in zip(told, model.position.encodings, strict=True):
        by_hand = F.layer_norm(one.bias.patch_bias(model.grid).permute(1, 2, 0), (3,), one.norm.weight, one.norm.bias)
        torch.testing.assert_close(given.bias[:, 1:, 1:], by_hand.permute(2, 0, 1), rtol=0, atol=1e-12)
    x = images(24, 40, dtype=torch.float64)
    before = model(x)
    torch.testing.assert_close(graticule.fold(model, (24, 40))(x), before, rtol=0, atol=1e-12)


@in_turn("norm", ["keys", "heads"])
@in_turn(
    ("encoding", "joining"),
    [
        ("relative_bias", "default"),
        ("continuous_bias", "default"),
        ("learnable", "lape"),
        ("learnable+relative_bias", "lape"),
        ("sinusoidal_2d+continuous_bias", "lape"),
    ],
)
def test_a_norm_of_a_bias_without_lape_or_beside_a_table_is_refused(encoding, joining, norm):
    said = {
        "default": "`joining` default must not have the option 'over'",
        "lape": "`over` must be left out unless a relative bias is joined, without an absolute encoding",
    }
    with pytest.raises(ValueError, match=said[joining]):
        tiny(encoding, spec(joining, over=norm))


def test_an_unknown_norm_of_a_bias_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"`over` of joining lape must be .*'keys' or 'heads'.*got 'head'"):
        tiny("relative_bias", "lape(over='head')")


def test_a_model_of_one_head_is_told_to_norm_over_the_keys():
    with pytest.raises(ValueError, match="`over` must be 'keys' with one head"):
        tiny("relative_bias", "lape(over='heads')", num_heads=1)
    assert isinstance(tiny("relative_bias", "lape", num_heads=1).position.encodings[0], NormalizedBias)


# One table for all layers


def test_a_shared_bias_is_the_bias_of_every_layer_whose_tables_are_equal():
    shared, own = (draw(tiny(name)).double().eval() for name in ("shared_relative_bias", "relative_bias"))
    state = {key: value for key, value in shared.state_dict().items() if not key.startswith("position.")}
    table = shared.position.encoding.relative_position_bias_table
    state |= {f"position.encodings.{layer}.relative_position_bias_table": table for layer in range(3)}
    own.load_state_dict(state, strict=True)
    given = shared.position(shared.grid)
    assert all(position.bias is given[0].bias for position in given)
    x = images(dtype=torch.float64)
    torch.testing.assert_close(shared(x), own(x), rtol=0, atol=1e-12)


def test_a_shared_table_of_another_size_is_resampled_when_it_is_loaded(tmp_path):
    model = draw(tiny("shared_relative_bias")).double().eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = tiny("shared_relative_bias", img_size=48).double().eval()
    graticule.load_checkpoint(other, tmp_path / "model.pt")
    model.set_input_size(48)
    x = images(48, 48, dtype=torch.float64)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=1e-11)


# Windows of another size


def swin(**kwargs):
    """Return a Swin with two stages of 8 x 8 and 4 x 4 patches in windows of 4."""
    small = {"img_size": 32, "embed_dim": 12, "depths": (2, 1), "num_heads": (3, 6), "window_size": 4, "num_classes": 5}
    return graticule.create_model("swin_tiny_patch4_window7_224", **{**small, **kwargs})


@pytest.mark.parametrize("choice", [{}, {"joining": "lape"}, {"joining": "lape(over='heads')"}], ids=str)
def test_loading_the_tables_of_other_windows_is_setting_the_windows(tmp_path, choice):
    model = draw(swin(**choice)).double().eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = swin(img_size=48, window_size=6, **choice).double().eval()
    graticule.load_checkpoint(other, tmp_path / "model.pt")
    model.set_input_size(48, window_size=6)
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)
    x = images(48, 48, dtype=torch.float64)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=1e-10)


@in_turn("encoding", ["relative_bias", "continuous_bias", "irpe"])
@in_turn("size", [(32, 32), (64, 48), (48, 96)])
def test_a_bias_within_windows_is_that_of_a_window_whatever_the_image(encoding, size):
    model = draw(swin(encoding=encoding)).double().eval()
    told = zip(model.position(model.grid_at(size)), model.position(model.grid), (3, 3, 6), strict=True)
    for there, here, heads in told:
        queries = torch.randn(1, heads, 16, 4, dtype=torch.float64)
        two = [one.bias if isinstance(one.bias, torch.Tensor) else one.bias(queries) for one in (there, here)]
        assert two[0].shape[-3:] == (heads, 16, 16)
        assert torch.equal(*two)


@in_turn("grid", [Grid(3, 4), Grid(3, 4, prefix=2), Grid(1, 9)])
@in_turn("kind", [ShawBias, Irpe, Decomposed])
@in_turn("elsewhere", [False, True])
def test_a_part_of_a_bias_that_is_made_from_the_queries_is_that_part_of_the_whole(kind, grid, elsewhere):
    encoding = draw_double(kind(Grid(2, 3, prefix=grid.prefix) if elsewhere else grid, HEADS, HEAD_DIM))
    made = encoding(grid)
    make = made.bias if kind is Irpe else made
    queries = torch.randn(2, HEADS, grid.tokens, HEAD_DIM, dtype=torch.float64)
    whole = make(queries)
    last = grid.tokens
    for start, stop, keys in ((0, 1, 1), (0, 4, 4), (1, 3, last), (3, 8, 8), (last - 1, last, last)):
        part = make(queries[:, :, start:stop], start=start, stop=keys)
        torch.testing.assert_close(part, whole[:, :, start:stop, :keys], rtol=0, atol=1e-12)
