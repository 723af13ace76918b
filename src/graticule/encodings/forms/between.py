"""Conditional encodings as positions: modules between blocks, or between the norm and the projections of a block."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import Position

#: Insert positions: the layers after which a module is inserted, one or several.
Places = int | tuple[int, ...]


def each_place(places: Places) -> tuple[int, ...]:
    """Return insert positions as a tuple.

    Raises:
        ValueError: if there are none, or one is given twice.
    """
    found = (places,) if isinstance(places, int) else tuple(places)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"`places` must be different layers, at least one, such as [0, 1, 2], got {places!r}.")
    return found


#: Key of the module before the first layer, at insert position -1.
_FIRST = "first"


class BetweenBlocks(Position):
    """Applies PEGs to the residual stream: at insert position l after layer l, at -1 before the first layer.

    Reference: CPVT (Chu et al., 2023), section 5.2, "position index".

    Args:
        pegs: insert position -> PEG; insert positions are from -1 to depth - 1.
        depth: number of layers.
    """

    crops = False

    def __init__(self, pegs: Mapping[int, nn.Module], depth: int) -> None:
        super().__init__()
        _check(pegs, depth - 1, depth)
        self.pegs = nn.ModuleDict({_key(place): pegs[place] for place in sorted(pegs)})
        self.depth = depth

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of each layer for `grid`: functions of the tokens."""
        given = [LayerPosition()] * self.depth
        for key, peg in self.pegs.items():
            act = partial(peg, grid=grid)
            if key == _FIRST:
                given[0] = given[0]._replace(before=act)
            else:
                given[int(key)] = given[int(key)]._replace(after=act)
        return given

    def set_grid(self, grid: Grid) -> None:
        """Do nothing: no parameter depends on the grid."""

    def layer_lists(self) -> list[str]:
        """Return the name of the list of PEGs."""
        return ["pegs"]

    def published_names(self) -> dict[str, str]:
        """Map `pos_block.i.proj...` of Twins' code, numbered in order."""
        return {
            f"pos_block.{i}.{name}": f"pegs.{key}.{name}"
            for i, (key, peg) in enumerate(self.pegs.items())
            for name, _ in peg.named_parameters()
        }


class BeforeProjections(Position):
    """Computes the inputs of queries, keys and values: at insert position l, those of the next layer, l + 1.

    So an insert position has the same meaning as between blocks, and -1 is for the first layer. CPVT's Table 16 says
    "position 0, as in our method" of CvT's projection; if it means the first layer, that is -1 here.

    Args:
        inputs: insert position -> module; insert positions are from -1 to depth - 2.
        depth: number of layers.
    """

    crops = False

    def __init__(self, inputs: Mapping[int, nn.Module], depth: int) -> None:
        super().__init__()
        _check(inputs, depth - 2, depth)
        self.inputs = nn.ModuleDict({str(place + 1): inputs[place] for place in sorted(inputs)})
        self.depth = depth

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of each layer for `grid`: functions of its normalized tokens."""
        given = [LayerPosition()] * self.depth
        for key, module in self.inputs.items():
            given[int(key)] = LayerPosition(inputs=partial(module, grid=grid))
        return given

    def set_grid(self, grid: Grid) -> None:
        """Do nothing: no parameter depends on the grid."""

    def layer_lists(self) -> list[str]:
        """Return the name of the list of modules."""
        return ["inputs"]


def _key(place: int) -> str:
    return _FIRST if place == -1 else str(place)


def _check(places: Mapping[int, nn.Module], last: int, depth: int) -> None:
    if not places:
        raise ValueError("`places` must name at least one insert position, got none.")
    for place in places:
        if not -1 <= place <= last:
            raise ValueError(
                f"`places` must be from -1, before the first of the {depth} layers, to {last}, got {place}."
            )
