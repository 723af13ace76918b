"""Every registered encoding, joining and family passes the public contract, and violations are found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graticule
from graticule import PatchBias, Points
from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.joining import JOININGS
from graticule.position.places import TokenCoordinates
from graticule.position.position import ENCODINGS
from graticule.position.tokens import Subset
from graticule.registry import plugins
from graticule.testing import methods
from graticule.testing.methods import check_backbone, check_encoding, check_joining
from graticule.testing.places import LAWS
from in_turn import in_turn
from tiny import SMALL, every_family, laws_of_places, layers, shallow

#: Options that change nothing in a model of 15 patches, or only training, or the algorithm of the same result.
WITHOUT_EFFECT = {"bucketed_bias": ("max_distance",), "peg": ("fill",), "cropped": ("least", "aspect")}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_passes_the_contract(encoding):
    # tests/backbones/test_compile.py compiles them
    check_encoding(encoding, compiled=False, without_effect=WITHOUT_EFFECT.get(encoding, ()))


@pytest.mark.parametrize("joining", JOININGS)
def test_every_joining_passes_the_contract(joining):
    check_joining(joining, compiled=False)


#: Families in which the second block of a stage has other windows than the first; for others one block is enough.
ALTERNATING = ("Swin", "Swin V2", "Twins-SVT", "SAM", "PosMLP")


@every_family
def test_every_family_passes_the_contract(family):
    name, sizes = SMALL[family]
    kwargs = {**sizes, **({} if family in ALTERNATING else shallow(family))}
    side = kwargs.pop("img_size")
    size = (side, side * 3 // 2)
    if family in ("Swin", "Swin V2"):  # with windows that both stages also shift at another size
        size, kwargs["window_size"] = (28, 36), 2
    check_backbone(name, compiled=False, img_size=size, **kwargs)  # tests/backbones/test_compile.py compiles them


def test_a_small_backbone_passes_the_contract_compiled():
    check_backbone("vit_nano_patch4_28", depth=1, img_size=(12, 20))


# Each check finds a fault


class Broken(BiasEncoding):
    """A relative bias with one of several faults."""

    steps: dict[tuple[int, int], Tensor] = {}  # noqa: RUF012 (the fault: one for the process, without the scale)
    biases: dict[tuple[int, int], Tensor] = {}  # noqa: RUF012 (the fault: one for the process, without the weight)
    exempt = ("permutation: values are of the order of pairs", "points: the same")
    known: set[int] = set()  # noqa: RUF012 (the fault: what is known of an instance, outside of it)
    alive: list[Any] = []  # noqa: RUF012 (no id is used twice)

    def __init__(self, grid: graticule.Grid, num_heads: int, fault: str = "", scale: float = 1.0) -> None:
        super().__init__()
        self.grid = self.first = grid
        self.fault, self.scale, self.calls, self.moved = fault, scale, 0, False
        self.weight = nn.Parameter(torch.zeros(num_heads))
        self.unused = nn.Parameter(torch.zeros(1)) if fault.endswith("gradient") else None
        self.known.add(id(self))
        self.alive.append(self)
        self.plain = torch.rand(()).item() if fault == "outside the state dict" else 0.0
        self.function = (lambda: 0) if fault == "pickle" else None
        self.register_buffer("one", torch.ones(()), persistent=False)

    def forward(self, grid: graticule.Grid) -> Tensor:
        self.calls += 1
        n, fault = grid.patches, self.fault
        if fault == "graph":
            torch._dynamo.graph_break()
        steps = torch.linspace(0, self.scale, n * n, dtype=self.weight.dtype, device=self.weight.device).view(n, n)
        if fault == "cache":
            steps = self.steps.setdefault(grid.shape, steps).to(self.weight.dtype)
        bias = self.weight[:, None, None] * steps + self.plain
        factors = {
            "state": self.calls,
            "no number": float("nan") if grid != self.grid else 1.0,
            "buffer": self.one,
            "copy": 1.0 if id(self) in self.known else 2.0,
            "way back": 2.0 if self.moved and grid == self.first else 1.0,
        }
        bias = bias * factors.get(fault, 1.0)
        if fault == "zero gradient" and self.unused is not None:
            bias = bias + 0 * self.unused
        if fault == "shared values":
            bias = self.biases.setdefault(grid.shape, bias.detach()).to(bias) + (bias - bias.detach())
        if fault == "rounding":
            bias = bias + (1e9 + 100 * steps) - 1e9
        if fault == "overflow":
            bias = bias * 1e30 * 1e30 / 1e30 / 1e30
        if fault == "refused grid" and grid != self.first:
            raise ValueError("`grid` must be the first.")
        return bias if fault == "prefix" else grid.with_prefix_bias(bias)

    def set_grid(self, grid: graticule.Grid) -> None:
        self.grid, self.moved = grid, True
        if self.fault == "set_grid":
            nn.init.zeros_(self.weight)


@pytest.fixture
def broken(monkeypatch):
    """Register `Broken` for one test."""
    monkeypatch.setattr(plugins, "_registered", dict(plugins._registered))
    ENCODINGS.register("broken")(Broken)
    yield "broken"
    del ENCODINGS.data["broken"]


FAULTS = {
    "gradient": "a gradient must reach every parameter, not .*unused",
    "zero gradient": "a gradient must reach every parameter, not .*unused",
    "state": "must compute the same",
    "no number": "logits must be finite at a grid",
    "set_grid": "set_input_size must compute the same at a grid",
    "way back": "set_input_size must restore the first size",
    "copy": "a copy must compute the same",
    "pickle": "a model must be picklable",
    "outside the state dict": "a model with the same state dict must compute the same",
    "buffer": "a model from the meta device must compute the same once its state dict is loaded",
    "shared values": "two models with other parameters must differ",
    "overflow": "logits must be finite torch.float32",
    "rounding": "a model must compute the same in torch.float32",
    "cache": r"the option `scale` of broken\(fault='cache'\) must have an effect, 2.5 give the same",
}


@in_turn("fault", FAULTS)
def test_each_fault_breaks_its_law(broken, fault):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_encoding(f"{broken}(fault={fault!r})", compiled=False, without_effect=["fault"])


def test_without_a_fault_it_passes_compiled_and_with_a_break_of_the_graph_it_does_not(broken):
    check_encoding(broken, without_effect=["fault"])
    with pytest.raises(AssertionError, match="must compile as one graph"):
        check_encoding(f"{broken}(fault='graph')")


class OtherShapes(graticule.Joining):
    """Gives layers tensors that broadcast, but do not have the documented shape."""

    def join(self, *tables):
        return [graticule.LayerPosition(added_to_stream=tables[0][None])] * self.depth, None


def test_a_tensor_that_broadcasts_to_the_documented_shape_is_found(monkeypatch):
    monkeypatch.setitem(JOININGS.data, "other_shapes", OtherShapes)
    with pytest.raises(AssertionError, match=r"`added_to_stream` must be \(16, 24\), got \(1, 16, 24\)"):
        check_joining("other_shapes", compiled=False)


@pytest.mark.parametrize(
    ("operation", "law"),
    [("fold", "folded for a grid .* must compute the same"), ("unfold", "an unfolded model must compute the same")],
)
def test_folding_that_changes_a_model_is_found(operation, law, monkeypatch):
    right = getattr(methods, operation)

    def wrong(model, *size):
        nn.init.normal_(right(model, *size).head.bias)
        return model

    monkeypatch.setattr(methods, operation, wrong)
    with pytest.raises(AssertionError, match=law):
        check_encoding("none", compiled=False)


class Counting(graticule.backbones.VisionTransformer):
    """Changes the first model when others are built."""

    built = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        type(self).built += 1
        self.first = self.built == 1

    def forward(self, x):
        return super().forward(x) * (self.built if self.first else 1)


def test_a_backbone_with_state_of_the_process_is_found(monkeypatch):
    def build(name, **kwargs):
        return Counting(graticule.build_position, embed_dim=24, depth=1, num_heads=3, patch_size=4, **kwargs)

    monkeypatch.setattr(methods, "create_model", build)
    with pytest.raises(AssertionError, match="a second model must not change the first"):
        check_backbone("counting", img_size=(12, 20), compiled=False)


class Wrong(PatchBias):
    """A bias of the displacement that breaks one of the laws of places."""

    def __init__(self, num_heads: int, fault: str) -> None:
        super().__init__(None, num_heads)
        self.fault, self.slope = fault, nn.Parameter(torch.zeros(num_heads))

    def patch_bias(self, grid: TokenCoordinates) -> Tensor:
        offsets = grid.offsets().to(self.slope)
        if self.fault == "text" and grid.ndim == 1:
            offsets = offsets @ torch.ones(2, 1)
        if self.fault == "permutation":
            offsets = offsets * torch.arange(grid.ndim, 0, -1)
        if self.fault == "points" and isinstance(grid, Points):
            offsets = 2 * offsets
        if self.fault == "crop" and grid.crop:
            offsets = 2 * offsets
        return self.slope[:, None, None] * offsets.square().sum(-1)


@in_turn("fault", ["text", "permutation", "points", "crop"])
def test_each_law_of_places_finds_a_fault(monkeypatch, fault):
    monkeypatch.setattr(plugins, "_registered", dict(plugins._registered))
    monkeypatch.setattr(Wrong, "crops", True, raising=False)
    monkeypatch.setitem(ENCODINGS.data, "wrong", Wrong)
    with pytest.raises(
        AssertionError, match=f"`{fault}`" if fault != "text" else "must be taken or refused with a Val"
    ):
        laws_of_places(f"wrong(fault={fault!r})")
    monkeypatch.setattr(Wrong, "exempt", (f"{fault}: it is so by definition",), raising=False)
    if fault != "text":
        assert laws_of_places(f"wrong(fault={fault!r})") == [law for law in LAWS if law not in (fault, "resampling")]


def test_the_pages_name_each_law_that_check_prints():
    docs = Path(__file__).parents[2] / "docs"
    names = {finding.check for finding in check_encoding("none", compiled=False)} | {"compilation", "fields"}
    page = (docs / "extending.md").read_text(encoding="utf-8")
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_a_subset_of_other_outputs_is_found(monkeypatch):
    monkeypatch.setattr(Subset, "pairs", lambda self, table: self.rows(table))
    with pytest.raises(AssertionError, match="patches in another order"):
        check_encoding("relative_bias", compiled=False)


def test_a_new_field_is_tested_with_the_first_encoding_that_gives_it(monkeypatch):
    for field in ("bias", "map_after"):
        positions = layers(methods._giving(field))
        assert any(getattr(position, field) is not None for position in positions)
    monkeypatch.setattr(methods, "ENCODINGS", {})
    with pytest.raises(AssertionError, match="must have only fields that an encoding gives to layers, not `bias`"):
        methods._giving("bias")
