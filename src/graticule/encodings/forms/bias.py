"""Base classes of biases on the attention logits, and LaPE's norm of a bias."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.position.bias import BiasFunction, LowRank
from graticule.position.grid import Grid
from graticule.position.grid_module import GridModule
from graticule.position.joining import Joining, PerLayer, fill_layers, joined_layers
from graticule.position.layer import LayerPosition
from graticule.position.position import Encoding, Position, SharedPosition, StageSpec
from graticule.position.resampling import resize_rows
from graticule.registry.fields import Positive, SmallCount
from graticule.system.symbolic import is_statically_true

#: A bias is passed in two factors from this number of tokens, up to this number of channels (`benchmarks/layers.py`).
LOW_RANK_TOKENS, LOW_RANK_CHANNELS = 1024, 16


class LayerBias(GridModule, ABC):
    """Makes the bias of one layer or of all: an encoding, or a normalized one."""

    num_heads: int

    @abstractmethod
    def forward(self, grid: Grid) -> Tensor | BiasFunction | LayerPosition:
        """Return the bias for `grid`, (heads, N, N), a function of the scaled queries, or a `LayerPosition`."""

    def low_rank(self, grid: Grid) -> LowRank | None:
        """Return the bias for `grid` in two factors, exactly; None if it has no such form."""
        return None

    def layer(self, grid: Grid) -> LayerPosition:
        """Return the position of a layer for `grid`, with the bias in its fastest form."""
        if is_statically_true(grid.tokens >= LOW_RANK_TOKENS):
            factors = self.low_rank(grid)
            if factors is not None and factors.rank <= LOW_RANK_CHANNELS:
                return LayerPosition(bias=factors)
        self.check_pairs(grid, self.num_heads)
        bias = self(grid)
        if isinstance(self, BiasEncoding) and not (callable(bias) or isinstance(bias, LayerPosition)):
            self.check_returned("forward", bias, "heads, N, N", (self.num_heads, grid.tokens, grid.tokens))
        return bias if isinstance(bias, LayerPosition) else LayerPosition(bias=bias)

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the published names of the parameter `name`, after `blocks.l.attn.`; the usual name is last."""
        return (name,)


class ChangedBias(LayerBias):
    """Changes the bias of an encoding, which it contains."""

    def __init__(self, bias: LayerBias) -> None:
        super().__init__()
        self.grid, self.num_heads = bias.grid, bias.num_heads
        self.bias = bias

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the published names of the parameter `name`; `pe_norm` is LaPE's name of the norm."""
        kind, _, leaf = name.partition(".")
        return (f"pe_norm.{leaf}",) if kind == "norm" else self.bias.published_names(leaf)


class BiasPosition(Position):
    """One relative encoding per joined layer; the other layers get nothing.

    Args:
        biases: one per joined layer, all for the same grid or window.
        depth: number of layers.
        layers: indices of the joined layers; the first ones by default.
    """

    of_pairs = True
    form = "bias"

    def __init__(self, biases: Iterable[LayerBias], depth: int, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.depth = depth
        biases = list(biases)
        if not 1 <= len(biases) <= depth:
            raise ValueError(f"`biases` must be from 1 to {depth}, one per layer, got {len(biases)}.")
        self.layer_indices = joined_layers(depth, len(biases) if layers is None else layers)
        self.encodings = PerLayer(biases, self.layer_indices)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the bias of each layer for `grid`, or for its windows: (heads, N, N), or a function of the queries."""
        biases = cast("Iterable[LayerBias]", self.encodings)
        return fill_layers([bias.layer(grid.within) for bias in biases], self.layer_indices, self.depth)

    def keep(self, layers: Collection[int]) -> None:
        self.layer_indices = tuple(layer for layer in self.layer_indices if layer in layers)
        for name in [name for name, _ in self.encodings.named_children() if int(name) not in self.layer_indices]:
            delattr(self.encodings, name)

    def layer_lists(self) -> list[str]:
        return ["encodings"]

    def published_names(self) -> dict[str, str]:
        """Map `blocks.l.attn.` and the published name of a parameter; `pe_norm` for LaPE's norm."""
        return {
            f"blocks.{layer}.attn.{leaf}": f"encodings.{layer}.{parameter}"
            for layer, bias in self.encodings.named_children()
            for parameter, _ in bias.named_parameters()
            for leaf in cast("LayerBias", bias).published_names(parameter)
        }


class SharedBiasPosition(SharedPosition):
    """One relative encoding whose bias is the same in all joined layers, as in T5."""

    form = "bias"

    def layer_positions(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of all joined layers for `grid`, with the bias."""
        return [self.encoding.layer(grid)]

    def published_names(self) -> dict[str, str]:
        """Map `rel_pos_bias.` of BEiT or `shared_rel_pos.` of timm, and the published name of a parameter."""
        return {
            f"{module}.{leaf.removeprefix('rel_pos.')}": f"encoding.{parameter}"
            for parameter, _ in self.encoding.named_parameters()
            for module in ("rel_pos_bias", "shared_rel_pos")
            for leaf in self.encoding.published_names(parameter)
        }


class BiasEncoding(LayerBias, Encoding):
    """Makes a bias on the attention logits for a grid, (heads, N, N), or a function that computes it from the queries.

    An encoding that gives its layers other fields as well returns a `LayerPosition`.
    """

    #: True if all layers share one instance, instead of one per layer.
    shared: ClassVar[bool] = False

    def __init__(self, grid: Grid | None = None, num_heads: SmallCount | None = None) -> None:
        """Set the attributes of that name; `build` sets those that a constructor leaves out."""
        super().__init__()
        for name, value in (("grid", grid), ("num_heads", num_heads)):
            if value is not None:
                setattr(self, name, value)

    @classmethod
    def position(cls, stage: StageSpec, joining: Joining, **options: Any) -> Position:
        """Build one instance per joined layer, or one that they share."""
        if cls.shared:
            return SharedBiasPosition(cls.build(stage, stage.within, options), stage.depth, joining.layer_indices)
        biases = [cls.build_layer(stage, joining, options) for _ in joining.layer_indices]
        return BiasPosition(biases, stage.depth, joining.layer_indices)

    @classmethod
    def build(cls, stage: StageSpec, grid: Grid, options: Mapping[str, Any]) -> Self:
        """Build one instance for `grid`, and set its attributes `grid` and `num_heads` if it has none."""
        built = super().build(stage, grid, options)
        for name, value in (("grid", grid), ("num_heads", stage.num_heads)):
            vars(built).setdefault(name, value)
        return built

    @classmethod
    def build_layer(cls, stage: StageSpec, joining: Joining, options: Mapping[str, Any]) -> LayerBias:
        return cls.build(stage, stage.within, options)


class PatchBias(BiasEncoding):
    """A bias between patches that depends on parameters and grid only; prefix tokens get none by default."""

    joinable_as: ClassVar[Literal["table", "bias"] | None] = "bias"

    @abstractmethod
    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid`, without prefix tokens, (heads, H * W, H * W)."""

    def checked_bias(self, grid: Grid) -> Tensor:
        """Return `patch_bias(grid)`, whose shape is checked."""
        shape = (self.num_heads, grid.patches, grid.patches)
        return self.check_returned("patch_bias", self.patch_bias(grid), "heads, H * W, H * W", shape)

    def with_prefix(self, bias: Tensor, grid: Grid) -> Tensor:
        """Prepend rows and columns for the prefix tokens, here zeros, to a bias of the patches: (heads, N, N)."""
        return grid.with_prefix_bias(bias)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (heads, N, N)."""
        return self.with_prefix(self.checked_bias(grid), grid)

    @classmethod
    def build_layer(cls, stage: StageSpec, joining: Joining, options: Mapping[str, Any]) -> LayerBias:
        """Build the bias of a layer, with its own norm if the joining is LaPE."""
        bias = cls.build(stage, stage.within, options)
        norms = {"keys": NormalizedBias, "heads": HeadNormalizedBias}
        return bias if joining.bias_norm is None else norms[joining.bias_norm](bias)


class NormalizedBias(ChangedBias):
    """LaPE for a relative bias: each layer has its own LayerNorm over the keys of every query.

    Its scale and shift have one entry for each key patch; at another grid they are resampled as maps.

    Reference: Position Embedding Needs an Independent Layer Normalization (Yu et al., 2022), appendix B.
    """

    resampled = True
    crops = False  # a whole row and a part of it have different norms
    bias: PatchBias

    def __init__(self, bias: PatchBias, eps: Positive = 1e-5) -> None:
        super().__init__(bias)
        self.norm = nn.LayerNorm(bias.grid.patches, eps)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), normalized between patches."""
        weight, shift = (self.at_grid(name, grid) for name in ("norm.weight", "norm.bias"))
        bias = F.layer_norm(self.bias.checked_bias(grid), (grid.patches,), weight, shift, self.norm.eps)
        return self.bias.with_prefix(bias, grid)

    def set_grid(self, grid: Grid) -> None:
        super().set_grid(grid)
        self.norm.normalized_shape = (grid.patches,)

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid of scale and shift, (H' W',)."""
        return self.grid.infer_grid(len(value), shape) if value.ndim == 1 else None

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample scale and shift, (H' W',), as maps."""
        return resize_rows(value[None], old.shape, new.shape)[0] if name.startswith("norm.") else value


class HeadNormalizedBias(ChangedBias):
    """A variant of `NormalizedBias`: a LayerNorm over the heads of every pair of patches.

    The papers normalize over the keys. A norm over the heads is, as for a table w, over the channels of one position;
    its 2h parameters do not depend on the grid, and a bias remains a function of the displacement, unlike with a norm
    over the keys of a query. The component that all heads share is lost.
    """

    bias: PatchBias

    def __init__(self, bias: PatchBias, eps: Positive = 1e-5) -> None:
        super().__init__(bias)
        if bias.num_heads < 2:
            raise ValueError("`over` must be 'keys' with one head, whose norm over the heads is constant, got 'heads'.")
        self.norm = nn.LayerNorm(bias.num_heads, eps)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), normalized between patches."""
        return self.bias.with_prefix(self.norm(self.bias.checked_bias(grid).permute(1, 2, 0)).permute(2, 0, 1), grid)


def squared_distance_factors(grid: Grid, weights: Tensor) -> LowRank:
    r"""Return the squared distance of two patches, in patches, times `weights`: (heads,), as two factors.

    .. math:: w |p - q|^2 = (w |p|^2, w, -2 w p_y, -2 w p_x) \cdot (1, |q|^2, q_y, q_x)

    Coordinates are relative to the mean of the grid, which keeps the squares small. Rows of prefix tokens are zero.
    """
    wide = torch.promote_types(weights.dtype, torch.float32)
    place = grid.coordinates(weights.device).to(wide)
    place = place - place.mean(0)
    square, ones = place.square().sum(-1, keepdim=True), torch.ones_like(place[:, :1])
    queries = weights.to(wide)[:, None, None] * torch.cat([square, ones, -2 * place], -1)  # (heads, H * W, 4)
    keys = torch.cat([ones, square, place], -1)[None]
    return LowRank(grid.with_prefix_rows(queries), grid.with_prefix_rows(keys))
