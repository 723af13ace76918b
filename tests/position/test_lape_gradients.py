"""LaPE's chain of norms: its gradients stay bounded at zero rows, and its values are those of the formula."""

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graticule
from graticule.encodings.relative_bias import RelativeBias
from graticule.position.joining import DECOMPOSITIONS, Lape
from graticule.position.layer import LayerPosition
from in_turn import in_turn
from tiny import draw, spec

DIM, DEPTH, EPS = 8, 6, 1e-6
NORMS = [name for name in DECOMPOSITIONS if "norm" in name]
#: Largest allowed factor of a parameter's gradient: the derivative of one norm at a row without variance.
ONE_NORM = 1 / math.sqrt(EPS)


class PlainChain(Lape):
    """Eq. 11 as in the released code: every norm is differentiated for any input."""

    def join(self, *tables):
        positions, table = [], tables[0]
        for norm in self.norms:
            table = norm(table)
            positions.append(LayerPosition(after_norm=table))
        return positions, table


def lape(decomposition):
    return spec("lape", decomposition=decomposition)


def model(depth, joining="lape", **kwargs):
    torch.manual_seed(0)
    sizes = {"img_size": 12, "embed_dim": 16, "num_heads": 2, "depth": depth, **kwargs}
    return graticule.create_model("vit_nano_patch4_28", joining=joining, **sizes)


def gradients(of, channels=1):
    """Return the gradient norm of every parameter, for a loss on drawn images and labels."""
    of.zero_grad()
    images = torch.randn(4, channels, *of.img_size, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(of(images), torch.arange(4)).backward()
    return {name: p.grad.norm().item() for name, p in of.named_parameters() if p.grad is not None and p.numel()}


def ratio(norms):
    """Return the ratio of the largest to the median; infinite if one is not finite."""
    values = norms.values()
    return max(values) / statistics.median(values) if all(map(math.isfinite, values)) else math.inf


def no_class_row(of):
    of.position.encodings[0].pos_embed[0, 0] = 0


def no_table(of):
    of.position.encodings[0].pos_embed.zero_()


def faint_table(of):
    of.position.encodings[0].pos_embed.mul_(1e-4)


def no_bias(of):
    for module in of.modules():
        if isinstance(module, RelativeBias):
            module.relative_position_bias_table.zero_()


CASES = {
    "sinusoidal_1d": ({"encoding": "sinusoidal_1d"}, None),
    **{f"sinusoidal_2d-{name}": ({"encoding": "sinusoidal_2d", "joining": lape(name)}, None) for name in NORMS},
    "learnable": ({}, None),
    **{f"no_class_row-{name}": ({"joining": lape(name)}, no_class_row) for name in NORMS},
    "no_table": ({}, no_table),
    "faint_table": ({}, faint_table),
    "no_bias": ({"encoding": "relative_bias"}, no_bias),
    "no_bias-heads": ({"encoding": "relative_bias", "joining": "lape(over='heads')"}, no_bias),
    "continuous_bias": ({"encoding": "continuous_bias"}, None),
    "continuous_bias-heads": ({"encoding": "continuous_bias", "joining": "lape(over='heads')"}, None),
}


def build(case):
    """Return a model of 24 layers, and its position changed as a case says."""
    kwargs, change = CASES[case]
    built = model(24, **kwargs)
    if change is not None:
        with torch.no_grad():
            change(built)
    return built


@in_turn("case", CASES)
def test_the_largest_gradient_is_no_more_than_one_norm_above_the_median(case):
    assert ratio(gradients(build(case))) < ONE_NORM


def test_the_chain_of_the_released_code_explodes_at_a_zero_row():
    built = model(24, encoding="sinusoidal_2d")
    built.position.joining.__class__ = PlainChain
    assert ratio(gradients(built)) == math.inf and ratio(gradients(model(24, encoding="sinusoidal_2d"))) < ONE_NORM


def test_a_pyramid_passes_the_chain_on_without_amplifying_a_zero_table():
    torch.manual_seed(0)
    sizes = {"img_size": 32, "in_chans": 1, "num_classes": 4, "embed_dim": 8, "depths": (8, 8), "num_heads": (1, 2)}
    sizes |= {"patch_size": 4, "window_size": 4, "encoding": "learnable", "joining": "lape"}
    built = graticule.create_model("swin_tiny_patch4_window7_224", **sizes)
    with torch.no_grad():
        built.position.stages[0].encodings[0].pos_embed.zero_()
    assert ratio(gradients(built)) < ONE_NORM


def chains(name="layer_norm"):
    torch.manual_seed(1)
    ours = Lape(DIM, DEPTH, decomposition=name).double()
    draw(ours)
    plain = PlainChain(DIM, DEPTH, decomposition=name).double()
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def rows():
    """Return rows of several magnitudes: zero, far below the root of eps, near it, and as in tables."""
    size = torch.tensor([0, 1e-9, 1e-4, 1e-3, 1e-2, 1, 1e3], dtype=torch.float64)
    return size[:, None] * torch.randn(len(size), DIM, dtype=torch.float64)


@in_turn("name", DECOMPOSITIONS)
def test_values_are_those_of_the_plain_chain_to_the_last_bit(name):
    ours, plain = chains(name)
    table = rows()
    assert all(torch.equal(a.after_norm, b.after_norm) for a, b in zip(ours(table), plain(table), strict=True))


@in_turn("name", DECOMPOSITIONS)
def test_gradients_of_rows_with_a_variance_of_eps_and_above_are_those_of_the_plain_chain(name):
    ours, plain = chains(name)
    drawn, gradients_of_chains = rows()[4:] if "norm" in name else rows(), []  # without a norm there is no eps
    for chain in (ours, plain):
        table = drawn.clone().requires_grad_()
        sum((p.after_norm.sin() * p.after_norm).sum() for p in chain(table)).backward()
        gradients_of_chains.append([table.grad, *(p.grad for p in chain.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients_of_chains, strict=True))


def test_a_zero_row_has_the_gradient_of_the_first_norm_and_of_no_other():
    joining = Lape(DIM, DEPTH).double()
    table = torch.zeros(1, DIM, dtype=torch.float64, requires_grad=True)
    tables = [position.after_norm for position in joining(table)]
    direction = torch.eye(DIM, dtype=torch.float64)[:1]
    (first,) = torch.autograd.grad((tables[0] * direction).sum(), table, retain_graph=True)
    torch.testing.assert_close(first, (direction - 1 / DIM) * ONE_NORM)  # of a norm at 0: (I - 1/D) / sqrt(eps)
    later = sum((later_table * direction).sum() for later_table in tables[1:])
    (later,) = torch.autograd.grad(later, table, allow_unused=True)
    assert later is None or not later.any()


def test_every_shift_of_the_chain_learns_from_a_zero_row():
    joining = Lape(DIM, DEPTH)
    sum(position.after_norm.sum() for position in joining(torch.zeros(3, DIM))).backward()
    for norm in joining.norms:
        assert torch.equal(norm.bias.grad, torch.full((DIM,), 3.0))


def corner(count):
    """Return images of 8 x 8 with a bright patch in one of four corners, and the index of the corner."""
    labels = torch.arange(count) % 4
    images = 0.1 * torch.randn(count, 1, 8, 8)
    for image, label in zip(images, labels, strict=True):
        y, x = divmod(int(label), 2)
        image[0, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] += 1
    return images, labels


@pytest.mark.parametrize(("chain", "learns"), [pytest.param(PlainChain, False, marks=pytest.mark.slow), (Lape, True)])
def test_a_model_under_gradient_clipping_learns_where_the_released_chain_stays_at_chance(chain, learns):
    built = model(12, encoding="sinusoidal_2d", img_size=8, num_classes=4)
    built.position.joining.__class__ = chain
    start = [p.detach().clone() for p in built.parameters()]
    optimizer = torch.optim.AdamW(built.parameters(), 1e-2, weight_decay=0)
    for _ in range(45):
        images, labels = corner(32)
        optimizer.zero_grad()
        F.cross_entropy(built(images), labels).backward()
        nn.utils.clip_grad_norm_(built.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        images, labels = corner(64)
        accuracy = (built(images).argmax(-1) == labels).float().mean()
    moved = [not torch.equal(p, before) for p, before in zip(built.parameters(), start, strict=True)]
    if learns:
        assert accuracy > 0.95 and any(moved)
    else:
        assert accuracy < 0.5 and not any(moved)
