"""Conversion of models of timm into backbones of this library, and back.

One file per group of families reads its models; `parts.py` has the code that they share.
"""

from graticule.external.convert.from_timm import convert
from graticule.external.convert.into_timm import to_timm
from graticule.external.convert.parts import Conversion, register_conversion

__all__ = ["Conversion", "convert", "register_conversion", "to_timm"]
