"""iRPE: one learned vector, or one number per head, per bucket of displacements of two patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.places import axis_letters, ravel
from graticule.position.position import register_encoding
from graticule.registry.fields import Bounded, Ratio, SmallCount

#: The ways to map a 2-D displacement to buckets.
Method = Literal["product", "cross", "euclidean", "quant"]
#: The tensors to which vectors or numbers apply.
On = Literal["q", "k", "v", "qk", "qv", "kv", "qkv"]


@register_encoding("irpe")
class Irpe(BiasEncoding):
    r"""Adds products of queries, keys or attention weights with a learned vector per bucket of displacements (iRPE).

    With the vectors :math:`r^k, r^q, r^v` of the bucket of the pair (i, j), the logits get

    .. math:: \frac{q_i \cdot r^k_{ij} + k_j \cdot r^q_{ij}}{\sqrt d}

    and the output of the query i gets :math:`\sum_j A_{ij} r^v_{ij}`, for each of the three that `on` names. With the
    mode 'bias', q and k each add one learned number per head and bucket instead. Displacements are query minus key, but
    key minus query for :math:`r^q`, as in the code. Buckets are defined by

    .. math:: g(t) = \begin{cases} [t] & |t| \le \alpha \\
              sign(t) \min(\beta, [\alpha + \frac{\ln(|t| / \alpha)}{\ln(\gamma / \alpha)}
              (\beta - \alpha)]) & |t| > \alpha \end{cases}

    with alpha, beta, gamma = ratio, 2 ratio, 8 ratio, truncated to integers:

    - 'product': one bucket per pair (g(dy), g(dx)), 49 of them at the ratio of 1.9;
    - 'cross': a bucket g(dy) and another g(dx), each with its own table; their vectors are added;
    - 'euclidean': g of the distance, rounded;
    - 'quant': g of the squared distance, which distinguishes close distances that 'euclidean' rounds to the same.

    The last two never use the buckets of negative displacements, which their tables contain as published. Pairs with a
    prefix token have a bucket of their own. All vectors start at zero; nothing is resampled at another grid.

    Reference: Rethinking and Improving Relative Position Encoding for Vision Transformer (iRPE, Wu et al., 2021),
    Eq. 11-20 and its code; the default, contextual product on the keys, shared by the heads, is recommended by its
    code.

    Args:
        method: the way to map a displacement to buckets.
        on: where vectors are used: any of 'q', 'k' and 'v', in this order.
        mode: 'contextual' for vectors, 'bias' for numbers (on q and k only).
        ratio: alpha.
        shared_heads: whether all heads have the same vectors or numbers.
    """

    crops = True
    dense = False
    index: Tensor
    rpe_q: nn.ParameterList
    rpe_k: nn.ParameterList
    rpe_v: nn.ParameterList

    def __init__(
        self,
        grid: Grid,
        num_heads: SmallCount,
        head_dim: Bounded,
        method: Method = "product",
        on: On = "k",
        mode: Literal["contextual", "bias"] = "contextual",
        ratio: Ratio = 1.9,
        shared_heads: bool = True,
    ) -> None:
        super().__init__(grid, num_heads)
        if mode == "bias" and "v" in on:
            raise ValueError(f"`on` must be 'q', 'k' or 'qk' with the mode 'bias', as values need vectors, got {on!r}.")
        self.head_dim, self.ratio = head_dim, ratio
        self.method, self.on, self.mode = method, on, mode
        if method in ("product", "cross"):
            self.exempt = ("permutation: buckets are of all axes, in their order",)
        self.side = 2 * int(2 * ratio) + 1
        axes = len(grid.shape)
        buckets = (self.side**axes if method == "product" else self.side) + bool(grid.prefix)
        heads = 1 if shared_heads else num_heads
        shapes = {"q": (heads, head_dim, buckets), "k": (heads, head_dim, buckets), "v": (heads, buckets, head_dim)}
        tables = axes if method == "cross" else 1
        for letter in on:
            shape = shapes[letter] if mode == "contextual" else (heads, buckets)
            parameters = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(tables))
            self.register_module(f"rpe_{letter}", parameters)
        self.init_non_persistent_buffers()

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"index": self._buckets(self.grid, device)}

    def forward(self, grid: Grid) -> LayerPosition:
        """Return functions of queries, keys and attention weights on `grid`; with the mode 'bias' a bias."""
        if self.mode == "bias":
            index = self._index(grid)
            terms = [self._numbers(self.rpe_k, index)] if "k" in self.on else []
            terms += [self._numbers(self.rpe_q, index).mT] if "q" in self.on else []
            return LayerPosition(bias=_sum(terms))
        return LayerPosition(
            bias=partial(self.bias, grid=grid) if "k" in self.on else None,
            key_bias=partial(self.key_bias, grid=grid) if "q" in self.on else None,
            value_bias=partial(self.value_bias, grid=grid) if "v" in self.on else None,
        )

    def bias(self, queries: Tensor, grid: Grid, start: int = 0, stop: int | None = None) -> Tensor:
        """Compute the bias, (B, h, n, M), from scaled queries, (B, h, n, d), of n tokens from `start` on.

        The M keys belong to the tokens before `stop`, or to all N.
        """
        index = self._index(grid)[:, start : start + queries.shape[-2], :stop]
        return self._products(self.rpe_k, queries, index)

    def key_bias(self, keys: Tensor, grid: Grid) -> Tensor:
        """Compute the term that is added to the logits, (B, h, N, N), from scaled keys, (B, h, N, d)."""
        return self._products(self.rpe_q, keys, self._index(grid)).mT

    def value_bias(self, weights: Tensor, grid: Grid) -> Tensor:
        """Compute the term that is added to the mixed values, (B, h, N, d), from attention weights, (B, h, N, N)."""
        added = weights.new_zeros(())
        for table, index in zip(self.rpe_v, self._index(grid), strict=True):
            # the weights of each bucket, (B, h, N, buckets), instead of one vector per pair
            sums = weights.new_zeros(*weights.shape[:-1], table.shape[1])
            sums = sums.scatter_add(-1, index.expand_as(weights), weights)
            added = added + sums @ table.to(weights.dtype)
        return added

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the name of a table in iRPE's code."""
        module, table = name.split(".")
        leaf = f"lookup_table_{'bias' if self.mode == 'bias' else 'weight'}"
        return (f"{module}.{self._tables[int(table)]}.{leaf}" if self.method == "cross" else f"{module}.{leaf}",)

    @property
    def _tables(self) -> list[str]:
        """The names of the tables of each axis in its code, which has two of them."""
        return [
            {"y": "rp_rows", "x": "rp_cols"}.get(letter, f"rp_{letter}")
            for letter in axis_letters(len(self.grid.shape))
        ]

    def _index(self, grid: Grid) -> Tensor:
        return self.index if grid == self.grid else self._buckets(grid, self.index.device)

    @staticmethod
    def _products(tables: nn.ParameterList, vectors: Tensor, index: Tensor) -> Tensor:
        """Return the products of vectors (B, h, n, d) with the buckets' vectors, (B, h, n, M)."""
        products = [
            (vectors @ table.to(vectors.dtype)).gather(-1, at.expand(*vectors.shape[:2], -1, -1))
            for table, at in zip(tables, index, strict=True)
        ]
        return _sum(products)

    def _numbers(self, tables: nn.ParameterList, index: Tensor) -> Tensor:
        """Return the number of every pair, (h, N, N)."""
        numbers = [
            table.index_select(1, at.flatten()).unflatten(1, at.shape) for table, at in zip(tables, index, strict=True)
        ]
        return _sum(numbers).expand(self.num_heads, -1, -1)

    def _buckets(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Return the bucket of every pair of tokens in every table, (tables, N, N), int64."""
        offsets = grid.offsets(device)
        middle, axes = self.side // 2, grid.ndim
        if self.method in ("product", "cross"):
            buckets = [self._bucket(offset) + middle for offset in offsets.unbind(-1)]
            buckets = [ravel(buckets, [self.side] * axes)] if self.method == "product" else buckets
        else:
            squares = offsets.square().sum(-1)
            buckets = [self._bucket(squares if self.method == "quant" else squares.double().sqrt().round()) + middle]
        patches = torch.stack(buckets)
        if not grid.prefix:
            return patches
        last = self.side**axes if self.method == "product" else self.side
        index = patches.new_full((len(buckets), grid.tokens, grid.tokens), last)
        index[:, grid.prefix :, grid.prefix :] = patches
        return index

    def _bucket(self, offset: Tensor) -> Tensor:
        alpha, beta, gamma = self.ratio, 2 * self.ratio, 8 * self.ratio
        t = offset.double()
        far = alpha + torch.log(t.abs().clamp(min=alpha) / alpha) / math.log(gamma / alpha) * (beta - alpha)
        # rounds toward zero
        return torch.where(t.abs() <= alpha, t.round(), t.sign() * far.round().clamp(max=beta)).long()


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])
