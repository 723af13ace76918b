"""Laws of places: how the position on one grid is connected with that on other grids, and at points."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graticule.encodings.build import build_position
from graticule.encodings.forms.mixing import TokenMixing
from graticule.external.table_grids import find_table
from graticule.position.bias import Bias
from graticule.position.displacement import Displacements
from graticule.position.grid import Crop, Grid
from graticule.position.grid_module import GridModule
from graticule.position.layer import FIELD_KINDS, LayerPosition
from graticule.position.places import Points, Shape, by
from graticule.position.position import ENCODINGS, Position
from graticule.position.resampling import build_resampler
from graticule.position.tokens import Subset
from graticule.registry.plugins import describe_error
from graticule.testing.model_under_test import Failed, NotApplicable, check_same, refusal

#: D, layers and heads; they differ from the numbers of axes, patches and displacements.
DIM, DEPTH, HEADS = 72, 2, 6
#: The largest difference, relative to the largest value.
_EXACT = 1e-12


def check_law(name: str, encoding: str, joining: str = "default") -> None:
    """Check one of the laws of places in float64, to 1e-12.

    A law applies unless its grid or points are refused with a `ValueError`, or an encoding has it in `exempt`.

    Raises:
        NotApplicable: with the reason.
        AssertionError: if it does not hold.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            LAWS[name](encoding, joining)
        except (RuntimeError, IndexError, ValueError) as error:
            raise AssertionError(
                f"a grid must be taken or refused with a ValueError, which names `grid`: {describe_error(error)}"
            ) from error


def permutation(encoding: str, joining: str, shape: Shape) -> None:
    """Check that permuting the axes of the grid, and of the parameters, permutes the position."""
    order = (2, 0, 1) if len(shape) > 2 else (1, 0)
    grid, other = _grid(encoding, shape), _grid(encoding, [shape[axis] for axis in order])
    first, second = (build_random(shaped, encoding, joining, "permutation", 4) for shaped in (grid, other))
    patches, offsets = (
        torch.arange(math.prod(sides)).view(sides).permute(order).flatten() for sides in (shape, grid.table)
    )
    tokens = torch.cat([torch.arange(grid.prefix), patches + grid.prefix])
    three = torch.arange(len(offsets), len(offsets) + 3)  # rows of prefix tokens, after the displacements
    index = {len(ranks): ranks for ranks in (patches, tokens, offsets, torch.cat([offsets, three]))}
    before = _values(first)

    def move(axes: list[int], form: str) -> dict[str, Tensor | None]:
        count = len(axes)  # sides may be of the axes, and of their distance; but heads and layers can be as many
        of_axes = {count: torch.tensor(axes)} if count else {}
        both = {**of_axes, **({count + 1: torch.tensor([*axes, count])} if count else {})}
        sides = {**index, **{"both": both, "axes": of_axes, "last": {}}[form]}
        last = both if form == "last" else {}
        values = {name: before[_of_axis(name, before, order)] for name in before}
        return {
            name: _moved(value, sides, order, {} if name.startswith("joining.") else last)
            for name, value in values.items()
        }

    last_first = [len(order) - 1 - axis for axis in reversed(order)]
    tries = itertools.starmap(move, itertools.product(([*order], last_first, []), ("both", "axes", "last")))
    expected = [reorder(layer, Subset(tokens, grid.tokens)) for layer in first(grid)]
    _check_any(second, tries, other, expected, "permuting the axes must permute the position (`permutation`)")


def points(encoding: str, joining: str, shape: Shape) -> None:
    """Check that points on a grid have the position of its patches, in any order."""
    grid = _grid(encoding, shape)
    position = build_random(grid, encoding, joining, "points")
    on_grid, order = position(grid), torch.randperm(grid.patches)
    tokens = Subset(torch.cat([torch.arange(grid.prefix), order + grid.prefix]), grid.tokens)
    expected = [reorder(layer, tokens) for layer in on_grid]
    places = grid.coordinates().double()[order]
    for coordinates in (places, places.expand(2, -1, -1)):  # of all samples, and of each
        positions = position(Points(coordinates, grid.prefix, grid.extent))
        check_layers(positions, expected, grid.tokens, "points on a grid must have its position (`points`)")


def crop(encoding: str, joining: str, case: tuple[Shape, Shape, Shape]) -> None:
    """Check that the position of a crop is the crop of the position, on the grid of the parameters and on another."""
    stored, shape, sides = case
    position, full = build_random(_grid(encoding, stored), encoding, joining, "crop"), _grid(encoding, shape)
    part = Grid(*sides, prefix=full.prefix, crop=Crop(shape, (1, 2, 0)[: len(shape)] + sides))
    index = Subset(torch.cat([torch.arange(full.prefix), full.prefix + part.order()]), full.tokens)
    expected = [layer.take(index) for layer in position(full)]
    check_layers(position(part), expected, part.tokens, "a crop must have its part of the position (`crop`)")


def row_order(encoding: str, joining: str, shape: Shape) -> None:
    """Check that no layer gets the position of a grid with H columns and W rows, as if sides had been exchanged.

    Such a position depends on the offsets, or is a sum over the axes, of that grid, and not of its own. Nor may rows
    depend on the width alone, and columns on the height, as of coordinates that are divided by the other side.
    """
    grid = _grid(encoding, shape)
    queries = torch.randn(1, HEADS, 1, DIM // HEADS, dtype=torch.float64).expand(2, -1, grid.tokens, -1)
    position = build_random(grid, encoding, joining)
    _check_sides(position, encoding, shape)
    for layer in position(grid):
        for field, value in values(layer, grid.tokens, queries).items():
            if value.shape[-2:] == (grid.tokens, grid.tokens):
                rest = partial(_beyond_offsets, value[..., grid.prefix :, grid.prefix :])
            elif value.shape == (grid.tokens, DIM):
                rest = partial(_beyond_axes, value[grid.prefix :])
            else:
                continue
            if rest(shape[::-1]) < _EXACT < 1e-6 < rest(shape):
                raise Failed(
                    f"patches must be row by row (`row_order`): `{field}` on {by(shape)} patches is the one of "
                    f"{by(shape[::-1])} patches; patch i is in row i // W and column i % W of a grid (H, W)"
                )


def _check_sides(position: Position, encoding: str, shape: Shape) -> None:
    """Check on which sides the first column and row depend; in fields of pairs, these are pairs of the first patch."""
    lines: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for sides in (shape, (shape[0] + 1, shape[1]), (shape[0], shape[1] + 1)):
        grid = _grid(encoding, sides)
        queries = torch.ones(1, HEADS, grid.tokens, DIM // HEADS).double()
        try:
            layer = position(grid)[0]
        except refusal():
            return
        for field, value in values(layer, grid.tokens, queries).items():
            is_of_pairs = value.shape[-2:] == (grid.tokens, grid.tokens)
            rows = value[..., grid.prefix, :].movedim(-1, 0) if is_of_pairs else value
            if len(rows) == grid.tokens:
                maps = rows[grid.prefix :].unflatten(0, sides)
                lines.setdefault(field, []).append((maps[: shape[0], 0], maps[0, : shape[1]]))
    for field, (first, *others) in lines.items():
        same = [[torch.allclose(*pair, 0, _EXACT) for pair in zip(first, other, strict=True)] for other in others]
        if same == [[True, False], [False, True]]:
            raise Failed(
                f"rows must depend on the height, and columns on the width (`row_order`): `{field}` has them exchanged"
            )


def resampling(encoding: str, joining: str, sides: tuple[Shape, Shape]) -> None:
    """Check that tables are resampled along each axis of the grid, by the `resampler` if there is one, also for files.

    A table with the coordinates of its entries tells which of them each entry of the resampled one comes from.
    """
    first, second = (build_random(_grid(encoding, shape), encoding, joining, "resampling") for shape in sides)
    others: dict[str, Any] = dict(second.named_modules())
    is_resampled = False
    for place, module in first.named_modules():
        for name, parameter in module.named_parameters() if isinstance(module, GridModule) else ():
            if parameter.requires_grad and hasattr(module, "grid"):
                is_resampled |= _check_resampled(module, others[place], name, parameter, sides)
    if not is_resampled:
        raise NotApplicable("no parameter is a table of the grid, or of offsets, that is resampled")


def _check_resampled(module: Any, other: Any, name: str, parameter: Tensor, sides: tuple[Shape, Shape]) -> bool:
    """Check how a module resamples a parameter; return False if it is no table of the grid or of one of its axes."""
    shape, new_shape = parameter.shape, module.resample(name, parameter, module.grid, other.grid).shape
    for axes in ((0, 1), (0,), (1,)):
        grids = [tuple(side[axis] for axis in axes) for side in sides]
        table = find_table(name, (shape, new_shape), grids, [(1,) * len(axes)])
        if table is not None and shape != new_shape:
            break
    else:
        return False
    old, new = map(table.sides, grids)
    first = table.prefix if table.kind == "positions" else 0
    coordinates = Grid(*old).coordinates().double()
    columns = []
    for column in (torch.ones(len(coordinates), dtype=torch.float64), *coordinates.mT):
        rows = parameter.flatten(table.start, table.stop).movedim(table.start, -1).clone()
        rows[..., first : first + len(column)] = column
        parameter.copy_(rows.movedim(-1, table.start).reshape(shape))
        value, fitted = (
            module.resample(name, parameter, module.grid, other.grid),
            other.fit_parameter(name, parameter, sides[0]),
        )
        law = f"the table of a file, `{name}` on {by(sides[0])} patches, must fit {by(sides[1])} (`resampling`)"
        if fitted is None:
            raise Failed(f"{law}, got None; define `fit`")
        check_same(fitted, value, f"{law} as it is resampled", _EXACT)
        rows = value.flatten(table.start, table.stop).movedim(table.start, -1)
        columns.append(rows.reshape(-1, rows.shape[-1])[0, first : first + math.prod(new)])
    measured = (torch.stack(columns[1:]) / columns[0]).unflatten(-1, new)  # some scale by the number of patches
    maps, resampler = coordinates.mT.unflatten(-1, old), getattr(module, "resampler", None)
    if resampler is None:
        expected = [build_resampler("bilinear")(maps, new)]
    elif len(old) > 1:
        expected = [resampler(maps, new)]
    else:
        expected = [resampler(maps[:, None], (1, *new))[:, 0]]
        if table.kind == "positions":  # of one axis, by a resampler whose axes depend on each other
            expected.append(maps @ resampler.matrices(*sides)[axes[0]].mT)
    # nearest entries are half an entry off, and corners that are aligned half a step
    steps = [(1 + max(n / m, 1)) / 2 for n, m in zip(old, new, strict=True)]
    near = torch.tensor(steps if resampler is None else [_EXACT] * len(steps))
    errors = [(measured - right).abs().nan_to_num(math.inf).flatten(1).amax(1) for right in expected]
    if not any(bool((error <= near).all()) for error in errors):
        how, error = "" if resampler is None else f" by {resampler}", float(torch.stack(errors).amax(1).min())
        raise Failed(
            f"a table must be resampled from {by(sides[0])} to {by(sides[1])} patches{how} (`resampling`): entries of "
            f"`{name}` come from places up to {error:.1f} entries off"
        )
    return True


def _beyond_offsets(pairs: Tensor, shape: Shape) -> float:
    """Return the share of values of pairs, (..., N, N), that does not depend on their offset in a grid alone."""
    index = Grid(*shape).offsets().add(torch.tensor(shape)).flatten(0, 1) @ torch.tensor([2 * max(shape), 1])
    table = pairs.flatten(-2).flatten(0, -2)
    counts = torch.zeros(int(index.max()) + 1, dtype=table.dtype).index_add(0, index, torch.ones_like(table[0]))
    means = torch.zeros(len(table), len(counts), dtype=table.dtype).index_add(1, index, table) / counts.clamp_min(1)
    return float((table - means[:, index]).abs().max() / table.abs().max().clamp_min(1e-9))


def _beyond_axes(rows: Tensor, shape: Shape) -> float:
    """Return the share of a table, (N, D), that is not a sum of functions of its axes."""
    maps = rows.unflatten(0, shape)
    rest = maps - maps.mean(0) - maps.mean(1, keepdim=True) + maps.mean((0, 1))
    return float(rest.abs().max() / rows.abs().max().clamp_min(1e-9))


def _check_cases(law: Callable[..., None], cases: Sequence[Any], encoding: str, joining: str) -> None:
    """Check a law in all cases that are not refused; raises NotApplicable with a reason if all are.

    Code for images may unpack `h, w = grid.shape`, whose ValueError is a refusal of other numbers of axes only.
    """
    reasons: list[str] = []  # those that were given on purpose first
    for case in cases:
        axes = len(case[0] if isinstance(case[0], tuple) else case)
        try:
            law(encoding, joining, case)
        except refusal() as error:
            reasons.insert(0, str(error))
        except ValueError as error:
            if axes == 2:
                raise
            reasons.append(describe_error(error))
    if len(reasons) == len(cases):
        raise NotApplicable(f"refused: {reasons[0]}")


#: Law -> its cases: grids, or for a crop the grid of the parameters, the grid of the image, and the sides of the crop.
_CASES: dict[Callable[..., None], list[Any]] = {
    permutation: [(5, 6), (5, 6, 7)],
    row_order: [(3, 5)],
    resampling: [((4, 6), (7, 5)), ((8, 5), (3, 4)), ((4, 3), (8, 6))],
    points: [(6,), (2, 3), (2, 3, 2)],
    crop: [((6, 8), (6, 8), (3, 4)), ((4, 5), (6, 8), (3, 4)), ((3, 4, 5), (3, 4, 5), (2, 2, 3))],
}
#: Name of each law -> its function of an encoding and a joining.
LAWS = {law.__name__: partial(_check_cases, law, cases) for law, cases in _CASES.items()}


def _grid(encoding: str, sides: Sequence[int]) -> Grid:
    return Grid(*sides, prefix=int(not mixes(encoding)))


def build_random(grid: Grid, encoding: str, joining: str = "default", law: str = "", depth: int = DEPTH) -> Position:
    """Build a position in float64 with random parameters, always the same; refuse an encoding that `law` exempts."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a traceback, which takes longer
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # so that formulas are not rounded to float32
    try:
        sizes: dict[str, int] = {"dim": DIM, "depth": depth, "num_heads": HEADS}
        position = build_position(grid, encoding=encoding, joining=joining, **sizes).double().eval()
    finally:
        torch.set_default_dtype(usual)
    for exempt in itertools.chain.from_iterable(getattr(part, "exempt", ()) for part in position.modules()):
        if law in exempt.partition(":")[0].split(", "):
            raise ValueError(f"`encoding` is exempt from {exempt}.")
    for parameter in position.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.25)
    return position


def check_layers(actual: Sequence[LayerPosition], expected: Sequence[LayerPosition], tokens: int, law: str) -> None:
    """Check that the positions of all layers are the same, for so many tokens."""
    for layer, expected_layer in zip(actual, expected, strict=True):
        first, second = values(layer, tokens), values(expected_layer, tokens)
        if first.keys() != second.keys():
            raise Failed(f"{law}, got the fields {', '.join(first)} instead of {', '.join(second)}")
        for field, value in second.items():
            if first[field].ndim > value.ndim:  # of each sample
                value = value.expand(first[field].shape)
            check_same(first[field], value, f"{law}: `{field}`", _EXACT)


def mixes(encoding: Any) -> bool:
    """Return whether an encoding mixes tokens, so that there may be no prefix tokens."""
    return any(issubclass(ENCODINGS[spec.name], TokenMixing) for spec in ENCODINGS.specs(encoding))


def values(position: LayerPosition, tokens: int, queries: Tensor | None = None) -> dict[str, Tensor]:
    """Return all that a layer gets, as tensors by the names of fields: functions are computed for the same tokens.

    A rotation is the logits of `queries`, (2, h, N, d), which are drawn by default.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    x, q = draw(2, tokens, DIM), draw(2, HEADS, tokens, DIM // HEADS)
    inputs = {"B N D": x, "B h N d": q}
    if position.value_bias is not None:  # of all pairs, whose drawing takes most of the time
        inputs["B h N N"] = draw(2, HEADS, tokens, tokens).softmax(-1)
    tensors: dict[str, Any] = {}
    for field, value in _fields_of(position).items():
        kind = FIELD_KINDS[field].function_input
        if field == "rotary":
            rotated, keys = value(q if queries is None else queries, q.flip(0) if queries is None else queries)
            tensors[field] = rotated @ keys.mT
        elif field == "bias":
            tensors[field] = Bias.of(value).table(q)
        else:
            tensors[field] = value(inputs[kind]) if kind and callable(value) else value
    for field in ("positional", "inputs"):
        if field in tensors:
            tensors.update((f"{field} {at}", tensor) for at, tensor in enumerate(tensors.pop(field)))
    if not isinstance(tensors.get("mixing", x), Tensor):
        mixing = tensors["mixing"]
        tensors["mixing"] = mixing.matrix() if isinstance(mixing, Displacements) else mixing.mix(x)
    return tensors


def _values(position: Position) -> dict[str, Tensor]:
    """Return trained parameters and saved buffers, such as random directions, by their names."""
    fixed = {name for name, parameter in position.named_parameters() if not parameter.requires_grad}
    state = {name: value for name, value in position.state_dict().items() if value.is_floating_point()}
    return {name: value for name, value in state.items() if name not in fixed}


def _of_axis(name: str, names: Iterable[str], order: Sequence[int]) -> str:
    """Return the name of the parameter for the axis that replaces the axis of `name` (`table_y` for `table_x`)."""
    stems = {other: re.sub("_[thywx]$", "", other) for other in names}
    axes = [other for other, stem in stems.items() if stem == stems[name]]
    axes.sort(key=lambda other: "thywx".find(other[-1]) % 9)  # a name without a letter belongs to the last axis
    return axes[order[axes.index(name)]] if len(axes) == len(order) else name


def _moved(
    value: Tensor, index: Mapping[int, Tensor], order: Sequence[int], last: Mapping[int, Tensor] | None = None
) -> Tensor:
    """Permute a parameter along the sides that have as many entries as there are axes, patches, tokens or offsets.

    Those of `last` are for the last side alone.
    """
    first = value.ndim - len(order)
    is_square = first > 1 and len(set(value.shape[first:])) == 1
    if is_square and (value.shape[-1] % 2 or value.shape[0] == 1):  # a kernel, or a table with sides of its own
        return value.permute(*range(first), *(first + axis for axis in order))
    if last and value.ndim and value.shape[-1] in last:
        value = value.index_select(-1, last[value.shape[-1]])
    for axis, side in enumerate(value.shape):
        if side in index:
            value = value.index_select(axis, index[side])
    return value


def _fields_of(position: LayerPosition) -> dict[str, Any]:
    return {field: value for field, value in position._asdict().items() if value is not None}


def reorder(position: LayerPosition, tokens: Subset) -> LayerPosition:
    """Return the position of all tokens in another order, also of fields that cannot follow a part of them."""
    fields = _fields_of(position)
    return LayerPosition(**{field: FIELD_KINDS[field].take(value, tokens) for field, value in fields.items()})


def _check_any(
    position: Position, tries: Iterable[Mapping[str, Tensor | None]], grid: Grid, expected: Any, law: str
) -> None:
    """Check that the position of `grid` is the expected one for one of several sets of parameters."""
    failed: Exception = Failed(f"{law}, got parameters of other shapes")
    for parameters in tries:
        known = {name: value for name, value in parameters.items() if value is not None}
        if len(known) < len(parameters):
            continue
        for name, parameter in _values(position).items():
            parameter.copy_(known[name])
        try:
            return check_layers(position(grid), expected, grid.tokens, law)
        except Failed as error:
            failed = error
    raise failed
