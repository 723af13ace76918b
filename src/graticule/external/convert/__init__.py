"""Conversion of models of timm and transformers into backbones of this library, and back.

One file per group of families reads its models; `parts.py` has the code that they share.
"""

from graticule.external.convert.back import to_timm, to_transformers
from graticule.external.convert.conversion import convert
from graticule.external.convert.parts import Conversion, register_conversion

__all__ = ["Conversion", "convert", "register_conversion", "to_timm", "to_transformers"]
