"""View of a backbone of this library; its position information is changed as `LayerPosition`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from graticule.backbones.base import Backbone
from graticule.external.attention_map import AttentionMap
from graticule.external.images import Size, evaluating
from graticule.external.view import (
    Edit,
    ModelView,
    Pass,
    Unavailable,
    chosen_layers,
    nearest,
    permutation,
    split_features,
)
from graticule.position.folded import Folded, FoldedPosition
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import NoPosition, Position
from graticule.position.rotation import Rotation
from graticule.position.tokens import Axes, Function, Tokens
from graticule.position.windows import Windows


@dataclass(frozen=True, eq=False)
class Places(Tokens):
    """The source of each patch's position; `LayerPosition.take` gives every patch the position of its source.

    A function of the tokens is moved only if this is a permutation: token i is passed to it at the index whose position
    it gets, and its output is taken from there. Otherwise it must be that for the grid of the tokens.

    index: (H * W,), for each patch the index of the patch of `source` whose position it gets.
    source: the grid that the position information was computed for.
    window: the same within the windows in which tokens see each other; None without windows.
    """

    index: Tensor
    source: Grid
    window: Places | None = None

    @property
    def permutes(self) -> bool:
        """True if every patch of the source is used once."""
        return len(self.index) == self.source.patches and (self.window is None or self.window.permutes)

    def of_rows(self, count: int) -> Tensor:
        """Return the rows of a table of `count` rows, prefix tokens first, that the tokens get.

        Raises:
            Unavailable: if the table is neither for the grid nor for a window.
        """
        for places in (self, self.window or self):
            if count == places.source.tokens:
                prefix = places.source.prefix
                return torch.cat([torch.arange(prefix), places.index + prefix])
        raise Unavailable(f"position information has {count} rows where there are {self.source.tokens} tokens")

    def rows(self, table: Tensor, axis: int = -2, fill: float = 0.0) -> Tensor:
        """Return a table with the rows of the sources along `axis`."""
        return table.index_select(axis, self.of_rows(table.shape[axis]).to(table.device))

    def rotation(self, rotation: Rotation) -> Rotation:
        """Return the rotation of the sources."""
        take = getattr(rotation, "take", None)
        if take is None:
            raise Unavailable(f"the rotation {type(rotation).__name__} has no method `take`")
        return cast("Rotation", take(self.of_rows((self.window or self).source.tokens)))

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return a function of moved tokens, if they can be moved back."""
        return partial(_moved, function, self, into, out) if self.permutes else function


def _moved(function: Function, places: Places, into: Axes, out: Axes, x: Tensor) -> Any:
    """Apply a function to tokens moved to `places`."""
    for axis in into:
        x = x.index_select(axis, places.of_rows(x.shape[axis]).argsort().to(x.device))
    return _back(function(x), places, out)


def _back(found: Any, places: Places, out: Axes) -> Any:
    """Move the tokens of one tensor or several back."""
    if isinstance(found, Tensor):
        for axis in out:
            found = places.rows(found, axis)
        return found
    parts = [_back(part, places, out) for part in found]
    return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)


#: From the position and the grid of all stages to the position of each layer.
Change = Callable[[Position, Grid], list[LayerPosition]]


class BackboneView(ModelView):
    """A backbone of this library.

    model: the backbone; it may be folded.
    img_size: (height, width) in pixels; that of the model by default.
    change: replaces the position information of the layers.
    """

    model: Backbone

    def __init__(self, model: Backbone, img_size: Size | None = None, change: Change | None = None) -> None:
        self.model = model
        self.img_size = model.img_size if img_size is None else img_size
        self.change = change

    def run(self, images: Tensor, edit: Edit | None = None) -> Pass:
        """Compute all layers on images (B, C, height, width); `edit` may replace the tokens after each layer."""
        model = self.model
        with evaluating(model), self._changed(edit):
            layers = list(model.each_layer(images))
            logits = model.forward_head(model.features_of(layers)) if model.num_classes else None
        return Pass(layers, logits)

    def features(self, images: Tensor, layers: Sequence[tuple[Tensor, Grid]]) -> Tensor:
        """Return the patches of the model's features, (B, H * W, D), computed from the tokens of the layers."""
        with evaluating(self.model):
            return split_features(self.model.features_of(layers), layers[-1][1])[1]

    def content(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Return the embedded patches before any position information, (B, H * W, D), and their grid."""
        grid = self.model.grid_of(images)
        with evaluating(self.model):
            return grid.split(self.model.embed(images))[1], Grid(*grid.shape)

    def grids(self, img_size: Size) -> list[Grid]:
        """Return the grid after each layer, for images of `img_size`."""
        stages = self.model.position_grids(self.model.grid_at(img_size))
        return [at for at, depth in zip(stages, self.model.depths, strict=True) for _ in range(depth)]

    @property
    def coarsest_patch(self) -> Size:
        """(height, width) in pixels of a patch of the last layer."""
        return self.model.coarsest_patch

    def sized(self, img_size: Size) -> BackboneView:
        """Return a view that takes images of another size."""
        self.model.grid_at(img_size)
        change = self.change
        if change is None and isinstance(self.model.position, FoldedPosition):
            change = _unfolded  # a folded position is for one grid
        return BackboneView(self.model, img_size, change)

    def without_position(self) -> BackboneView:
        """Return a view of the model without any position information.

        Raises:
            Unavailable: if its layers need position information.
        """
        if needed := self.model.needs:
            raise Unavailable(
                f"{type(self.model).__name__} mixes tokens by position information alone ({', '.join(sorted(needed))})"
            )
        return BackboneView(self.model, self.img_size, _nothing)

    def shuffled(self, seed: int = 0) -> BackboneView:
        """Return a view of the model in which each patch has the position of another one, the same in all layers."""
        return BackboneView(self.model, self.img_size, partial(self._shuffled, seed))

    def placed_at(self, img_size: Size) -> BackboneView:
        """Return a view in which each patch has the position of the nearest patch of a larger image.

        Functions of the tokens, such as a PEG, are not changed.
        """
        try:
            self.model.grid_at(img_size)
        except ValueError as error:
            raise Unavailable(str(error)) from None
        return BackboneView(self.model, self.img_size, partial(self._from, img_size))

    def attention(self, images: Tensor, layers: Sequence[int] | None = None) -> list[AttentionMap]:
        """Compute the attention weights of chosen layers, all by default, in addition to the forward pass."""
        attentions = [block.attn for block in self.blocks if hasattr(block, "attn")]
        if not attentions:
            raise Unavailable(f"`model` must have attention, got {type(self.model).__name__}, which has none.")
        chosen = chosen_layers(layers, len(attentions))
        found: dict[int, tuple[Tensor, tuple[Grid, Grid] | None, Windows | None]] = {}
        with ExitStack() as hooks:
            for layer in set(chosen):
                hook = attentions[layer].register_forward_pre_hook(partial(_keep, found, layer), with_kwargs=True)
                hooks.callback(hook.remove)
            grids = [grid for _, grid in self.run(images).layers]
        return [_map(layer, *found[layer], grids[layer]) for layer in chosen]

    def variants(self) -> dict[str, Callable[[Tensor], object]]:
        """Return forward passes with position information computed, folded into constants, and without any."""
        original = _original(self.model.position)
        grid = self.model.grid_at(self.img_size)
        positions = {"computed": original, "folded": FoldedPosition(original, grid).eval()}
        if not self.model.needs:
            positions["without"] = NoPosition(len(self.blocks)).eval()
        return {name: partial(self._with_position, position) for name, position in positions.items()}

    def _with_position(self, position: Position, images: Tensor) -> object:
        held = self.model.position
        self.model.position = position
        try:
            return self.model(images)
        finally:
            self.model.position = held

    @property
    def blocks(self) -> list[Any]:
        """The blocks of all stages."""
        model = self.model
        return [model.block(stage, index) for stage, depth in enumerate(model.depths) for index in range(depth)]

    @property
    def position_parameters(self) -> dict[str, int]:
        """Map each kind of module of the position to the number of its own parameters."""
        counts: Counter[str] = Counter()
        for module in self.model.position.modules():
            counts[type(module).__name__] += sum(one.numel() for one in module.parameters(recurse=False))
        return {name: count for name, count in counts.items() if count}

    @contextmanager
    def _changed(self, edit: Edit | None) -> Iterator[None]:
        """Replace the position of the model within the block."""
        if self.change is None and edit is None:
            yield
            return
        original = self.model.position
        self.model.position = _ChangedPosition(original, self.change, edit, self.model)
        try:
            yield
        finally:
            self.model.position = original

    def _shuffled(self, seed: int, position: Position, grid: Grid) -> list[LayerPosition]:
        grids = self.model.layer_grids(grid)
        return [one.take(_shuffling(at, seed)) for one, at in zip(position(grid), grids, strict=True)]

    def _from(self, img_size: Size, position: Position, grid: Grid) -> list[LayerPosition]:
        """Give each patch the position of the nearest patch of an image of `img_size`."""
        source, grids_of = self.model.grid_at(img_size), self.model.layer_grids
        own, other = position(grid), position(source)
        found = []
        for there, here, at, wide in zip(other, own, grids_of(grid), grids_of(source), strict=True):
            window = Places(nearest(at.within, wide.within), wide.within) if at.windows else None
            found.append(there.with_functions(here).take(Places(nearest(at, wide), wide, window)))
        return found


class _ChangedPosition(Position):
    """Replaces a position while it is changed; the modules of the position remain submodules."""

    def __init__(self, original: Position, change: Change | None, edit: Edit | None, model: Backbone) -> None:
        super().__init__()
        self.original = original
        self.change, self.edit = change, edit
        self.__dict__["model"] = model  # no submodule of itself

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the changed position, with the edit after each layer."""
        given = self.original(grid) if self.change is None else self.change(_original(self.original), grid)
        edit = self.edit
        if edit is None:
            return given
        model = cast("Backbone", self.model)
        stages = zip(model.position_grids(grid), model.depths, strict=True)
        grids = [at for at, depth in stages for _ in range(depth)]

        def after(layer: int) -> Callable[[Tensor], Tensor]:
            return lambda tokens: edit(layer, tokens, grids[layer])

        return [one.merge(LayerPosition(after=after(layer))) for layer, one in enumerate(given)]

    def set_grid(self, grid: Grid) -> None:
        """Pass the grid to the position."""
        self.original.set_grid(grid)


def _original(position: Position) -> Position:
    return position.original if isinstance(position, Folded) else position


def _unfolded(position: Position, grid: Grid) -> list[LayerPosition]:
    given: list[LayerPosition] = position(grid)
    return given


def _nothing(position: Position, grid: Grid) -> list[LayerPosition]:
    return [LayerPosition()] * len(position(grid))


def _shuffling(grid: Grid, seed: int) -> Places:
    window = Places(permutation(grid.within.patches, seed), grid.within) if grid.windows else None
    return Places(permutation(grid.patches, seed), grid, window)


def _keep(
    found: dict[int, tuple[Tensor, tuple[Grid, Grid] | None, Windows | None]],
    layer: int,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Store the attention weights of a layer, the grids of its queries and keys if it names them, and its windows."""
    seen = windows = None
    for given in args:
        if isinstance(given, Windows):
            seen, windows = (given.window, given.window), given
        elif isinstance(given, Grid) and hasattr(module, "seen_grids"):
            seen = module.seen_grids(given)
    found[layer] = module.weights(*args, **kwargs), seen, windows


def _map(
    layer: int, weights: Tensor, seen: tuple[Grid, Grid] | None, windows: Windows | None, grid: Grid
) -> AttentionMap:
    """Build the map of a layer: the grids of queries and keys are `seen`, or the grid of the layer."""
    tokens = None if windows is None else windows.tokens().numpy()
    return AttentionMap(layer, weights.double().cpu().numpy(), *(seen or (grid, grid)), tokens)
