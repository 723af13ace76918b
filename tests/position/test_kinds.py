"""The kinds of the fields of `LayerPosition`."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from graticule import Grid
from graticule.external.backbone_view import PatchIndices
from graticule.position import layer
from graticule.position.folded import FoldedPosition
from graticule.position.position import Position, check_fields

LAST = "    spatial_bias: Annotated[Tensor | None, SPATIAL] = None\n"


@pytest.fixture
def toy(monkeypatch):
    """Return `LayerPosition` with a field more, `toy`, which is one line of its file."""
    spec = importlib.util.spec_from_loader("toy_layer", None)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy_layer", module)
    source = Path(layer.__file__).read_text()
    assert source.count(LAST) == 1
    exec(source.replace(LAST, LAST + LAST.replace("spatial_bias", "toy").replace("SPATIAL", "SCALE")), module.__dict__)
    assert (*layer.OF_PAIRS, "toy") == module.OF_PAIRS
    return module.LayerPosition


class OfRows(Position):
    """Gives one layer the field `toy`."""

    def __init__(self, kind, grid):
        super().__init__()
        self.kind, self.table = kind, torch.nn.Parameter(torch.rand(grid.tokens))

    def forward(self, grid):
        return [self.kind(toy=2 * self.table)]

    def set_grid(self, grid):
        pass


def test_a_new_field_is_one_line(toy):
    grid, index = Grid(2, 4), torch.tensor([3, 2, 1, 0, 7, 6, 5, 4])
    rows = torch.rand(3, grid.tokens)
    position = toy(toy=rows)
    assert torch.equal(position.part(2, 5).toy, rows[:, 2:5])
    assert torch.equal(position.with_prefix(2).toy, torch.cat([torch.ones(3, 2), rows], 1))
    assert torch.equal(position.merge(position).toy, rows * rows) and position.merge(toy()).toy is rows
    assert torch.equal(position.take(PatchIndices(index, grid)).toy, rows[:, index])
    with pytest.raises(ValueError, match="gives layer 0 `toy`"):
        check_fields([position], {"added_to_stream"}, set(), "Family")


def test_a_new_field_is_folded(toy):
    grid = Grid(2, 3)
    position = OfRows(toy, grid)
    folded = FoldedPosition(position, grid).eval()
    assert [name for name, _ in folded.named_buffers()] == ["layer0_toy"]
    assert torch.equal(folded(grid)[0].toy, 2 * position.table)
