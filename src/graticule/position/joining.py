"""Joinings, which pass a table to the layers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from graticule.position.layer import LayerPosition
from graticule.registry.checks import Checked, checked, known_name
from graticule.registry.fields import Channels, Depth, LayerIndex, SmallCount, SmallWhole
from graticule.registry.registry import Registry, options_of
from graticule.registry.specs import Spec

Decomposition = Literal["w", "scalar_w", "channel_w", "affine_w", "norm", "scalar_norm", "channel_norm", "layer_norm"]


class TableScale(nn.Module):
    """gamma * w, with one gamma (`channels=1`) or one per channel; `shift` adds beta."""

    @checked
    def __init__(self, channels: SmallCount, shift: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        """Scale x: (N, D) to (N, D)."""
        return x * self.weight if self.bias is None else torch.addcmul(self.bias, x, self.weight)


def layer_norm(dim: int) -> nn.Module:
    """gamma * norm(w) + beta: the complete LayerNorm, with eps 1e-6 as in DeiT."""
    return nn.LayerNorm(dim, 1e-6)


def _norm(dim: int) -> nn.Module:
    return nn.LayerNorm(dim, 1e-6, elementwise_affine=False)


#: Modules that can replace LN_l: LaPE (2023), Table 8; the first version (2022), Table 5.
#: Parameters per layer, in this order: 0, 1, D, 2D, 0, 1, D, 2D.
DECOMPOSITIONS: dict[str, Callable[[int], nn.Module]] = {
    "w": lambda dim: nn.Identity(),
    "scalar_w": lambda dim: TableScale(1),
    "channel_w": lambda dim: TableScale(dim),
    "affine_w": lambda dim: TableScale(dim, shift=True),
    "norm": _norm,
    "scalar_norm": lambda dim: nn.Sequential(_norm(dim), TableScale(1)),
    "channel_norm": lambda dim: nn.Sequential(_norm(dim), TableScale(dim)),
    "layer_norm": layer_norm,
}


#: The joined layers: an int for the first ones, indices for any, None for all.
Layers = int | Sequence[int] | None


def joined_layers(depth: int, layers: Layers) -> tuple[int, ...]:
    """Return the indices of the layers that are joined, in order.

    Raises:
        ValueError: if a layer does not exist, or is named twice.
    """
    if layers is None or isinstance(layers, int):
        count = depth if layers is None else layers
        if not 1 <= count <= depth:
            raise ValueError(f"`layers` must be from 1 to the depth of the model, {depth}, got {layers}.")
        return tuple(range(count))
    if not layers or len(set(layers)) < len(layers) or min(layers) < 0 or max(layers) >= depth:
        raise ValueError(
            f"`layers` must be a number of layers, or different layers from 0 to {depth - 1}, at least one, got "
            f"{list(layers)}."
        )
    return tuple(sorted(layers))


def fill_layers(positions: Iterable[LayerPosition], layers: Sequence[int], depth: int) -> list[LayerPosition]:
    """Assign positions to the joined layers, in order, and empty ones to the others."""
    spread_positions = [LayerPosition()] * depth
    for layer, position in zip(layers, positions, strict=False):
        spread_positions[layer] = position
    return spread_positions


class PerLayer(nn.ModuleList):
    """One module per joined layer, under the index of the layer: `norms.4` belongs to layer 4."""

    def __init__(self, modules: Iterable[nn.Module], layers: Sequence[int]) -> None:
        super().__init__()
        for layer, module in zip(layers, modules, strict=True):
            self.add_module(str(layer), module)


class Joining(Checked, nn.Module, ABC):
    """Turns the table w of an absolute encoding into one `LayerPosition` per layer.

    The parameters of a constructor called `dim` (D of the tables), `depth`, `num_heads` (h) or `prefix` (the number of
    prefix tokens) come from the backbone; all others are the options of the joining, as in `lape(layers=6)`.

    Args:
        depth: number of layers; in a pyramid, of one stage.
        layers: eta, the number of the first layers that are joined, or the indices of any layers; the other
            layers get nothing. All by default.

    `layer_indices` are the joined layers and `layers` is their number. `tables` is the number of tables that it
    accepts: one, unless each layer has its own.
    """

    #: True if it adds a table once, which reaches every layer through the residual stream.
    added_once: ClassVar[bool] = False
    #: True if each layer has a table of its own.
    per_layer: ClassVar[bool] = False
    #: True if it passes w to every layer, separately or by adding it to the residual stream.
    added_per_layer: ClassVar[bool] = True
    #: True if layers get something for all pairs of tokens, which windows cannot use.
    whole_grid: ClassVar[bool] = False
    #: Kinds that it can join: the table of an absolute encoding, a relative bias, or None, which stands for neither.
    accepts: ClassVar[frozenset[str | None]] = frozenset({"table"})

    def __init__(self, depth: Depth, layers: LayerIndex | tuple[LayerIndex, ...] | None = None) -> None:
        super().__init__()
        self.depth = depth
        self.layer_indices = joined_layers(depth, layers)

    @property
    def layers(self) -> int:
        return len(self.layer_indices)

    @property
    def tables(self) -> int:
        """Return the number of tables that `forward` takes."""
        return 1

    @property
    def bias_norm(self) -> Literal["keys", "heads"] | None:
        """The axis that a relative bias is normalized over; None to add it unchanged."""
        return None

    def check(self, joined: str | None, options: Collection[str]) -> None:
        """Refuse options that have no effect on the joined kind, one of `joins`.

        Raises:
            ValueError: naming the option.
        """
        if self.added_once and joined == "table" and "layers" in options:
            raise ValueError(
                f"`layers` must be left out with joining {JOININGS.name_of(type(self))!r} and an absolute encoding: it "
                "is added once and reaches every layer."
            )

    def forward(self, *tables: Tensor) -> list[LayerPosition]:
        """Turn tables of (N, D) into one `LayerPosition` per layer."""
        return self.stage(*tables)[0]

    def stage(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Return the same, and the table (N, D) that the next stage of a pyramid joins (see `join`)."""
        positions, last = self.join(*tables)
        return fill_layers(positions, self.layer_indices, self.depth), last

    @abstractmethod
    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Return the positions of the joined layers, in order, and the table for the next stage of a pyramid.

        That table is None if w is part of the residual stream, which carries it to the next stage.
        """

    def extra_repr(self) -> str:
        first = self.layer_indices == tuple(range(self.layers))
        return f"depth={self.depth}, layers={self.layers if first else list(self.layer_indices)}"


#: The joinings by name.
JOININGS: Registry[type[Joining]] = Registry(
    "joining", Joining, lambda cls: options_of(cls.__init__, frozenset({"self", "dim", "depth", "num_heads", "prefix"}))
)
register_joining = JOININGS.register


def build_joining(spec: Spec, dim: int, depth: int, num_heads: int = 1, prefix: int = 0) -> Joining:
    """Build a joining.

    Args:
        spec: its name and options.
        dim: D of the tables.
        depth: number of layers.
        num_heads: h.
        prefix: number of prefix tokens.
    """
    kind = JOININGS[spec.name]
    accepted = inspect.signature(kind.__init__).parameters
    known = {"dim": dim, "depth": depth, "num_heads": num_heads, "prefix": prefix}
    return kind(**{name: value for name, value in known.items() if name in accepted}, **spec.options)


@register_joining("default")
class Default(Joining):
    """Adds w once, to the token embedding; the residual stream carries it through the layers.

    Reference: ViT (Dosovitskiy et al., 2021), Eq. 1; LaPE (Yu et al., 2023), Eq. 2.
    """

    added_once = True
    added_per_layer = False
    accepts = frozenset({"table", "bias", None})

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w: (N, D) to the residual stream before the first layer."""
        return [LayerPosition(added_to_stream=tables[0])], None


@register_joining("concatenation")
class Concatenation(Joining):
    r"""Appends w to the token embedding and projects both, D channels each, to D channels, once.

    .. math:: x_n = V \begin{bmatrix} W p_n \\ w_n \end{bmatrix} = (V_1 W) p_n + V_2 w_n

    V_1 W is one matrix, the weight of the patch embedding (of prefix tokens, the tokens), so V_2 alone is a parameter
    here. It starts as the identity: the model starts as with `default`, and then learns amplitude and directions of
    the appended part apart from the table, which can be fixed.

    Reference: An Introduction to Transformers (Turner, 2024), section 3 and footnote 16.

    Args:
        layers: left out, as with `Default` and a table.
    """

    added_once = True
    added_per_layer = False

    def __init__(self, dim: Channels, depth: Depth, layers: LayerIndex | tuple[LayerIndex, ...] | None = None) -> None:
        super().__init__(depth, layers)
        #: V_2, (D, D).
        self.projection = nn.Parameter(torch.eye(dim))

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w V_2^T: (N, D) to the residual stream before the first layer."""
        return [LayerPosition(added_to_stream=tables[0] @ self.projection.T)], None


@register_joining("shared")
class Shared(Joining):
    """Adds the same w to the residual stream before every layer.

    Reference: LaPE (Yu et al., 2023), section 4.5, "shared PE".
    """

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w: (N, D) to the residual stream before each layer."""
        return [LayerPosition(added_to_stream=tables[0])] * self.layers, tables[0]


@register_joining("unshared")
class Unshared(Joining):
    """Adds one table per layer to the residual stream before that layer; for learnable tables.

    Reference: LaPE (Yu et al., 2023), section 4.5, "unshared PE".
    """

    per_layer = True
    added_per_layer = False

    @property
    def tables(self) -> int:
        """The number of joined layers."""
        return self.layers

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w_l: (N, D) to the residual stream before layer l."""
        return [LayerPosition(added_to_stream=table) for table in tables], None


@register_joining("queries_keys")
class QueriesKeys(Joining):
    r"""Adds the same w to the inputs of queries and keys in every layer, and not to the inputs of values.

    .. math:: q = (LN(x) + w) W_Q, \quad k = (LN(x) + w) W_K, \quad v = LN(x) W_V

    So position decides which tokens attend to each other, and does not enter the values. The projection of
    queries, keys and values is computed twice.

    Reference: End-to-End Object Detection with Transformers (DETR, Carion et al., 2020), appendix A.3.
    """

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w: (N, D) to the inputs of queries and keys of each layer."""
        return [LayerPosition(queries_keys=tables[0])] * self.layers, tables[0]


@register_joining("tupe")
class Tupe(Joining):
    r"""Makes a bias on the attention logits from w by its own projections, the same in all layers (TUPE).

    .. math:: \alpha_{ij} = \frac{(x_i W_Q)(x_j W_K)^T + (w_i U_Q)(w_j U_K)^T}{\sqrt{2d}}

    Nothing is added to the tokens. Prefix tokens have no meaningful position, so their bias is replaced by learned
    numbers, two per head: theta_1 where the query is a prefix token, theta_2 where only the key is. Other biases are
    added to it: `learnable + bucketed_bias` is TUPE-R. The scale of the content, 1 / sqrt(2d), is the usual one times
    `query_scale` = 1 / sqrt(2). All of it depends on parameters and grid alone.

    The released code applies a LayerNorm to w first (`norm=True`), has biases in the projections, and computes theta
    from two more positions; here theta is a free parameter, as in the paper.

    Reference: Rethinking Positional Encoding in Language Pre-training (TUPE, Ke et al., 2021), Eq. 7-10.

    Args:
        layers: the joined layers, as in `Joining`.
        norm: whether w is normalized by a LayerNorm first.
    """

    whole_grid = True

    def __init__(
        self,
        dim: Channels,
        depth: Depth,
        num_heads: SmallCount = 1,
        prefix: SmallWhole = 0,
        layers: LayerIndex | tuple[LayerIndex, ...] | None = None,
        norm: bool = False,
    ) -> None:
        super().__init__(depth, layers)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"`dim` must be a multiple of `num_heads`, got {dim} with {num_heads} heads.")
        self.num_heads, self.head_dim, self.prefix = num_heads, dim // num_heads, prefix
        self.norm = layer_norm(dim) if norm else nn.Identity()
        self.queries, self.keys = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        for projection in (self.queries, self.keys):
            nn.init.normal_(projection.weight, std=dim**-0.5)
        #: theta_1 and theta_2 of each head.
        self.theta = nn.Parameter(torch.zeros(num_heads, 2)) if prefix else None

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Compute the bias (h, N, N) from w: (N, D), and the scale of the queries."""
        w = self.norm(tables[0][self.prefix :])
        queries, keys = (
            projection(w).unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for projection in (self.queries, self.keys)
        )  # (heads, H * W, d)
        bias = queries @ keys.mT * (2 * self.head_dim) ** -0.5
        if self.theta is not None:
            of_query, of_key = (theta[:, None, None].to(bias.dtype) for theta in self.theta.unbind(-1))
            patches, tokens = w.shape[0], self.prefix + w.shape[0]
            bias = torch.cat([of_key.expand(-1, patches, self.prefix), bias], 2)
            bias = torch.cat([of_query.expand(-1, self.prefix, tokens), bias], 1)
        scale = tables[0].new_full((tables[0].shape[0],), 0.5**0.5)
        return [LayerPosition(bias=bias, query_scale=scale)] * self.layers, tables[0]


@register_joining("lape_sharing")
class LapeSharing(Joining):
    r"""LaPE, first version: each layer normalizes the same w with its own norm.

    .. math:: x'_l = MSA_l(LN_{x|l}(x_l) + LN_{w|l}(w)), \quad x_0 = \alpha

    Reference: Position Embedding Needs an Independent Layer Normalization (Yu et al., 2022), Eq. 8-9.

    Args:
        layers: eta, as in `Joining`.
        decomposition: replacement of LN, one of `DECOMPOSITIONS`.
    """

    def __init__(
        self,
        dim: Channels,
        depth: Depth,
        layers: LayerIndex | tuple[LayerIndex, ...] | None = None,
        decomposition: Decomposition = "layer_norm",
    ) -> None:
        super().__init__(depth, layers)
        build = DECOMPOSITIONS[known_name("decomposition", decomposition, DECOMPOSITIONS)]
        self.norms = PerLayer((build(dim) for _ in self.layer_indices), self.layer_indices)

    def check(self, joined: str | None, options: Collection[str]) -> None:
        """Refuse `decomposition` without a table."""
        if joined != "table" and "decomposition" in options:
            raise ValueError("`decomposition` must go with an absolute encoding, got none.")

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add LN_l(w): (N, D) to the normalized tokens of layer l."""
        return [LayerPosition(after_norm=norm(tables[0])) for norm in self.norms], tables[0]


@register_joining("lape")
class Lape(LapeSharing):
    r"""LaPE: each layer normalizes the position embedding of the layer before, adds it, and passes it on.

    .. math:: x'_l = MSA_l(LN_{x|l}(x_l) + LN_{w|l}(w_l)), \quad w_0 = w, \quad w_{l+1} = LN_{w|l}(w_l)

    The residual stream starts without w. Everything here depends on parameters and grid alone, never on the image, and
    so can be folded. In section 4.5 the paper writes LN_{w|l-1}(w_{l-1}) for the term of layer l; then the first layer
    would get the raw w and the last norm would be unused. Eq. 9 and the released code agree with each other, and this
    follows them.

    **Gradients.** A norm divides a row by the root of its variance plus eps, so a row whose variance is far below eps
    (the class row of `sinusoidal_2d` is zero) has a Jacobian of 1 / sqrt(eps) = 1000, and its variance stays small
    after the norm, except for the shift, which starts at zero. In a chain the factors multiply. So with the released
    code and 12 layers the gradient of the first shift is 1e29 at initialization, its norm overflows, and under gradient
    clipping no weight ever moves. Here such a row is detached before it is passed on: the layer's own term keeps its
    gradient, so tables and shifts learn, but the gradient never passes through two such norms. Values are exactly those
    of the formula, and so are the gradients of rows with a variance of eps and above.

    **Pyramids.** Eq. 11 does not mention stages, whose tables differ in size. The tokens of a later stage are
    P(x), P being its patch merging, so w_l, kept separate from the tokens, is merged in the same way: the first norm of
    the stage gets w_l = P(LN_{w|l-1}(w_{l-1})), with l - 1 the last joined layer of the stage before. P is shared with
    the tokens. The paper trains Swin with LaPE (Table 1) without saying how, and that code is not released; this is
    Eq. 11 taken literally.

    **Some layers.** With `layers` the chain has a norm for each joined layer and skips the others.

    A relative bias has its own LayerNorm in every layer (LaPE, 2022, appendix B), over the keys of a query or, our
    variant, over the heads.

    Reference: LaPE (Yu et al., 2023), Eq. 8-11.

    Args:
        layers: eta, as in `Joining`.
        decomposition: replacement of LN, one of `DECOMPOSITIONS`; for tables.
        over: the axis that a relative bias is normalized over.
    """

    accepts = frozenset({"table", "bias"})

    def __init__(
        self,
        dim: Channels,
        depth: Depth,
        layers: LayerIndex | tuple[LayerIndex, ...] | None = None,
        decomposition: Decomposition = "layer_norm",
        over: Literal["keys", "heads"] = "keys",
    ) -> None:
        super().__init__(dim, depth, layers, decomposition)
        self.over: Literal["keys", "heads"] = over

    @property
    def bias_norm(self) -> Literal["keys", "heads"] | None:
        """The axis that a relative bias is normalized over."""
        return self.over

    def check(self, joined: str | None, options: Collection[str]) -> None:
        """Refuse `decomposition` without a table, and `over` with one."""
        super().check(joined, options)
        if joined != "bias" and "over" in options:
            raise ValueError("`over` must be left out unless a relative bias is joined, without an absolute encoding.")

    def join(self, *tables: Tensor) -> tuple[list[LayerPosition], Tensor | None]:
        """Add w_{l+1}: (N, D) to the normalized tokens of layer l."""
        positions, table = [], tables[0]
        eps = next((module.eps for module in self.norms.modules() if isinstance(module, nn.LayerNorm)), None)
        for norm in self.norms:
            joined = norm(table)  # progressive: layer l refines the embedding of layer l - 1
            positions.append(LayerPosition(after_norm=joined))
            if eps is not None and joined.requires_grad:  # rows whose variance is below eps are detached
                *_, inverse = torch.native_layer_norm(table.detach(), table.shape[-1:], None, None, eps)  # 1 / the root
                joined = torch.where(inverse <= (2 * eps) ** -0.5, joined, joined.detach())  # of variance plus eps
            table = joined
        return positions, table
