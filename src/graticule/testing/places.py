"""Laws of places: how the position on one grid is connected with that on other grids, and at points."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graticule.encodings.build import build_position
from graticule.encodings.forms.mixing import TokenMixing
from graticule.position.bias import Bias
from graticule.position.displacement import Displacements
from graticule.position.grid import Crop, Grid
from graticule.position.layer import FIELD_KINDS, LayerPosition
from graticule.position.places import Points, Shape
from graticule.position.position import ENCODINGS, Position
from graticule.position.tokens import Subset
from graticule.testing.model_under_test import Failed, check_same

#: D, layers and heads, other numbers than those of axes, patches and displacements.
DIM, DEPTH, HEADS = 72, 2, 6
#: The largest difference, relative to the largest value.
_EXACT = 1e-12


def check_places(encoding: str, joining: str = "default") -> list[str]:
    """Check the laws of places in float64, to 1e-12, and return the names of those that apply.

    A law applies unless its grid or points are refused with a `ValueError`, or an encoding has it in `exempt`.

    Raises:
        AssertionError: naming the law that does not hold.
    """
    found = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, law in LAWS.items():
            try:
                law(encoding, joining)
            except ValueError:
                continue
            except (RuntimeError, IndexError) as error:
                raise AssertionError(f"a grid must be taken or refused with a ValueError: {error}") from error
            found.append(name)
    return found


def one_frame(encoding: str, joining: str) -> None:
    """Check that a film of one frame has the position of the image, and one row that of the text.

    That is for some values of the parameters of the new axis; all others are the same.
    """

    def check(shape: Shape) -> None:
        lower, higher = (Grid(*sides, prefix=int(not mixes(encoding))) for sides in (shape, (1, *shape)))
        image, film = (built(grid, encoding, joining, "one_frame") for grid in (lower, higher))
        given, random = _values(image), {name: one.clone() for name, one in _values(film).items()}

        def fitted(place: int, drawn: bool) -> dict[str, Tensor | None]:
            fresh = {name: one if drawn else torch.zeros_like(one) for name, one in random.items()}
            return {name: _grown(given[name], one, place) if name in given else one for name, one in fresh.items()}

        tries = itertools.starmap(fitted, itertools.product((0, -1, -2), (True, False)))
        law = f"a grid of {higher.shape} must have the position of {shape} (`one_frame`)"
        _check_any(film, tries, higher, image(lower), law)

    _check_each(check, [(5,), (3, 4)])


def permutation(encoding: str, joining: str) -> None:
    """Check that permuting the axes of the grid, and of the parameters, permutes the position."""
    shape, order = (5, 6, 7), (2, 0, 1)
    grid, other = (Grid(*sides, prefix=int(not mixes(encoding))) for sides in (shape, [shape[at] for at in order]))
    first, second = (built(each, encoding, joining, "permutation") for each in (grid, other))
    patches, offsets = (
        torch.arange(math.prod(sides)).view(sides).permute(order).flatten() for sides in (shape, grid.table)
    )
    tokens = torch.cat([torch.arange(grid.prefix), patches + grid.prefix])
    three = torch.arange(len(offsets), len(offsets) + 3)  # rows of prefix tokens, after those of displacements
    index = {len(each): each for each in (patches, tokens, offsets, torch.cat([offsets, three]))}
    given = _values(first)

    def moved(axes: list[int]) -> dict[str, Tensor | None]:
        sides = {**index, 3: torch.tensor(axes), 4: torch.tensor([*axes, 3])}  # of the axes, and of their distance
        return {name: _moved(given[_of_axis(name, given, order)], sides, order) for name in given}

    expected = [reordered(each, Subset(tokens, grid.tokens)) for each in first(grid)]
    tries = map(moved, ([*order], [2 - axis for axis in reversed(order)]))  # or the last axis first
    _check_any(second, tries, other, expected, "permuting the axes must permute the position (`permutation`)")


def points(encoding: str, joining: str) -> None:
    """Check that points on a grid have the position of its patches, in any order."""

    def check(shape: Shape) -> None:
        grid = Grid(*shape, prefix=int(not mixes(encoding)))
        position = built(grid, encoding, joining, "points")
        on_grid, order = position(grid), torch.randperm(grid.patches)
        places = grid.coordinates().double()[order]
        index = torch.cat([torch.arange(grid.prefix), order + grid.prefix])
        expected = [reordered(each, Subset(index, grid.tokens)) for each in on_grid]
        for given in (places, places.expand(2, -1, -1)):  # of all samples, and of each
            found = position(Points(given, prefix=grid.prefix))
            check_layers(found, expected, grid.tokens, "points on a grid must have its position (`points`)")

    _check_each(check, [(6,), (2, 3), (2, 3, 2)])


def crop(encoding: str, joining: str) -> None:
    """Check that the position of a crop is the crop of the position, on the grid of the parameters and on another."""

    def check(case: tuple[Shape, Shape, Shape]) -> None:
        first, shape, sides = case
        prefix = int(not mixes(encoding))
        position, whole = built(Grid(*first, prefix=prefix), encoding, joining, "crop"), Grid(*shape, prefix=prefix)
        part = Grid(*sides, prefix=prefix, crop=Crop(shape, (1, 2, 0)[: len(shape)] + sides))
        index = Subset(torch.cat([torch.arange(prefix), prefix + part.order()]), whole.tokens)
        expected = [each.take(index) for each in position(whole)]
        check_layers(position(part), expected, part.tokens, "a crop must have its part of the position (`crop`)")

    _check_each(check, [((6, 8), (6, 8), (3, 4)), ((4, 5), (6, 8), (3, 4)), ((3, 4, 5), (3, 4, 5), (2, 2, 3))])


#: Name of each law -> its function of an encoding and a joining.
LAWS: dict[str, Callable[[str, str], None]] = {law.__name__: law for law in (one_frame, permutation, points, crop)}


def built(grid: Grid, encoding: str, joining: str = "default", law: str = "") -> Position:
    """Build a position in float64 with random parameters, always the same.

    Raises:
        ValueError: if the encoding is exempt from `law`.
    """
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # so that formulas are not rounded to float32
    try:
        sizes: dict[str, int] = {"dim": DIM, "depth": DEPTH, "num_heads": HEADS}
        position = build_position(grid, encoding=encoding, joining=joining, **sizes).double().eval()
    finally:
        torch.set_default_dtype(usual)
    for exempt in (one for part in position.modules() for one in getattr(part, "exempt", ())):
        if law in exempt.partition(":")[0].split(", "):
            raise ValueError(f"`encoding` is exempt from {exempt}.")
    for parameter in position.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.25)
    return position


def check_layers(found: Sequence[LayerPosition], expected: Sequence[LayerPosition], tokens: int, law: str) -> None:
    """Check that the positions of all layers are the same, for so many tokens."""
    for one, two in zip(found, expected, strict=True):
        first, second = values(one, tokens), values(two, tokens)
        if first.keys() != second.keys():
            raise Failed(f"{law}, got the fields {', '.join(first)} instead of {', '.join(second)}")
        for field, value in second.items():
            if first[field].ndim > value.ndim:  # of each sample
                value = value.expand(first[field].shape)
            check_same(first[field], value, f"{law}: `{field}`", _EXACT)


def mixes(encoding: Any) -> bool:
    """Return whether an encoding mixes tokens, so that there may be no prefix tokens."""
    return any(issubclass(ENCODINGS[spec.name], TokenMixing) for spec in ENCODINGS.specs(encoding))


def values(position: LayerPosition, tokens: int) -> dict[str, Tensor]:
    """Return all that a layer gets, as tensors by the names of fields: functions are computed for the same tokens."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, q = draw(2, tokens, DIM), draw(2, HEADS, tokens, DIM // HEADS)
    inputs = {"B N D": x, "B h N d": q, "B h N N": draw(2, HEADS, tokens, tokens).softmax(-1)}
    found: dict[str, Any] = {}
    for field, value in _given(position).items():
        if field == "rotary":
            queries, keys = value(q, q.flip(0))
            found[field] = queries @ keys.mT
        elif field == "bias":
            found[field] = Bias.of(value).table(q)
        else:
            found[field] = (
                value(inputs[FIELD_KINDS[field].function_input])
                if FIELD_KINDS[field].function_input and callable(value)
                else value
            )
    for field in ("positional", "inputs"):
        if field in found:
            found.update((f"{field} {at}", each) for at, each in enumerate(found.pop(field)))
    if not isinstance(found.get("mixing", x), Tensor):
        mixing = found["mixing"]
        found["mixing"] = mixing.matrix() if isinstance(mixing, Displacements) else mixing.mix(x)
    return found


def _values(position: Position) -> dict[str, Tensor]:
    """Return trained parameters and saved buffers, such as random directions, by their names."""
    fixed = {name for name, one in position.named_parameters() if not one.requires_grad}
    return {name: one for name, one in position.state_dict().items() if name not in fixed and one.is_floating_point()}


def _grown(value: Tensor, like: Tensor, place: int) -> Tensor | None:
    """Return a parameter as one of another axis; what it has of this axis are the values of `like`.

    Sides that are longer by one get them at `place`; of a kernel with one side more, the middle is the value.
    """
    if value.numel() == like.numel():
        return value.view(like.shape)
    grown = like.clone()
    for axis in range(like.ndim if like.ndim > value.ndim else 0):
        if like.select(axis, 0).shape == value.shape:
            grown.select(axis, like.shape[axis] // 2).copy_(value)
            return grown
    if value.ndim != like.ndim or any(
        new - old not in (0, 1) for old, new in zip(value.shape, like.shape, strict=True)
    ):
        return None
    index = []
    for old, new in zip(value.shape, like.shape, strict=True):
        index.append(torch.tensor([at for at in range(new) if new == old or at != place % new]))
    grown[torch.meshgrid(*index, indexing="ij")] = value
    return grown


def _of_axis(name: str, given: Iterable[str], order: Sequence[int]) -> str:
    """Return the name of the parameter of the axis that replaces that of `name`, such as `table_y` of `table_x`."""
    stems = {one: re.sub("_[thywx]$", "", one) for one in given}
    axes = [one for one, stem in stems.items() if stem == stems[name]]
    axes.sort(key=lambda one: "thywx".find(one[-1]) % 9)  # a name without a letter is that of the last axis
    return axes[order[axes.index(name)]] if len(axes) == len(order) else name


def _moved(value: Tensor, index: Mapping[int, Tensor], order: Sequence[int]) -> Tensor:
    """Permute a parameter along the sides that have as many entries as there are axes, patches, tokens or offsets."""
    if value.ndim > 3 and len(set(value.shape[-3:])) == 1:  # a kernel
        return value.permute(*range(value.ndim - 3), *(value.ndim - 3 + axis for axis in order))
    for axis, side in enumerate(value.shape):
        if side in index:
            value = value.index_select(axis, index[side])
    return value


def _given(position: LayerPosition) -> dict[str, Any]:
    return {field: value for field, value in position._asdict().items() if value is not None}


def reordered(position: LayerPosition, tokens: Subset) -> LayerPosition:
    """Return the position of all tokens in another order, also of fields that cannot follow a part of them."""
    return LayerPosition(**{one: FIELD_KINDS[one].take(value, tokens) for one, value in _given(position).items()})


def _check_each(check: Callable[[Any], None], cases: Sequence[Any]) -> None:
    """Check all cases that are not refused.

    Raises:
        ValueError: if all are.
    """
    refused = []
    for case in cases:
        try:
            check(case)
        except ValueError as error:
            refused.append(error)
    if len(refused) == len(cases):
        raise refused[-1]


def _check_any(
    position: Position, tries: Iterable[Mapping[str, Tensor | None]], grid: Grid, expected: Any, law: str
) -> None:
    """Check that the position of `grid` is the expected one for one of several sets of parameters."""
    failed: Exception = Failed(f"{law}, got parameters of other shapes")
    for given in tries:
        known = {name: value for name, value in given.items() if value is not None}
        if len(known) < len(given):
            continue
        for name, parameter in _values(position).items():
            parameter.copy_(known[name])
        try:
            return check_layers(position(grid), expected, grid.tokens, law)
        except Failed as error:
            failed = error
    raise failed
