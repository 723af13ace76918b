"""The one place where the names of encodings, joinings and decompositions become modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from graticule.checks import checked
from graticule.encodings import (
    AbsoluteEncoding,
    Alibi,
    AxialRotary,
    BucketedBias,
    ContextualProduct,
    ContinuousBias,
    ConvolutionalProjection,
    DenseMixing,
    HeadNormalizedBias,
    Learnable,
    LearnableMixing,
    MixedRotary,
    MixingEncoding,
    MixingSum,
    NormalizedBias,
    Peg,
    QuadraticMixing,
    QueryKeyPeg,
    RelativeBias,
    Rotary1d,
    ShawBias,
    Sinusoidal1d,
    Sinusoidal2d,
)
from graticule.grid import Grid, Interpolation
from graticule.joining import DECOMPOSITIONS, Default, Joining, Lape, LapeSharing, Shared, Unshared
from graticule.names import known_name
from graticule.position import (
    BeforeProjections,
    BetweenBlocks,
    BiasPosition,
    CombinedPosition,
    JoinedPosition,
    MixingPosition,
    NoPosition,
    Position,
    RotaryPosition,
    SharedBiasPosition,
)
from graticule.typed import Count, Flag, Side, check_fields

ABSOLUTE: dict[str, Callable[..., AbsoluteEncoding]] = {
    "learnable": Learnable,
    "sinusoidal_1d": Sinusoidal1d,
    "sinusoidal_2d": Sinusoidal2d,
}
#: Those whose bias all layers share.
SHARED: dict[str, Callable[..., nn.Module]] = {
    "shared_relative_bias": RelativeBias,
    "bucketed_bias": BucketedBias,
    "alibi": Alibi,
}
RELATIVE = ("relative_bias", "continuous_bias", "contextual_product", "shaw", *SHARED)
ROTARY = ("rotary", "rotary_mixed", "rotary_1d")
CONDITIONAL = ("peg", "convolutional_projection")
MIXING = ("sgu", "lrpe", "glrpe", "lrpe_m", "gqpe", "ggqpe")
JOININGS: dict[str, type[Joining]] = {
    "default": Default,
    "shared": Shared,
    "unshared": Unshared,
    "lape_sharing": LapeSharing,
    "lape": Lape,
}


@dataclass(frozen=True)
class PegOptions:
    """Form and places of a conditional encoding (`graticule.encodings.Peg`, CPVT)."""

    places: tuple[Annotated[int, Field(strict=True)], ...] = (0,)
    """the layers behind which it stands; -1 is before the first"""
    kernel: Side = 3
    """side of the convolution, odd"""
    convolution: Literal["depthwise", "separable", "dense"] = "depthwise"
    """over each channel alone, that and then over all channels, or both at once"""
    layers: Count = 1
    """convolutions of each; more than one come with batch norm and ReLU"""
    padding: Literal["zeros", "circular", "replicate", "reflect", "none"] = "zeros"
    """what stands around the grid"""
    bias: Flag = True
    """whether the convolutions have a bias"""
    frozen: Flag = False
    """keep the weights as they are drawn or loaded (the statistics of a batch norm still follow the data)"""
    acts_on: Literal["tokens", "queries_keys"] = "tokens"
    """the stream of tokens, or the queries and keys of the next layer alone"""

    def __post_init__(self) -> None:
        given: Any = self.places
        if isinstance(given, int):
            object.__setattr__(self, "places", (given,))
        check_fields(self, "peg.")
        if not self.places or len(set(self.places)) < len(self.places):
            raise ValueError(f"`peg.places` must be different layers, at least one, as 0 1 2, got {self.places!r}.")


@dataclass(frozen=True)
class MixingOptions:
    """Form of a mixing encoding (`graticule.encodings.QuadraticMixing`, PosMLP) and of the units that use it."""

    form: Literal["alpha", "alpha_released", "gamma", "gamma_released", "gamma_gamma_t"] = "gamma_gamma_t"
    """the matrix of a quadratic encoding; _released as the authors' code, where it is not what the paper prints"""
    shift: Flag = True
    """whether a quadratic encoding learns its center; it stays at 0 if not"""
    start: Literal["released", "spread"] = "released"
    """initial values: those of the authors' code, or groups spread over directions and widths with a bias of one"""
    bias: Flag = True
    """whether a number per token is added to what was mixed"""
    product: Literal["auto", "matrix", "displacement"] = "auto"
    """by the matrix of all pairs, or as a convolution over displacements (default: where that is faster)"""

    def __post_init__(self) -> None:
        check_fields(self, "token_mixing.")


def list_encodings() -> list[str]:
    """List the names that `encoding` takes; several at once are joined by '+', as 'learnable+relative_bias'."""
    return ["none", *ABSOLUTE, *RELATIVE, *ROTARY, *CONDITIONAL, *MIXING]


def list_joinings() -> list[str]:
    """List the names that `joining` takes."""
    return list(JOININGS)


def list_decompositions() -> list[str]:
    """List what can stand in the place of LaPE's norm, the names that `decomposition` takes."""
    return list(DECOMPOSITIONS)


@checked
def build_position(
    grid: Grid,
    *,
    dim: int,
    depth: int,
    num_heads: int,
    encoding: str = "learnable",
    joining: str = "default",
    joined_layers: int | None = None,
    decomposition: str | None = None,
    peg: PegOptions | Mapping[str, Any] | None = None,
    shaw_clip: int | None = None,
    interpolation: Interpolation = "bicubic",
    table_std: float | None = None,
    token_mixing: MixingOptions | Mapping[str, Any] | None = None,
    window: int | None = None,
    absolute: bool = True,
    merged: bool = False,
    bias_norm: Literal["keys", "heads"] | None = None,
    identity_start: bool = True,
    causal: bool = False,
) -> Position:
    """Build the position of a backbone from names.

    Args:
        grid: the grid that tables are held for.
        dim: D.
        depth: number of layers.
        num_heads: h.
        encoding: one of `list_encodings()`, or several joined by '+'.
        joining: one of `list_joinings()`; it is how an absolute encoding reaches the layers. A relative
            bias takes 'default' (as it is) and 'lape' (through a LayerNorm over the keys); beside an absolute
            encoding it stays as it is. What is made from the tokens ('shaw', 'peg') and what all layers share
            ('shared_relative_bias', 'bucketed_bias', 'alibi') takes 'default' alone.
        joined_layers: eta, the first layers that are joined; all by default.
        decomposition: one of `list_decompositions()`, in the place of LaPE's norm.
        peg: form and places of a conditional encoding, as `PegOptions` or a mapping of its fields.
        shaw_clip: K of Shaw's encoding, in patches; 8 by default, as CPVT has it.
        token_mixing: form of a mixing encoding, as `MixingOptions` or a mapping of its fields.
        table_std: standard deviation of the normal, cut at 2, from which a learnable table is drawn; 0.02 by default.
        window: side of the windows within which a mixing encoding mixes tokens; the whole grid if None.
        absolute: whether an absolute encoding that is asked for is built; a pyramid may have it in its first stage
            only, and in all where every layer has a table of its own.
        bias_norm: what LaPE's norm of a relative bias is over, the keys of a query as in the papers, or the heads.
        merged: whether this is a stage of a pyramid that gets the table of the stage before, for joinings that bring
            it to every layer.
        interpolation: how a learnable table is resampled for another grid, 'bicubic' or 'bilinear'.
        identity_start: whether the dense matrix of 'sgu' starts near zero with a bias of one, so that its unit starts
            as the identity (gMLP); if not, with std 0.02 and a bias of zero, as PosMLP's code starts it.
        causal: whether tokens attend to those before them alone; all of T5's buckets are for those then.

    Raises:
        ValueError: for an unknown name, or a pair that the mathematics does not allow.
    """
    names = [known_name("encoding", name, list_encodings()) for name in encoding.split("+")]
    known_name("joining", joining, JOININGS)
    if len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ValueError(f"`encoding` must name each encoding once, and 'none' alone, got {encoding!r}.")
    tables = [name for name in names if name in ABSOLUTE]
    if len(tables) > 1:
        raise ValueError(f"`encoding` must have one absolute encoding at most, got {' and '.join(tables)}.")
    if decomposition is not None:
        known_name("decomposition", decomposition, DECOMPOSITIONS)
        if joining not in ("lape", "lape_sharing") or not tables:
            raise ValueError(
                "`decomposition` must go with an absolute encoding and joining 'lape' or 'lape_sharing', "
                f"got encoding {encoding!r} with joining {joining!r}."
            )
    if joining == "default" and tables and joined_layers is not None:
        raise ValueError(
            f"`joined_layers` must be left out with joining 'default', which adds once and reaches every layer, "
            f"got {joined_layers}."
        )
    alone = not tables and not set(names) & {*RELATIVE, *ROTARY}
    if alone and joined_layers is not None:
        raise ValueError(f"`joined_layers` must be left out with encoding {encoding!r}, got {joined_layers}.")
    if alone and joining != "default":
        raise ValueError(
            f"`joining` must be 'default' with encoding {encoding!r}: there is nothing to join, got {joining!r}."
        )
    if bias_norm is not None:
        known_name("bias_norm", bias_norm, ("keys", "heads"))
        if joining != "lape" or tables or not {"relative_bias", "continuous_bias"} & set(names):
            raise ValueError(
                "`bias_norm` must go with joining 'lape' and a relative bias without an absolute encoding, got "
                f"encoding {encoding!r} with joining {joining!r}."
            )
    if shaw_clip is not None and "shaw" not in names:
        raise ValueError(f"`shaw_clip` must be left out without encoding 'shaw', got {shaw_clip} with {encoding!r}.")
    if table_std is not None and "learnable" not in names:
        raise ValueError(
            f"`table_std` must be left out without encoding 'learnable', got {table_std} with {encoding!r}."
        )
    form = peg if isinstance(peg, PegOptions) else peg_options(peg or {})
    mixed = token_mixing if isinstance(token_mixing, MixingOptions) else mixing_options(token_mixing or {})
    if mixed != MixingOptions() and not set(names) & set(MIXING):
        raise ValueError(f"`token_mixing` must be left out without encoding {' or '.join(MIXING)}, got {encoding!r}.")
    if len(set(names) & set(MIXING)) > 1:
        raise ValueError(f"`encoding` must have one mixing encoding at most, got {encoding!r}.")
    if form != PegOptions() and not set(names) & set(CONDITIONAL):
        raise ValueError(f"`peg` must be left out without encoding {' or '.join(CONDITIONAL)}, got {encoding!r}.")

    joined_by_name = tables or {"relative_bias", "continuous_bias"} & set(names)
    parts: list[Position] = []
    for name in names:
        if name in ABSOLUTE:
            before = merged and joining not in ("default", "unshared")
            if not before and not absolute and joining != "unshared":
                continue
            build: Callable[..., AbsoluteEncoding] = partial(ABSOLUTE[name], grid, dim)
            if name == "learnable":
                build = partial(build, std=0.02 if table_std is None else table_std, interpolation=interpolation)
            joined = _joining(joining, dim, depth, joined_layers, decomposition)
            if name != "learnable" and isinstance(joined, Unshared):
                raise ValueError(
                    f"`joining` must not be 'unshared' with the fixed encoding {name!r}: every layer's table would be "
                    "the same; use 'shared', or encoding 'learnable'."
                )
            parts.append(JoinedPosition([] if before else [build() for _ in range(joined.tables)], joined))
        elif name in ROTARY:
            if not joined_by_name and joining != "default":
                raise ValueError(f"`joining` must be 'default' with encoding {name!r}, got {joining!r}.")
            parts.append(_rotary(name, grid.window(window), depth, num_heads, dim, joined_layers, window))
        elif name in MIXING:
            identity = identity_start or mixed.start == "spread"
            encodings = [_mixing(name, grid.window(window), num_heads, mixed, identity) for _ in range(depth)]
            one = identity if name == "sgu" else mixed.start == "spread"
            parts.append(MixingPosition(encodings, mixed.bias, window, mixed.product, float(one)))
        elif name in CONDITIONAL:
            parts.append(_conditional(name, dim, depth, form))
        elif name in ("shaw", "contextual_product"):
            if not joined_by_name and joining != "default":
                raise ValueError(f"`joining` must be 'default' with encoding {name!r}, got {joining!r}.")
            head_dim = dim // max(num_heads, 1)
            build_bias: Callable[[], Any] = partial(ContextualProduct, grid.window(window), num_heads, head_dim)
            if name == "shaw":
                clip = 8 if shaw_clip is None else shaw_clip
                build_bias = partial(ShawBias, grid.window(window), num_heads, head_dim, clip)
            parts.append(BiasPosition(_every(build_bias, depth, joined_layers), depth, window))
        elif name in SHARED:
            if not joined_by_name and joining != "default":
                raise ValueError(f"`joining` must be 'default' with encoding {name!r}, got {joining!r}.")
            further = {"causal": causal} if name == "bucketed_bias" else {}
            shared = SHARED[name](grid.window(window), num_heads, **further)
            parts.append(SharedBiasPosition(shared, depth, joined_layers, window))
        elif name in RELATIVE:
            biases = _relative(name, grid.window(window), num_heads, "default" if tables else joining, bias_norm)
            parts.append(BiasPosition(_every(biases, depth, joined_layers), depth, window))
    if not parts:
        return NoPosition(depth)
    return parts[0] if len(parts) == 1 else CombinedPosition(parts)


def _joining(name: str, dim: int, depth: int, layers: int | None, decomposition: str | None) -> Joining:
    if name == "default":
        return Default(depth)
    if name in ("lape", "lape_sharing"):
        kind = Lape if name == "lape" else LapeSharing
        return kind(dim, depth, layers, DECOMPOSITIONS[decomposition] if decomposition else None)
    return JOININGS[name](depth, layers)


def _relative(name: str, grid: Grid, num_heads: int, joining: str, bias_norm: str | None) -> Callable[[], nn.Module]:
    if joining not in ("default", "lape"):
        raise ValueError(
            f"`joining` must be 'default' or 'lape' with the encoding {name!r}, which every layer has of its own, "
            f"got {joining!r}."
        )
    build = partial(RelativeBias if name == "relative_bias" else ContinuousBias, grid, num_heads)
    if joining == "default":
        return build
    norm = HeadNormalizedBias if bias_norm == "heads" else NormalizedBias
    return lambda: norm(build())


def _rotary(
    name: str, grid: Grid, depth: int, num_heads: int, dim: int, layers: int | None, window: int | None
) -> RotaryPosition:
    layers = depth if layers is None else layers
    if not 1 <= layers <= depth:
        raise ValueError(f"`joined_layers` must be from 1 to the depth of the model, {depth}, got {layers}.")
    head_dim = dim // max(num_heads, 1)
    if name in ("rotary", "rotary_1d"):
        fixed = AxialRotary(grid, head_dim) if name == "rotary" else Rotary1d(grid, head_dim)
        return RotaryPosition(fixed, depth, layers, window)
    return RotaryPosition(MixedRotary(grid, layers, num_heads, head_dim), depth, layers, window)


def _every(build: Callable[[], Any], depth: int, layers: int | None) -> list[Any]:
    """Build one for each of the first `layers` layers, or for all."""
    layers = depth if layers is None else layers
    if not 1 <= layers <= depth:
        raise ValueError(f"`joined_layers` must be from 1 to the depth of the model, {depth}, got {layers}.")
    return [build() for _ in range(layers)]


def _mixing(name: str, grid: Grid, groups: int, options: MixingOptions, identity: bool) -> MixingEncoding:
    if name == "sgu":
        return DenseMixing(grid) if identity else DenseMixing(grid, std=0.02)
    if name == "lrpe_m":
        return MixingSum(DenseMixing(grid), LearnableMixing(grid))
    groups = groups if name.startswith("gg") or name == "glrpe" else 1
    if name.endswith("lrpe"):
        return LearnableMixing(grid, groups)
    return QuadraticMixing(grid, groups, options.form, options.shift, options.start)


def mixing_options(given: Mapping[str, Any]) -> MixingOptions:
    """Make `MixingOptions` from a mapping.

    Raises:
        ValueError: for a name that it does not have.
    """
    for name in given:
        known_name("token_mixing", name, [field.name for field in dataclasses.fields(MixingOptions)])
    return MixingOptions(**given)


def peg_options(given: Mapping[str, Any]) -> PegOptions:
    """Make `PegOptions` from a mapping.

    Raises:
        ValueError: for a name that it does not have.
    """
    for name in given:
        known_name("peg", name, [field.name for field in dataclasses.fields(PegOptions)])
    return PegOptions(**given)


def _conditional(name: str, dim: int, depth: int, form: PegOptions) -> Position:
    position: Position
    if name == "convolutional_projection":
        plain = PegOptions(
            places=form.places, kernel=form.kernel, padding=form.padding, bias=form.bias, frozen=form.frozen
        )
        if form != plain:
            raise ValueError(
                "`peg` must name no more than places, kernel, padding, bias and frozen with encoding "
                f"'convolutional_projection', got {form}."
            )
        build = partial(ConvolutionalProjection, dim, form.kernel, form.padding, form.bias)
        position = BeforeProjections({place: build() for place in form.places}, depth)
    else:
        make = partial(Peg, dim, form.kernel, form.convolution, form.layers, form.padding, form.bias)
        if form.acts_on == "tokens":
            position = BetweenBlocks({place: make() for place in form.places}, depth)
        else:
            position = BeforeProjections({place: QueryKeyPeg(make()) for place in form.places}, depth)
    return position.requires_grad_(not form.frozen)
