"""What the token-mixing encodings of gated MLPs and mixers share: how their position is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from graticule.encodings.base import Encoding, Position, Site
from graticule.encodings.mixing_position import MixingPosition, Product
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
