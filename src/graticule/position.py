"""Encodings and joinings put together: a grid in, one `LayerPosition` a layer out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from graticule.encodings import AbsoluteEncoding, Learnable, NormalizedBias, RelativeBias
from graticule.grid import Grid
from graticule.joining import Joining, LayerPosition, Unshared


class Position(nn.Module, ABC):
    """The one thing that a backbone knows of position: `position(grid)` is a list of `LayerPosition`."""

    @abstractmethod
    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Say what each layer gets for `grid`."""

    @abstractmethod
    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the parameters are held for."""

    def published_names(self) -> dict[str, str]:
        """Name in published checkpoints of a vision transformer -> name of the parameter here."""
        return {}

    def layer_lists(self) -> list[str]:
        """Names of the module lists that have an entry of its own for each layer, from the first."""
        return []

    def fit(self, name: str, value: Tensor) -> Tensor | None:
        """Make the published `value` fit the parameter `name`; None leaves the parameter as it is."""
        return value


class PositionBuilder(Protocol):
    """Makes the position of a backbone once the backbone knows its own sizes."""

    def __call__(self, grid: Grid, *, dim: int, depth: int, num_heads: int) -> Position:
        """Build for tokens of `dim` channels on `grid`, `depth` layers of `num_heads` heads."""


class NoPosition(Position):
    """No layer is told anything."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return `depth` empty positions."""
        return [LayerPosition()] * self.depth

    def set_grid(self, grid: Grid) -> None:
        """Do nothing: no parameter depends on the grid."""


class JoinedPosition(Position):
    """An absolute encoding, or one a layer, and the joining that brings it to the layers."""

    def __init__(self, encodings: Iterable[AbsoluteEncoding], joining: Joining) -> None:
        super().__init__()
        encodings = list(encodings)
        if len(encodings) != joining.tables:
            raise ValueError(
                f"`encodings` must be as many as {type(joining).__name__} takes, {joining.tables}, "
                f"got {len(encodings)}."
            )
        fixed = next((type(e).__name__ for e in encodings if not e.learnable), None)
        if len(encodings) > 1 and fixed:
            raise ValueError(
                f"`encoding` must be learnable where each layer has a table of its own, got {fixed}: "
                "its tables would all be the same; use the joining shared."
            )
        self.encodings = nn.ModuleList(encodings)
        self.joining = joining

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Say what each layer gets for `grid`: (N, D) as `pre` or `inner`."""
        return self.joining(*[encoding(grid) for encoding in self.encodings])

    def set_grid(self, grid: Grid) -> None:
        """Resample or recompute every table for `grid`."""
        for encoding in cast("Iterable[Any]", self.encodings):
            encoding.set_grid(grid)

    def layer_lists(self) -> list[str]:
        """The norms of LaPE, and the tables where each layer has one."""
        norms = ["joining.norms"] if hasattr(self.joining, "norms") else []
        return norms + ["encodings"] * isinstance(self.joining, Unshared)

    def published_names(self) -> dict[str, str]:
        """`pos_embed` as DeiT and timm have it; `pos_embed0...` and `blocks.l.pe_norm` as LaPE's code."""
        own_tables = isinstance(self.joining, Unshared)
        tables = [f"pos_embed{i}" for i in range(len(self.encodings))] if own_tables else ["pos_embed"]
        names = {name: f"encodings.{i}.pos_embed" for i, name in enumerate(tables)}
        for own, _ in self.joining.named_parameters():
            _, layer, *rest = own.split(".")
            names[f"blocks.{layer}.pe_norm.{rest[-1]}"] = f"joining.{own}"
        return names

    def fit(self, name: str, value: Tensor) -> Tensor | None:
        """Bring a published table to this grid: a learnable one is resampled, a formula needs none."""
        if not name.endswith("pos_embed") or value.ndim < 2:
            return value
        encoding = self.get_submodule(name.rpartition(".")[0])
        assert isinstance(encoding, AbsoluteEncoding)
        value = value.reshape(1, -1, value.shape[-1])  # some are stored without the axis of one
        if value.shape[1:] == encoding.pos_embed.shape[1:] or value.shape[-1] != encoding.dim:
            return value
        if not isinstance(encoding, Learnable):
            return None
        prefix = encoding.grid.prefix
        side = round(max(value.shape[1] - prefix, 0) ** 0.5)
        if side < 1 or side * side + prefix != value.shape[1]:
            return value  # not a square grid behind as many prefix tokens: the loader names the mismatch
        return Grid(side, side, prefix).resize(value[0], encoding.grid)[None]


class BiasPosition(Position):
    """A relative encoding a layer; the layers past the last one get nothing."""

    def __init__(self, encodings: Iterable[RelativeBias | NormalizedBias], depth: int) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self.depth = depth
        if not 1 <= len(self.encodings) <= depth:
            raise ValueError(f"`encodings` must be from 1 to {depth}, one a layer, got {len(self.encodings)}.")

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Say what each layer gets for `grid`: (heads, N, N) as `bias`."""
        given = [LayerPosition(bias=encoding(grid)) for encoding in self.encodings]
        return given + [LayerPosition()] * (self.depth - len(given))

    def set_grid(self, grid: Grid) -> None:
        """Resample every table for `grid`."""
        for encoding in cast("Iterable[Any]", self.encodings):
            encoding.set_grid(grid)

    def layer_lists(self) -> list[str]:
        """The biases."""
        return ["encodings"]

    def published_names(self) -> dict[str, str]:
        """`blocks.l.attn.relative_position_bias_table` and `blocks.l.attn.pe_norm`, as LaPE's code."""
        names = {}
        for own, _ in self.encodings.named_parameters():
            layer, *rest = own.split(".")
            leaf = "pe_norm." + rest[-1] if rest[0] == "norm" else rest[-1]
            names[f"blocks.{layer}.attn.{leaf}"] = f"encodings.{own}"
        return names


class CombinedPosition(Position):
    """Several positions at once, each saying what it has to say to every layer."""

    def __init__(self, parts: Sequence[Position]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Merge, layer by layer, what the parts say for `grid`."""
        first, *others = [part(grid) for part in self.parts]
        for other in others:
            first = [a.merge(b) for a, b in zip(first, other, strict=True)]
        return first

    def set_grid(self, grid: Grid) -> None:
        """Pass `grid` on to every part."""
        for part in cast("Iterable[Position]", self.parts):
            part.set_grid(grid)

    def layer_lists(self) -> list[str]:
        """The lists of every part."""
        parts = enumerate(cast("Iterable[Position]", self.parts))
        return [f"parts.{i}.{name}" for i, part in parts for name in part.layer_lists()]

    def published_names(self) -> dict[str, str]:
        """The published names of every part."""
        return {
            theirs: f"parts.{i}.{own}"
            for i, part in enumerate(cast("Iterable[Position]", self.parts))
            for theirs, own in part.published_names().items()
        }

    def fit(self, name: str, value: Tensor) -> Tensor | None:
        """Let the part that owns `name` fit it."""
        _, index, own = name.split(".", 2)
        return cast("Position", self.parts[int(index)]).fit(own, value)


class FoldedPosition(Position):
    """Constants for one grid in the place of a position that depends on parameters and grid alone.

    It keeps the original, so that nothing is lost, and its state dict is the original's: the constants are
    computed anew when one is loaded. It refuses another grid and refuses to be trained.
    """

    def __init__(self, original: Position, grid: Grid) -> None:
        super().__init__()
        # not a module of its own, which would change the names of the parameters: the two share what they hold
        self.__dict__["original"] = original
        self._modules = original._modules
        self.grid = grid
        self.fold()
        self.register_load_state_dict_post_hook(_fold_again)

    original: Position

    @torch.no_grad()
    def fold(self) -> None:
        """Compute the constants from the parameters as they are now."""
        self.layout: list[list[str | None]] = []
        seen: dict[int, str] = {}  # a table that several layers share is kept once
        keep: list[Tensor] = []
        for layer, position in enumerate(self.original(self.grid)):
            names: list[str | None] = []
            for field, value in zip(position._fields, position, strict=True):
                if isinstance(value, nn.Module):
                    raise ValueError(
                        f"the {field} of layer {layer} depends on the image ({type(value).__name__}) and cannot "
                        "be folded."
                    )
                if value is not None and id(value) not in seen:
                    seen[id(value)] = f"layer{layer}_{field}"
                    keep.append(value)  # so that no id is used twice
                    self.register_buffer(seen[id(value)], value.detach().clone(), persistent=False)
                names.append(None if value is None else seen[id(value)])
            self.layout.append(names)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the constants, if `grid` is the folded one and the model is in evaluation mode."""
        if self.training:
            raise RuntimeError(
                "the model is folded, its position information is constant and would not be trained; call "
                "graticule.unfold(model) first, or model.eval() to use it."
            )
        if grid != self.grid:
            raise ValueError(
                f"the model is folded for a grid of {self.grid.shape} patches with {self.grid.prefix} prefix tokens, "
                f"got one of {grid.shape} with {grid.prefix}; unfold it, or fold it with `img_size` for this size."
            )
        return [
            LayerPosition(*(None if name is None else getattr(self, name) for name in names)) for names in self.layout
        ]

    def set_grid(self, grid: Grid) -> None:
        """Fold for `grid` instead."""
        self.original.set_grid(grid)
        self.grid = grid
        self.fold()

    def published_names(self) -> dict[str, str]:
        """The published names of the original."""
        return self.original.published_names()

    def layer_lists(self) -> list[str]:
        """The lists of the original."""
        return self.original.layer_lists()

    def fit(self, name: str, value: Tensor) -> Tensor | None:
        """Let the original fit `name`."""
        return self.original.fit(name, value)

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, prefix={self.grid.prefix}"


def _fold_again(module: nn.Module, _: Any) -> None:
    cast("FoldedPosition", module).fold()
