"""What position information is: one file a kind."""

from graticule.encodings.absolute import (
    AbsoluteEncoding,
    FixedEncoding,
    Learnable,
    MergedTable,
    Sinusoidal1d,
    Sinusoidal2d,
)
from graticule.encodings.conditional import ConvolutionalProjection, Peg, QueryKeyPeg
from graticule.encodings.mixing import (
    DenseMixing,
    LearnableMixing,
    MixingEncoding,
    MixingSum,
    QuadraticMixing,
)
from graticule.encodings.relative import NormalizedBias, RelativeBias, ShawBias

__all__ = [
    "AbsoluteEncoding",
    "ConvolutionalProjection",
    "DenseMixing",
    "FixedEncoding",
    "Learnable",
    "LearnableMixing",
    "MergedTable",
    "MixingEncoding",
    "MixingSum",
    "NormalizedBias",
    "Peg",
    "QuadraticMixing",
    "QueryKeyPeg",
    "RelativeBias",
    "ShawBias",
    "Sinusoidal1d",
    "Sinusoidal2d",
]
