"""Conversion of models of timm into backbones of this library, and back.

One file per group of families reads its models; `conversion.py` has the code that they share.
"""

from graticule.external.convert import cait, eva, mixers, multiscale, pyramids, relative, sam, vit
from graticule.external.convert.from_timm import convert
from graticule.external.convert.into_timm import to_timm
from graticule.external.convert.parts import Conversion, register_conversion

__all__ = [
    "Conversion",
    "cait",
    "convert",
    "eva",
    "mixers",
    "multiscale",
    "pyramids",
    "register_conversion",
    "relative",
    "sam",
    "to_timm",
    "vit",
]
