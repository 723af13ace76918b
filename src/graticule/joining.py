"""How position information reaches each layer: `LayerPosition`, the joinings and the decompositions of LaPE."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graticule.checks import checked
from graticule.displacement import Displacements

Function = Callable[[Tensor], Tensor]
BiasFunction = Callable[..., Tensor]


class LayerPosition(NamedTuple):
    """All that a layer needs to know of position. Every field may be None.

    What depends on parameters and grid alone is a tensor; what depends on the tokens is a function of them.

    pre: (N, D), added to the residual stream before the layer.
    before: takes the stream that enters the layer, `pre` added, (B, N, D) -> (B, N, D).
    inner: (N, D), added after the layer's first norm, before attention.
    inputs: makes what queries, keys and values are projected from, (B, N, D) -> three of (B, N, D), out of the
        normalised tokens.
    bias: (heads, N, N), added to the attention logits; or a function of the scaled queries that makes it,
        (B, heads, N, d) -> (B, heads, N, N). It takes `start` and `stop` as well: then the queries are those of n
        tokens from `start` on, and the bias is for the keys of those before `stop`.
    rotary: (N, 2d) or (heads, N, 2d), sines then cosines, by which queries and keys are turned.
    after: takes the stream that leaves the layer, (B, N, D) -> (B, N, D).
    mixing: the weights by which a gating unit mixes the patches of its grid or window: (groups, N, N), or
        `Displacements` where they depend on displacements alone.
    gate: (N,), added to every channel of the mixed tokens.

    `pre`, `before` and `after` stand between blocks: `enter` and `leave` apply them.
    """

    pre: Tensor | None = None
    inner: Tensor | None = None
    bias: Tensor | BiasFunction | None = None
    rotary: Tensor | None = None
    before: Function | None = None
    inputs: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    after: Function | None = None
    mixing: Tensor | Displacements | None = None
    gate: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Take the stream x: (B, N, D) to what enters the layer."""
        if self.pre is not None:
            x = x + self.pre
        return x if self.before is None else self.before(x)

    def leave(self, x: Tensor) -> Tensor:
        """Take what the layer makes, x: (B, N, D), to the stream behind it."""
        return x if self.after is None else self.after(x)

    def part(self, start: int, stop: int) -> LayerPosition:
        """Return what the tokens from `start` on are told where there are none from `stop` on.

        So a text that grows is told, token by token, what the whole one is.

        Raises:
            ValueError: if something acts on all the tokens at once, and has no part.
        """
        for field in ("before", "inputs", "after", "mixing", "gate"):
            if getattr(self, field) is not None:
                raise ValueError(f"`{field}` must be None for a part of the tokens: it takes all of them at once.")
        return LayerPosition(
            pre=None if self.pre is None else self.pre[start:stop],
            inner=None if self.inner is None else self.inner[start:stop],
            bias=None if self.bias is None else _part(self.bias, start, stop),
            rotary=None if self.rotary is None else self.rotary[..., start:stop, :],
        )

    def merge(self, other: LayerPosition) -> LayerPosition:
        """Take what both say: tensors and biases add up, functions of the stream follow one another.

        Raises:
            ValueError: if both turn queries and keys, make the inputs, or mix tokens.
        """
        for field in ("rotary", "inputs", "mixing"):
            if getattr(self, field) is not None and getattr(other, field) is not None:
                raise ValueError(f"`{field}` must be given by one encoding at most, got two.")
        return LayerPosition(
            pre=_sum(self.pre, other.pre),
            inner=_sum(self.inner, other.inner),
            bias=_sum(self.bias, other.bias),
            rotary=self.rotary if other.rotary is None else other.rotary,
            before=_chain(self.before, other.before),
            inputs=self.inputs if other.inputs is None else other.inputs,
            after=_chain(self.after, other.after),
            mixing=self.mixing if other.mixing is None else other.mixing,
            gate=_sum(self.gate, other.gate),
        )


class BiasSum(NamedTuple):
    """A bias of two parts: one that can be folded, (heads, N, N), and a function of the scaled queries."""

    constant: Tensor
    function: BiasFunction

    def __call__(self, queries: Tensor) -> Tensor:
        """Make the bias, (B, heads, N, N), from the scaled queries, (B, heads, N, d)."""
        return self.constant + self.function(queries)


def bias_of(bias: Tensor | BiasFunction, queries: Tensor) -> Tensor:
    """Return a bias as a tensor, made from the scaled queries (B, h, N, d) if it depends on them."""
    return bias if isinstance(bias, Tensor) else bias(queries)


def _sum(a: Any, b: Any) -> Any:
    """Add what is there: two tensors, or two biases of which one at least is a function."""
    if a is None or b is None:
        return b if a is None else a
    constants = [x.constant if isinstance(x, BiasSum) else x for x in (a, b) if isinstance(x, Tensor | BiasSum)]
    functions = [x.function if isinstance(x, BiasSum) else x for x in (a, b) if not isinstance(x, Tensor)]
    if not functions:
        return a + b
    function: Any = functions[0] if len(functions) == 1 else partial(_added, functions[0], functions[1])
    return BiasSum(sum(constants[1:], constants[0]), function) if constants else function


def _added(first: BiasFunction, second: BiasFunction, queries: Tensor, **part: Any) -> Tensor:
    return first(queries, **part) + second(queries, **part)


def _part(bias: Any, start: int, stop: int) -> Any:
    """Rows from `start` to `stop` of a bias, and columns up to there."""
    if isinstance(bias, Tensor):
        return bias[:, start:stop, :stop]
    if isinstance(bias, BiasSum):
        return BiasSum(_part(bias.constant, start, stop), _part(bias.function, start, stop))
    return partial(_moved, bias, start, stop)


def _moved(
    bias: BiasFunction, first: int, last: int, queries: Tensor, start: int = 0, stop: int | None = None
) -> Tensor:
    return bias(queries, start=first + start, stop=last if stop is None else stop)


def _chain(first: Function | None, second: Function | None) -> Function | None:
    if first is None or second is None:
        return second if first is None else first
    return partial(_composed, first, second)


def _composed(first: Function, second: Function, x: Tensor) -> Tensor:
    return second(first(x))


class Joining(nn.Module, ABC):
    """Turns the table w of an absolute encoding into what each layer gets.

    Args:
        depth: number of layers.
        layers: eta; only the first `layers` layers are joined, the others get nothing. All by default.

    `tables` says how many tables it joins: one, unless each layer has its own.
    """

    @checked
    def __init__(self, depth: int, layers: int | None = None) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"`depth` must be at least 1, got {depth}.")
        layers = depth if layers is None else layers
        if not 1 <= layers <= depth:
            raise ValueError(f"`joined_layers` must be from 1 to the depth of the model, {depth}, got {layers}.")
        self.depth = depth
        self.layers = layers

    @property
    def tables(self) -> int:
        """How many tables `forward` takes."""
        return 1

    def forward(self, *tables: Tensor) -> list[LayerPosition]:
        """Turn tables of (N, D) into one `LayerPosition` per layer."""
        return self.stage(*tables)[0]

    def stage(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Return the same, and the table (N, D) that the next stage of a pyramid joins, as `join` does."""
        joined, last = self.join(*tables)
        return joined + [LayerPosition()] * (self.depth - len(joined)), last

    @abstractmethod
    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Return what the first layers get (the others get nothing), and the table for the next stage of a pyramid.

        That table is None where w is part of the residual stream, which brings it to the next stage.
        """

    def extra_repr(self) -> str:
        return f"depth={self.depth}, layers={self.layers}"


class Default(Joining):
    """Adds w once, to the token embedding; it goes through the layers with the residual stream.

    Reference: ViT (Dosovitskiy et al., 2021), Eq. 1; LaPE (Yu et al., 2023), Eq. 2.
    """

    @checked
    def __init__(self, depth: int) -> None:
        super().__init__(depth)

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w: (N, D) to the residual stream before the first layer."""
        return [LayerPosition(pre=tables[0])], None


class Shared(Joining):
    """Adds the same w to the residual stream before every layer.

    Reference: LaPE (Yu et al., 2023), section 4.5, "shared PE".
    """

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w: (N, D) to the residual stream before each layer."""
        return [LayerPosition(pre=tables[0])] * self.layers, tables[0]


class Unshared(Joining):
    """Adds one table per layer to the residual stream before that layer; for learnable tables.

    Reference: LaPE (Yu et al., 2023), section 4.5, "unshared PE".
    """

    @property
    def tables(self) -> int:
        """One per joined layer."""
        return self.layers

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w_l: (N, D) to the residual stream before layer l."""
        return [LayerPosition(pre=table) for table in tables], None


class LapeSharing(Joining):
    r"""LaPE, first version: each layer normalizes the one w with its own norm.

    .. math:: x'_l = MSA_l(LN_{x|l}(x_l) + LN_{w|l}(w)), \quad x_0 = \alpha

    Reference: Position Embedding Needs an Independent Layer Normalization (Yu et al., 2022), Eq. 8-9.

    Args:
        dim: D.
        depth: number of layers.
        layers: eta, as in `Joining`.
        decomposition: what replaces LN: builds a module from `dim` (`DECOMPOSITIONS`).
    """

    @checked
    def __init__(
        self,
        dim: int,
        depth: int,
        layers: int | None = None,
        decomposition: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__(depth, layers)
        build = decomposition or layer_norm
        self.norms = nn.ModuleList(build(dim) for _ in range(self.layers))

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add LN_l(w): (N, D) to the normalized tokens of layer l."""
        return [LayerPosition(inner=norm(tables[0])) for norm in self.norms], tables[0]


class Lape(LapeSharing):
    r"""LaPE: each layer normalizes the position embedding of the layer before, adds it, and passes it on.

    .. math:: x'_l = MSA_l(LN_{x|l}(x_l) + LN_{w|l}(w_l)), \quad w_0 = w, \quad w_{l+1} = LN_{w|l}(w_l)

    The residual stream starts without w. Everything here depends on parameters and grid alone, never on the image,
    and so can be folded. In section 4.5 the paper writes LN_{w|l-1}(w_{l-1}) for the term of layer l, which leaves the
    first layer with the raw w and the last norm without use; Eq. 9 and the released code agree with each other, and
    this follows them.

    **Gradients.** A norm divides a row by the root of its variance plus eps, so a row whose variance is far below eps
    (the class row of `sinusoidal_2d` is zero) has a Jacobian of 1 / sqrt(eps) = 1000, and it leaves the norm as small
    as it entered, but for the shift, which starts at zero. In a chain the factors multiply. The released code does
    that: with 12 layers the gradient of the first shift is 1e29 at initialization, its norm overflows, and under
    gradient clipping no weight ever moves. Here such a row is passed on without its gradient: the layer's own term is
    differentiated as it is, so tables and shifts learn, but the gradient never passes through two such norms. Values
    are exactly those of the formula, and so are the gradients of rows with a variance of eps and above.

    **Pyramids.** Eq. 11 says nothing of stages, whose tables differ in size. The tokens of a later stage are
    P(x), P being its patch merging, so w_l, kept beside the tokens, goes the same way: the first norm of the stage gets
    w_l = P(LN_{w|l-1}(w_{l-1})), with l - 1 the last joined layer of the stage before. P is shared with the tokens.
    The paper trains Swin so (Table 1) without saying how, and that code is not released; this is Eq. 11 read to
    the letter.

    Reference: LaPE (Yu et al., 2023), Eq. 8-11.
    """

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w_{l+1}: (N, D) to the normalized tokens of layer l."""
        positions, table = [], tables[0]
        for norm in self.norms:
            joined = norm(table)  # progressive: layer l refines the embedding of layer l - 1
            positions.append(LayerPosition(inner=joined))
            eps = _eps(norm)
            if eps is not None:
                joined = torch.where(_variance(table.detach()) >= eps, joined, joined.detach())
            table = joined
        return positions, table


def _variance(table: Tensor) -> Tensor:
    """Return the variance of every row, (N, D) -> (N, 1); on a CPU `Tensor.var` takes several times as long."""
    return (table - table.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)


def _eps(norm: nn.Module) -> float | None:
    """Return what a norm adds to the variance of a row; None for a module that does not normalize."""
    return next((module.eps for module in norm.modules() if isinstance(module, nn.LayerNorm)), None)


class Scale(nn.Module):
    """gamma * w, with one gamma (`channels=1`) or one a channel; `shift` adds beta."""

    @checked
    def __init__(self, channels: int, shift: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        """Scale x: (N, D) to (N, D)."""
        return x * self.weight if self.bias is None else torch.addcmul(self.bias, x, self.weight)


def layer_norm(dim: int) -> nn.Module:
    """gamma * norm(w) + beta: the whole LayerNorm, eps 1e-6 as DeiT's."""
    return nn.LayerNorm(dim, 1e-6)


def _norm(dim: int) -> nn.Module:
    return nn.LayerNorm(dim, 1e-6, elementwise_affine=False)


#: What can stand in the place of LN_l: LaPE (2023), Table 8; the first version (2022), Table 5.
#: Parameters a layer, in this order: 0, 1, D, 2D, 0, 1, D, 2D.
DECOMPOSITIONS: dict[str, Callable[[int], nn.Module]] = {
    "w": lambda dim: nn.Identity(),
    "scalar_w": lambda dim: Scale(1),
    "channel_w": lambda dim: Scale(dim),
    "affine_w": lambda dim: Scale(dim, shift=True),
    "norm": _norm,
    "scalar_norm": lambda dim: nn.Sequential(_norm(dim), Scale(1)),
    "channel_norm": lambda dim: nn.Sequential(_norm(dim), Scale(dim)),
    "layer_norm": layer_norm,
}
