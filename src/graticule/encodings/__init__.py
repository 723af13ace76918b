"""What position information is: one file a kind."""

from graticule.encodings.absolute import (
    AbsoluteEncoding,
    FixedEncoding,
    Learnable,
    Sinusoidal1d,
    Sinusoidal2d,
)
from graticule.encodings.conditional import ConvolutionalProjection, Peg, QueryKeyPeg
from graticule.encodings.relative import NormalizedBias, RelativeBias, ShawBias

__all__ = [
    "AbsoluteEncoding",
    "ConvolutionalProjection",
    "FixedEncoding",
    "Learnable",
    "NormalizedBias",
    "Peg",
    "QueryKeyPeg",
    "RelativeBias",
    "ShawBias",
    "Sinusoidal1d",
    "Sinusoidal2d",
]
