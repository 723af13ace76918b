"""Base class of mixing encodings, which make the token-mixing weights of a gating unit from the grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.grid import Grid
from graticule.position.grid_module import GridModule
from graticule.position.joining import Joining, PerLayer, fill_layers, joined_layers
from graticule.position.layer import LayerPosition, MixingWeights
from graticule.position.position import Encoding, Position, StageSpec
from graticule.position.resampling import resize_rows
from graticule.registry.fields import SmallCount
from graticule.registry.registry import Option


class MixingEncoding(GridModule, ABC):
    """Makes the weights (groups, N, N) with which a gating unit mixes the N patches of a grid or window.

    Row i contains the weights of all tokens j for token i. Groups are groups of channels: one if all channels are mixed
    by the same weights (a dense matrix, LRPE, GQPE). It depends on parameters and grid only, so it is computed once per
    forward pass and can be folded.
    """

    #: Whether whole windows are mixed by Fourier transforms of `displacements`, which must be periodic then.
    spectral: bool = False

    def __init__(self, grid: Grid, groups: SmallCount) -> None:
        super().__init__()
        if grid.prefix:
            raise ValueError(f"`grid` must have no prefix tokens where tokens are mixed, got {grid.prefix}.")
        self.grid = grid
        self.groups = groups

    @abstractmethod
    def forward(self, grid: Grid) -> Tensor | TokenMlp:
        """Return the weights for `grid`, a grid or window, (groups, N, N), or an MLP over its patches."""

    def published_names(self) -> dict[str, str]:
        """Map names in timm's blocks to names of parameters here; '' is the bias of `MixingPosition`."""
        return {"mlp_channels.gate.proj.bias": ""}

    def displacements(self, grid: Grid) -> Displacements | None:
        """Return the table of displacements of the weights for `grid`; None if there is none."""
        return None

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, groups={self.groups}"


class MixingPosition(Position):
    """One mixing encoding per joined layer and, with `bias`, numbers that are added to the mixed tokens.

    There is one number per token, for all channels.

    The bias starts at `bias_start`: at 1 a unit whose weights start near zero starts as the identity (gMLP); 0 is used
    in PosMLP's code. At another grid it is resampled as a map.

    Reference: gMLP (Liu et al., 2021), Eq. 2; PosMLP (Wang et al., 2022), Eq. 15.

    Args:
        encodings: one per joined layer, all for the same grid or window.
        bias: whether each layer has that bias.
        bias_start: initial value of the bias.
        depth: number of layers; as many as there are encodings by default.
        layers: indices of the joined layers; the first ones by default.
    """

    def __init__(
        self,
        encodings: Iterable[MixingEncoding],
        bias: bool = True,
        bias_start: float = 1.0,
        depth: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        modules = list(encodings)
        if not modules:
            raise ValueError("`encodings` must be one per layer, got none.")
        self.depth = len(modules) if depth is None else depth
        self.layer_indices = joined_layers(self.depth, len(modules) if layers is None else layers)
        self.encodings = PerLayer(modules, self.layer_indices)
        grid = modules[0].grid
        starts = {layer: torch.full((grid.patches,), bias_start) for layer in self.layer_indices if bias}
        self.biases = _Biases(starts, grid)

    @property
    def grid(self) -> Grid:
        """The grid, or the grid of a window, that the encodings are built for."""
        return self.biases.grid

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of each layer for `grid`: weights or a table as `mixing`, the bias as `spatial_bias`."""
        grid = grid.within
        biases: list[Tensor | None] = [self.biases.at_grid(name, grid) for name, _ in self.biases.named_parameters()]
        biases = biases or [None] * len(self.encodings)
        positions = [
            LayerPosition(mixing=self._mixing(encoding, grid), spatial_bias=bias)
            for encoding, bias in zip(cast("Iterable[MixingEncoding]", self.encodings), biases, strict=True)
        ]
        return fill_layers(positions, self.layer_indices, self.depth)

    def _mixing(self, encoding: MixingEncoding, grid: Grid) -> MixingWeights:
        table = encoding.displacements(grid)
        if table is not None and encoding.spectral:
            return table
        encoding.check_pairs(grid, encoding.groups * (2 if table is not None and table.softmax else 1))
        return cast("MixingWeights", encoding(grid)) if table is None else table.with_weights()

    def layer_lists(self) -> list[str]:
        return ["encodings", "biases"]

    def published_names(self) -> dict[str, str]:
        """Map `blocks.l.` and the encoding's name in timm, such as `mlp_channels.gate.proj.weight` of gMLP."""
        names = {}
        for layer, encoding in self.encodings.named_children():
            for published, parameter in cast("MixingEncoding", encoding).published_names().items():
                if parameter or len(self.biases):
                    names[f"blocks.{layer}.{published}"] = (
                        f"encodings.{layer}.{parameter}" if parameter else f"biases.{layer}"
                    )
        return names


class _Biases(GridModule):
    """One bias per joined layer, under the index of the layer, for a grid or window."""

    held_for_grid = True

    def __init__(self, values: Mapping[int, Tensor], grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        for layer, value in values.items():
            self.register_parameter(str(layer), nn.Parameter(value))

    def __len__(self) -> int:
        return len(self._parameters)

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid of a bias, (N,)."""
        return self.grid.infer_grid(len(value), shape) if value.ndim == 1 else None

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample a bias, (N,), as a map."""
        return resize_rows(value[None], old.shape, new.shape)[0]


class TokenMixing(Encoding):
    """An encoding whose weights mix the tokens in gated MLPs and mixers; one per joined layer."""

    #: True if its weights are a softmax; gating units then have no norm by default (PosMLP, section 5.3).
    softmax: bool = False
    #: True if each group of channels of the stage has its own weights (`groups` of the constructor).
    grouped: ClassVar[bool] = False

    @classmethod
    def option_types(cls) -> dict[str, Option]:
        """Return the options by name; `groups` is none of them, as it comes from the stage."""
        return {name: option for name, option in super().option_types().items() if name != "groups"}

    @classmethod
    def build(cls, stage: StageSpec, grid: Grid, options: Mapping[str, Any]) -> Self:
        """Build one instance for `grid`, the grid of the stage or of a window of it."""
        return super().build(stage, grid, {**options, "groups": stage.num_heads} if cls.grouped else options)

    @classmethod
    def position(
        cls,
        stage: StageSpec,
        joining: Joining,
        *,
        bias: bool = True,
        bias_start: float | None = None,
        **options: Any,
    ) -> Position:
        """Build one instance per joined layer.

        Args:
            stage: the sizes of the backbone.
            joining: 'default'; it decides which layers are joined.
            bias: whether one number per token is added to the mixed tokens.
            bias_start: initial value of that bias; by default 1 if the unit then starts as the identity.
            options: of the constructor.
        """
        modules: list[Any] = [cls.build(stage, stage.within, options) for _ in joining.layer_indices]
        start = cls.default_bias(options) if bias_start is None else bias_start
        return MixingPosition(modules, bias, start, stage.depth, joining.layer_indices)

    @classmethod
    def default_bias(cls, options: Mapping[str, Any]) -> float:
        """Return the initial value of the bias: 0, as in PosMLP's code."""
        return 0.0
