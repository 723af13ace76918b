"""What position information is: one file a kind."""

from graticule.encodings.absolute import (
    AbsoluteEncoding,
    FixedEncoding,
    Learnable,
    Sinusoidal1d,
    Sinusoidal2d,
)
from graticule.encodings.alibi import Alibi
from graticule.encodings.bucketed import BucketedBias
from graticule.encodings.conditional import ConvolutionalProjection, Peg, QueryKeyPeg
from graticule.encodings.contextual import ContextualProduct
from graticule.encodings.continuous import ContinuousBias
from graticule.encodings.mixing import (
    DenseMixing,
    LearnableMixing,
    MixingEncoding,
    MixingSum,
    QuadraticMixing,
)
from graticule.encodings.relative import HeadNormalizedBias, NormalizedBias, RelativeBias, ShawBias
from graticule.encodings.rotary import AxialRotary, FixedRotary, MixedRotary
from graticule.encodings.rotary_1d import Rotary1d

__all__ = [
    "AbsoluteEncoding",
    "Alibi",
    "AxialRotary",
    "BucketedBias",
    "ContextualProduct",
    "ContinuousBias",
    "ConvolutionalProjection",
    "DenseMixing",
    "FixedEncoding",
    "FixedRotary",
    "HeadNormalizedBias",
    "Learnable",
    "LearnableMixing",
    "MixedRotary",
    "MixingEncoding",
    "MixingSum",
    "NormalizedBias",
    "Peg",
    "QuadraticMixing",
    "QueryKeyPeg",
    "RelativeBias",
    "Rotary1d",
    "ShawBias",
    "Sinusoidal1d",
    "Sinusoidal2d",
]
