"""Every registered encoding and joining passes the public contract; what breaks a law is found."""

import pytest
import torch
from torch import Tensor, nn

import graticule
from graticule.encodings import ENCODINGS, AbsoluteEncoding, BiasEncoding
from graticule.joining import JOININGS
from graticule.testing import check_backbone, check_encoding, check_joining


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_passes_the_contract(encoding):
    check_encoding(encoding, compiled=False)  # tests/backbones/test_compile.py compiles each of them


@pytest.mark.parametrize("joining", JOININGS)
def test_every_joining_passes_the_contract(joining):
    check_joining(joining, compiled=False)


def test_a_small_backbone_passes_the_contract_compiled():
    check_backbone("vit_nano_patch4_28", depth=1, img_size=(12, 20))


class Broken(BiasEncoding):
    """A relative bias with a fault."""

    def __init__(self, grid: graticule.Grid, num_heads: int, fault: str = "") -> None:
        super().__init__()
        self.grid, self.num_heads, self.fault = grid, num_heads, fault
        self.weight = nn.Parameter(torch.zeros(num_heads))
        self.unused = nn.Parameter(torch.zeros(1)) if fault == "gradient" else None
        self.calls = 0

    def forward(self, grid: graticule.Grid) -> Tensor:
        self.calls += 1
        shape = grid.offsets().shape[:2]
        bias = self.weight[:, None, None] * torch.linspace(0, 1, shape[0] * shape[1], dtype=self.weight.dtype).view(
            shape
        )
        if self.fault == "state":
            bias = bias * self.calls
        if self.fault == "nan" and grid != self.grid:
            bias = bias / 0
        return bias if self.fault == "prefix" else grid.with_prefix_bias(bias)

    def set_grid(self, grid: graticule.Grid) -> None:
        self.grid = grid


@pytest.fixture
def broken():
    """Register `Broken` for one test."""
    ENCODINGS.register("broken")(Broken)
    yield "broken"
    del ENCODINGS._classes["broken"]


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ("gradient", "a gradient must reach every parameter, not .*unused"),
        ("state", "must compute the same"),
        ("nan", "logits must be finite at a grid"),
    ],
)
def test_a_fault_is_named(broken, fault, law):
    check_encoding(broken, compiled=False)
    with pytest.raises(AssertionError, match=law):
        check_encoding(f"{broken}(fault={fault!r})", compiled=False)


def test_a_bias_of_another_shape_is_an_error(broken):
    with pytest.raises((RuntimeError, AssertionError)):
        check_encoding(f"{broken}(fault='prefix')", compiled=False)


def test_an_unregistered_class_has_no_spec():
    class Mine(AbsoluteEncoding):
        """An encoding without a name."""

    with pytest.raises(ValueError, match="Mine must be registered"):
        Mine.options()
