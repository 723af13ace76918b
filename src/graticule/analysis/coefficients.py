"""Share of position in the input of each layer's attention, with the default joining."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graticule.backbones.base import Backbone
from graticule.external.view import evaluating


@dataclass(frozen=True, eq=False)
class Coefficients:
    r"""The coefficients of a layer's norm of the sum of tokens and position, for each image and token.

    .. math:: LN(\tilde x + w) = \lambda_1 LN(\tilde x) + \lambda_2 LN(w) + \lambda_3 \beta, \quad
        \lambda_1 = \frac{\sigma_{\tilde x}}{\sigma_{\tilde x + w}}, \quad
        \lambda_2 = \frac{\sigma_w}{\sigma_{\tilde x + w}}, \quad
        \lambda_3 = \frac{\sigma_{\tilde x + w} - \sigma_{\tilde x} - \sigma_w}{\sigma_{\tilde x + w}}

    :math:`\sigma` is the standard deviation over the channels of a token, :math:`\tilde x` the residual stream without
    w, and :math:`\beta` the shift of the norm.

    Reference: LaPE (Yu et al., 2023), Eq. 6 and 7.

    tokens, position, shift: lambda_1, lambda_2 and lambda_3 of every layer, (L, B, N).
    """

    tokens: Tensor
    position: Tensor
    shift: Tensor


def coefficients(tokens: Tensor, position: Tensor) -> Coefficients:
    """Return the coefficients for tokens without position, (..., B, N, D), and w, (N, D)."""
    beside, added, both = (x.std(-1, unbiased=False) for x in (tokens, position.expand_as(tokens), tokens + position))
    return Coefficients(beside / both, added / both, (both - beside - added) / both)


def norm_coefficients(model: Any, images: Tensor) -> Coefficients:
    """Measure the coefficients of every layer of a model that adds one table to the embedded tokens.

    Args:
        model: a backbone of one stage with the default joining of an absolute encoding.
        images: (B, C, height, width).

    Raises:
        ValueError: if the model does not add one table w at the start, and nothing else.
    """
    if not isinstance(model, Backbone) or len(model.depths) != 1:
        raise ValueError(f"`model` must be a backbone of one stage, got {type(model).__name__}.")
    with evaluating(model):
        first, *others = model.position(model.grid_of(images))
    given = {name for name, value in first._asdict().items() if value is not None}
    if given != {"pre"} or any(value is not None for layer in others for value in layer):
        raise ValueError(
            "`model` must add one table to the embedded tokens and have no other position information (joining "
            f"'default' of an absolute encoding), got {', '.join(sorted(given)) or 'none'} in the first layer."
        )
    assert first.pre is not None
    with evaluating(model):
        embedded = model.embed(images)
        after = [tokens - first.pre for tokens, _ in model.each_layer(images)]
        return coefficients(torch.stack([embedded, *after[:-1]]), first.pre)
