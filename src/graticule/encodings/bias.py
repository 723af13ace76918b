"""Base classes of biases on the attention logits, and LaPE's norm of a bias."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.attention_bias import LowRank
from graticule.encodings.base import Encoding, Position, Site
from graticule.encodings.layer_bias import BiasPosition, LayerBias, SharedBiasPosition, SomeHeads
from graticule.grid import Grid
from graticule.joined_layers import chosen_heads
from graticule.joining import Joining
from graticule.resampling import BICUBIC


class BiasEncoding(LayerBias, Encoding):
    """Makes a bias on the attention logits for a grid, (heads, N, N), or a function that computes it from the queries.

    An encoding that gives its layers other fields as well returns a `LayerPosition`.
    """

    #: True if all layers share one instance, instead of one per layer.
    shared: ClassVar[bool] = False
    num_heads: int

    @classmethod
    def position(
        cls, site: Site, joining: Joining, *, heads: tuple[int, ...] | None = None, **options: Any
    ) -> Position:
        """Build one instance per joined layer, or one that they share.

        Args:
            site: the sizes of the backbone.
            joining: decides which layers are joined.
            heads: indices of the heads with the bias; all by default.
            options: of the constructor.
        """
        chosen = None if heads is None else chosen_heads(site.num_heads, heads)
        of_heads = site
        if chosen is not None:
            of_heads = replace(site, dim=site.head_dim * len(chosen), num_heads=len(chosen))

        def one() -> LayerBias:
            bias = cls.one(of_heads, joining, options)
            return bias if chosen is None else SomeHeads(bias, chosen, site.num_heads)

        if cls.shared:
            return SharedBiasPosition(one(), site.depth, joining.joined)
        return BiasPosition([one() for _ in joining.joined], site.depth, joining.joined)

    @classmethod
    def build(cls, site: Site, grid: Grid, options: Mapping[str, Any]) -> Self:
        """Build one instance for `grid`, and set its attributes `grid` and `num_heads` if it has none."""
        built = super().build(site, grid, options)
        for name, value in (("grid", grid), ("num_heads", site.num_heads)):
            if name not in vars(built):
                setattr(built, name, value)
        return built

    @classmethod
    def one(cls, site: Site, joining: Joining, options: Mapping[str, Any]) -> LayerBias:
        """Build the bias of a layer."""
        return cls.build(site, site.within, options)


class PatchBias(BiasEncoding):
    """A bias between patches that depends on parameters and grid only; prefix tokens get none by default."""

    joined: ClassVar[Literal["table", "bias"] | None] = "bias"

    @abstractmethod
    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid`, without prefix tokens, (heads, H * W, H * W)."""

    def with_prefix(self, bias: Tensor, grid: Grid) -> Tensor:
        """Prepend rows and columns for the prefix tokens, here zeros, to a bias of the patches: (heads, N, N)."""
        return grid.with_prefix_bias(bias)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (heads, N, N)."""
        return self.with_prefix(self.patch_bias(grid), grid)

    @staticmethod
    def of_pairs(table: Tensor, grid: Grid) -> Tensor:
        """Return the values of all pairs of patches, (heads, N, N), from those of displacements, (heads, n)."""
        index = grid.offset_index(table.device)
        pairs: Tensor = table.index_select(1, index.flatten()).unflatten(1, index.shape)
        return pairs

    @classmethod
    def one(cls, site: Site, joining: Joining, options: Mapping[str, Any]) -> LayerBias:
        """Build the bias of a layer, with its own norm if the joining is LaPE."""
        bias = cls.build(site, site.within, options)
        norm = {None: None, "keys": NormalizedBias, "heads": HeadNormalizedBias}[joining.bias_norm]
        return bias if norm is None or cls.shared else norm(bias)


class _NormalizedBias(LayerBias):
    """A bias and its norm."""

    def __init__(self, bias: PatchBias) -> None:
        super().__init__()
        self.grid = bias.grid
        self.bias = bias

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the encoding."""
        super().set_grid(grid)
        self.bias.set_grid(grid)

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` of a checkpoint fit the parameter `name`, as the bias does."""
        return self.bias.fit(name.removeprefix("bias."), value, shape) if name.startswith("bias.") else value

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the published names of the parameter `name`; `pe_norm` is LaPE's name of the norm."""
        kind, _, leaf = name.partition(".")
        return (f"pe_norm.{leaf}",) if kind == "norm" else self.bias.published_names(leaf)


class NormalizedBias(_NormalizedBias):
    """LaPE for a relative bias: each layer has its own LayerNorm over the keys of every query.

    Its scale and shift have one entry for each key patch; at another grid they are resampled as maps.

    Reference: Position Embedding Needs an Independent Layer Normalization (Yu et al., 2022), appendix B.
    """

    resampled = True
    crops = False  # the norm of a whole row differs from that of a part of it

    def __init__(self, bias: PatchBias, eps: float = 1e-5) -> None:
        super().__init__(bias)
        self.norm = nn.LayerNorm(bias.grid.patches, eps)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), normalized between patches."""
        weight, shift = (self._map_at(p, grid) for p in (self.norm.weight, self.norm.bias))
        bias = F.layer_norm(self.bias.patch_bias(grid), (grid.patches,), weight, shift, self.norm.eps)
        return self.bias.with_prefix(bias, grid)

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the encoding."""
        norm = nn.LayerNorm(grid.patches, self.norm.eps).to(self.norm.weight)
        with torch.no_grad():
            norm.weight.copy_(self._map_at(self.norm.weight, grid))
            norm.bias.copy_(self._map_at(self.norm.bias, grid))
        norm.weight.requires_grad_(self.norm.weight.requires_grad)
        norm.bias.requires_grad_(self.norm.bias.requires_grad)
        self.norm = norm
        super().set_grid(grid)

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Resample scale and shift of another grid, (H' W',), for this one; the bias fits its own parameters."""
        if not name.startswith("norm.") or value.ndim != 1:
            return super().fit(name, value, shape)
        old = self.grid.alike(value.shape[0], shape)
        if old is None or old.shape == self.grid.shape:
            return value
        return BICUBIC(value.view(1, *old.shape), self.grid.shape).flatten()

    def _map_at(self, values: Tensor, grid: Grid) -> Tensor:
        if grid.has_shape(self.grid.shape):
            return values
        return BICUBIC(values.view(1, *self.grid.shape), grid.shape).flatten()


class HeadNormalizedBias(_NormalizedBias):
    """A variant of `NormalizedBias`: a LayerNorm over the heads of every pair of patches.

    The papers normalize over the keys. A norm over the heads is, as for a table w, over the channels of one position;
    its 2h parameters do not depend on the grid, and a bias remains a function of the displacement, unlike with a norm
    over the keys of a query. The component that all heads share is lost.
    """

    def __init__(self, bias: PatchBias, eps: float = 1e-5) -> None:
        super().__init__(bias)
        if bias.num_heads < 2:
            raise ValueError("`over` must be 'keys' with one head, whose norm over the heads is constant, got 'heads'.")
        self.norm = nn.LayerNorm(bias.num_heads, eps)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), normalized between patches."""
        return self.bias.with_prefix(self.norm(self.bias.patch_bias(grid).permute(1, 2, 0)).permute(2, 0, 1), grid)


def squared_distance_factors(grid: Grid, weights: Tensor) -> LowRank:
    r"""Return the squared distance of two patches, in patches, times `weights`: (heads,), as two factors.

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
