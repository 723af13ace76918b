"""Every rotary encoding has the angles of its formula, and logits that depend on the displacement alone."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import softplus

import graticule
from graticule import Grid
from graticule.encodings.forms.scaling import Scaling
from graticule.encodings.liere import LieRe
from graticule.encodings.mrope import Mrope
from graticule.encodings.pope import Pope
from graticule.encodings.rope import Frequencies, Rope, Rope1d
from graticule.encodings.rope_directions import GoldenGateRope, MixedRope
from graticule.position.rotation import PairRotation
from in_turn import in_turn, refusals
from tiny import DEPTH, DIM, assert_same, draw, images, spec, tiny

GRIDS = [Grid(4, 4), Grid(3, 5, prefix=2), Grid(1, 6)]
BUILT, OTHER = Grid(3, 5, prefix=1), Grid(6, 4, prefix=1)
HEADS, D = 3, 8
GOLDEN = math.pi * (math.sqrt(5) - 1) / 2


# The angle of a pair of channels at (y, x) on a grid, by the formula


def axial(encoding, layer, head, y, x, pair, grid):
    step = [1.0, 1.0]
    if encoding.scaling.scaling == "interpolation":
        step = [old / new for old, new in zip(encoding.scaling.reference, grid.shape, strict=True)]
    quarter = D // 4
    return (y * step[0] if pair < quarter else x * step[1]) * 100.0 ** (-4 * (pair % quarter) / D)


def sequence(encoding, layer, head, y, x, pair, grid):
    return (y * grid.width + x) * 20.0 ** (-2 * pair / D)


def mixed(encoding, layer, head, y, x, pair, grid):
    horizontal, vertical = encoding.freqs[:, layer, head, pair].tolist()
    return x * horizontal + y * vertical


def golden(encoding, layer, head, y, x, pair, grid):
    height, width = grid.shape
    lengths = [0.0] + [0.5 * 8 ** (i / 2) for i in range(3)]
    v = (2 * y / max(height - 1, 1) - 1) * math.sqrt(height / width)
    u = (2 * x / max(width - 1, 1) - 1) * math.sqrt(width / height)
    phi = (head * D // 2 + pair) * GOLDEN
    return lengths[pair] * (u * math.cos(phi) + v * math.sin(phi))


def interleaved(encoding, layer, head, y, x, pair, grid):
    return (0, y, x)[pair % 3] * 10.0 ** (-2 * pair / D)


#: Name -> its builder for a grid, and its formula.
ROTATIONS = {
    "rope": (lambda grid: Rope(grid, D, Frequencies(100.0)), axial),
    "rope, half": (lambda grid: Rope(grid, D, Frequencies(100.0), layout="half"), axial),
    "rope, interpolated": (lambda grid: Rope(grid, D, Frequencies(100.0), scaling=Scaling("interpolation")), axial),
    "rope_1d": (lambda grid: Rope1d(grid, D, 20.0), sequence),
    "rope_mixed": (lambda grid: MixedRope(grid, 2, HEADS, D), mixed),
    "rope_golden_gate": (lambda grid: GoldenGateRope(grid, HEADS, D, lowest=0.5, highest=4.0, zeros=0.25), golden),
    "mrope": (lambda grid: Mrope(grid, D, base=10.0), interleaved),
}
#: Those whose logits depend on the displacement; along the sequence for a text.
OTHERS = {
    "rope, ntk": lambda grid: Rope(grid, D, Frequencies(100.0), scaling=Scaling("ntk")),
    "rope, yarn": lambda grid: Rope(grid, D, Frequencies(100.0), scaling=Scaling("yarn", ramp=(0.25, 1.0))),
    "pope": lambda grid: Pope(grid, 1, HEADS, D, base=10.0),
    "liere, 2": lambda grid: LieRe(grid, 1, HEADS, D, block=2, per_head=True),
    "liere": lambda grid: LieRe(grid, 1, HEADS, D, per_head=True),
}
every = in_turn("name", ROTATIONS)
grids = in_turn("grid", GRIDS)


def built(name, grid=BUILT):
    encoding = (OTHERS.get(name) or ROTATIONS[name][0])(grid).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return encoding


def logits(rotation, q, k, grid):
    """Return the logits of one query and one key per head, (heads, d), at all tokens, (heads, N, N)."""
    queries, keys = rotation(*(t[None, :, None].expand(1, -1, grid.tokens, -1) for t in (q, k)))
    return (queries @ keys.mT)[0].detach()


def angles(name, encoding, grid, layer, head):
    formula = ROTATIONS[name][1]
    rows = [
        [formula(encoding, layer, head, y, x, pair, grid) for pair in range(D // 2)]
        for y, x in grid.coordinates().tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


@every
@grids
@in_turn("elsewhere", [False, True])
def test_angles_and_logits_are_those_of_the_formula_also_at_another_grid_and_when_it_is_set(name, grid, elsewhere):
    encoding = built(name, Grid(2, 4, prefix=grid.prefix) if elsewhere else grid)
    q, k = torch.randn(2, HEADS, D, dtype=torch.float64)
    pairs = [t.unflatten(-1, (-1, 2)).unbind(-1) for t in (q, k)]
    rotations = encoding.rotations(grid)
    if isinstance(rotations[0], PairRotation) and rotations[0].half:
        pairs = [t.chunk(2, -1) for t in (q, k)]
    a, b = (torch.complex(*pair) for pair in pairs)  # (heads, d / 2)
    values = encoding.angles(grid)
    for layer, rotation in enumerate(rotations):
        product = logits(rotation, q, k, grid)
        for head in range(HEADS):
            theta = angles(name, encoding, grid, layer, head)
            actual = values if values.ndim == 2 else values[head] if values.ndim == 3 else values[layer, head]
            assert_same(actual, theta, 1e-12)
            theta = torch.cat([theta.new_zeros(grid.prefix, D // 2), theta])  # prefix tokens are not rotated
            turns = torch.polar(torch.ones_like(theta[:, None]), theta[:, None] - theta)  # RoFormer, Eq. 12
            assert_same(product[head], (a[head] * b[head].conj() * turns).real.sum(-1), 1e-10)
    encoding.set_grid(grid)
    assert encoding.grid == grid
    assert_same(encoding.rotations(grid)[0][0], rotations[0][0], 1e-12)


@in_turn("name", [*ROTATIONS, *OTHERS])
@in_turn("at", [BUILT, OTHER])
def test_logits_depend_on_the_displacement_alone_unless_matrices_do_not_commute(name, at):
    q, k = torch.randn(2, HEADS, D, dtype=torch.float64)
    grid = Grid(1, 9, prefix=1) if name == "rope_1d" else at
    for rotation in built(name).rotations(grid):
        patches = logits(rotation, q, k, grid)[:, 1:, 1:].unflatten(2, grid.shape).unflatten(1, grid.shape)
        worst = 0.0
        for dy, dx in itertools.product(range(grid.height), range(grid.width)):
            same = [patches[:, y + dy, x + dx, y, x] for y in range(grid.height - dy) for x in range(grid.width - dx)]
            worst = max(worst, (torch.stack(same) - same[0]).abs().max().item())
        assert (worst < 1e-10) == (name != "liere") and patches.max() - patches.min() > 0.1


@in_turn("name", [*ROTATIONS, "liere, 2", "liere"])
@in_turn("prefix", [1, 3])
def test_prefix_tokens_are_unchanged_and_no_norm_is_changed(name, prefix):
    grid = Grid(2, 3, prefix=prefix)
    x = torch.randn(1, HEADS, grid.tokens, D, dtype=torch.float64)
    for rotation in built(name, grid).rotations(grid):
        for turned in rotation(x, x):
            assert torch.equal(turned[:, :, :prefix], x[:, :, :prefix])
            assert (turned[:, :, prefix + 1 :] != x[:, :, prefix + 1 :]).any(-1).all()  # (0, 0) may have angles of 0
            assert_same(turned.norm(dim=-1), x.norm(dim=-1), 1e-12)


def test_the_state_of_a_model_has_the_frequencies_if_they_are_learned_also_under_the_name_of_timm():
    for name in ("rope", "rope_1d", "mrope", "rope_golden_gate"):
        assert not [key for key in tiny(name).state_dict() if key.startswith("position")]
    model, other = tiny("rope_mixed"), tiny("rope_mixed")
    state = model.state_dict()
    assert [key for key in state if key.startswith("position")] == ["position.encoding.freqs"]
    frequencies = state.pop("position.encoding.freqs")
    assert frequencies.shape == (2, DEPTH, HEADS, D // 2)
    other.load_state_dict({**state, "rope.freqs": frequencies})
    assert torch.equal(other.position.encoding.freqs, frequencies)
    model = draw(model).double()
    model(images(dtype=torch.float64)).square().sum().backward()
    assert (model.position.encoding.freqs.grad != 0).all()


@in_turn("encoding", ["rope", "rope_mixed"])
def test_layers_share_a_computed_table_and_have_their_own_learned_one_and_others_get_nothing(encoding):
    model = tiny(encoding, joining=spec("default", layers=2))
    first, second, third = model.position(model.grid)
    assert all(value is None for value in third)
    assert (first.rotary.table is second.rotary.table) == (encoding == "rope")
    if encoding == "rope_mixed":
        assert model.position.encoding.freqs.shape[1] == 2 and first.rotary.table.shape == (HEADS, 17, 2 * D)
        assert not torch.equal(first.rotary.table, second.rotary.table)


def swin(encoding, **kwargs):
    """Return a Swin with two stages of 8 x 8 and 4 x 4 patches in windows of 4, with heads of 8 channels."""
    sizes = {"img_size": 32, "embed_dim": 24, "depths": (2, 1), "num_heads": (3, 6), "window_size": 4, "num_classes": 5}
    return graticule.create_model("swin_tiny_patch4_window7_224", encoding=encoding, **{**sizes, **kwargs})


@in_turn("encoding", ["rope", "rope_mixed"])
def test_windows_of_another_size_are_those_of_a_model_that_is_built_for_them(encoding):
    model, x = draw(swin(encoding)).double().eval(), images(64, 48, dtype=torch.float64)
    model.set_input_size((64, 48), window_size=6)
    other = swin(encoding, img_size=(64, 48), window_size=6).double().eval()
    other.load_state_dict(model.state_dict())
    assert_same(model(x), other(x), 1e-12)
    wide = swin("rope", window_size=7)  # cut to the grid of the last stage
    assert [layer.rotary.table.shape[0] for layer in wide.position(wide.grid)] == [49, 49, 16]


@in_turn(("head_dim", "base"), [(8, 10.0), (16, 100.0)])
def test_frequencies_start_with_the_published_speeds_in_two_directions_at_a_right_angle(head_dim, base):
    encoding = MixedRope(BUILT, 4, HEADS, head_dim, base)
    freqs = encoding.freqs.detach().double()
    quarter = head_dim // 4
    speeds = torch.tensor([base ** (-4 * k / head_dim) for k in range(quarter)], dtype=torch.float64)
    torch.testing.assert_close(freqs.norm(dim=0), speeds.repeat(2).expand(4, HEADS, -1), rtol=1e-6, atol=0)
    first, second = (freqs / freqs.norm(dim=0)).split(quarter, -1)
    assert_same(first, first[..., :1].expand_as(first), 1e-6)
    assert_same(second, torch.stack([-first[1], first[0]]), 1e-6)  # (c, s) by a quarter turn is (-s, c)
    directions = torch.atan2(freqs[1, ..., 0], freqs[0, ..., 0]).flatten()
    assert len(set(directions.tolist())) == 4 * HEADS and directions.min() < 0 < directions.max()


def test_golden_gate_directions_cover_the_circle_evenly():
    vectors = GoldenGateRope(BUILT, 8, 16).vectors().flatten(0, 1)
    directions = torch.atan2(vectors[:, 0], vectors[:, 1]).remainder(math.pi).sort().values
    gaps = torch.cat([directions.diff(), directions[:1] + math.pi - directions[-1:]])
    assert gaps.max() / gaps.min() < 3  # three distances at most, the largest the sum of the others


def test_sections_of_mrope_take_turns_or_follow_each_other():
    cut = Mrope(BUILT, 24, sections=(6, 2, 4), base=100.0).vectors()
    assert cut[:, 0].nonzero().flatten().tolist() == [1, 4] and cut[:, 1].nonzero().flatten().tolist() == [2, 5, 8, 11]
    chunked = Mrope(BUILT, 16, sections=(2, 3, 3), arrangement="chunked").vectors()
    assert chunked[:, 0].nonzero().flatten().tolist() == [2, 3, 4]
    assert chunked[:, 1].nonzero().flatten().tolist() == [5, 6, 7]
    assert_same(chunked.sum(-1)[2:], 10_000 ** (-torch.arange(2, 8, dtype=torch.float64) / 8), 1e-12)


def test_liere_is_the_exponential_of_the_skew_matrix_of_the_position():
    grid = Grid(3, 5, prefix=2)
    encoding = LieRe(grid, 2, HEADS, D, block=4, per_layer=True, per_head=True).double()
    matrices, generators = encoding(grid).detach(), encoding.generators.unflatten(-1, (2, 6))
    assert matrices.shape == (2, HEADS, grid.tokens, 2, 4, 4)
    assert_same(matrices.det(), torch.ones(matrices.shape[:-2], dtype=torch.float64), 1e-12)
    for patch, (row, column) in enumerate(grid.coordinates().tolist()):
        upper = (row / 2) * generators[0] + (column / 4) * generators[1]
        for layer, head, block in ((0, 0, 0), (1, 2, 1)):
            matrix = torch.zeros(4, 4, dtype=torch.float64)
            matrix[*torch.triu_indices(4, 4, 1)] = upper[layer, head, block].detach()
            values, vectors = torch.linalg.eig(matrix - matrix.T)  # another algorithm for the exponential
            expected = (vectors @ torch.diag(values.exp()) @ torch.linalg.inv(vectors)).real
            assert_same(matrices[layer, head, 2 + patch, block], expected, 1e-10)


def test_liere_with_blocks_of_two_is_the_mixed_encoding():
    lie, mixed_rope = LieRe(BUILT, 1, HEADS, D, block=2, per_head=True).double(), built("rope_mixed")
    with torch.no_grad():  # x before y, per patch instead of per side, and the other way round
        mixed_rope.freqs[0, 0] = -lie.generators[1] / 4
        mixed_rope.freqs[1, 0] = -lie.generators[0] / 2
    q, k = torch.randn(2, 2, HEADS, BUILT.tokens, D, dtype=torch.float64)
    assert_same(lie.rotations(BUILT)[0](q, k), mixed_rope.rotations(BUILT)[0](q, k), 1e-12)


def test_pope_is_a_sum_of_magnitudes_and_cosines_of_positions():
    encoding = built("pope")
    q, k = torch.randn(2, HEADS, D, dtype=torch.float64)
    product = logits(encoding.rotations(BUILT)[0], q, k, BUILT)[:, 1:, 1:].unflatten(2, (3, 5)).unflatten(1, (3, 5))
    half = D // 2
    for i, j in (((0, 0), (0, 0)), ((2, 1), (0, 4)), ((1, 3), (2, 2))):
        for head in range(HEADS):
            total = 0.0
            for c in range(D):
                axis = 0 if c < half else 1
                angle = (i[axis] - j[axis]) * 10 ** (-(c % half) / half) - encoding.delta[0, head, c].item()
                total += (softplus(q[head, c]) * softplus(k[head, c])).item() * math.cos(angle)
            assert product[head, *i, *j].item() == pytest.approx(total, abs=1e-10)
    position = tiny("pope").position(Grid(4, 4, prefix=1))
    assert len(position) == DEPTH and position[0].rotary.channels == 2 * DIM // HEADS
    assert [table.shape for table in position[0].rotary] == [(17, 16), (HEADS, 17, 16)]


test_heads_and_sums_that_cannot_be_rotated_are_refused = refusals(
    *(
        (lambda kind=kind, d=d: kind(d), rf"`head_dim` must be a multiple of 4.*got {d};.*embed_dim / num_heads")
        for kind in (lambda d: Rope(BUILT, d), lambda d: MixedRope(BUILT, 1, 2, d))
        for d in (6, 2, 9, 0)
    ),
    *((lambda d=d: Rope1d(BUILT, d), f"`head_dim` must be a multiple of 2 .*got {d}") for d in (0, 1, 7)),
    (lambda: tiny("rope", embed_dim=18), r"`head_dim` must be a multiple of 4.*got 6; it is embed_dim / num_heads"),
    (lambda: tiny("rope+rope_mixed"), "`rotary` must be given by one encoding at most"),
)
