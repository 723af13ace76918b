"""What position information is: one file a kind."""

from graticule.encodings.absolute import (
    AbsoluteEncoding,
    FixedEncoding,
    Learnable,
    Sinusoidal1d,
    Sinusoidal2d,
)
from graticule.encodings.relative import NormalizedBias, RelativeBias

__all__ = [
    "AbsoluteEncoding",
    "FixedEncoding",
    "Learnable",
    "NormalizedBias",
    "RelativeBias",
    "Sinusoidal1d",
    "Sinusoidal2d",
]
