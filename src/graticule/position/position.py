"""The interfaces of encodings and positions: a position maps a grid to one `LayerPosition` per layer."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, ClassVar, Literal, Protocol, Self, cast

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.position.grid import Grid
from graticule.position.grid_module import GridModule, outermost
from graticule.position.joining import Joining, Layers, fill_layers, joined_layers
from graticule.position.layer import LayerPosition
from graticule.position.places import Points, TokenCoordinates
from graticule.registry.checks import BrokenContract, format_value
from graticule.registry.registry import Option, Registry, options_of
from graticule.registry.specs import Spec


class Position(nn.Module, ABC):
    """The interface of a backbone to position: `position(grid)` returns a list with one `LayerPosition` per layer."""

    #: True if the position of every layer is empty.
    empty: bool = False
    #: True if it fills only fields for pairs of tokens (`OF_PAIRS`).
    of_pairs: ClassVar[bool] = False
    #: "table", "bias" or "rotation"; "" for all others. A part of a position replaces one of the same form.
    form: ClassVar[Literal["table", "bias", "rotation", ""]] = ""
    #: The number of axes of the grids that it is built for; None if it is not known.
    axes: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(_check_grid, with_kwargs=True)

    def __call__(self, grid: TokenCoordinates, **options: Any) -> Any:
        """Return the same as `forward`, after the hooks; points of each sample are computed one after the other.

        Autocast does not reduce its precision: it is computed once for all images, and its errors are in all of them.
        """
        device = next((tensor.device.type for tensor in chain(self.parameters(), self.buffers())), "cpu")
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self(grid, **options)
        samples = grid.samples if isinstance(grid, Points) else None
        if samples is None:
            return super().__call__(grid, **options)
        results = [super(Position, self).__call__(points, **options) for points in samples]
        return [LayerPosition.stack(layer) for layer in zip(*results, strict=True)]

    @abstractmethod
    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return one `LayerPosition` per layer for `grid`."""

    def stage(self, grid: Grid, table: Tensor | None) -> tuple[list[LayerPosition], Tensor | None]:
        """Return the same for one stage of a pyramid, and the table w for the next stage, (N, D).

        Args:
            grid: the grid of the stage.
            table: w from the previous stage, merged as the tokens are, (N, D); None if there is none.
        """
        return self(grid), None

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the parameters: `grid`, or a window of it."""
        for part in outermost(self):
            part.set_grid(grid if isinstance(part, Position) else grid.within)

    def components(self) -> dict[str, Position]:
        """Return the positions that make up this one, by the names of their modules."""
        parts: dict[str, Position] = {}
        for name, module in self.named_modules():
            if name and isinstance(module, Position) and not any(name.startswith(f"{at}.") for at in parts):
                parts[name] = module
        return parts

    def published_names(self) -> dict[str, str]:
        """Map names in published checkpoints of a vision transformer to names of parameters here."""
        parts = self.components().items()
        return {published: f"{at}.{name}" for at, part in parts for published, name in part.published_names().items()}

    def layer_lists(self) -> list[str]:
        """Return the names of the module lists with one entry per layer, under the index of the layer."""
        return [f"{at}.{name}" for at, part in self.components().items() for name in part.layer_lists()]

    def resampled_encodings(self) -> list[str]:
        """Return the names of the encodings with values for their grid, which are resampled for another grid."""
        flags = ("resampled", "has_own_grid")
        return sorted({type(part).__name__ for part in self.modules() if any(getattr(part, f, False) for f in flags)})

    def table_shapes(self) -> dict[str, tuple[int, int]]:
        """Map every parameter with values for a grid or window to the (H, W) of that grid, in patches."""
        holders = [(name, module) for name, module in self.named_modules() if _holds_a_grid(module)]
        return {name: holder.grid.shape for at, holder in holders for name, _ in holder.named_parameters(prefix=at)}

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Make `value` of a checkpoint fit the parameter `name`; None leaves the parameter unchanged.

        `shape` is the (H, W) of the grid or window that the value is for, if the checkpoint records it. A value that
        cannot be made to fit is returned unchanged.

        Raises:
            ValueError: if the encoding is a formula, and the value is another table than the formula's.
        """
        module, leaf = self.holder_of(name)
        return value if module is None else module.fit_parameter(leaf, value, shape)

    def holder_of(self, name: str) -> tuple[GridModule | None, str]:
        """Return the innermost module for a grid that has the parameter `name`, and its name there."""
        path = name.split(".")
        for count in reversed(range(1, len(path))):
            module = self.get_submodule(".".join(path[:count]))
            if isinstance(module, GridModule):
                return module, ".".join(path[count:])
        return None, name


def _check_grid(position: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a grid of another number of axes, and a crop that a part of a position cannot encode."""
    grid: Grid = args[0] if args else kwargs["grid"]
    if not isinstance(grid, TokenCoordinates):
        raise ValueError(f"`grid` must be a graticule.Grid or Points, got {format_value(grid)}; Grid(4, 4) makes one.")
    axes: Any = position.axes
    if axes is not None and grid.ndim != axes:
        kinds = {1: "texts", 2: "images", 3: "videos or volumes"}
        built = f"{axes} axes ({kinds.get(axes, 'more than three')})"
        raise ValueError(f"`grid` must have {built}, for which the encoding is built, got {grid.ndim}.")
    if grid.crop is None:
        return
    if grid.windows:
        raise ValueError("`crop` must be left out with windows, which begin at the border of the grid.")
    for module in position.modules():
        if not getattr(module, "crops", True):
            kind = type(module)
            name = (ENCODINGS.name_of(kind) if issubclass(kind, Encoding) else None) or kind.__name__
            raise ValueError(f"`crop` must be left out with {name}, which cannot encode a part of a larger image.")


def _holds_a_grid(module: nn.Module) -> bool:
    return (
        getattr(module, "resampled", False) or hasattr(module, "pos_embed") or getattr(module, "held_for_grid", False)
    )


@dataclass(frozen=True)
class StageSpec:
    """Describes a backbone, or a stage of a pyramid, to the encoding whose position is built for it.

    grid: the grid of the parameters, with the windows of this stage if it has windows.
    dim: D.
    depth: number of layers.
    num_heads: h, or the number of groups of channels of a gated MLP.
    causal: whether tokens attend only to those before them.
    absolute: whether an absolute encoding is built; a pyramid may have one in its first stage only.
    merged: whether this stage of a pyramid gets the table of the previous stage, merged as its tokens are.
    """

    grid: Grid
    dim: int
    depth: int
    num_heads: int
    causal: bool = False
    absolute: bool = True
    merged: bool = False

    @property
    def within(self) -> Grid:
        """The grid within which tokens interact: a window, or the whole grid."""
        return self.grid.within

    @property
    def head_dim(self) -> int:
        return self.dim // max(self.num_heads, 1)


#: Parameters of an encoding's constructor that a `StageSpec` provides; all others are its options.
FROM_STAGE = frozenset({"self", "grid", "axes", "dim", "depth", "num_heads", "head_dim", "causal"})


class Encoding(GridModule, ABC):
    """Makes position information for a grid; subclasses define its form: `AbsoluteEncoding`, `BiasEncoding`, ...

    The parameters of the constructor called `grid` (the grid, or window, that the encoding is built for), `axes` (their
    number), `dim` (D), `depth` (number of layers), `num_heads` (h), `head_dim` (d) or `causal` (whether tokens attend
    only to those before them) come from the `StageSpec`; all others are the encoding's options, as in `shaw(clip=4)`.
    """

    #: The form in which a joining other than 'default' passes it to the layers: a table or a bias; None if it cannot.
    joinable_as: ClassVar[Literal["table", "bias"] | None] = None
    #: True if it can be restricted to some layers (option `layers` of the joining or of the encoding).
    layered: ClassVar[bool] = True
    #: True if it encodes a crop (`Grid.crop`) as a part of the whole image, by the coordinates of the grid.
    crops: ClassVar[bool] = False
    #: The laws of places (see `check_encoding`) that do not hold, with the reason, as "permutation: ...".
    exempt: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def position(cls, stage: StageSpec, joining: Joining, **options: Any) -> Position:
        """Build the position of a backbone at `stage`, with as many instances as its layers need.

        The keyword arguments of this method are options, too.
        """

    @classmethod
    def option_types(cls) -> dict[str, Option]:
        """Return the options by name, with their types and defaults."""
        more = options_of(cls.position, frozenset({"stage", "joining"}))
        return {**options_of(cls.__init__, FROM_STAGE), **more}

    @classmethod
    def has_layers(cls) -> bool:
        """Return whether its option `layers` is the common one of all encodings, and not one of its own."""
        return cls.layered and "layers" not in cls.option_types()

    @classmethod
    def options(cls, **options: Any) -> Spec:
        """Return the spec of this encoding with options, such as `encoding=ShawBias.options(clip=4)`.

        Raises:
            ValueError: if the class is not registered, or has no such option.
        """
        return ENCODINGS.spec_of(cls, options)

    @classmethod
    def build(cls, stage: StageSpec, grid: Grid, options: Mapping[str, Any]) -> Self:
        """Build one instance for `grid`, the grid of the stage or of a window of it."""
        known = {
            "grid": grid,
            "axes": grid.ndim,
            "dim": stage.dim,
            "depth": stage.depth,
            "num_heads": stage.num_heads,
            "head_dim": stage.head_dim,
            "causal": stage.causal,
        }
        parameters = _parameters(cls.__init__)
        return cls(**{name: value for name, value in known.items() if name in parameters}, **options)

    def check_returned(self, method: str, value: Any, letters: str, shape: tuple[int, ...] | None) -> Any:
        """Return what a method returned if it has this shape, which is not compared while a model is compiled.

        Raises:
            BrokenContract: naming the encoding, the method, the expected shape, and the shape of the value.
        """
        if not torch.compiler.is_compiling() and (shape is None or getattr(value, "shape", None) != shape):
            name, actual = ENCODINGS.name_of(type(self)) or type(self).__name__, type(value).__name__
            if shape is None:
                expected, actual = letters, f"a list of {len(value)}" if isinstance(value, list) else actual
            else:
                expected = f"({letters}) = {shape}"
                actual = str(tuple(value.shape)) if isinstance(value, Tensor) else actual
            raise BrokenContract(f"`{method}` of encoding {name!r} must return {expected}, got {actual}")
        return value

    def extra_repr(self) -> str:
        """Return the arguments of the constructor that differ from their defaults, as far as they are attributes."""
        defaults, values = _parameters(type(self).__init__), vars(self)
        names = [name for name in defaults if name in values and str(values[name]) != str(defaults[name])]
        return ", ".join(f"{name}={values[name]}" for name in names)


def init_table(table: Tensor, std: float) -> None:
    """Draw a table from a normal of `std`, truncated at 2 (absolute); it is zero if `std` is."""
    if std:
        trunc_normal_(table, std=std)
    else:
        nn.init.zeros_(table)


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of a function, in order, with their defaults."""
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


#: The option `layers`: the number of the first layers with the encoding, or the indices of any layers.
LAYERS = Option(int | tuple[int, ...] | None, None)
#: The encoding classes by name, with the plugins'.
ENCODINGS: Registry[type[Encoding]] = Registry(
    "encoding",
    Encoding,
    lambda cls: {**cls.option_types(), **({"layers": LAYERS} if cls.has_layers() else {})},
    "graticule.encodings",
)
register_encoding = ENCODINGS.register


@register_encoding("none")
class NoEncoding(Encoding):
    """No position information."""

    layered = False

    @classmethod
    def position(cls, stage: StageSpec, joining: Joining, **options: Any) -> Position:
        """Return a position that is empty for every layer."""
        return NoPosition(stage.depth)


class PositionBuilder(Protocol):
    """Builds the position module of a backbone from its sizes."""

    def __call__(self, grid: Grid, *, dim: int, depth: int, num_heads: int, **within: Any) -> Position:
        """Build the position for `depth` layers of `num_heads` heads or groups, and tokens of `dim` channels on `grid`.

        `within` are further fields of `StageSpec`: `absolute=False` for stages without an absolute encoding of their
        own; `merged=True` for stages that can get the table of the previous stage, merged; `causal=True` where tokens
        attend only to those before them.
        """


def check_fields(
    layers: Sequence[LayerPosition], takes: Collection[str], needs: Collection[str], family: str, why: str = ""
) -> None:
    """Check that the layers of a family can use all fields that they get, and get all fields that they need.

    `why` is a sentence for the message, on why the family takes no other fields.

    Raises:
        ValueError: naming the first layer and field that violate this.
    """
    for layer, position in enumerate(layers):
        for field, value in zip(position._fields, position, strict=True):
            if value is not None and field not in takes:
                raise ValueError(
                    f"`encoding` must be one that {family} can use, which gives its layers {', '.join(sorted(takes))}; "
                    f"got one that gives layer {layer} `{field}`.{why and ' ' + why}"
                )
            if value is None and field in needs:
                raise ValueError(
                    f"`encoding` must give every layer of {family} `{field}`, got one that gives layer {layer} none."
                )


class NoPosition(Position):
    """No position information for any layer."""

    empty = True

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return `depth` empty positions."""
        return [LayerPosition()] * self.depth


class SharedPosition(Position, ABC):
    """One encoding for all joined layers, whose parameters they share.

    Args:
        encoding: built for the grid, or for a window of it.
        depth: number of layers.
        layers: the number of the first layers that are joined, or the indices of any layers; all by default.
    """

    of_pairs = True

    def __init__(self, encoding: nn.Module, depth: int, layers: Layers = None) -> None:
        super().__init__()
        self.encoding: Any = encoding
        self.depth = depth
        self.layer_indices = joined_layers(depth, layers)

    @abstractmethod
    def layer_positions(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of the joined layers for `grid`, or for a window: one for all, or one each."""

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of each layer for `grid`."""
        positions = self.layer_positions(grid.within)
        return fill_layers(
            positions * len(self.layer_indices) if len(positions) == 1 else positions, self.layer_indices, self.depth
        )


class CombinedPosition(Position):
    """Several positions at once, merged layer by layer."""

    def __init__(self, parts: Sequence[Position]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Merge the positions of the parts for `grid`, layer by layer."""
        return self.stage(grid, None)[0]

    def stage(self, grid: Grid, table: Tensor | None) -> tuple[list[LayerPosition], Tensor | None]:
        """Merge the positions of the parts; at most one of them has a table for the next stage."""
        (positions, last), *others = [part.stage(grid, table) for part in cast("Iterable[Position]", self.parts)]
        for other, table_of_other in others:
            positions = [a.merge(b) for a, b in zip(positions, other, strict=True)]
            last = table_of_other if last is None else last
        return positions, last
