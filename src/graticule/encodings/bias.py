"""Biases on the attention logits: what they have in common, LaPE's norm of them, and how layers get them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.encodings.base import Encoding, Position, Site
from graticule.grid import Grid, resize_map
from graticule.joining import Joining, Layers, PerLayer, chosen_heads, joined_layers, spread, spread_heads
from graticule.layer_position import BiasFunction, LayerPosition, LowRank
from graticule.symbolic import holds

#: A bias is given in two factors from this many tokens on, up to this many channels (`benchmarks/bias.py`).
LOW_RANK_TOKENS, LOW_RANK_CHANNELS = 1024, 16


class BiasEncoding(Encoding):
    """Makes a bias on the attention logits of a grid, (heads, N, N), or a function that makes it from the queries.

    One that gives its layers something else as well returns a `LayerPosition`.
    """

    #: The grid that it is built for.
    grid: Grid
    #: Whether all layers share one, instead of one per layer.
    shared: ClassVar[bool] = False

    @abstractmethod
    def forward(self, grid: Grid) -> Tensor | BiasFunction | LayerPosition:
        """Return the bias for `grid`, (heads, N, N), or a function of the scaled queries; or all that a layer gets."""

    def low_rank(self, grid: Grid) -> LowRank | None:
        """Return the bias for `grid` in two factors, exactly; None if it has no such form."""
        return None

    @abstractmethod
    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that it is built for."""

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` of a checkpoint fit the parameter `name`; what cannot be is returned as it is.

        `shape` is the (H, W) of the grid or window that the value is for, if the checkpoint says so.
        """
        return value

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return what published checkpoints call the parameter `name`, after `blocks.l.attn.`; the usual name last."""
        return (name,)

    @classmethod
    def position(
        cls, site: Site, joining: Joining, *, heads: tuple[int, ...] | None = None, **options: Any
    ) -> Position:
        """Build one per joined layer, or one that they share.

        Args:
            site: what the backbone says about itself.
            joining: says which layers are joined.
            heads: indices of the heads that have the bias; all by default.
            options: of the constructor.
        """
        chosen = None if heads is None else chosen_heads(site.num_heads, heads)
        of_heads = site
        if chosen is not None:
            of_heads = replace(site, dim=site.head_dim * len(chosen), num_heads=len(chosen))

        def one() -> nn.Module:
            bias = cls.one(of_heads, joining, options)
            return bias if chosen is None else SomeHeads(bias, chosen, site.num_heads)

        if cls.shared:
            return SharedBiasPosition(one(), site.depth, joining.joined)
        return BiasPosition([one() for _ in joining.joined], site.depth, joining.joined)

    @classmethod
    def one(cls, site: Site, joining: Joining, options: Mapping[str, Any]) -> nn.Module:
        """Build the bias of a layer."""
        return cls.build(site, site.within, options)


class PatchBias(BiasEncoding):
    """A bias between patches that depends on parameters and grid only; prefix tokens get none by default."""

    joined: ClassVar[Literal["table", "bias"] | None] = "bias"
    num_heads: int

    @abstractmethod
    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid`, without prefix tokens, (heads, H * W, H * W)."""

    def with_prefix(self, bias: Tensor, grid: Grid) -> Tensor:
        """Put rows and columns for the prefix tokens before a bias of the patches: (heads, N, N), here of zeros."""
        return grid.with_prefix_bias(bias)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (heads, N, N)."""
        return self.with_prefix(self.patch_bias(grid), grid)

    @classmethod
    def one(cls, site: Site, joining: Joining, options: Mapping[str, Any]) -> nn.Module:
        """Build the bias of a layer, with a norm of its own if the joining is LaPE."""
        bias = cls.build(site, site.within, options)
        norm = {None: None, "keys": NormalizedBias, "heads": HeadNormalizedBias}[joining.bias_norm]
        return bias if norm is None or cls.shared else norm(bias)


class _NormalizedBias(nn.Module):
    """A bias and a norm of it."""

    def __init__(self, bias: PatchBias) -> None:
        super().__init__()
        self.bias = bias

    @property
    def grid(self) -> Grid:
        """The grid that the encoding is built for."""
        return self.bias.grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` of a checkpoint fit the parameter `name`, as `BiasEncoding.fit` does."""
        return self.bias.fit(name.removeprefix("bias."), value, shape) if name.startswith("bias.") else value

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return what published checkpoints call the parameter `name`; `pe_norm` is LaPE's name of the norm."""
        kind, _, leaf = name.partition(".")
        return (f"pe_norm.{leaf}",) if kind == "norm" else self.bias.published_names(leaf)


class NormalizedBias(_NormalizedBias):
    """LaPE for a relative bias: a LayerNorm of its own over the keys of every query.

    Its scale and shift have one entry for each key patch; at another grid they are resampled as maps.

    Reference: Position Embedding Needs an Independent Layer Normalization (Yu et al., 2022), appendix B.
    """

    resampled = True
    crops = False  # the norm of a whole row is not that of its part

    def __init__(self, bias: PatchBias, eps: float = 1e-5) -> None:
        super().__init__(bias)
        self.norm = nn.LayerNorm(bias.grid.patches, eps)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), normalized between patches."""
        weight, shift = (self._map_at(p, grid) for p in (self.norm.weight, self.norm.bias))
        bias = F.layer_norm(self.bias.patch_bias(grid), (grid.patches,), weight, shift, self.norm.eps)
        return self.bias.with_prefix(bias, grid)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for."""
        norm = nn.LayerNorm(grid.patches, self.norm.eps).to(self.norm.weight)
        with torch.no_grad():
            norm.weight.copy_(self._map_at(self.norm.weight, grid))
            norm.bias.copy_(self._map_at(self.norm.bias, grid))
        norm.weight.requires_grad_(self.norm.weight.requires_grad)
        norm.bias.requires_grad_(self.norm.bias.requires_grad)
        self.norm = norm
        self.bias.set_grid(grid)

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Resample scale and shift of another grid, (H' W',), for this one; the bias fits its own parameters."""
        if not name.startswith("norm.") or value.ndim != 1:
            return super().fit(name, value, shape)
        old = self.grid.alike(value.shape[0], shape)
        if old is None or old.shape == self.grid.shape:
            return value
        return resize_map(value.view(1, *old.shape), self.grid.shape).flatten()

    def _map_at(self, values: Tensor, grid: Grid) -> Tensor:
        if grid.has_shape(self.grid.shape):
            return values
        return resize_map(values.view(1, *self.grid.shape), grid.shape).flatten()


class HeadNormalizedBias(_NormalizedBias):
    """A variant of `NormalizedBias`: a LayerNorm over the heads of every pair of patches.

    The papers normalize over the keys. Over the heads the norm is, as for a table w, over the channels of one position;
    its parameters, 2h, do not depend on the grid, and a bias stays a function of the displacement, which it does not
    with a norm over the keys of a query. The part that all heads share is lost.
    """

    def __init__(self, bias: PatchBias, eps: float = 1e-5) -> None:
        super().__init__(bias)
        if bias.num_heads < 2:
            raise ValueError(
                "`over` must be 'keys' where there is one head, whose norm over the heads is constant, got 'heads'."
            )
        self.norm = nn.LayerNorm(bias.num_heads, eps)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), normalized between patches."""
        return self.bias.with_prefix(self.norm(self.bias.patch_bias(grid).permute(1, 2, 0)).permute(2, 0, 1), grid)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for."""
        self.bias.set_grid(grid)


class SomeHeads(nn.Module):
    """A bias for some of the heads; it is zero for the others.

    Args:
        bias: a bias encoding, or a norm of one, for as many heads as are chosen.
        heads: their indices.
        num_heads: h.
    """

    def __init__(self, bias: nn.Module, heads: Sequence[int], num_heads: int) -> None:
        super().__init__()
        self.bias = bias
        self.heads, self.num_heads = tuple(heads), num_heads

    @property
    def grid(self) -> Grid:
        """The grid that the encoding is built for."""
        grid: Grid = cast("Any", self.bias).grid
        return grid

    def forward(self, grid: Grid) -> LayerPosition:
        """Return what a layer of all heads gets for `grid`."""
        given = _layer(self.bias, grid)
        positional = given.positional
        return given._replace(
            bias=self._spread(given.bias),
            key_bias=self._spread(given.key_bias),
            value_bias=self._spread(given.value_bias),
            positional=None if positional is None else type(positional)(*map(self._spread, positional)),
        )

    def _spread(self, made: Any) -> Any:
        """Give the chosen heads theirs, a tensor (heads, ...) or a function from and to (B, heads, ...)."""
        if made is None or isinstance(made, Tensor):
            return None if made is None else spread_heads(made, self.heads, self.num_heads)
        if isinstance(made, LowRank):
            return LowRank(spread_heads(made.queries, self.heads, self.num_heads), made.keys[:1])
        return partial(_of_heads, made, self.heads, self.num_heads)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for, for good."""
        cast("Any", self.bias).set_grid(grid)

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` of a checkpoint fit the parameter `name`, as `BiasEncoding.fit` does."""
        fitted: Tensor = cast("Any", self.bias).fit(name.removeprefix("bias."), value, shape)
        return fitted

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return what published checkpoints call the parameter `name`, as `BiasEncoding.published_names` does."""
        names: tuple[str, ...] = cast("Any", self.bias).published_names(name.removeprefix("bias."))
        return names

    def extra_repr(self) -> str:
        return f"heads={list(self.heads)}, num_heads={self.num_heads}"


def _of_heads(function: BiasFunction, heads: tuple[int, ...], num_heads: int, queries: Tensor, **part: Any) -> Tensor:
    return spread_heads(function(queries[:, list(heads)], **part), heads, num_heads, dim=1)


class BiasPosition(Position):
    """One relative encoding per joined layer; the others get nothing.

    Args:
        encodings: one per joined layer, of the same grid, or of the windows of it.
        depth: number of layers.
        layers: indices of the joined layers; the first ones by default.
    """

    def __init__(
        self,
        encodings: Iterable[nn.Module],
        depth: int,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.depth = depth
        encodings = list(encodings)
        if not 1 <= len(encodings) <= depth:
            raise ValueError(f"`encodings` must be from 1 to {depth}, one per layer, got {len(encodings)}.")
        self.joined = joined_layers(depth, len(encodings) if layers is None else layers)
        self.encodings = PerLayer(encodings, self.joined)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the bias of each layer for `grid`, or for its windows: (heads, N, N), or a function of the queries."""
        each = cast("Iterable[Any]", self.encodings)
        given = [_layer(encoding, grid.within) for encoding in each]
        return spread(given, self.joined, self.depth)

    def set_grid(self, grid: Grid) -> None:
        """Resample every table for `grid`, or for its windows."""
        for encoding in cast("Iterable[Any]", self.encodings):
            encoding.set_grid(grid.within)

    def layer_lists(self) -> list[str]:
        """The biases."""
        return ["encodings"]

    def published_names(self) -> dict[str, str]:
        """`blocks.l.attn.` and the name of the encoding's parameter in published code; `pe_norm` for LaPE's norm."""
        names: dict[str, str] = {}
        for own, _ in self.encodings.named_parameters():
            layer, _, name = own.partition(".")
            encoding: Any = self.encodings.get_submodule(layer)
            names |= {f"blocks.{layer}.attn.{leaf}": f"encodings.{own}" for leaf in encoding.published_names(name)}
        return names

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Bring a bias table, or a norm of one, of another grid or window to this one."""
        _, layer, own = name.split(".", 2)
        encoding: Any = self.encodings.get_submodule(layer)
        fitted: Tensor = encoding.fit(own, value, shape)
        return fitted


class SharedBiasPosition(Position):
    """One relative encoding whose bias is the same in all joined layers, as in T5.

    Args:
        encoding: built for the grid, or for a window of it.
        depth: number of layers.
        layers: how many of the first layers get the bias, or the indices of those that do; all by default.
    """

    def __init__(self, encoding: nn.Module, depth: int, layers: Layers = None) -> None:
        super().__init__()
        self.encoding = encoding
        self.depth = depth
        self.joined = joined_layers(depth, layers)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return what each layer gets for `grid`: the same (heads, N, N) as `bias`."""
        encoding: Any = self.encoding
        given = _layer(encoding, grid.within)
        return spread([given] * len(self.joined), self.joined, self.depth)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid`, or a window of it, the one that the encoding is built for."""
        encoding: Any = self.encoding
        encoding.set_grid(grid.within)

    def published_names(self) -> dict[str, str]:
        """`rel_pos_bias.` as BEiT, or `shared_rel_pos.` as timm, and the name of the encoding's parameter there."""
        encoding: Any = self.encoding
        return {
            f"{module}.{leaf.removeprefix('rel_pos.')}": f"encoding.{own}"
            for own, _ in self.encoding.named_parameters()
            for module in ("rel_pos_bias", "shared_rel_pos")
            for leaf in encoding.published_names(own)
        }

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Bring a bias table of another grid or window to this one."""
        encoding: Any = self.encoding
        fitted: Tensor = encoding.fit(name.removeprefix("encoding."), value, shape)
        return fitted


def _layer(encoding: Any, grid: Grid) -> LayerPosition:
    """Return what a layer gets: all of it, or a bias, in the form that is fastest."""
    if isinstance(encoding, BiasEncoding) and holds(grid.tokens >= LOW_RANK_TOKENS):
        factors = encoding.low_rank(grid)
        if factors is not None and factors.rank <= LOW_RANK_CHANNELS:
            return LayerPosition(bias=factors)
    given = encoding(grid)
    return given if isinstance(given, LayerPosition) else LayerPosition(bias=given)


def squared_distance_factors(grid: Grid, weights: Tensor) -> LowRank:
    r"""Return `weights`: (heads,) times the squared distance of two patches, in patches, as two factors.

    .. math:: w |p - q|^2 = (w |p|^2, w, -2 w p_y, -2 w p_x) \cdot (1, |q|^2, q_y, q_x)

    Coordinates are relative to the mean of the grid, which keeps the squares small. Rows of prefix tokens are zero.
    """
    wide = torch.promote_types(weights.dtype, torch.float32)
    place = grid.coordinates(weights.device).to(wide)
    place = place - place.mean(0)
    square, one = place.square().sum(-1, keepdim=True), torch.ones_like(place[:, :1])
    queries = weights.to(wide)[:, None, None] * torch.cat([square, one, -2 * place], -1)  # (heads, H * W, 4)
    keys = torch.cat([one, square, place], -1)[None]
    return LowRank(grid.with_prefix_rows(queries), grid.with_prefix_rows(keys))
