"""Resamplers: one matrix per axis, exact against PyTorch's `interpolate`; rows sum to one."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.interpolate import RectBivariateSpline
from torch import nn
from torch.export import export

import graticule
from graticule.position.resampling import RESAMPLERS, Bicubic, CropResampler, Geometric, Resampler, build_resampler
from graticule.testing.methods import check_resampler
from in_turn import in_turn, refusals
from tiny import assert_same

#: Every mode of `interpolate` as a resampler, with its arguments there.
MODES = {
    f"{mode}(antialias={antialias}, align_corners={align})": {
        "mode": mode,
        "antialias": antialias,
        "align_corners": align,
    }
    for mode, antialias, align in itertools.product(("bicubic", "bilinear"), (False, True), (False, True))
} | {"area": {"mode": "area"}}
#: From (7, 10) up, down, both at once, to one row, and to the same size.
SIZES = [(14, 21), (8, 11), (3, 4), (12, 5), (1, 13), (7, 10)]
#: Resamplers of every kind, and the sides of the tables that they take.
POSITIONS = [*MODES, "bicubic(antialias=False, offset=0.1)", "crop", "tiled"]
DISPLACEMENTS = ["geometric", "geometric(mode='linear')", "clamped"]
TABLES = {**dict.fromkeys(POSITIONS, "positions"), **dict.fromkeys(DISPLACEMENTS, "displacements")}
#: A small size of each kind of tables, and another one.
TINY = {"positions": ((3, 4), (5, 3)), "displacements": ((3, 5), (7, 3))}
#: Sizes of tables of displacements.
ODD = [(3, 3), (5, 13), (27, 27), (1, 9)]


def image(height, width, channels=3):
    return torch.randn(channels, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def sizes(name):
    """Return pairs (old, new) for a resampler."""
    if TABLES[name] == "positions":
        return [((7, 10), new) for new in SIZES]
    return [(old, new) for old in ODD for new in ODD]


@in_turn("name", MODES)
def test_it_is_the_interpolation_of_pytorch(name):
    map_, resampler = image(7, 10), build_resampler(name)
    for size in SIZES:
        expected = F.interpolate(map_[None], size=size, **MODES[name])[0]
        torch.testing.assert_close(resampler(map_, size), expected, rtol=0, atol=1e-12, msg=f"{name} at {size}")


@pytest.mark.parametrize("antialias", [False, True])
def test_an_offset_is_that_of_dinov2s_code(antialias):
    map_ = image(7, 10)
    for size in ((9, 13), (5, 6), (7, 12)):
        scale = tuple((new + 0.1) / old for new, old in zip(size, (7, 10), strict=True))
        expected = F.interpolate(map_[None], scale_factor=scale, mode="bicubic", antialias=antialias)[0]
        actual = Bicubic(antialias=antialias, offset=0.1)(map_, size)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, msg=f"{size}")


@pytest.mark.parametrize("new", [(9, 5), (5, 9), (3, 2), (7, 7)])
def test_a_crop_of_a_square_table_is_naflex(new):
    map_ = image(7, 7)
    longer = max(new)
    expected = F.interpolate(map_[None], size=(longer, longer), mode="bicubic", antialias=True)[0]
    assert_same(CropResampler()(map_, new), expected[:, : new[0], : new[1]], 1e-12)


def test_a_crop_keeps_the_aspect_ratio_of_a_table_that_is_not_square():
    """A ramp along the rows has the same slope along the columns of the transposed ramp."""
    ramp = torch.arange(4, dtype=torch.float64)[:, None].expand(4, 8)
    resized = build_resampler("crop(mode='bilinear', antialias=False)")(ramp, (8, 8))
    torch.testing.assert_close(resized[2:6, 0], torch.arange(4, dtype=torch.float64) / 2 + 0.75)  # twice as dense
    resized = build_resampler("crop(mode='bilinear', antialias=False)")(ramp.T, (8, 8))
    torch.testing.assert_close(resized[0, 2:6], torch.arange(4, dtype=torch.float64) / 2 + 0.75)
    assert torch.equal(CropResampler()(ramp, (4, 8)), ramp)


@pytest.mark.parametrize(("old", "new"), [(9, 27), (27, 31), (27, 13), (13, 13)])
def test_geometric_is_beits(old, new):
    """BEiT's code uses the spline of FITPACK through knots in a geometric series."""
    map_ = image(old, old)
    if old == new:
        assert torch.equal(Geometric()(map_, (new, new)), map_)
        return
    left, right = 1.01, 1.5
    while right - left > 1e-6:
        q = (left + right) / 2.0
        if (1 - q ** (old // 2)) / (1 - q) > new // 2:
            right = q
        else:
            left = q
    half = np.cumsum(q ** np.arange(old // 2))
    knots, reach = np.concatenate([-half[::-1], [0.0], half]), new // 2
    at = np.arange(-reach, reach + 1.0)
    inside = np.clip(at, knots[0], knots[-1])
    expected = np.stack([RectBivariateSpline(knots, knots, channel, s=0)(inside, inside) for channel in map_.numpy()])
    assert_same(Geometric()(map_, (new, new)), torch.from_numpy(expected), 1e-9)


@in_turn("name", [name for name in TABLES if "offset" not in name and name not in ("crop", "tiled")])
def test_a_flipped_table_gives_the_flipped_result(name):
    resampler = build_resampler(name, TABLES[name])
    old, new = ((7, 10), (12, 5)) if TABLES[name] == "positions" else ((5, 13), (27, 9))
    map_ = image(*old)
    expected = resampler(map_, new).flip(-1, -2)
    if "antialias=True, align_corners=True" in name:
        assert not torch.allclose(resampler(map_.flip(-1, -2), new), expected)  # PyTorch's is not symmetric
    else:
        assert_same(resampler(map_.flip(-1, -2), new), expected, 1e-12)


@in_turn("name", TABLES)
def test_it_is_differentiable_and_keeps_the_dtype(name):
    resampler = build_resampler(name, TABLES[name])
    old, new = TINY[TABLES[name]]
    assert torch.autograd.gradcheck(lambda map_: resampler(map_, new), image(*old).requires_grad_())
    for dtype in (torch.bfloat16, torch.float32):
        resized = resampler(image(*old).to(dtype), new)
        assert resized.dtype == dtype
        assert_same(resized.double(), resampler(image(*old), new), 0.05)


class _Resized(nn.Module):
    def __init__(self, resampler, size):
        super().__init__()
        self.resampler, self.size = resampler, size

    def forward(self, map_):
        return self.resampler(map_, self.size)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "align_corners" in name else name for name in TABLES]
)
def test_it_is_exported_as_matrix_products(name):
    old, new = TINY[TABLES[name]]
    module, map_ = _Resized(build_resampler(name, TABLES[name]), new), image(*old)
    exported = export(module, (map_,))
    used = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert any("matmul" in target for target in used)
    assert not [target for target in used if "upsample" in target or "interpolate" in target or "pool" in target]
    assert_same(exported.module()(map_), module(map_), 1e-12)


@pytest.mark.parametrize("kind", sorted(set(TABLES.values())))
def test_it_is_compiled_as_one_graph(kind):
    name = next(name for name, table in TABLES.items() if table == kind)
    old, new = TINY[kind]
    module, map_ = _Resized(build_resampler(name, kind), new), image(*old)
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=False)
    assert_same(compiled(map_), module(map_), 1e-12)


test_what_is_wrong_is_named = refusals(
    (("bicubik",), "`resampler` must be one of bicubic, .*did you mean 'bicubic'"),
    (("bicubic(a=1)",), "`resampler` bicubic must not have the option 'a'"),
    (("bicubic(antialias=1)",), "`antialias` of resampler bicubic must be a valid boolean"),
    (("bicubic(offset=-1.0)",), "`offset` must be at least 0"),
    (("bilinear(offset=0.1, align_corners=True)",), "`offset` must be 0 with `align_corners`"),
    (("crop(mode='area')",), "`mode` of resampler crop"),
    (("bicubic + area",), "`resampler` must be one resampler"),
    (("geometric",), "`resampler` must be one for tables of positions, bicubic, bilinear, area"),
    (("crop", "displacements"), "`resampler` must be one for tables of displacements"),
    call=lambda arguments: build_resampler(*arguments),
)
test_even_sides_and_other_classes_are_refused = refusals(
    (lambda: Geometric().weights(4, 7), "`table` must have odd sides"),
    (lambda: graticule.register_resampler("mine")(dict), "must be a subclass of Resampler"),
    error=(ValueError, TypeError),
)


def test_every_resampler_keeps_the_contract_and_what_breaks_it_is_found(monkeypatch):
    for name in {*RESAMPLERS, *TABLES}:
        check_resampler(name)
    with pytest.raises(ValueError, match="`resampler` must be one of"):
        check_resampler("bicubic_")

    class Wrong(Resampler):
        fault = ""

        def __init__(self, power: float = 1.0) -> None:
            self.power = power

        def weights(self, old, new, device=None):
            index = (torch.arange(new, device=device) * old) // new
            matrix = torch.eye(old, device=device, dtype=torch.float32 if self.fault == "dtype" else torch.float64)[
                index
            ]
            matrix = matrix.mT if self.fault == "shape" else matrix
            return 2 * matrix if self.fault == "sum" else matrix

        def __str__(self):
            return "bilinear" if self.fault == "text" else super().__str__()

        def __call__(self, image, size):
            made = super().__call__(image, size)
            return made.detach().requires_grad_() if self.fault == "gradient" else made

    monkeypatch.setitem(RESAMPLERS.data, "wrong", Wrong)
    for fault, law in (
        ("dtype", "must be float64, got torch.float32"),
        ("shape", r"must be \(new, old\) = \(13, 7\) from \(7, 5\) to \(13, 9\), got \(7, 13\)"),
        ("sum", "rows must sum to one"),
        ("text", "keep every option"),
        ("gradient", "a gradient must reach the map"),
    ):
        monkeypatch.setattr(Wrong, "fault", fault)
        with pytest.raises(AssertionError, match=law):
            check_resampler("wrong")
    monkeypatch.setattr(Wrong, "fault", "")
    check_resampler("wrong(power=2.0)")


def test_the_documentation_lists_every_resampler_and_its_options():
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.partition("## A resampler")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)(?:\((.*?)\))?` \|.*\| (\w+) \|$", section, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == list(RESAMPLERS)
    for name, options, takes in rows:
        known = {option: parameter.default for option, parameter in RESAMPLERS.options(name).items()}
        assert options == ", ".join(f"{option}={value!r}" for option, value in known.items()), name
        assert RESAMPLERS[name].takes == ({"positions", "displacements"} if takes == "all" else {takes}), name
    for encoding in re.findall(r"^    (\w+\(resampler=.*\))$", section, flags=re.MULTILINE):
        graticule.create_model("vit_nano_patch4_28", encoding=encoding)
