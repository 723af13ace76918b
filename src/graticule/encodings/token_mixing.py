"""Base class of the token-mixing encodings of gated MLPs and mixers, which builds their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graticule.encodings.base import Encoding, Position, Site
from graticule.encodings.mixing_position import MixingPosition, Product
from graticule.joining import Joining


class TokenMixing(Encoding):
    """An encoding whose weights mix the tokens in gated MLPs and mixers; one per joined layer."""

    #: True if its weights are a softmax; gating units then have no norm by default (PosMLP, section 5.3).
    softmax: bool = False

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
        """Build one instance per joined layer.

        Args:
            site: the sizes of the backbone.
            joining: 'default'; it decides which layers are joined.
            bias: whether one number per token is added to the mixed tokens.
            bias_start: initial value of that bias; by default 1 if the unit then starts as the identity.
            product: 'matrix' for a matrix of all pairs, 'displacement' for a convolution, 'auto' for the faster one.
            group_bias: whether there is one such number per group of channels, if there are several groups.
            options: of the constructor.
        """
        each: list[Any] = [cls.build(site, site.within, options) for _ in joining.joined]
        start = cls.default_bias(options) if bias_start is None else bias_start
        return MixingPosition(each, bias, product, start, site.depth, joining.joined, group_bias)

    @classmethod
    def default_bias(cls, options: Mapping[str, Any]) -> float:
        """Return the initial value of the bias: 0, as in PosMLP's code."""
        return 0.0
