"""Functions of the tokens that layers get: their insert positions, merging, stages; and a new field in one line."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from graticule import Grid, LayerPosition, build_position
from graticule.encodings.conditional import BeforeProjections, BetweenBlocks, ConvolutionalProjection, Peg, QueryKeyPeg
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.forms.pyramid import PyramidPosition
from graticule.encodings.learnable import Learnable
from graticule.external.backbone_view import PatchIndices
from graticule.position import layer as fields
from graticule.position.folded import FoldedPosition
from graticule.position.joining import Default
from graticule.position.position import CombinedPosition, Position, check_fields
from in_turn import in_turn
from tiny import assert_same, draw_double

GRID = Grid(3, 5, prefix=1)
DIM = 6
assert_near = partial(assert_same, atol=1e-12)
FIELDS = ("added_to_stream", "after_norm", "bias", "rotary", "map_before", "inputs", "map_after")


def tokens(grid=GRID, dim=DIM):
    return torch.randn(2, grid.tokens, dim, dtype=torch.float64)


def peg(**kwargs):
    return draw_double(Peg(DIM, **kwargs))


def fields_of(position):
    return [field for field in FIELDS if getattr(position, field) is not None]


def test_a_table_is_added_before_a_function_acts_and_what_acts_after_a_layer_does_not_act_before_it():
    x, table = tokens(), tokens()[0]
    assert_near(LayerPosition(added_to_stream=table, map_before=torch.square).enter_block(x), (x + table) ** 2)
    assert_near(LayerPosition(added_to_stream=table).enter_block(x), x + table)
    assert_near(LayerPosition(map_before=torch.square).enter_block(x), x**2)
    assert LayerPosition(map_after=torch.square).enter_block(x) is x
    assert LayerPosition(added_to_stream=table, map_before=torch.square, after_norm=table).leave_block(x) is x
    assert_near(LayerPosition(map_after=torch.square).leave_block(x), x**2)


@pytest.mark.parametrize("field", ["map_before", "map_after"])
def test_merged_functions_of_the_residual_stream_follow_one_another_in_order(field):
    x = tokens()
    double, square = LayerPosition(**{field: lambda t: 2 * t}), LayerPosition(**{field: torch.square})
    act = LayerPosition.enter_block if field == "map_before" else LayerPosition.leave_block
    assert_near(act(double.merge(square), x), (2 * x) ** 2)
    assert_near(act(square.merge(double), x), 2 * x**2)
    assert_near(act(square.merge(double).merge(square), x), (2 * x**2) ** 2)
    for merged in (double.merge(LayerPosition()), LayerPosition().merge(double)):
        assert_near(act(merged, x), 2 * x)


@pytest.mark.parametrize("field", ["inputs", "rotary"])
def test_inputs_and_rotation_are_given_once(field):
    position = LayerPosition(**{field: torch.square})
    with pytest.raises(ValueError, match=f"`{field}` must be given by one encoding at most, got two"):
        position.merge(position)
    assert getattr(position.merge(LayerPosition(added_to_stream=tokens()[0])), field) is torch.square


@in_turn("place", range(-1, 4))
def test_a_peg_stands_after_the_layer_of_its_place_and_minus_one_is_before_the_first(place):
    module = peg()
    positions = BetweenBlocks({place: module}, depth=4)(GRID)
    assert [fields_of(position) for position in positions] == [
        ["map_before"] * (place == -1 and layer == 0) + ["map_after"] * (layer == place) for layer in range(4)
    ]
    x, layer = tokens(), positions[max(place, 0)]
    assert_near(layer.enter_block(x) if place == -1 else layer.leave_block(x), module(x, GRID))


@pytest.mark.parametrize("place", range(-1, 3))
def test_inputs_at_a_place_are_those_of_the_layer_after_it(place):
    projection = draw_double(ConvolutionalProjection(DIM))
    positions = BeforeProjections({place: projection}, depth=4)(GRID)
    assert [fields_of(position) for position in positions] == [["inputs"] * (layer == place + 1) for layer in range(4)]
    x = tokens()
    for actual, expected in zip(positions[place + 1].inputs(x), projection(x, GRID), strict=True):
        assert_near(actual, expected)


@pytest.mark.parametrize(
    ("kind", "build", "last"),
    [(BetweenBlocks, lambda: Peg(DIM), 2), (BeforeProjections, lambda: QueryKeyPeg(Peg(DIM)), 1)],
)
def test_places_are_from_before_the_first_layer_to_the_last_that_has_a_meaning(kind, build, last):
    assert len(kind({place: build() for place in range(-1, last + 1)}, depth=3)(GRID)) == 3
    for place in (-2, last + 1):
        with pytest.raises(
            ValueError, match=f"`places` must be from -1, before the first of the 3 layers, to {last}, got {place}"
        ):
            kind({0: build(), place: build()}, depth=3)
    with pytest.raises(ValueError, match="`places` must name at least one insert position, got none"):
        kind({}, depth=3)


@pytest.mark.parametrize("order", [1, -1])
def test_a_peg_before_the_first_layer_sees_the_table_whatever_the_order_of_the_names(order):
    module, table = peg(), draw_double(Learnable(GRID, DIM))
    parts = [JoinedPosition([table], Default(2)), BetweenBlocks({-1: module}, 2)]
    position = CombinedPosition(parts[::order])(GRID)
    x = tokens()
    assert_near(position[0].enter_block(x), module(x + table(GRID), GRID))
    assert fields_of(position[1]) == []


def test_two_that_make_the_inputs_of_one_layer_are_refused_and_of_two_layers_are_not():
    at = [BeforeProjections({place: QueryKeyPeg(peg())}, 3) for place in (-1, 0, 0)]
    assert [fields_of(position) for position in CombinedPosition(at[:2])(GRID)] == [["inputs"], ["inputs"], []]
    with pytest.raises(ValueError, match="`inputs` must be given by one encoding at most, got two"):
        CombinedPosition(at[1:])(GRID)


def pyramid(encoding="peg", prefix=1, **kwargs):
    sizes = {"dims": (4, 8, 12), "depths": (2, 1, 3), "num_heads": (1, 2, 3), "prefix": prefix}
    return PyramidPosition(partial(build_position, encoding=encoding, **kwargs), Grid(4, 8), **sizes).double()


def test_the_layers_of_all_stages_stand_one_after_another_each_on_its_grid():
    position = draw_double(pyramid())
    layers = position(Grid(4, 8))
    assert [fields_of(layer) for layer in layers] == [["map_after"], [], ["map_after"], ["map_after"], [], []]
    grids = [Grid(4, 8), Grid(2, 4), Grid(1, 2, prefix=1)]
    assert position.grids(Grid(4, 8)) == grids
    for layer, stage, grid, dim in zip((0, 2, 3), position.stages, grids, (4, 8, 12), strict=True):
        x = tokens(grid, dim)
        assert_near(layers[layer].leave_block(x), stage.pegs["0"](x, grid))


def test_every_stage_has_a_table_of_its_own_and_of_its_grid():
    position = pyramid("learnable")
    tables = [layer.added_to_stream.shape for layer in position(Grid(4, 8)) if layer.added_to_stream is not None]
    assert tables == [(32, 4), (8, 8), (3, 12)]
    position.set_grid(Grid(8, 4))
    assert [stage.encodings[0].grid for stage in position.stages] == [Grid(8, 4), Grid(4, 2), Grid(2, 1, prefix=1)]


@in_turn(
    ("position", "names"),
    [
        (  # pegs are named by place here, and counted in published checkpoints
            lambda: BetweenBlocks({place: peg(bias=False) for place in (3, -1, 0)}, depth=4),
            {
                "pos_block.0.proj.0.weight": "pegs.first.proj.0.weight",
                "pos_block.1.proj.0.weight": "pegs.0.proj.0.weight",
                "pos_block.2.proj.0.weight": "pegs.3.proj.0.weight",
            },
        ),
        (
            lambda: build_position(GRID, dim=12, depth=3, num_heads=3, encoding="peg(bias=False)+learnable"),
            {"pos_block.0.proj.0.weight": "parts.0.pegs.0.proj.0.weight", "pos_embed": "parts.1.encodings.0.pos_embed"},
        ),
        (
            lambda: pyramid("peg(bias=False)"),
            {f"pos_block.{stage}.proj.0.weight": f"stages.{stage}.pegs.0.proj.0.weight" for stage in range(3)},
        ),
        (
            lambda: pyramid("learnable"),
            {f"pos_embed{stage + 1}": f"stages.{stage}.encodings.0.pos_embed" for stage in range(3)},
        ),
    ],
)
def test_the_published_names_of_all_parameters(position, names):
    built = position()
    assert built.published_names() == names and set(names.values()) == {name for name, _ in built.named_parameters()}


def test_published_names_of_a_pyramid_are_those_of_published_models_alone():
    for position in (pyramid(), pyramid("learnable+peg")):
        assert set(position.published_names().values()) == {name for name, _ in position.named_parameters()}
    # several PEGs in a stage would use the names of the next stage
    two = pyramid("peg(places=(-1, 0))+learnable").published_names()
    assert sorted(two) == ["pos_embed1", "pos_embed2", "pos_embed3"]
    names = pyramid("relative_bias").published_names()  # timm's Swin
    assert names["layers.1.blocks.0.attn.relative_position_bias_table"] == (
        "stages.1.encodings.0.relative_position_bias_table"
    )
    position = build_position(GRID, dim=12, depth=3, num_heads=3, encoding="peg+learnable")
    assert "parts.0.pegs" in position.layer_lists()


def test_a_stage_fits_its_own_tables():
    position = pyramid("learnable", prefix=0)
    value = torch.randn(1, 16, 8, dtype=torch.float64)  # 4 x 4, for the second stage's 2 x 4
    fitted = position.fit("stages.1.encodings.0.pos_embed", value)
    assert_near(fitted[0], Grid(4, 4).resize(value[0], Grid(2, 4)))


LAST = "    spatial_bias: Annotated[Tensor | None, SPATIAL] = None\n"


@pytest.fixture
def toy(monkeypatch):
    """Return `LayerPosition` with a field more, `toy`, which is one line of its file."""
    spec = importlib.util.spec_from_loader("toy_layer", None)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy_layer", module)
    source = Path(fields.__file__).read_text()
    assert source.count(LAST) == 1
    exec(source.replace(LAST, LAST + LAST.replace("spatial_bias", "toy").replace("SPATIAL", "SCALE")), module.__dict__)
    assert (*fields.OF_PAIRS, "toy") == module.OF_PAIRS
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
