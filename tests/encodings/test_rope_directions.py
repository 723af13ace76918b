"""Laws of golden-gate directions, MRoPE, LieRE and PoPE."""

import math

import pytest
import torch
from torch.nn.functional import softplus

import graticule
from graticule import Grid
from graticule.encodings.liere import LieRe
from graticule.encodings.mrope import Mrope
from graticule.encodings.pope import Pope
from graticule.encodings.rope_directions import GoldenGateRope, MixedRope
from tiny import DEPTH, DIM, draw, images, tiny

HEADS = 3
GRID = Grid(3, 5, prefix=2)
D = 8
GOLDEN = math.pi * (math.sqrt(5) - 1) / 2


def logits(rotation, q, k, grid=GRID):
    """Return the logits between the patches, for one query and one key at every token, (h, H, W, H, W)."""
    turned = rotation(*(t[None, :, None].expand(1, -1, grid.tokens, -1) for t in (q, k)))
    queries, keys = (t[0, :, grid.prefix :] for t in turned)
    return (queries @ keys.mT).unflatten(2, grid.shape).unflatten(1, grid.shape)


def spread_over_displacements(found):
    """Return the largest difference of two logits of one displacement, and the range of all."""
    _, height, width, _, _ = found.shape
    worst = 0.0
    for dy in range(height):
        for dx in range(width):
            same = torch.stack([found[:, y + dy, x + dx, y, x] for y in range(height - dy) for x in range(width - dx)])
            worst = max(worst, (same - same[0]).abs().max().item())
    return worst, (found.max() - found.min()).item()


def make(name):
    torch.manual_seed(0)
    encoding = {
        "golden": lambda: GoldenGateRope(GRID, HEADS, D),
        "mrope": lambda: Mrope(GRID, D, base=10.0),
        "pope": lambda: Pope(GRID, 1, HEADS, D, base=10.0),
        "liere_2": lambda: LieRe(GRID, 1, HEADS, D, block=2, per_head=True),
        "liere": lambda: LieRe(GRID, 1, HEADS, D, per_head=True),
    }[name]()
    if name == "pope":
        torch.nn.init.normal_(encoding.delta)
    return encoding.double()


@pytest.mark.parametrize("name", ["golden", "mrope", "pope", "liere_2"])
def test_logits_depend_on_the_displacement_alone(name):
    q, k = torch.randn(2, HEADS, D, dtype=torch.float64)
    worst, overall = spread_over_displacements(logits(make(name).rotations(GRID)[0], q, k).detach())
    assert worst < 1e-10 and overall > 0.1


def test_matrices_that_do_not_commute_know_more_than_the_displacement():
    q, k = torch.randn(2, HEADS, D, dtype=torch.float64)
    worst, _ = spread_over_displacements(logits(make("liere").rotations(GRID)[0], q, k).detach())
    assert worst > 0.1


# Golden gate


def test_golden_gate_angles_are_the_formula():
    encoding = GoldenGateRope(GRID, HEADS, D, lowest=0.5, highest=4.0, zeros=0.25)
    found = encoding.angles(GRID)
    assert found.shape == (HEADS, 15, D // 2)
    lengths = [0.0] + [0.5 * 8 ** (i / 2) for i in range(3)]
    for head in range(HEADS):
        for patch, (row, column) in enumerate(GRID.coordinates().tolist()):
            y = (2 * row / 2 - 1) * math.sqrt(3 / 5)
            x = (2 * column / 4 - 1) * math.sqrt(5 / 3)
            for k in range(D // 2):
                phi = (head * D // 2 + k) * GOLDEN
                expected = lengths[k] * (x * math.cos(phi) + y * math.sin(phi))
                assert found[head, patch, k].item() == pytest.approx(expected, abs=1e-12)


def test_golden_gate_directions_cover_the_circle_evenly():
    vectors = GoldenGateRope(GRID, 8, 16).vectors().flatten(0, 1)
    angles = torch.atan2(vectors[:, 0], vectors[:, 1]).remainder(math.pi).sort().values
    gaps = torch.cat([angles.diff(), angles[:1] + math.pi - angles[-1:]])
    assert gaps.max() / gaps.min() < 3  # three distances at most, the largest the sum of the others


# MRoPE


def test_interleaved_axes_take_turns_and_time_is_still():
    found = Mrope(GRID, 24, base=100.0).vectors()
    omega = [100 ** (-2 * k / 24) for k in range(12)]
    expected = [[omega[k] if k % 3 == 1 else 0.0, omega[k] if k % 3 == 2 else 0.0] for k in range(12)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    cut = Mrope(GRID, 24, sections=(6, 2, 4), base=100.0).vectors()
    assert cut[:, 0].nonzero().flatten().tolist() == [1, 4] and cut[:, 1].nonzero().flatten().tolist() == [2, 5, 8, 11]


def test_chunked_axes_follow_each_other():
    found = Mrope(GRID, 16, sections=(2, 3, 3), arrangement="chunked").vectors()
    assert found[:, 0].nonzero().flatten().tolist() == [2, 3, 4]
    assert found[:, 1].nonzero().flatten().tolist() == [5, 6, 7]
    torch.testing.assert_close(found.sum(-1)[2:], 10_000 ** (-torch.arange(2, 8, dtype=torch.float64) / 8))


# LieRE


def test_liere_matrices_are_rotations_that_leave_prefix_tokens_alone():
    matrices = make("liere")(GRID).detach()
    assert matrices.shape == (1, HEADS, GRID.tokens, 1, D, D)
    identity = torch.eye(D, dtype=torch.float64)
    torch.testing.assert_close(matrices @ matrices.mT, identity.expand_as(matrices), rtol=0, atol=1e-12)
    torch.testing.assert_close(matrices.det(), torch.ones(matrices.shape[:-2], dtype=torch.float64))
    assert torch.equal(matrices[:, :, :2], identity.expand_as(matrices[:, :, :2]))
    assert torch.equal(matrices[:, :, 2], identity.expand_as(matrices[:, :, 2]))  # the patch at (0, 0)


def test_liere_is_the_exponential_of_the_skew_matrix_of_the_position():
    encoding = LieRe(GRID, 2, HEADS, D, block=4, per_layer=True, per_head=True).double()
    found, generators = encoding(GRID).detach(), encoding.generators.unflatten(-1, (2, 6))
    assert found.shape == (2, HEADS, GRID.tokens, 2, 4, 4)
    for patch, (row, column) in enumerate(GRID.coordinates().tolist()):
        upper = (row / 2) * generators[0] + (column / 4) * generators[1]
        for layer, head, block in ((0, 0, 0), (1, 2, 1)):
            matrix = torch.zeros(4, 4, dtype=torch.float64)
            entries = iter(upper[layer, head, block].tolist())
            for i in range(4):
                for j in range(i + 1, 4):
                    matrix[i, j] = next(entries)
                    matrix[j, i] = -matrix[i, j]
            values, vectors = torch.linalg.eig(matrix)  # another algorithm for the exponential
            expected = (vectors @ torch.diag(values.exp()) @ torch.linalg.inv(vectors)).real
            torch.testing.assert_close(found[layer, head, 2 + patch, block], expected, rtol=0, atol=1e-10)


def test_liere_with_blocks_of_two_is_the_mixed_encoding():
    lie = LieRe(GRID, 1, HEADS, D, block=2, per_head=True).double()
    mixed = MixedRope(GRID, 1, HEADS, D).double()
    with torch.no_grad():  # x before y, per patch instead of per side, and the other way round
        mixed.freqs[0] = -lie.generators[1] / 4
        mixed.freqs[1] = -lie.generators[0] / 2
    q, k = torch.randn(2, 2, HEADS, GRID.tokens, D, dtype=torch.float64)
    for a, b in zip(lie.rotations(GRID)[0](q, k), mixed.rotations(GRID)[0](q, k), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# PoPE


def test_pope_is_a_sum_of_magnitudes_and_cosines_of_positions():
    encoding = make("pope")
    q, k = torch.randn(2, HEADS, D, dtype=torch.float64)
    found = logits(encoding.rotations(GRID)[0], q, k).detach()
    half = D // 2
    omega = [10 ** (-c / half) for c in range(half)]
    for i, j in (((0, 0), (0, 0)), ((2, 1), (0, 4)), ((1, 3), (2, 2))):
        for head in range(HEADS):
            total = 0.0
            for c in range(D):
                axis = 0 if c < half else 1
                angle = (i[axis] - j[axis]) * omega[c % half] - encoding.delta[0, head, c].item()
                total += (softplus(q[head, c]) * softplus(k[head, c])).item() * math.cos(angle)
            assert found[head, *i, *j].item() == pytest.approx(total, abs=1e-10)


def test_pope_doubles_the_channels_of_queries_and_keys_and_not_of_values():
    position = tiny("pope").position(Grid(4, 4, prefix=1))
    assert len(position) == DEPTH and position[0].rotary.channels == 2 * DIM // HEADS
    assert [each.shape for each in position[0].rotary] == [(17, 16), (HEADS, 17, 16)]


@pytest.mark.parametrize("encoding", ["pope", "liere", "mrope", "rope_golden_gate", "rope_1d(layout='half')", "log_n"])
def test_generation_with_a_cache_is_the_whole_text(encoding):
    model = graticule.create_language_model(
        "lm_nano", vocab_size=11, context=12, encoding=encoding, embed_dim=24, depth=2, num_heads=3
    )
    model = draw(model).double().eval()
    tokens = torch.randint(11, (2, 12))
    with torch.no_grad():
        whole = model(tokens)
        torch.testing.assert_close(model(tokens[:, :5]), whole[:, :5], rtol=0, atol=1e-12)
        with_cache, without = (
            torch.stack(list(graticule.generate(model, tokens[:, :4], 6, temperature=0, use_cache=use)))
            for use in (True, False)
        )
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("encoding", ["pope", "liere(block=4)", "mrope", "rope_golden_gate"])
def test_the_model_sees_the_order_of_patches_and_not_of_a_translation_of_the_whole(encoding):
    model = draw(tiny(encoding)).double().eval()
    x = images(dtype=torch.float64)
    swapped = torch.cat([x[..., 16:], x[..., :16]], -1)
    assert (model(swapped) - model(x)).abs().max() > 1e-3
