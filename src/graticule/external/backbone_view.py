"""View of a backbone of this library; its position information is changed as `LayerPosition`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from graticule.backbones.base import Backbone
from graticule.external.attention_map import AttentionMap
from graticule.external.images import Size, evaluating
from graticule.external.view import Edit, ModelView, Pass, Unavailable, chosen_layers, nearest, permutation
from graticule.position.folded import Folded, FoldedPosition
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import NoPosition, Position
from graticule.position.rotation import Rotation
from graticule.position.tokens import Axes, Function, TokenSelection
from graticule.position.windows import Windows


@dataclass(frozen=True, eq=False)
class PatchIndices(TokenSelection):
    """The source of each patch's position; `LayerPosition.take` gives every patch the position of its source.

    A function of the tokens is moved only if this is a permutation: token i is passed to it at the index whose position
    it gets, and its output is taken from there. Otherwise it must be that for the grid of the tokens.

    index: (H * W,), for each patch the index of the patch of `source` whose position it gets.
    source: the grid that the position information was computed for.
    window: the same within the windows in which tokens see each other; None without windows.
    """

    index: Tensor
    source: Grid
    window: PatchIndices | None = None

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


def _moved(function: Function, places: PatchIndices, into: Axes, out: Axes, x: Tensor) -> Any:
    """Apply a function to tokens moved to `places`."""
    for axis in into:
        x = x.index_select(axis, places.of_rows(x.shape[axis]).argsort().to(x.device))
    return _back(function(x), places, out)


def _back(output: Any, places: PatchIndices, out: Axes) -> Any:
    if isinstance(output, Tensor):
        for axis in out:
            output = places.rows(output, axis)
        return output
    parts = [_back(part, places, out) for part in output]
    return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)


#: From the position and the grid of all stages to the position of each layer.
Change = Callable[[Position, Grid], list[LayerPosition]]


class BackboneView(ModelView):
    """A backbone of this library.

    model: the backbone; it may be folded.
    img_size: (height, width) in pixels; the model's by default.
    change: replaces the position information of the layers.
    """

    model: Backbone
    change: Change | None = None

    def __init__(self, model: Backbone, img_size: Size | None = None) -> None:
        self.model = model
        self.img_size = model.img_size if img_size is None else img_size

    def run(self, images: Tensor, edit: Edit | None = None) -> Pass:
        model = self.model
        changed = self.change is not None or edit is not None
        with evaluating(model), _holding(model, _ChangedPosition(self, edit)) if changed else nullcontext():
            layers = list(model.each_layer(images))
            logits = None
            if model.num_classes:
                features = model.features_of(layers)
                if self.debiased is not None:
                    features = self.debiased.clean(features, layers[-1][1])
                logits = model.forward_head(features)
        return Pass(layers, logits)

    def features(self, images: Tensor, layers: Sequence[tuple[Tensor, Grid]]) -> Tensor:
        with evaluating(self.model):
            return self.patches_of(self.model.features_of(layers), layers[-1][1])

    def patch_embeddings(self, images: Tensor) -> tuple[Tensor, Grid]:
        grid = self.model.grid_of(images)
        with evaluating(self.model):
            return grid.split(self.model.embed(images))[1], Grid(*grid.shape)

    def grids(self, img_size: Size) -> list[Grid]:
        return self.model.layer_grids(self.model.grid_at(img_size))

    @property
    def coarsest_patch(self) -> Size:
        return self.model.coarsest_patch

    def resized_to(self, img_size: Size) -> BackboneView:
        self.model.grid_at(img_size)
        view = self._with(self.change)
        if view.change is None and isinstance(self.model.position, FoldedPosition):
            view.change = lambda position, grid: position(grid)  # a folded position is for one grid
        view.img_size = img_size
        return view

    def without_position(self) -> BackboneView:
        """Return a view of the model without any position information.

        Raises:
            Unavailable: if its layers need position information.
        """
        if needed := self.model.needs:
            raise Unavailable(
                f"{type(self.model).__name__} mixes tokens by position information alone ({', '.join(sorted(needed))})"
            )
        return self._with(lambda position, grid: [LayerPosition()] * len(position(grid)))

    def shuffled(self, seed: int = 0) -> BackboneView:

        def change(position: Position, grid: Grid) -> list[LayerPosition]:
            layers = zip(position(grid), self.model.layer_grids(grid), strict=True)
            return [layer.take(_places(at, at, lambda at, _: permutation(at.patches, seed))) for layer, at in layers]

        return self._with(change)

    def with_position_of(self, other: BackboneView) -> BackboneView:
        """Return a view in which each patch has the position of the nearest patch in a view at another size.

        Functions of the tokens, such as a PEG, are not changed.
        """
        grids_of, source = self.model.layer_grids, self.model.grid_at(other.img_size)

        def change(position: Position, grid: Grid) -> list[LayerPosition]:
            layers = zip(position(grid), position(source), grids_of(grid), grids_of(source), strict=True)
            return [there.with_functions(here).take(_places(at, wide, nearest)) for here, there, at, wide in layers]

        return self._with(change)

    def _with(self, change: Change | None) -> BackboneView:
        view = copy.copy(self)
        view.change = change
        return view

    def attention(self, images: Tensor, layers: Sequence[int] | None = None) -> list[AttentionMap]:
        """Compute the attention weights of chosen layers, all by default, in addition to the forward pass."""
        attentions = [block.attn for block in self.blocks if hasattr(block, "attn")]
        if not attentions:
            raise Unavailable(f"`model` must have attention, got {type(self.model).__name__}, which has none.")
        chosen = chosen_layers(layers, len(attentions))
        calls: dict[int, tuple[tuple[Any, ...], Tensor]] = {}

        def keep(layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[layer] = args, module.weights(*args, **kwargs)

        with ExitStack() as hooks:
            for layer in set(chosen):
                hook = attentions[layer].register_forward_pre_hook(partial(keep, layer), with_kwargs=True)
                hooks.callback(hook.remove)
            grids = [grid for _, grid in self.run(images).layers]
        if calls.keys() < set(chosen):
            raise Unavailable("a block is compiled, and calls no hooks")
        maps = []
        for layer in chosen:
            args, weights = calls[layer]
            windows = next((argument for argument in args if isinstance(argument, Windows)), None)
            within = grids[layer] if windows is None else windows.window
            seen_grids = getattr(attentions[layer], "seen_grids", lambda grid: (grid, grid))  # of reduced keys
            queries, keys = (within, within) if windows is not None else seen_grids(within)
            tokens = None if windows is None else windows.tokens().numpy()
            maps.append(AttentionMap(layer, weights.double().cpu().numpy(), queries, keys, tokens))
        return maps

    def variants(self) -> dict[str, Callable[[Tensor], object]]:
        """Return forward passes with position information computed, folded into constants, and without any."""
        original = _original(self.model.position)
        grid = self.model.grid_at(self.img_size)
        positions = {"computed": original, "folded": FoldedPosition(original, grid).eval()}
        if not self.model.needs:
            positions["without"] = NoPosition(len(self.blocks)).eval()

        def run(position: Position, images: Tensor) -> object:
            with _holding(self.model, position):
                return self.model(images)

        return {name: partial(run, position) for name, position in positions.items()}

    @property
    def blocks(self) -> list[Any]:
        """The blocks of all stages."""
        model = self.model
        return [model.block(stage, index) for stage, depth in enumerate(model.depths) for index in range(depth)]

    @property
    def position_parameters(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for module in self.model.position.modules():
            counts[type(module).__name__] += sum(value.numel() for value in module.parameters(recurse=False))
        return {name: count for name, count in counts.items() if count}


@contextmanager
def _holding(model: Backbone, position: Position) -> Iterator[None]:
    original = model.position
    model.position = position
    try:
        yield
    finally:
        model.position = original


class _ChangedPosition(Position):
    """Replaces the position of a view's model; the modules of the position remain submodules."""

    def __init__(self, view: BackboneView, edit: Edit | None) -> None:
        super().__init__()
        self.original = view.model.position
        self.change, self.edit, self.layer_grids = view.change, edit, view.model.layer_grids

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the changed position, with the edit after each layer."""
        layers = self.original(grid) if self.change is None else self.change(_original(self.original), grid)
        edit = self.edit
        if edit is None:
            return layers

        def edit_after(layer: int, at: Grid) -> LayerPosition:
            return LayerPosition(map_after=lambda tokens: edit(layer, tokens, at))

        grids = enumerate(self.layer_grids(grid))
        return [position.merge(edit_after(layer, at)) for position, (layer, at) in zip(layers, grids, strict=True)]

    def set_grid(self, grid: Grid) -> None:
        self.original.set_grid(grid)


def _original(position: Position) -> Position:
    return position.original if isinstance(position, Folded) else position


def _places(grid: Grid, source: Grid, index: Callable[[Grid, Grid], Tensor]) -> PatchIndices:
    """Return the place in `source` of each patch of `grid`, by the function `index` of both, also within windows."""
    window = PatchIndices(index(grid.within, source.within), source.within) if grid.windows else None
    return PatchIndices(index(grid, source), source, window)
