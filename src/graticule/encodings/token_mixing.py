"""The token-mixing encodings by name: gMLP's dense matrix and PosMLP's relative ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from graticule.checks import checked
from graticule.encodings.base import Encoding, Position, Site, register_encoding
from graticule.encodings.mixing import (
    DenseMixing,
    Form,
    GlobalFilter,
    LearnableMixing,
    MixingSum,
    MlpMixing,
    QuadraticMixing,
    Start,
)
from graticule.encodings.mixing_position import MixingPosition, Product
from graticule.grid import Grid
from graticule.joining import Joining


class TokenMixing(Encoding):
    """An encoding that makes the weights by which gated MLPs and mixers mix tokens; one per joined layer."""

    #: Whether its weights are a softmax; gating units then have no norm by default (PosMLP, section 5.3).
    softmax: ClassVar[bool] = False

    @classmethod
    def position(
        cls,
        site: Site,
        joining: Joining,
        *,
        bias: bool = True,
        bias_start: float | None = None,
        product: Product = "auto",
        group_bias: bool = False,
        **options: Any,
    ) -> Position:
        """Build one per joined layer.

        Args:
            site: of the backbone.
            joining: 'default'; it says which layers are joined.
            bias: whether one number per token is added to the mixed tokens.
            bias_start: initial value of that bias; by default 1 if the unit then starts as the identity.
            product: by the matrix of all pairs, or as a convolution over displacements ('auto': where it is faster).
            group_bias: whether that number is one per group of channels, where there are several groups.
            options: those of the constructor.
        """
        each: list[Any] = [cls.build(site, site.within, options) for _ in joining.joined]
        start = cls.default_bias(options) if bias_start is None else bias_start
        return MixingPosition(each, bias, product, start, site.depth, joining.joined, group_bias)

    @classmethod
    def default_bias(cls, options: Mapping[str, Any]) -> float:
        """Return the initial value of the bias: 0, as in PosMLP's code."""
        return 0.0


@register_encoding("sgu")
class Sgu(TokenMixing, DenseMixing):
    """Mixes tokens by one learned number per pair of tokens, a dense matrix."""

    @checked
    def __init__(self, grid: Grid, std: float = 1e-6, resampler: str = "bicubic") -> None:
        super().__init__(grid, std, resampler)

    @classmethod
    def default_bias(cls, options: Mapping[str, Any]) -> float:
        """Return 1: with weights near zero the unit starts as the identity, as in gMLP."""
        return 1.0


@register_encoding("gsgu")
class Gsgu(TokenMixing, DenseMixing):
    """Mixes tokens by one learned number per pair of tokens and group of channels, dense matrices.

    It has the groups of `glrpe` and `ggqpe` and knows as little of displacements as `sgu`, so it tells apart what
    groups and what relative positions contribute to the difference of those and `sgu`.
    """

    @checked
    def __init__(self, grid: Grid, num_heads: int, std: float = 1e-6, resampler: str = "bicubic") -> None:
        super().__init__(grid, std, resampler, num_heads)

    @classmethod
    def default_bias(cls, options: Mapping[str, Any]) -> float:
        """Return 1: with weights near zero the unit starts as the identity, as in gMLP."""
        return 1.0


@register_encoding("global_filter")
class GlobalFilters(TokenMixing, GlobalFilter):
    """Mixes tokens by a circular convolution: one learned filter of the 2-D frequencies per group of channels."""

    @checked
    def __init__(self, grid: Grid, num_heads: int, std: float = 0.02) -> None:
        super().__init__(grid, num_heads, std)


@register_encoding("token_mlp")
class TokenMlpMixing(TokenMixing, MlpMixing):
    """Mixes tokens by an MLP over the tokens, the same for each channel."""


@register_encoding("lrpe")
class Lrpe(TokenMixing, LearnableMixing):
    """Mixes tokens by one learned number per displacement of two tokens."""

    @checked
    def __init__(self, grid: Grid, std: float = 0.02, resampler: str = "bicubic") -> None:
        super().__init__(grid, 1, std, resampler)


@register_encoding("glrpe")
class Glrpe(TokenMixing, LearnableMixing):
    """Mixes tokens by one learned number per displacement and group of channels."""

    @checked
    def __init__(self, grid: Grid, num_heads: int, std: float = 0.02, resampler: str = "bicubic") -> None:
        super().__init__(grid, num_heads, std, resampler)


@register_encoding("lrpe_m")
class LrpeM(TokenMixing, MixingSum):
    """Mixes tokens by the sum of a dense matrix and one number per displacement.

    Args:
        grid: the grid that both are for.
        resampler: how both are resampled at another grid.
    """

    @checked
    def __init__(self, grid: Grid, resampler: str = "bicubic") -> None:
        super().__init__(DenseMixing(grid, resampler=resampler), LearnableMixing(grid, resampler=resampler))


class _Quadratic(TokenMixing, QuadraticMixing):
    """A Gaussian around a learned displacement, by a quadratic form."""

    softmax = True

    @classmethod
    def default_bias(cls, options: Mapping[str, Any]) -> float:
        """Return 1 where groups start spread over directions and widths, 0 where they start as in PosMLP's code."""
        return float(options.get("start") == "spread")


@register_encoding("gqpe")
class Gqpe(_Quadratic):
    """Mixes tokens by a Gaussian around one learned displacement."""

    @checked
    def __init__(self, grid: Grid, form: Form = "gamma_gamma_t", shift: bool = True, start: Start = "released") -> None:
        super().__init__(grid, 1, form, shift, start)


@register_encoding("ggqpe")
class Ggqpe(_Quadratic):
    """Mixes tokens by a Gaussian around one learned displacement per group of channels."""

    @checked
    def __init__(
        self, grid: Grid, num_heads: int, form: Form = "gamma_gamma_t", shift: bool = True, start: Start = "released"
    ) -> None:
        super().__init__(grid, num_heads, form, shift, start)
