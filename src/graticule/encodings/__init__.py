"""What position information is, one file per method: a grid in, one `LayerPosition` per layer out."""

from graticule.encodings.absolute import AbsoluteEncoding, FixedEncoding, JoinedPosition
from graticule.encodings.alibi import Alibi
from graticule.encodings.base import (
    ENCODINGS,
    CombinedPosition,
    Encoding,
    NoPosition,
    Position,
    PositionBuilder,
    Site,
    check_fields,
    register_encoding,
)
from graticule.encodings.between import BeforeProjections, BetweenBlocks
from graticule.encodings.bias import (
    BiasEncoding,
    BiasPosition,
    HeadNormalizedBias,
    NormalizedBias,
    PatchBias,
    SharedBiasPosition,
)
from graticule.encodings.bucketed import BucketedBias
from graticule.encodings.conditional import ConvolutionalProjection, Peg, QueryKeyPeg
from graticule.encodings.contextual import ContextualProduct
from graticule.encodings.continuous import ContinuousBias
from graticule.encodings.folded import FoldedPosition
from graticule.encodings.learnable import Learnable
from graticule.encodings.mixing import DenseMixing, LearnableMixing, MixingEncoding, MixingSum, QuadraticMixing
from graticule.encodings.mixing_position import MixingPosition
from graticule.encodings.pyramid import PyramidPosition
from graticule.encodings.relative_bias import RelativeBias, SharedRelativeBias
from graticule.encodings.rope_1d import Rotary1d
from graticule.encodings.rotary import AxialRotary, FixedRotary, MixedRotary, RotaryEncoding, RotaryPosition
from graticule.encodings.shaw import ShawBias
from graticule.encodings.sinusoidal import Sinusoidal1d, Sinusoidal2d
from graticule.encodings.token_mixing import Ggqpe, Glrpe, Gqpe, Lrpe, LrpeM, Sgu, TokenMixing

__all__ = [
    "ENCODINGS",
    "AbsoluteEncoding",
    "Alibi",
    "AxialRotary",
    "BeforeProjections",
    "BetweenBlocks",
    "BiasEncoding",
    "BiasPosition",
    "BucketedBias",
    "CombinedPosition",
    "ContextualProduct",
    "ContinuousBias",
    "ConvolutionalProjection",
    "DenseMixing",
    "Encoding",
    "FixedEncoding",
    "FixedRotary",
    "FoldedPosition",
    "Ggqpe",
    "Glrpe",
    "Gqpe",
    "HeadNormalizedBias",
    "JoinedPosition",
    "Learnable",
    "LearnableMixing",
    "Lrpe",
    "LrpeM",
    "MixedRotary",
    "MixingEncoding",
    "MixingPosition",
    "MixingSum",
    "NoPosition",
    "NormalizedBias",
    "PatchBias",
    "Peg",
    "Position",
    "PositionBuilder",
    "PyramidPosition",
    "QuadraticMixing",
    "QueryKeyPeg",
    "RelativeBias",
    "Rotary1d",
    "RotaryEncoding",
    "RotaryPosition",
    "Sgu",
    "SharedBiasPosition",
    "SharedRelativeBias",
    "ShawBias",
    "Sinusoidal1d",
    "Sinusoidal2d",
    "Site",
    "TokenMixing",
    "check_fields",
    "register_encoding",
]
