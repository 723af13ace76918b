"""Initialization of convolutions between blocks as if they were absent."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from graticule.encodings import BetweenBlocks, NoPosition
from graticule.encodings.conditional import Peg
from graticule.surgery.fits.registry import Before, register_fit


@register_fit(NoPosition, BetweenBlocks)
def start_as_identity(old: NoPosition, new: Any, before: Before) -> bool:
    """Set the last convolution of each PEG to zero, so that it adds nothing; exact."""
    pegs = [module for module in new.modules() if isinstance(module, Peg)]
    convolutions = [peg.proj[-1] for peg in pegs]
    if not pegs or not all(isinstance(convolution, nn.Conv2d) for convolution in convolutions):
        return False  # several layers end with a batch norm
    for convolution in cast("list[nn.Conv2d]", convolutions):
        convolution.weight.zero_()
        if convolution.bias is not None:
            convolution.bias.zero_()
    return True
