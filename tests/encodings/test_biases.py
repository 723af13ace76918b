"""Every relative bias is its formula, pair by pair, and obeys the laws of all of them."""

import math
from fractions import Fraction

import pytest
import torch

import graticule
from graticule import Crop, Grid
from graticule.encodings.alibi import Alibi, Kerple, default_slopes
from graticule.encodings.bucketed import BucketedBias, edges
from graticule.encodings.decomposed import Decomposed
from graticule.encodings.fire import Fire
from graticule.encodings.gqpe import GqpeBias
from graticule.encodings.irpe import Irpe
from graticule.encodings.mlp_bias import ContinuousBias, MlpBias
from graticule.encodings.relative_bias import RelativeBias
from graticule.encodings.sandwich import Sandwich
from graticule.encodings.shaw import ShawBias
from graticule.encodings.sinusoidal import Sinusoidal1d
from graticule.position.bias import Bias
from graticule.surgery.fold import fold
from in_turn import in_turn, refusals
from tiny import assert_same, draw, images, tiny

HEADS, HEAD_DIM = 3, 4
BUILT, OTHER = Grid(3, 5, prefix=1), Grid(4, 3, prefix=1)


def t5_bucket(offset, buckets=32, max_distance=128, causal=False):
    """T5's bucket of key - query, one offset at a time: the largest t with (n / m)^(M - m) >= (L / m)^t, exactly."""
    first, distance = 0, max(-offset, 0)
    if not causal:
        buckets //= 2
        first, distance = buckets if offset > 0 else 0, abs(offset)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far, steps = Fraction(distance, exact) ** (buckets - exact), 0
    while far >= Fraction(max_distance, exact) ** (steps + 1):
        steps += 1
    return first + min(exact + steps, buckets - 1)


def irpe_bucket(t, ratio):
    """Compute iRPE's published piecewise rule: rounded if near, else by the logarithm, truncated to integers."""
    alpha, beta, gamma = ratio, 2 * ratio, 8 * ratio
    if abs(t) <= alpha:
        return round(t)
    far = min(beta, round(alpha + math.log(abs(t) / alpha) / math.log(gamma / alpha) * (beta - alpha)))
    return int(far if t > 0 else -far)


# The formula of each bias for p_i - p_j = (dy, dx) and the scaled queries (heads, d) of i; returns (heads,)


def relative(encoding, q, dy, dx, grid):
    height, width = encoding.grid.shape
    return encoding.relative_position_bias_table[(dy + height - 1) * (2 * width - 1) + dx + width - 1]


def continuous(encoding, q, dy, dx, grid):
    sides = zip((dy, dx), encoding.reference.tolist(), strict=True)
    s = [math.copysign(math.log(1 + 8 * abs(t) / max(n - 1, 1), 8), t) if t else 0.0 for t, n in sides]
    first, _, last = encoding.cpb_mlp
    hidden = (first.weight @ torch.tensor(s, dtype=torch.float64) + first.bias).relu()
    return 16 / (1 + torch.exp(-last.weight @ hidden))


def mlp(encoding, q, dy, dx, grid):
    s = torch.tensor([math.copysign(math.log1p(abs(t)), t) if t else 0.0 for t in (dy, dx)], dtype=torch.float64)
    hidden = (encoding.fc1.weight @ s + encoding.fc1.bias).relu()
    return encoding.fc2.weight @ hidden + encoding.fc2.bias


def alibi(encoding, q, dy, dx, grid):
    distances = {
        "euclidean": [math.hypot(dy, dx)] * 3,
        "manhattan": [abs(dy) + abs(dx)] * 3,
        "squared": [dy**2 + dx**2] * 3,
        "axes": [abs(dy), abs(dy), abs(dx)],
    }
    return -encoding.slopes * torch.tensor(distances[encoding.distance], dtype=torch.float64)


def kerple(encoding, q, dy, dx, grid):
    distance, (first, second) = math.hypot(dy, dx), encoding.rates()
    return -first * (torch.log(1 + second * distance) if encoding.kernel == "log" else distance**second)


def fire(encoding, q, dy, dx, grid):
    built = encoding.reference.tolist()
    scale, threshold = encoding.log_scale.exp(), encoding.log_threshold.exp()

    def share(t, largest, reference):
        bound = torch.maximum(threshold * max(reference, 1), torch.tensor(largest, dtype=torch.float64))
        return torch.log(1 + scale * abs(t)) / torch.log(1 + scale * bound) * (-1 if t < 0 else 1)

    ends, built = ([side - 1 for side in sides] for sides in (grid.shape, built))
    if encoding.form == "axes":
        return encoding.mlp(torch.cat([share(*axis) for axis in zip((dy, dx), ends, built, strict=True)]))
    return encoding.mlp(share(math.hypot(dy, dx), math.hypot(*ends), math.hypot(*built)))


def sandwich(encoding, q, dy, dx, grid):
    waves = sum(torch.cos(encoding.omega * t) - 1 for t in (dy, dx)).sum()
    return waves * torch.tensor([HEADS / (8 * h) for h in range(1, HEADS + 1)], dtype=torch.float64)


def bucketed(encoding, q, dy, dx, grid):
    down, across = (t5_bucket(-t, encoding.buckets, encoding.max_distance, encoding.causal) for t in (dy, dx))
    rows = getattr(encoding, "relative_attention_bias_y", None)
    return encoding.relative_attention_bias[across] + (0 if rows is None else rows[down])


def gaussian(encoding, q, dy, dx, grid):
    delta, center = torch.tensor([-dx, -dy], dtype=torch.float64), encoding.gaussian.center
    form = encoding.gaussian.quadratic()
    squares = [torch.einsum("hi,hij,hj->h", v, form, v) for v in (delta - center, center)]
    return (squares[1] - squares[0]) / 2


def shaw(encoding, q, dy, dx, grid):
    k = encoding.clip
    rows = [max(-k, min(k, -t)) + k for t in (dy, dx)]
    return q @ (encoding.relative_position_y[rows[0]] + encoding.relative_position_x[rows[1]])


def irpe(encoding, q, dy, dx, grid):
    bucket = -1  # of pairs with a prefix token
    if dy is not None:
        row, column = (irpe_bucket(t, encoding.ratio) + encoding.side // 2 for t in (dy, dx))
        bucket = row * encoding.side + column
    return (q * encoding.rpe_k[0][..., bucket]).sum(-1)  # with vectors (heads or 1, d)


def decomposed(encoding, q, dy, dx, grid):
    height, width = encoding.grid.shape
    vector = encoding.rel_pos_h[dy + height - 1] + encoding.rel_pos_w[dx + width - 1]
    return q @ vector * (1 if encoding.scaled else math.sqrt(HEAD_DIM))


#: Name -> its builder for a grid and its formula.
BIASES = {
    "relative": (lambda grid: RelativeBias(grid, HEADS), relative),
    "continuous": (lambda grid: ContinuousBias(grid, HEADS, hidden=16), continuous),
    "mlp": (lambda grid: MlpBias(grid, HEADS, hidden=16), mlp),
    **{
        f"alibi, {distance}": (lambda grid, distance=distance: Alibi(grid, HEADS, distance), alibi)
        for distance in ("euclidean", "manhattan", "squared")
    },
    "alibi, learned": (lambda grid: Alibi(grid, HEADS, slopes="learned"), alibi),
    "kerple, log": (lambda grid: Kerple(grid, HEADS), kerple),
    "kerple, power": (lambda grid: Kerple(grid, HEADS, kernel="power"), kerple),
    "fire": (lambda grid: Fire(grid, HEADS), fire),
    "fire, axes": (lambda grid: Fire(grid, HEADS, form="axes"), fire),
    "sandwich": (lambda grid: Sandwich(grid, HEADS, channels=8, temperature=100.0), sandwich),
    "bucketed": (lambda grid: BucketedBias(grid, HEADS, 8, 4), bucketed),
    **{
        f"gqpe, {form}": (lambda grid, form=form: GqpeBias(grid, HEADS, form), gaussian)
        for form in ("gamma_gamma_t", "alpha")
    },
    **{
        f"shaw, {clip}": (lambda grid, clip=clip: ShawBias(grid, HEADS, HEAD_DIM, clip), shaw)
        for clip in (1, 3, 8)  # smaller than either side, between them, larger
    },
    "irpe": (lambda grid: Irpe(grid, HEADS, HEAD_DIM), irpe),
    "irpe, ratio 1": (lambda grid: Irpe(grid, HEADS, HEAD_DIM, ratio=1.0, shared_heads=False), irpe),
    "decomposed": (lambda grid: Decomposed(grid, HEADS, HEAD_DIM), decomposed),
    "decomposed, scaled": (lambda grid: Decomposed(grid, HEADS, HEAD_DIM, scaled=True), decomposed),
}
RESAMPLED = [name for name in BIASES if name.startswith(("relative", "decomposed"))]
OF_QUERIES = [name for name in BIASES if name.startswith(("shaw", "irpe", "decomposed"))]
every = in_turn("name", BIASES)
grids = in_turn("grid", [BUILT, Grid(4, 2, prefix=2), Grid(1, 6)])


def built(name, grid=BUILT):
    encoding = BIASES[name][0](grid).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return encoding


def queries(grid, batch=2):
    return torch.randn(batch, HEADS, grid.tokens, HEAD_DIM, dtype=torch.float64)


def table(encoding, grid, q):
    return Bias.of(encoding.layer(grid).bias).table(q).expand(len(q), -1, -1, -1)


def naive(name, encoding, grid, q):
    """Compute the bias pair by pair; pairs with a prefix token get none, except in iRPE."""
    formula, rows = BIASES[name][1], []
    places = [None] * grid.prefix + grid.coordinates().tolist()
    for sample in q:
        for i, p in enumerate(places):
            for r in places:
                if p is not None and r is not None:
                    rows.append(formula(encoding, sample[:, i], p[0] - r[0], p[1] - r[1], grid))
                elif name.startswith("irpe"):
                    rows.append(formula(encoding, sample[:, i], None, None, grid))
                else:
                    rows.append(torch.zeros(HEADS, dtype=torch.float64))
    return torch.stack(rows).view(len(q), len(places), len(places), HEADS).permute(0, 3, 1, 2)


@every
@grids
def test_a_bias_and_its_gradients_are_those_of_the_formula_pair_by_pair(name, grid):
    encoding, q = built(name, grid), queries(grid, 1).requires_grad_()
    bias, expected = table(encoding, grid, q), naive(name, encoding, grid, q)
    assert bias.shape == (1, HEADS, grid.tokens, grid.tokens)
    assert_same(bias, expected, 1e-10)
    inputs = [parameter for parameter in [q, *encoding.parameters()] if parameter.requires_grad]
    weight = torch.randn_like(bias)
    gradients = (
        torch.autograd.grad((values * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for values in (bias, expected)
        if values.requires_grad
    )
    for gradient, other in zip(*[*gradients] or [[], []], strict=True):
        assert gradient.isfinite().all()
        assert_same(gradient, other.nan_to_num(), 1e-9)  # the derivative of a power of a distance of 0


@every
@in_turn("at", [OTHER, Grid(2, 2, prefix=1)])
def test_another_grid_is_computed_and_set_grid_changes_no_value(name, at):
    encoding, q = built(name), queries(at, 1)
    bias = table(encoding, at, q)
    if name not in RESAMPLED:
        assert_same(bias, naive(name, encoding, at, q), 1e-10)
    encoding.set_grid(at)
    assert encoding.grid == at
    assert_same(table(encoding, at, q), bias, 1e-12)


@every
@in_turn("at", [BUILT, OTHER, Grid(2, 3, prefix=1, crop=Crop((6, 7), (1, 2, 2, 3)))])
def test_for_equal_queries_a_bias_depends_on_the_displacement_alone_and_prefix_tokens_get_none(name, at):
    encoding = built(name)
    bias = table(encoding, at, queries(at)[:, :, :1].expand(-1, -1, at.tokens, -1))
    outside = bias[:, :, :1].any() or bias[..., :1].any()
    assert outside == name.startswith("irpe") and bias[:, :, 1:, 1:].any()
    patches = bias[:, :, 1:, 1:].unflatten(-1, at.shape).unflatten(2, at.shape)
    assert_same(patches[:, :, 1:, :, 1:], patches[:, :, :-1, :, :-1], 1e-12)
    assert_same(patches[:, :, :, 1:, :, 1:], patches[:, :, :, :-1, :, :-1], 1e-12)


@in_turn("name", OF_QUERIES)
@grids
@in_turn("elsewhere", [False, True])
def test_a_part_of_a_bias_of_the_queries_is_that_part_of_the_whole_and_of_its_own_queries(name, grid, elsewhere):
    encoding, q = built(name, Grid(2, 3, prefix=grid.prefix) if elsewhere else grid), queries(grid)
    function, last = encoding.layer(grid).bias, grid.tokens
    full = function(q)
    for start, stop, keys in ((0, 1, 1), (0, 4, 4), (1, 3, last), (3, 6, 6), (last - 1, last, last)):
        part = function(q[:, :, start:stop], start=start, stop=keys)
        assert_same(part, full[:, :, start:stop, :keys], 1e-12)
    changed = q.clone()
    changed[:, :, grid.prefix + 1] += 1
    rows = (function(changed) - full).abs().amax((0, 1, 3)) > 1e-9
    assert rows.nonzero().flatten().tolist() == [grid.prefix + 1]


@in_turn("name", ["shared_relative_bias", "shared_mlp_bias", "alibi", "bucketed_bias", "sandwich"])
def test_layers_share_one_bias_that_folds_into_one_constant(name):
    model = draw(tiny(f"{name}(layers=[0, 2])")).eval()
    first, between, last = model.position(model.grid)
    assert last.bias is first.bias and between.bias is None
    x = images()
    before = model(x)
    fold(model)
    assert [buffer for buffer, _ in model.position.named_buffers() if buffer.startswith("layer")] == ["layer0_bias"]
    assert_same(model(x), before, 1e-6)


@in_turn("causal", [False, True])
@in_turn(("buckets", "max_distance"), [(32, 128), (16, 20), (8, 64), (4, 5)])
def test_the_buckets_of_t5_are_those_of_the_formula(causal, buckets, max_distance):
    encoding = BucketedBias(Grid(9), HEADS, buckets, max_distance, causal)
    offsets = list(range(-200, 201))
    expected = [t5_bucket(offset, buckets, max_distance, causal) for offset in offsets]
    assert encoding.bucket(torch.tensor(offsets)).tolist() == expected
    side = buckets if causal else buckets // 2
    exact, starts = side // 2, edges(side, max_distance)
    for distance in range(exact, 2 * max_distance):
        real = math.log(distance / exact) / math.log(max_distance / exact) * (side - exact)
        if abs(real - round(real)) > 1e-9:  # at an edge the logarithm of the code may be rounded up or down
            assert sum(edge <= distance for edge in starts) == min(exact + math.floor(real), side - 1)


def test_at_the_ratio_of_the_paper_there_are_forty_nine_buckets_and_one_for_prefix_tokens():
    assert Irpe(Grid(14, 14), 1, 2).rpe_k[0].shape[-1] == 49
    index = Irpe(Grid(14, 14, prefix=1), 1, 2).index[0]
    assert index.unique().tolist() == list(range(50))
    assert (index[0] == 49).all() and (index[:, 0] == 49).all() and (index[1:, 1:] < 49).all()
    row = Irpe(Grid(1, 14), 1, 2).index[0, 0] - 3 * 7 - 3  # the first patch sees displacements 0 to -13
    assert row.tolist() == [0, -1, -2, -2, -3, -3, -3, -3, -3, -3, -3, -3, -3, -3]
    for ratio in (1.9, 1.0, 2.5):  # opposite displacements have opposite buckets
        encoding = Irpe(Grid(15, 16), 1, 2, ratio=ratio)
        assert torch.equal(encoding.index[0].T, encoding.side**2 - 1 - encoding.index[0])


def test_a_model_gives_irpe_its_scaled_queries():
    """An equal vector in every bucket adds a constant to all logits of a query, which does not change the softmax."""
    model = draw(tiny("irpe")).double().eval()
    x = images(dtype=torch.float64)
    assert not Irpe(BUILT, HEADS, HEAD_DIM)(BUILT).bias(queries(BUILT).float()).any()  # at the start
    outputs = []
    for values in (torch.zeros(1, 8, 50), torch.randn(1, 8, 1).expand(-1, -1, 50), torch.randn(1, 8, 50)):
        for encoding in model.position.encodings:
            encoding.rpe_k[0].data.copy_(values[..., : encoding.rpe_k[0].shape[-1]])
        outputs.append(model(x))
    assert_same(outputs[1], outputs[0], 1e-10)
    assert (outputs[2] - outputs[0]).abs().max() > 1e-3


@in_turn("heads", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 32])
def test_slopes_are_geometric_for_a_power_of_two_and_else_follow_the_recursion_of_the_code(heads):
    below = 1 << (heads.bit_length() - 1)
    first, second = ([2 ** (-8 * h / count) for h in range(1, count + 1)] for count in (below, 2 * below))
    assert default_slopes(heads) == pytest.approx([*first, *second[::2][: heads - below]], rel=1e-12)


def test_slopes_are_those_of_the_formula_or_given_or_learned_from_it_and_stay_positive():
    assert Alibi(BUILT, 2, slopes=[0.5, 0.25]).slopes.tolist() == [0.5, 0.25]
    learned = Alibi(BUILT, 3, slopes="learned").double()
    assert_same(learned.slopes, Alibi(BUILT, 3).double().slopes, 1e-7)
    with torch.no_grad():
        learned.log_slopes.sub_(100)
    assert (learned.slopes > 0).all()
    encoding = Alibi(BUILT, 3)
    assert not list(encoding.parameters()) and not encoding.state_dict()
    large = Grid(3, 4, prefix=1, crop=Crop((6, 8), (0, 0, 6, 8)))
    assert_same(encoding(large), 2 * encoding(Grid(3, 4, prefix=1)))


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_kerples_kernels_are_conditionally_positive_definite_and_start_in_the_ranges_of_its_code(kernel):
    grid = Grid(5, 6)
    for bias in Kerple(grid, 8, kernel=kernel).double()(grid):
        centered = bias - bias.mean(0) - bias.mean(1, keepdim=True) + bias.mean()
        assert torch.linalg.eigvalsh(centered).min() > -1e-10
    for rate, most in zip(
        Kerple(grid, 4096, kernel=kernel).rates(), {"log": (2, 1), "power": (1, 2)}[kernel], strict=True
    ):
        assert 0.0099 < rate.min() < 0.02 and most - 0.02 < rate.max() <= most
        assert rate.mean().item() == pytest.approx(most / 2, abs=0.05)


def test_sandwich_on_a_row_is_the_product_of_the_table_of_a_transformer_up_to_the_index_of_the_first_wave():
    # the published waves start at k = 1, those of the table at k = 0
    grid = Grid(1, 9)
    sines = Sinusoidal1d(grid, 16)(grid).double()
    shifted = Sandwich(grid, 1, channels=16).double()
    with torch.no_grad():
        shifted.omega.mul_(10_000 ** (2 / 16))
    product = sines @ sines.T
    assert_same(8 * shifted(grid)[0], product - product.diagonal(), 1e-4)


def test_fire_of_a_text_normalizes_by_the_position_of_the_query_as_in_the_paper():
    grid = Grid(8)
    encoding = Fire(grid, HEADS, causal=True).double()
    with torch.no_grad():
        encoding.log_threshold.fill_(math.log(3 / 7))  # L = 3
    bias = encoding(grid)
    for i in range(8):
        for j in range(i + 1):
            share = math.log(1 + 0.1 * (i - j)) / math.log(1 + 0.1 * max(3, i))
            expected = encoding.mlp(torch.tensor([share], dtype=torch.float64))
            assert_same(bias[:, i, j], expected, 1e-6)  # 0.1 is stored in float32


TABLES = ["learnable", "relative_bias", "factorized", "lrpe", "glrpe", "sgu", "global_filter"]


@in_turn("encoding", TABLES)
def test_a_table_of_std_zero_starts_at_zero(encoding):
    position = graticule.build_position(Grid(4, 5), dim=8, depth=2, num_heads=2, encoding=f"{encoding}(std=0)")
    tables = {name: values for name, values in position.named_parameters() if "biases" not in name}
    assert tables and not any(values.any() for values in tables.values())


def test_shaws_tables_are_shared_by_heads_and_start_as_a_normal_of_std_a_fiftieth():
    tables = torch.cat(list(ShawBias(BUILT, 1, 256, clip=32).parameters()))
    assert abs(tables.std().item() / 0.02 - 1) < 0.05 and abs(tables.mean().item()) < 1e-3
    assert sum(p.numel() for p in ShawBias(BUILT, 3, HEAD_DIM, clip=2).parameters()) == 2 * (2 * 2 + 1) * HEAD_DIM


@torch.no_grad()
def test_rows_of_prefix_tokens_are_the_same_at_another_grid_and_beside_a_norm():
    encoding = RelativeBias(BUILT, HEADS, prefix_rows=True).double()
    last, bias = encoding.relative_position_bias_table[-3:].clone(), encoding(OTHER)
    encoding.set_grid(OTHER)
    assert encoding.relative_position_bias_table.shape == (7 * 5 + 3, HEADS)
    assert torch.equal(encoding.relative_position_bias_table[-3:], last) and torch.equal(encoding(OTHER), bias)
    model = draw(tiny("relative_bias(prefix_rows=True)", "lape")).double()
    bias = model.position(model.grid)[0].bias
    rows = model.position.encodings.get_submodule("0").bias.relative_position_bias_table[-3:]
    assert all(map(torch.equal, (bias[:, 0, 1], bias[:, 1, 0], bias[:, 0, 0]), rows))


test_invalid_arguments_are_refused = refusals(
    (lambda: Sandwich(BUILT, 2, channels=3), "`channels` must be a multiple of 2 .*, got 3"),
    (lambda: Sandwich(BUILT, 2, channels=0), "`channels` must be at least 1, got 0"),
    (lambda: Fire(BUILT, 2, form="axis"), "`form` must be one of"),
    (lambda: Kerple(BUILT, 2, kernel="linear"), "`kernel` must be one of"),
    (lambda: Alibi(BUILT, 0), "`num_heads` must be at least 1, got 0"),
    (lambda: Alibi(BUILT, 2, "chebyshev"), "`distance` must be one of"),
    (lambda: Alibi(BUILT, 3, slopes=[0.5, 0.25]), "`slopes` must be one per head, 3, got 2"),
    (lambda: Alibi(BUILT, 2, slopes=[0.5, -0.25]), "`slopes` must be at least 0, got"),
    (lambda: BucketedBias(BUILT, HEADS, 6), "`buckets` must be a multiple of 4, got 6"),
    (lambda: BucketedBias(BUILT, HEADS, 0), "`buckets` must be a multiple of 4, got 0"),
    (lambda: BucketedBias(Grid(9), HEADS, 5, causal=True), "`buckets` must be a multiple of 2, got 5"),
    (lambda: BucketedBias(BUILT, HEADS, max_distance=8), "`max_distance` must be more than the 8 exact buckets"),
    (lambda: BucketedBias(Grid(2, 3), HEADS, causal=True), "`grid` must have height 1"),
    (lambda: BucketedBias(Grid(1, 9), HEADS)(Grid(2, 3)), "`grid` must have height 1, .* got 2 x 3"),
    (lambda: BucketedBias(Grid(1, 9), HEADS).set_grid(Grid(2, 3)), "`grid` must have height 1, .* got 2 x 3"),
    (lambda: Irpe(BUILT, HEADS, HEAD_DIM, ratio=0.0), r"`ratio` must be greater than 0, got 0\.0"),
    (lambda: Irpe(BUILT, HEADS, HEAD_DIM, on="qkv", mode="bias"), "`on` must be 'q', 'k' or 'qk' with the mode"),
    (
        lambda: tiny("relative_bias(prefix_rows=True)", class_token=False, global_pool="avg"),
        "`prefix_rows` must be False where there is no prefix token, got True",
    ),
    (
        lambda: graticule.build_position(Grid(4, 5), dim=8, depth=2, num_heads=2, encoding="fourier(std=0)"),
        "`std` must be positive, as features of no direction are constant, got 0",
    ),
)
